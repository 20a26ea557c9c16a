"""config.json of a transformers folder <-> ModelSpec."""

from __future__ import annotations

import dataclasses
import math
from itertools import groupby
from operator import attrgetter
from typing import Any

from trainer.config import ConfigError, typed
from trainer.config.model import DEEPEST, LOSS_OF_EXPERTS, SCALING_FIELDS, LayerSpec, ModelSpec, RopeSpec
from trainer.config.typed import flatten_values
from trainer.hf.families import ACTIVATIONS, FAMILIES, ModelFamily
from trainer.util.reading import shorten_foreign

LARGEST = 1 << 31
"""Any number of a model but its layers: what is made of a larger one would fill the memory."""

ROPE_TYPES = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
}
ROPE_NAMES = {
    "theta": "rope_theta",
    "fraction": "partial_rotary_factor",
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
}
"""Field of `RopeSpec` -> its name in rope_parameters."""
OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
"""Fields of `RopeSpec` that rope_parameters may lack; null and 0 stand there for what is the default here."""
UNSUPPORTED = {
    "quantization_config": "quantised weights are not supported; supported: fp32, bf16, fp16, and mxfp4 of gpt_oss "
    "(DeepSeek's repositories have inference/fp8_cast_bf16.py, which writes bf16; then remove quantization_config)",
    "transformers_weights": "weights in another file than model.safetensors are not supported; rename the file",
    "per_layer_config": "options of single layers are not supported; supported: the same options for all layers",
}


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """The spec of a complete config.json, as `config_from_spec` writes it.

    Raises `ConfigError` naming each unsupported option.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type={format_option(model_type)} is not supported; supported: {', '.join(FAMILIES)}, and with "
            "model.code=transformers the types in docs/data_and_models.md"
        )
    family, config = FAMILIES[model_type], rename_options(config)
    names = {new: f"{new} or {old}" for old, new in family.renamed.items()}
    problems = [
        f"{names.get(key, key)}=None is not supported by model family {model_type}; supported: a number"
        for key in family.needed
        if config.get(key, 0) is None
    ]
    problems += [
        f"{key}={format_option(config[key])} is not supported by model family {model_type}; supported: {value!r}"
        for key, value in family.required.items()
        if config.get(key, value) != value
    ]
    problems += [f"{key}: {reason}" for key, reason in UNSUPPORTED.items() if config.get(key)]
    spec = ModelSpec(family=model_type)
    for key, paths in family.fields.items():
        for path in (paths,) if isinstance(paths, str) else paths:
            try:
                assign_field(spec, path, decode_option(path, config.get(key)))
            except ValueError as error:
                problems.append(f"{key}={format_option(config.get(key))} is not supported; supported: {error}")
    for path, value in family.fixed.items():
        assign_field(spec, path, value(spec) if callable(value) else value)
    spec.feed_forward.width = spec.feed_forward.width or 4 * spec.width  # GPT-2's n_inner: null
    if family.rope:
        spec.attention.rope = rope_from_config(config, family, problems)
    read_mixture(config, family, spec, problems)
    windows = windows_from_config(config, family, spec.depth, problems)
    if len(set(windows)) == 1:
        spec.attention.window = windows[0]
    else:
        spec.pattern = window_pattern(windows)
    wrong: dict[str, str] = {}
    typed.build_typed(spec.to_dict(), wrong, ModelSpec, "model")
    if problems := problems or list(wrong.values()) or spec.check():
        raise ConfigError(problems)
    return spec


def rename_options(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the names of options that the table of families has, whatever version wrote it."""
    renamed = FAMILIES[config["model_type"]].renamed
    return {renamed.get(key, key): value for key, value in config.items()}


def read_mixture(config: dict[str, Any], family: ModelFamily, spec: ModelSpec, problems: list[str]) -> None:
    """Sets what several options of a family with experts say together: layers without experts, the width of the shared
    block, and groups of experts."""
    experts = spec.feed_forward.experts
    if family.dense_layers:
        block = {"width": config["intermediate_size"], "experts": {"count": 0}}
        spec.overrides = {str(index): {"feed_forward": block} for index in dense_layers(config, family, spec.depth)}
    if family.shared_experts:
        if not (shared := config[family.shared_experts]):
            problems.append(f"{family.shared_experts}={shared} is not supported; supported: at least 1")
        experts.shared_width = (shared or 0) * spec.feed_forward.width
    if family.grouped_by:
        method = config.get("topk_method")
        if method == "greedy":
            experts.groups = experts.top_groups = 1
        elif method != family.grouped_by:
            problems.append(
                f"topk_method={format_option(method)} is not supported; supported: greedy, {family.grouped_by}"
            )


