"""Which family serves which checkpoint. A new family is one file here and one line per model_type below.

Nothing of a family is imported before it is chosen, so the stub tower starts without torch.
"""

import json
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from gpu_workers.device import Device, PlainDevice
from gpu_workers.errors import ConfigurationError
from gpu_workers.families.base import Family
from gpu_workers.families.stub import StubFamily
from shm.messages import WorkerConfig
from shm.region import Region

if TYPE_CHECKING:
    import torch

# model_type -> "module:function", the function being (WorkerConfig, torch.device, model_type) -> Family.
_LOADERS: Final = {
    "qwen2_vl": "gpu_workers.families.qwen_vl:load",
    "qwen2_5_vl": "gpu_workers.families.qwen_vl:load",
    "qwen3_vl": "gpu_workers.families.qwen_vl:load",
    "qwen3_vl_moe": "gpu_workers.families.qwen_vl:load",
    "qwen3_5": "gpu_workers.families.qwen_vl:load",
    "qwen3_5_moe": "gpu_workers.families.qwen_vl:load",
    "qwen2_audio": "gpu_workers.families.speech:load",
    "qwen2_5_omni": "gpu_workers.families.qwen_omni:load",
    "qwen3_omni_moe": "gpu_workers.families.qwen_omni:load",
    "qwen3_asr": "gpu_workers.families.speech:load",
    "glmasr": "gpu_workers.families.speech:load",
    "gemma3n": "gpu_workers.families.gemma3n:load",
    "gemma3": "gpu_workers.families.plain:load",
    "llava": "gpu_workers.families.plain:load",
    "llava_next": "gpu_workers.families.plain:load",
    "llava_onevision": "gpu_workers.families.plain:load",
    "mistral3": "gpu_workers.families.plain:load",
    "internvl": "gpu_workers.families.plain:load",
    "glm4v": "gpu_workers.families.plain:load",
    "glm4v_moe": "gpu_workers.families.plain:load",
    "glm46v": "gpu_workers.families.plain:load",
    "glm_ocr": "gpu_workers.families.plain:load",
    "kimi_k25": "gpu_workers.families.kimi:load",
}
# Not in transformers, and any other model_type that comes with code: that code, under --trust-remote-code.
_OWN_CODE: Final = "gpu_workers.families.own_code:load"
_OWN_CODE_TYPES: Final = ("kimi_vl", "mimo_v2")
_MODEL_IN_AUTO_MAP: Final = "AutoModel"  # the keys of auto_map that name a model begin so
# Of any other model_type: whatever transformers itself can do with it.
_ANY_OTHER: Final = "gpu_workers.families.anything:load"
# Packages may bring families, and replace ours: a model_type = "module:function" of this group.
_ENTRY_POINTS: Final = "encoderd.families"


class Loaded(NamedTuple):
    """A family and the device it is loaded on."""

    family: Family
    device: Device


def load_family(config: WorkerConfig, segment: Region) -> Loaded:
    """The family that config asks for, ready to encode. ConfigurationError if that can never work."""
    if config.tower == "stub":
        return Loaded(StubFamily(), PlainDevice())
    if config.tower != "auto":
        raise ConfigurationError(f"unknown tower {config.tower!r}, known: auto, stub")
    _loader_of(config.checkpoint)  # refuse before a device is opened
    from gpu_workers.torch_device import open_device  # here, because it loads torch

    device = open_device(config.device, config.torch_threads, segment)
    return Loaded(load_on(config, device.torch_device), device)


def load_on(config: WorkerConfig, device: "torch.device") -> Family:
    """The checkpoint's family on an open device. ConfigurationError if it has none, or cannot work."""
    model_type, loader = _loader_of(config.checkpoint)
    if loader == _LOADERS.get(model_type):
        # Ours are transformers' own classes: code in the checkpoint would only get into their way.
        config = msgspec.structs.replace(config, trust_remote_code=False)
    module, function = loader.split(":")
    family: Family = getattr(import_module(module), function)(config, device, model_type)
    return family


def _loader_of(checkpoint: str) -> tuple[str, str]:
    model_type = read_model_type(checkpoint)
    installed = entry_points(group=_ENTRY_POINTS, name=model_type)
    if installed:
        return model_type, next(iter(installed)).value
    if model_type in _LOADERS:
        return model_type, _LOADERS[model_type]
    if model_type in _OWN_CODE_TYPES or _brings_code(checkpoint):
        return model_type, _OWN_CODE
    return model_type, _ANY_OTHER


def _brings_code(checkpoint: str) -> bool:
    """Whether config.json names the model's class in a file of the checkpoint."""
    auto_map = read_config(checkpoint).get("auto_map")
    return isinstance(auto_map, dict) and any(key.startswith(_MODEL_IN_AUTO_MAP) for key in auto_map)


def read_model_type(checkpoint: str) -> str:
    """model_type of a checkpoint directory. ConfigurationError if it is not there or cannot be read."""
    model_type = read_config(checkpoint).get("model_type")
    if not isinstance(model_type, str):
        raise ConfigurationError(f"{checkpoint}/config.json names no model_type")
    return model_type


def read_config(checkpoint: str) -> dict[str, Any]:
    """config.json of a checkpoint directory. ConfigurationError if it is not there or cannot be read."""
    path = Path(checkpoint, "config.json")
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigurationError(f"no such checkpoint: {checkpoint} has no config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} names no model_type")
    return config
