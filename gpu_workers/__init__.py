"""The worker process: takes media from shared memory, encodes it on one device, publishes the rows.

Start reading at worker.py. One request is a jobs.Job; its way leads through intake.py, prepare.py, forward.py
and publish.py, and backlog.py keeps it in between. A model family is one file in families/.
"""
