"""Longer sequences for a model that has been trained: its rotary positions, changed."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from trainer.config import typed
from trainer.config.fields import ConfigError
from trainer.config.model import ModelSpec, RopeSpec

LENGTH = "max_length"


def extended(spec: ModelSpec, changes: dict[str, Any]) -> ModelSpec:
    """`spec` with the changes of `model.extend`: fields of `model.attention.rope`, for every layer, and the longest
    sequence. Raises `ConfigError` with everything that is wrong."""
    if not changes:
        return spec
    if spec.attention.positions != "rope":
        raise ConfigError(f"model.extend={changes}: a model without rotary positions cannot be extended; leave it out")
    problems: typed.Problems = {}
    given = {name: value for name, value in changes.items() if name != LENGTH}
    rope = typed.build({**asdict(spec.attention.rope), **given}, problems, RopeSpec, "model.extend")
    length = changes.get(LENGTH, spec.max_length)
    if not isinstance(length, int) or length < 1:
        problems[LENGTH] = f"model.extend.{LENGTH}={length} must be a number of tokens"
    if problems:
        raise ConfigError(list(problems.values()))
    other = replace(spec, max_length=length, attention=replace(spec.attention, rope=rope))
    if found := typed.out_of_range(rope, "model.extend") or other.check():
        raise ConfigError(found)
    return other
