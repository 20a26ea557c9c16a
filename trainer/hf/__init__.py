"""Interoperability with transformers: folders with config.json and safetensors, in and out."""

from trainer.hf.folder import export, spec_from_hf
from trainer.hf.weights import HFWeights

__all__ = ["HFWeights", "export", "spec_from_hf"]