def dense_layers(config: dict[str, Any], family: ModelFamily, depth: int) -> list[int]:
    """The layers without experts."""
    if family.dense_layers == "first_k_dense_replace":
        return list(range(min(config[family.dense_layers] or 0, depth)))
    named, step = config.get(family.dense_layers) or [], config.get("decoder_sparse_step") or 1
    return [index for index in range(depth) if index in named or (index + 1) % step or not config["num_experts"]]


def mixture_options(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of `read_mixture`. What the family cannot express is lost."""
    family, options = FAMILIES[spec.family], dict[str, Any]()
    blocks = [spec.layer(index).feed_forward for index in range(spec.depth)]
    dense = [index for index, block in enumerate(blocks) if not block.experts.count]
    common = next((block for block in blocks if block.experts.count), blocks[0])
    if family.dense_layers:
        options["intermediate_size"] = blocks[dense[0] if dense else 0].width
    if family.dense_layers == "first_k_dense_replace":
        options[family.dense_layers] = len(dense)
    elif family.dense_layers:
        options |= {family.dense_layers: dense, "decoder_sparse_step": 1}
    if family.shared_experts:
        options[family.shared_experts] = max(1, common.experts.shared_width // common.width)
    if family.grouped_by:
        options["topk_method"] = family.grouped_by if common.experts.groups > 1 else "greedy"
    return options


def common_layer(layers: list[LayerSpec]) -> LayerSpec:
    """The layer whose fields the options of a model are: the first one with experts, if there is any."""
    return next((layer for layer in layers if layer.feed_forward.experts.count), layers[0])


def format_option(value: Any) -> str:
    """An option's value in a message."""
    return repr(value) if len(repr(value)) <= 40 else shorten_foreign(value)


def check_sizes(raw: dict[str, Any]) -> None:
    """Raises `ConfigError` for numbers that no model has, before anything is made of them."""
    problems = [
        f"{key}={shorten_foreign(value)} is beyond any model; legal: up to {most}"
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
    layers = [spec.layer(index) for index in range(spec.depth)]
    layer = common_layer(layers)
    common = dataclasses.replace(spec, attention=layer.attention, feed_forward=layer.feed_forward, norm=layer.norm)
    for key, paths in family.fields.items():
        path = paths if isinstance(paths, str) else paths[0]
        config[key] = encode_option(path, attrgetter(path)(common))
    if family.rope:
        config.update(rope_to_config(layer.attention.rope, family))
    config |= mixture_options(spec)
    windows = [layer.attention.window for layer in layers]
    if family.windows != "none":
        config["sliding_window"] = max(windows) or (spec.max_length if family.window_needed else None)
    if family.windows == "layers":
        config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    # Reading the result back shows whether it lost anything.
    difference = first_difference(spec, spec_from_config(config))
    if difference:
        raise ConfigError(
            f"{difference}, which the transformers family of model.family={spec.family} cannot express; choose the "
            f"family that has it (supported: {', '.join(FAMILIES)}), or train without it if the model is to be "
            "exported"
        )
    return config


def first_difference(spec: ModelSpec, other: ModelSpec) -> str | None:
    """The first field in which two specs describe different functions: `model.attention.window=16 (layer 3)`."""
    theirs = flatten_values(dataclasses.asdict(other))
    for path, value in flatten_values(dataclasses.asdict(spec)).items():
        if path.split(".")[0] not in ("name", "init", "attention", "feed_forward", "pattern", "overrides"):
            if not same_value(value, theirs[path]):
                return f"model.{path}={value}"
    for index in range(spec.depth):
        theirs = layer_facts(other, index)
        for key, value in layer_facts(spec, index).items():
            if not same_value(value, theirs.get(key)):
                return f"model.{key}={value} (layer {index})"
    return None


def layer_facts(spec: ModelSpec, index: int) -> dict[str, Any]:
    """Dotted field -> value of a resolved layer, without fields that have no effect beside the others."""
    facts = flatten_values(dataclasses.asdict(spec.layer(index)))
    rope = facts["attention.positions"] == "rope"
    if not facts[(count := "feed_forward.experts.count")]:
        facts = {key: value for key, value in facts.items() if key == count or ".experts." not in key}
    if FAMILIES[spec.family].balance and (rate := "feed_forward.experts.bias_rate") in facts:
        facts[rate] = facts[rate] > 0
    used = ("theta", "fraction", "scaling", *SCALING_FIELDS[facts["attention.rope.scaling"]])
    return {
        key: value
        for key, value in facts.items()
        if not key.endswith(LOSS_OF_EXPERTS)
        and (not key.startswith("attention.rope.") or rope and key.removeprefix("attention.rope.") in used)
    }


def same_value(a: Any, b: Any) -> bool:
    return math.isclose(a, b, rel_tol=1e-9) if isinstance(a, float) and isinstance(b, float) else a == b


def assign_field(spec: ModelSpec, path: str, value: Any) -> None:
    """Sets the field at a dotted path."""
    *blocks, name = path.split(".")
    setattr(attrgetter(".".join(blocks))(spec) if blocks else spec, name, value)


def decode_option(path: str, value: Any) -> Any:
    """An option's value as the spec holds it; null becomes 0. Raises `ValueError` listing what is supported."""
    if path == "feed_forward.activation":
        if value not in ACTIVATIONS:
            raise ValueError(", ".join(ACTIVATIONS))
        return ACTIVATIONS[value]
    if path == "attention.scale":
        return float(value) ** -0.5
    if value is None:
        return 1 if path.endswith("groups") else 0
    return float(value) if path.endswith(("eps", "std", "soft_cap")) else value


def encode_option(path: str, value: Any) -> Any:
    """A field's value as config.json holds it: the inverse of `decode_option`."""
    if path == "feed_forward.activation":
        return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == value), "silu")
    if path == "attention.scale":
        return round(value**-2)  # an integer in transformers
    return None if path.endswith(("soft_cap", "q_rank")) and not value else value


