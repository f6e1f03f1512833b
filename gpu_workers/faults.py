"""Named fault points, for tests only: places where a worker can be told to die, hang or fail.

Every request arms those of WorkerConfig.faults; an item of the stub tower with `fault=NAME` arms one for its
own. Death is SIGKILL of the own process: nothing is cleaned up, as with a real crash.
"""

import os
import signal
import threading
from enum import StrEnum

from gpu_workers.errors import ConfigurationError, ItemError
from shm.errors import ErrorCode


class FaultPoint(StrEnum):
    """Where a fault strikes. The names are those of WorkerConfig.faults and of the stub's `fault=`."""

    EXIT_ON_TAKE = "exit-on-take"  # the descriptor is read, nothing is visible yet
    EXIT_BEFORE_SHAPE = "exit-before-shape"  # the block is FILLING, SHAPE_KNOWN is not published
    ERROR_IN_DECODE = "error-in-decode"
    EXIT_IN_FORWARD = "exit-in-forward"
    HANG_IN_FORWARD = "hang-in-forward"
    ERROR_IN_FORWARD = "error-in-forward"
    EXIT_BEFORE_READY = "exit-before-ready"  # all rows are in the block, which is still FILLING
    EXIT_AFTER_READY = "exit-after-ready"  # the READY record is published


class InjectedError(Exception):
    """What ERROR_IN_FORWARD raises: stands for any exception out of a tower."""


class Faults:
    """The armed fault points. Made by worker.run; the pipeline reaches each point by name."""

    def __init__(self, names: list[str]) -> None:
        """ConfigurationError for a name that is no FaultPoint."""
        known = {str(point) for point in FaultPoint}
        if unknown := sorted(set(names) - known):
            raise ConfigurationError(f"unknown fault point {unknown[0]}")
        self._armed = frozenset(names)

    def reach(self, point: FaultPoint, asked_for: tuple[str, ...] = ()) -> None:
        """Strike if `point` is armed, or one of those the items ask for. Returns otherwise."""
        if point not in self._armed and point not in asked_for:
            return
        match point:
            case FaultPoint.ERROR_IN_DECODE:
                raise ItemError(ErrorCode.DECODE_FAILED)
            case FaultPoint.ERROR_IN_FORWARD:
                raise InjectedError("fault point error-in-forward")
            case FaultPoint.HANG_IN_FORWARD:
                threading.Event().wait()
            case _:
                os.kill(os.getpid(), signal.SIGKILL)
