"""Interoperability with transformers: folders with config.json and safetensors, in and out.

Whoever renders a chat template or opens a tokenizer here, as each process that tokenises does, needs no torch."""

import importlib
from typing import Any

from trainer.config import Config

_HOMES = {
    "HFWeights": "trainer.hf.weights",
    "find_base": "trainer.hf.adapters",
    "export_adapter": "trainer.hf.folder",
    "starting_weights": "trainer.hf.folder",
    "export_model": "trainer.hf.folder",
    "join_adapters": "trainer.hf.adapters",
    "model_from_hf": "trainer.hf.folder",
    "open_generation": "trainer.hf.folder",
    "open_weights": "trainer.hf.adapters",
    "spec_from_hf": "trainer.hf.folder",
}

__all__ = [*_HOMES, "with_known_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer.hf' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def with_known_model(config: Config) -> Config:
    """The configuration with the model that `model.from_hf` names, if it does."""
    if config.model.from_hf:
        from trainer.hf.folder import model_from_hf

        config.model = model_from_hf(config.model)  # type: ignore[assignment]
    return config
