"""Longer sequences for a model that has been trained: its rotary positions, changed."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from trainer.config import typed
from trainer.config.fields import ConfigError
from trainer.config.model import SCALING_FIELDS, CodeSpec, ModelSpec, RopeSpec

LENGTH = "max_length"


def extend_spec(spec: ModelSpec, changes: dict[str, Any]) -> ModelSpec:
    """`spec` with the changes of `model.extend`: fields of `model.attention.rope`, for every layer, and the longest
    sequence. What they leave out follows from the model, not from the fields' defaults. Raises `ConfigError` with
    everything that is wrong."""
    if not changes:
        return spec
    if isinstance(spec, CodeSpec):
        raise ConfigError(
            f"model.extend={changes} changes this project's rotary positions, and the model runs by transformers' own "
            "code; leave it out and change rope_parameters in config.json"
        )
    if spec.attention.positions != "rope":
        raise ConfigError(f"model.extend={changes}: a model without rotary positions cannot be extended; leave it out")
    problems: typed.Problems = {}
    given = {name: value for name, value in changes.items() if name != LENGTH}
    length = changes.get(LENGTH, spec.max_length)
    if type(length) is not int or length < 1:
        problems[LENGTH] = f"model.extend.{LENGTH}={length} must be a number of tokens"
    own = spec.attention.rope
    rope = typed.build_typed({**asdict(inherit_rope(spec, given)), **given}, problems, RopeSpec, "model.extend")
    if problems:
        raise ConfigError(list(problems.values()))
    if rope.scaling in ("yarn", "longrope") and rope.scaling != own.scaling and "factor" not in given:
        rope.factor = max(1.0, length / rope.original_length)  # as transformers has it
    other = replace(spec, max_length=length, attention=replace(spec.attention, rope=rope))
    if found := typed.out_of_range(rope, "model.extend") or find_contradictions(spec, other, given) or other.check():
        raise ConfigError(found)
    return other


def inherit_rope(spec: ModelSpec, given: dict[str, Any]) -> RopeSpec:
    """The rotary positions that the given fields change. The original length is the model's own; fields of another
    kind of scaling than the given one are left behind."""
    rope = spec.attention.rope
    scaled = "original_length" in SCALING_FIELDS[rope.scaling]
    length = rope.original_length if scaled else spec.max_length
    if given.get("scaling", rope.scaling) == rope.scaling:
        return replace(rope, original_length=length)
    return RopeSpec(theta=rope.theta, fraction=rope.fraction, original_length=length)


def find_contradictions(spec: ModelSpec, other: ModelSpec, given: dict[str, Any]) -> list[str]:
    """What of the given fields would have no effect or another one than its name says. other: the extended `spec`."""
    scaling = other.attention.rope.scaling
    read = ("scaling", "theta", "fraction", *SCALING_FIELDS[scaling])
    found = [
        f"model.extend.{name}={value} has no effect with scaling={scaling}; leave it out, or set "
        "model.extend.scaling to a kind that reads it"
        for name, value in given.items()
        if name not in read
    ]
    if scaling in ("linear", "dynamic", "llama3") and scaling != spec.attention.rope.scaling and "factor" not in given:
        factor = max(other.max_length / spec.max_length, 2.0)
        found.append(
            f"model.extend.scaling={scaling} stretches nothing without a factor; set model.extend.factor, such as "
            f"{factor:g}"
        )
    if scaling == "dynamic" and other.max_length != spec.max_length:
        found.append(
            f"model.extend.{LENGTH}={other.max_length} contradicts scaling=dynamic, which stretches what is longer "
            f"than the model's own {spec.max_length} tokens; leave {LENGTH} out"
        )
    return found
