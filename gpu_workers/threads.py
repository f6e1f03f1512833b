"""Threads of a worker: one that fails takes the process with it.

A worker that lacks a thread would keep tickets for ever. Dead, it is seen at once by control, which gives its
tickets to another worker and starts a new one.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Final

from shm.messages import EXIT_CONFIG

EXIT_SOFTWARE: Final = 70  # sysexits.h: an internal error; a restart may help
EXIT_CONFIGURATION: Final = EXIT_CONFIG

logger = logging.getLogger(__name__)


def start_thread(name: str, body: Callable[[], None]) -> threading.Thread:
    """Run body on a new thread, under run_or_exit. Daemon: only the main thread decides when to end."""
    thread = threading.Thread(target=run_or_exit, args=(body,), name=name, daemon=True)
    thread.start()
    return thread


def run_or_exit(body: Callable[[], None]) -> None:
    """Call body; whatever it raises is logged and ends the process with EXIT_SOFTWARE."""
    try:
        body()
    except Exception:  # the edge of a thread: nobody above could do more than exit
        logger.critical("%s failed", threading.current_thread().name, exc_info=True)
        logging.shutdown()
        os._exit(EXIT_SOFTWARE)  # no unwinding: other threads hold locks, and the device may be broken