def rope_from_config(config: dict[str, Any], family: ModelFamily, problems: list[str]) -> RopeSpec:
    """Rotary positions from `rope_parameters` (transformers 5) or from `rope_scaling` and options beside it (before).

    What the architecture does not read is not read here either.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    options = {**{ROPE_NAMES[name]: config.get(option) for option, name in family.rope.items()}, **given}
    kind, rope = options.get("rope_type") or options.get("type") or "default", RopeSpec()
    if kind not in ROPE_TYPES:
        problems.append(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        return rope
    rope.scaling = ROPE_TYPES[kind]
    part = options.get(ROPE_NAMES["fraction"])
    if kind != "default" and part not in (None, 1.0) and "fraction" not in family.rope.values():
        # transformers scales the frequencies of a part of each head, and rotates whole heads.
        problems.append(f"rope type {kind!r} with {ROPE_NAMES['fraction']}={part} is not supported; leave that out")
    if rope.scaling in ("yarn", "longrope") and options.get("factor") is None:
        before = options.get(ROPE_NAMES["original_length"])
        options["factor"] = config["max_position_embeddings"] / before if before else None
    for name in dict.fromkeys((*family.rope.values(), *SCALING_FIELDS[rope.scaling])):
        value = options.get(ROPE_NAMES[name])
        if value or isinstance(value, bool):
            setattr(rope, name, type(getattr(rope, name))(value))
        elif name not in OPTIONAL:
            problems.append(f"rope type {kind!r} needs {ROPE_NAMES[name]}")
    return rope


def rope_to_config(rope: RopeSpec, family: ModelFamily) -> dict[str, Any]:
    """The options of rotary positions under the names of transformers 5 and of its predecessors. None is left to a
    default."""
    kind = next(theirs for theirs, ours in ROPE_TYPES.items() if ours == rope.scaling)
    everywhere = {ROPE_NAMES[name]: getattr(rope, name) for name in family.rope.values() if name != "original_length"}
    values = {name: getattr(rope, name) for name in SCALING_FIELDS[rope.scaling]}
    scaling = {
        ROPE_NAMES[name]: value
        for name, value in values.items()
        if name not in OPTIONAL or value or isinstance(value, bool)
    }
    return {
        "rope_parameters": {"rope_type": kind, **everywhere, **scaling},
        "rope_scaling": {"rope_type": kind, **scaling} if scaling else None,
        **{option: getattr(rope, name) for option, name in family.rope.items()},
    }


def windows_from_config(config: dict[str, Any], family: ModelFamily, depth: int, problems: list[str]) -> list[int]:
    """The sliding window of each layer; 0 means none."""
    if family.windows == "none":
        return [0] * depth
    window, legal = config.get("sliding_window"), ("full_attention", "sliding_attention")
    types = config["layer_types"] if family.windows == "layers" else ["sliding_attention"] * depth
    if window == 0 and family.windows == "layers":
        window = None  # what some families make of use_sliding_window=false
    if window is not None and window < 1:
        problems.append(f"sliding_window={window} is not supported; supported: null, or at least 1")
    if unknown := sorted(set(types) - set(legal)):
        problems.append(f"layer_types: {', '.join(map(repr, unknown))} is not supported; supported: {', '.join(legal)}")
    if window is None and family.windows == "layers" and "sliding_attention" in types:
        problems.append(
            "sliding_window=None is not supported beside sliding_attention in layer_types; supported: a number (with "
            "use_sliding_window=True, where the family has it), or full_attention alone"
        )
    return [window or 0 if kind == "sliding_attention" else 0 for kind in types]


def window_pattern(windows: list[int]) -> list[dict[str, Any]]:
    """The shortest `pattern` of a spec that gives each layer its window."""
    period = next(p for p in range(1, len(windows) + 1) if all(w == windows[i % p] for i, w in enumerate(windows)))
    runs = [(window, len(list(run))) for window, run in groupby(windows[:period])]
    return [{"attention": {"window": window}, **({"repeat": count} if count > 1 else {})} for window, count in runs]
