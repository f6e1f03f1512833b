"""Why work fails in a worker, by cause. Numbers travel to the control plane, which makes the text."""

from shm.errors import ErrorCode


class WorkerError(Exception):
    """Base of everything that gpu_workers raises on purpose."""


class ItemError(WorkerError):
    """One item cannot be encoded. `value` and `limit` are the two numbers of the message, if it has them."""

    def __init__(self, code: ErrorCode, value: int = 0, limit: int = 0) -> None:
        super().__init__(f"{code.name} value={value} limit={limit}")
        self.code = code
        self.value = value
        self.limit = limit


class ConfigurationError(WorkerError):
    """This worker can never start as it is configured: a restart would end the same way."""


class DeviceLost(WorkerError):
    """The device's context is broken (a sticky CUDA error): only a new process can use the device again."""


class GroupBroken(WorkerError):
    """A rank of the group does not do as planned: the whole group has to end."""


class RanksDisagree(GroupBroken):
    """The ranks of a group fared differently in one forward: its rows cannot be trusted."""


class CompletionRingFull(WorkerError):
    """The control plane let more tickets out than the ring can answer, so its bookkeeping is broken."""
