"""Plain log lines on stderr, each with the worker's place and epoch."""

import logging
import sys

from shm.messages import WorkerConfig


def configure_logging(config: WorkerConfig) -> None:
    """Send this process's records to stderr, from config.log_level up. Called once, by worker.main."""
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format=f"%(levelname)s worker={config.index} epoch={config.epoch} %(name)s: %(message)s",
    )
    for library in ("PIL", "transformers", "torch"):
        logging.getLogger(library).setLevel(logging.ERROR)
