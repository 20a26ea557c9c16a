"""The modules of a model, whether its code is this project's or transformers'."""

from __future__ import annotations

from trainer.config.model import CodeSpec, ModelSpec
from trainer.model.stage import Stage
from trainer.model.transformer import Transformer


def make_stage(spec: ModelSpec, layers: range | None = None) -> Stage:
    """The pipeline stage with `layers` (None: all of them)."""
    if isinstance(spec, CodeSpec):
        from trainer.hf.code import CodeStage  # imports transformers, which takes seconds

        return CodeStage(spec, layers)
    return Transformer(spec, layers)
