"""Checkpoints that bring their model's code: auto_map in config.json names it, --trust-remote-code runs it.

The model's class decides how it is driven: by the hooks that it has for encoder servers (encoder_hook), by
its pictures alone (Kimi-VL), or as any model that has get_*_features (anything).
"""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoImageProcessor, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import HF_MODULES_CACHE

from gpu_workers.errors import ConfigurationError
from gpu_workers.families import anything, encoder_hook, kimi_vl
from gpu_workers.families.composed import ComposedFamily, Part, compose
from gpu_workers.families.own_pictures import OwnPictures
from gpu_workers.families.registry import read_config
from gpu_workers.towers import load_towers
from shm.messages import WorkerConfig

logger = logging.getLogger(__name__)

_MODEL_CLASSES: Final = "AutoModel"  # the keys of auto_map that name a model begin so
# Models that transformers' classes of others can stand for, so that the flag is a choice.
_WITHOUT_CODE: Final = {"kimi_vl": kimi_vl.load}
LOCK_NAME: Final = ".encoderd.lock"
# A model of pictures without get_image_features: the method that its forward calls for them.
_PICTURE_METHODS: Final = {"kimi_vl": "_extract_image_features"}


def load(config: WorkerConfig, device: torch.device, model_type: str) -> ComposedFamily:
    """Load the checkpoint's towers by its own class. ConfigurationError that names what is missing."""
    if _is_in_transformers(config.checkpoint, model_type):
        return anything.load(msgspec.structs.replace(config, trust_remote_code=False), device, model_type)
    known = _WITHOUT_CODE.get(model_type)
    if known is not None and not (config.trust_remote_code and _class_reference(config.checkpoint)):
        return known(config, device, model_type)
    if not config.trust_remote_code:
        raise ConfigurationError(
            f"this model (model_type {model_type!r}) is not in transformers, and the code in its checkpoint "
            "is only run on request: it needs --trust-remote-code"
        )
    reference = _class_reference(config.checkpoint)
    if reference is None:
        raise ConfigurationError(
            f"model_type {model_type!r} is not supported: transformers does not know it, and auto_map in "
            f"{config.checkpoint}/config.json names no model"
        )
    logger.warning("%s: the checkpoint's own code runs in this process", model_type)
    with _explained(reference):
        model = _load_model(config, device, reference)
    if encoder_hook.has_hook(model):
        return compose(model, model_type, encoder_hook.part_loaders(config, model))
    if model_type in _PICTURE_METHODS:
        return compose(model, model_type, {"image": partial(_load_pictures, config, model, model_type)})
    return anything.compose_tried(config, model, model_type)


def _is_in_transformers(checkpoint: str, model_type: str) -> bool:
    """Its type, and a class that it names if it names any: then transformers' code is the one to run."""
    architectures = read_config(checkpoint).get("architectures") or []
    named = [name for name in architectures if hasattr(transformers, str(name))]
    return model_type in CONFIG_MAPPING and (bool(named) or not architectures)


def _load_model(config: WorkerConfig, device: torch.device, reference: str) -> PreTrainedModel:
    """Configuration and class are the checkpoint's code, which may raise anything."""
    with alone_in(Path(HF_MODULES_CACHE)):
        described = AutoConfig.from_pretrained(config.checkpoint, trust_remote_code=True)
        model_class = get_class_from_dynamic_module(reference, config.checkpoint)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ConfigurationError(f"the checkpoint's {reference} is no PreTrainedModel")
    return load_towers(
        model_class,
        config.checkpoint,
        dtype=config.dtype,
        device=device,
        trust_remote_code=True,
        config=described,
    )


def _load_pictures(config: WorkerConfig, model: PreTrainedModel, model_type: str) -> Part:
    """OSError or ValueError if the checkpoint has no image processor."""
    with alone_in(Path(HF_MODULES_CACHE)):
        processor = AutoImageProcessor.from_pretrained(config.checkpoint, trust_remote_code=True)
    return OwnPictures(config, model, _PICTURE_METHODS[model_type], processor)


@contextmanager
def _explained(reference: str) -> Iterator[None]:
    """One line for whatever foreign code raises; a restart would end the same way."""
    try:
        yield
    except (ConfigurationError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ConfigurationError(f"the checkpoint's {reference} does not work here: {reason}") from error


def _class_reference(checkpoint: str) -> str | None:
    """ "file.Class" of the class that config.json calls its architecture, else of the first that it maps."""
    described = read_config(checkpoint)
    references = [
        reference
        for key, reference in described.get("auto_map", {}).items()
        if key.startswith(_MODEL_CLASSES) and isinstance(reference, str)
    ]
    architectures = described.get("architectures") or []
    named = [one for one in references if one.rpartition(".")[2] in architectures]
    return next(iter([*named, *references]), None)


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Workers start together, and transformers copies the code into one directory of them all, unlocked.
    ConfigurationError if it cannot be written."""
    with ExitStack() as undo:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = undo.enter_context(Path(directory, LOCK_NAME).open("w"))
        except OSError as error:
            raise ConfigurationError(
                f"the checkpoint's code is copied to {directory}, which cannot be written "
                f"({error.strerror}): set HF_HOME"
            ) from None
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
