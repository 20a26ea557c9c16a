"""ZeRO by DeepSpeed: its engine, imported only where `parallel.zero.engine=deepspeed` asks for it."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from trainer.config import ConfigError

if TYPE_CHECKING:
    import torch


def import_engine(device: torch.device) -> ModuleType:
    """`engine.py`, imported for the kind of the run's device: DeepSpeed settles on one when it is imported, and left
    to itself on a GPU where there is one. Raises `ConfigError` if it has been imported for another."""
    if "deepspeed" not in sys.modules:
        os.environ["DS_ACCELERATOR"] = device.type
    module = importlib.import_module("trainer.parallel.zero.deepspeed_engine")
    if (kind := module.get_accelerator().device_name()) != device.type:
        raise ConfigError(
            [
                f"run.device={device.type}: DeepSpeed has already been imported in this process, for "
                f"run.device={kind}; set that, or run in a process of its own"
            ]
        )
    return module
