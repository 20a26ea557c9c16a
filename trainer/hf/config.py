"""config.json of a transformers folder <-> ModelSpec."""

from __future__ import annotations

import dataclasses
import math
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any

from trainer.config import ConfigError, typed
from trainer.config.model import ModelSpec, RopeSpec
from trainer.config.typed import flat
from trainer.hf.families import ACTIVATIONS, FAMILIES, Family
from trainer.util.reading import brief, read_json

DEEPEST, LARGEST = 10_000, 1 << 31
"""Layers, and any other number, of a model: what is made of a larger one would fill the memory."""

ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3"}
ROPE_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
}
ROPE_SCALING_FIELDS = {"none": (), "linear": ("factor",), "llama3": tuple(ROPE_FIELDS)}


def spec_from_hf(folder: str | Path) -> ModelSpec:
    """The architecture in `folder`/config.json. Raises `ConfigError` for what cannot be read or is not supported."""
    folder = Path(folder).expanduser()
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model.from_hf={folder}: there is no {path.name} in it; give a folder as transformers saves "
            "it (a model of the hub: hf download NAME --local-dir DIR)"
        )
    try:
        raw = read_json(path, {"model_type": (str, NoneType)}, "write it anew with transformers' save_pretrained")
        check_sizes(raw)
        if raw["model_type"] in FAMILIES:  # transformers fills in the defaults of its class
            from transformers import AutoConfig

            raw = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
        spec = spec_from_config(raw)
    except ConfigError as error:
        raise ConfigError([f"model.from_hf={folder}: {path.name}: {problem}" for problem in error.problems]) from error
    except Exception as error:  # every class of error by which transformers refuses a field, or a field is of no use
        raise ConfigError(f"model.from_hf={folder}: {path.name} cannot be read: {brief(error)}") from error
    spec.name = folder.resolve().name
    return spec


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """The spec of a complete config.json, as `config_from_spec` writes it.

    Raises `ConfigError` naming each unsupported option.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(f"model_type={model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    problems = [
        f"{key}={config[key]!r} is not supported by model family {model_type}; supported: {value!r}"
        for key, value in family.required.items()
        if config.get(key, value) != value
    ]
    if config.get("quantization_config"):
        problems.append("quantization_config: quantised weights are not supported; supported: fp32, bf16, fp16")
    spec = ModelSpec(family=model_type)
    for key, paths in family.fields.items():
        for path in (paths,) if isinstance(paths, str) else paths:
            try:
                assign(spec, path, decode(path, config.get(key)))
            except ValueError as error:
                problems.append(f"{key}={config.get(key)!r} is not supported; supported: {error}")
    for path, value in family.fixed.items():
        assign(spec, path, value(spec) if callable(value) else value)
    spec.feed_forward.width = spec.feed_forward.width or 4 * spec.width  # GPT-2's n_inner: null
    if spec.attention.positions == "rope":
        spec.attention.rope = rope_from_config(config, problems)
    windows = windows_from_config(config, family, spec.depth, problems)
    if len(set(windows)) == 1:
        spec.attention.window = windows[0]
    else:
        spec.pattern = window_pattern(windows)
    wrong: dict[str, str] = {}
    typed.build(spec.to_dict(), wrong, ModelSpec, "model")
    if problems := problems or list(wrong.values()) or spec.check():
        raise ConfigError(problems)
    return spec


def check_sizes(raw: dict[str, Any]) -> None:
    """Raises `ConfigError` for numbers that no model has, before anything is made of them."""
    problems = [
        f"{key}={brief(value)} is beyond any model; legal: up to {most}"
        for key, value in raw.items()
        if isinstance(value, int | float) and value > (most := DEEPEST if "layer" in key else LARGEST)
    ]
    if problems:
        raise ConfigError(problems)


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """config.json as transformers reads it (4.x and 5.x).

    Raises `ConfigError` where the family cannot express the spec.
    """
    family = FAMILIES[spec.family]
    config: dict[str, Any] = {
        "model_type": spec.family,
        "architectures": [family.architecture],
        **family.required,
        **family.written,
    }
    layer = spec.layer(0)
    common = dataclasses.replace(spec, attention=layer.attention, feed_forward=layer.feed_forward, norm=layer.norm)
    for key, paths in family.fields.items():
        path = paths if isinstance(paths, str) else paths[0]
        config[key] = encode(path, attrgetter(path)(common))
    if layer.attention.positions == "rope":
        config.update(rope_to_config(layer.attention.rope))
    windows = [spec.layer(index).attention.window for index in range(spec.depth)]
    if family.windows != "none":
        config["sliding_window"] = max(windows) or None
    if family.windows == "layers":
        config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    # Reading the result back shows whether it lost anything.
    difference = first_difference(spec, spec_from_config(config))
    if difference:
        raise ConfigError(
            f"{difference}, which the transformers family of model.family={spec.family} cannot express; "
            f"choose the family that has it (supported: {', '.join(FAMILIES)}), or train without it if "
            "the model is to be exported"
        )
    return config


def first_difference(spec: ModelSpec, other: ModelSpec) -> str | None:
    """The first field in which two specs describe different functions: `model.attention.window=16 (layer 3)`."""
    for field in dataclasses.fields(ModelSpec):
        if field.name not in ("name", "init", "attention", "feed_forward", "pattern", "overrides"):
            if not same(getattr(spec, field.name), getattr(other, field.name)):
                return f"model.{field.name}={getattr(spec, field.name)}"
    for index in range(spec.depth):
        theirs = layer_facts(other, index)
        for key, value in layer_facts(spec, index).items():
            if not same(value, theirs.get(key)):
                return f"model.{key}={value} (layer {index})"
    return None


def layer_facts(spec: ModelSpec, index: int) -> dict[str, Any]:
    """Dotted field -> value of a resolved layer, without fields that have no effect beside the others."""
    facts = flat(dataclasses.asdict(spec.layer(index)))
    rope = facts["attention.positions"] == "rope"
    scaling = (ROPE_FIELDS[key] for key in ROPE_SCALING_FIELDS[facts["attention.rope.scaling"]])
    used = ("theta", "fraction", "scaling", *scaling)
    return {
        key: value
        for key, value in facts.items()
        if not key.startswith("attention.rope.") or rope and key.removeprefix("attention.rope.") in used
    }


def same(a: Any, b: Any) -> bool:
    return math.isclose(a, b, rel_tol=1e-9) if isinstance(a, float) and isinstance(b, float) else a == b


def assign(spec: ModelSpec, path: str, value: Any) -> None:
    """Sets the field at a dotted path."""
    *blocks, name = path.split(".")
    setattr(attrgetter(".".join(blocks))(spec) if blocks else spec, name, value)


def decode(path: str, value: Any) -> Any:
    """An option's value as the spec holds it; null becomes 0. Raises `ValueError` listing what is supported."""
    if path == "feed_forward.activation":
        if value not in ACTIVATIONS:
            raise ValueError(", ".join(ACTIVATIONS))
        return ACTIVATIONS[value]
    if path == "attention.scale":
        return float(value) ** -0.5
    if value is None:
        return 0
    return float(value) if path.endswith(("eps", "std", "soft_cap")) else value


