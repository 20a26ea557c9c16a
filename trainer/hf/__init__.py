"""Interoperability with transformers: folders with config.json and safetensors, in and out.

Whoever renders a chat template or opens a tokenizer here, as each process that tokenises does, needs no torch."""

import importlib
from typing import Any

_NAMES = {
    "weights": "HFWeights",
    "adapters": "find_base join_adapters open_weights",
    "folder": "export_adapter export_model model_from_hf open_generation spec_from_hf starting_weights",
}
_HOMES = {name: f"trainer.hf.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer.hf' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
