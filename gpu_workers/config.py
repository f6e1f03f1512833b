"""The worker's configuration: one JSON document in argv, written by the control plane's supervisor."""

import msgspec

from gpu_workers.errors import ConfigurationError
from shm.messages import WorkerConfig


def parse_config(argv: list[str]) -> WorkerConfig:
    """WorkerConfig from `argv` (program, JSON). ConfigurationError if it is not one."""
    if len(argv) != 2:
        raise ConfigurationError("usage: python -m gpu_workers '<WorkerConfig as JSON>'")
    try:
        return msgspec.json.decode(argv[1], type=WorkerConfig)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"not a WorkerConfig: {error}") from None