def encode(path: str, value: Any) -> Any:
    """A field's value as config.json holds it: the inverse of `decode`."""
    if path == "feed_forward.activation":
        return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == value)
    if path == "attention.scale":
        return round(value**-2)  # an integer in transformers
    return None if path.endswith("soft_cap") and not value else value


def rope_from_config(config: dict[str, Any], problems: list[str]) -> RopeSpec:
    """Rotary positions from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    options = {
        "rope_theta": config.get("rope_theta", config.get("rotary_emb_base", 10000.0)),
        "partial_rotary_factor": config.get("partial_rotary_factor", config.get("rotary_pct", 1.0)),
        **(config.get("rope_parameters") or config.get("rope_scaling") or {}),
    }
    kind = options.get("rope_type") or options.get("type") or "default"
    rope = RopeSpec(theta=float(options["rope_theta"]), fraction=float(options["partial_rotary_factor"]))
    if kind not in ROPE_TYPES:
        problems.append(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        return rope
    rope.scaling = ROPE_TYPES[kind]
    options.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    for key in ROPE_SCALING_FIELDS[rope.scaling]:
        if options.get(key) is None:
            problems.append(f"rope type {kind!r} needs {key}")
        else:
            kept = type(getattr(rope, ROPE_FIELDS[key]))
            setattr(rope, ROPE_FIELDS[key], kept(options[key]))
    return rope


def rope_to_config(rope: RopeSpec) -> dict[str, Any]:
    """The options of rotary positions under the names of transformers 5 and of its predecessors."""
    kind = next(theirs for theirs, ours in ROPE_TYPES.items() if ours == rope.scaling)
    scaling = {key: getattr(rope, ROPE_FIELDS[key]) for key in ROPE_SCALING_FIELDS[rope.scaling]}
    parameters = {"rope_type": kind, "rope_theta": rope.theta, "partial_rotary_factor": rope.fraction, **scaling}
    if rope.fraction == 1.0:
        del parameters["partial_rotary_factor"]
    old = {"rope_theta": rope.theta, "rope_scaling": {"rope_type": kind, **scaling} if scaling else None}
    if rope.fraction != 1.0:
        old.update(partial_rotary_factor=rope.fraction, rotary_pct=rope.fraction, rotary_emb_base=rope.theta)
    return {"rope_parameters": parameters, **old}


def windows_from_config(config: dict[str, Any], family: Family, depth: int, problems: list[str]) -> list[int]:
    """The sliding window of each layer; 0 means none."""
    legal = ("full_attention", "sliding_attention")
    types = config.get("layer_types") or ["sliding_attention"] * depth
    if unknown := sorted(set(types) - set(legal)):
        problems.append(f"layer_types: {', '.join(map(repr, unknown))} is not supported; supported: {', '.join(legal)}")
    window = 0 if family.windows == "none" else config.get("sliding_window") or 0
    return [window if kind == "sliding_attention" else 0 for kind in types]


def window_pattern(windows: list[int]) -> list[dict[str, Any]]:
    """The shortest `pattern` of a spec that gives each layer its window."""
    period = next(p for p in range(1, len(windows) + 1) if all(w == windows[i % p] for i, w in enumerate(windows)))
    runs = [(window, len(list(run))) for window, run in groupby(windows[:period])]
    return [{"attention": {"window": window}, **({"repeat": count} if count > 1 else {})} for window, count in runs]
