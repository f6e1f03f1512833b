"""`python -m gpu_workers '<WorkerConfig as JSON>'`: so the control plane starts each worker."""

import sys

from gpu_workers.worker import main

sys.exit(main(sys.argv))
