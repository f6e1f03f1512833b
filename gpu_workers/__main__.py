"""`python -m gpu_workers '<WorkerConfig as JSON>'`: so the control plane starts each worker."""

import logging
import os
import sys

from gpu_workers.worker import main

status = main(sys.argv)
# Everything the worker had is the kernel's to take back. Taking a model library's modules apart in Python
# costs seconds, more than the control plane waits before it kills.
logging.shutdown()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
