"""Every field of a spec and every option of a config.json, varied by what their declarations say."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from trainer.config.model import LatentSpec, ModelSpec
from trainer.config.typed import Setting, list_settings
from trainer.hf.config import assign_field
from trainer.hf.families import FAMILIES

FIELDS = {setting.path: setting for setting in list_settings(ModelSpec()) if setting.registry is None}
"""Every leaf of the spec, but for settings of what packages register, which transformers does not have."""
LAYER_FIELDS = [path for path in FIELDS if path.split(".")[0] in ("attention", "feed_forward", "norm")]


LATENT = "attention.latent."
OF_HEADS = ("attention.kv_heads", "attention.head_dim", "attention.qk_norm", "attention.rope.fraction")
"""Fields of latent attention alone, and those that it has no use for."""


def small(family: str, **changes: Any) -> ModelSpec:
    """A tiny spec with the values that the architecture implies. changes: by path, two underscores for a dot."""
    spec = ModelSpec(family=family, vocab_size=61, width=32, depth=2, max_length=64)
    spec.attention.heads, spec.feed_forward.width = 4, 40
    if any("experts" in rule.theirs for rule in FAMILIES[family].layer_rules):
        spec.feed_forward.experts.count = 4
        spec.feed_forward.experts.shared_width = 24 if family == "qwen2_moe" else 0
    if FAMILIES[family].shared_experts:
        spec.feed_forward.experts.shared_width = 80
        spec.attention.latent = LatentSpec(q_rank=12, kv_rank=20, nope_dim=12, rope_dim=8, value_dim=16)
    for path, value in changes.items():
        assign_field(spec, path.replace("__", "."), value)
    imply(spec)
    return spec


def imply(spec: ModelSpec, *but: str) -> None:
    """Sets the fields whose value the architecture implies, but for some."""
    for path, value in FAMILIES[spec.family].fixed.items():
        if path not in but:
            assign_field(spec, path, value(spec) if callable(value) else value)


def variations(spec: ModelSpec, path: str) -> Iterator[ModelSpec]:
    """Legal specs with another value at `path`: every choice; the first legal one of several numbers; in `pattern` and
    `overrides`, another value of every field of a layer."""
    if path in ("pattern", "overrides"):
        for field in LAYER_FIELDS:
            for other in variations(spec, field):
                change: Any = attrgetter(field)(other)
                for name in reversed(field.split(".")):
                    change = {name: change}
                assign_field(varied := copied(spec), path, {"-1": change} if path == "overrides" else [{}, change])
                yield varied
                break
        return
    found = False
    for value in candidates(FIELDS[path], attrgetter(path)(spec)):
        assign_field(varied := copied(spec), path, value)
        if path == "family":
            imply(varied)
        derived = [name for name, implied in FAMILIES[spec.family].fixed.items() if not callable(implied)]
        imply(varied, path, *derived)
        if not varied.check():
            yield varied
            found = True
            if not FIELDS[path].choices:
                return
    alone = FIELDS[path].choices and len(FIELDS[path].choices) == 1
    # Experts are gated; one group has no other number of best groups. Latent attention has sizes of its own, and no
    # norms of queries and keys.
    fixed = spec.feed_forward.experts.count or path.startswith("feed_forward.experts.")
    fixed = (
        fixed or path in OF_HEADS
        if spec.attention.kind == "latent"
        else fixed or path.startswith(("attention.kind", LATENT))
    )
    assert found or alone or fixed or spec.check(), f"no legal variation of model.{path}"


def copied(spec: ModelSpec) -> ModelSpec:
    """A deep copy, in a fifth of the time of `copy.deepcopy`."""
    return pickle.loads(pickle.dumps(spec))


def candidates(setting: Setting, value: Any) -> list[Any]:
    """Other values of a field, the likeliest to be legal first."""
    if setting.choices:
        return [choice for choice in setting.choices if choice != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [value + "x"]
    if isinstance(value, list):
        return [[2 * item for item in value]]
    if isinstance(value, int):
        return [n for n in (2 * value, value // 2, value + 2, value + 1) if n not in (0, value)]
    assert isinstance(value, float), f"model.{setting.path} is of a type that has no variations here"
    return [x for x in (2 * value, value / 2, value + 0.5) if x not in (0, value)]


def other_options(key: str, value: Any, choices: dict[str, list[Any]]) -> list[Any]:
    """Other values of an option of config.json: null, and values of its type or, where it is null, of several types.

    choices: of options whose values are names."""
    if key in choices:
        others = choices[key]
    elif isinstance(value, bool):
        others = [not value]
    elif isinstance(value, (int, float)):
        others = [2 * value if value else type(value)(1)]
    elif isinstance(value, str):
        others = [value + "x"]
    elif isinstance(value, list):
        others = [value[::-1], *([item] * len(value) for item in dict.fromkeys(value))]
    elif isinstance(value, dict):
        others = [{}]
    else:
        others = [5, True, 0.5, "x"]
    return [other for other in [*others, None] if other != value]
