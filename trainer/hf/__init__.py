"""Interoperability with transformers: folders with config.json and safetensors, in and out."""

from trainer.hf.folder import export, model_from_hf, spec_from_hf
from trainer.hf.weights import HFWeights

__all__ = ["HFWeights", "export", "model_from_hf", "spec_from_hf"]
