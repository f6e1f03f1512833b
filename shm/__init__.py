"""The data plane: rings, segments, sessions, and the client that prefill uses.

Nothing is imported here, so that each process loads only its half: `from shm.client import connect`.
"""
