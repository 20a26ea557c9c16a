"""Which linear layers multiply in fp8 (`precision.float8`), and what cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

from trainer.config import Config, PrecisionConfig
from trainer.config.model import ModelSpec
from trainer.planning.layer import has_experts
from trainer.planning.parameters import (
    ROLES,
    ParameterInfo,
    UpdateSettings,
    float8_setting,
    float8_settings,
    layer_tables,
)
from trainer.planning.plan import Feature, Plan

MULTIPLE = 16
"""The tensor cores take fp8 operands whose rows have a multiple of so many elements."""

BLOCKS = "blockwise"
"""The recipe with a scale for each block. Weights have to be whole blocks; tokens are padded to whole blocks."""

BLOCK = 128
"""Side of a block."""

WIDE = "rowwise_with_gw_hp"
"""The recipe whose weight gradients are not in fp8."""


class Float8Linear(NamedTuple):
    """A linear layer that multiplies in fp8: by which recipe, and facts of its matrix."""

    recipe: str
    info: ParameterInfo


def numeric_types(precision: PrecisionConfig) -> str:
    """The types of a run, for people."""
    reduction = [f"{precision.reduce} reduction"] if precision.reduce != "fp32" else []
    recipes = dict.fromkeys(float8_settings(precision).values())
    products = [f"fp8 products ({' and '.join(recipes)})"] if recipes else []
    return ", ".join([precision.compute, *products, *reduction])


def float8_linears(precision: PrecisionConfig, spec: ModelSpec) -> dict[str, Float8Linear]:
    """Global name of each linear layer that multiplies in fp8 -> how. Which layers can, `precision.float8` says; by
    which recipe, the parameter-type map, and where that leaves it open `precision.float8` again."""
    float8, types, found = precision.float8, UpdateSettings(types=precision.types), {}
    if not float8_settings(precision):
        return {}
    tables = layer_tables(spec)
    for index in range(float8.ends, spec.depth - float8.ends):
        for name, info in _projections(index, tables[index]):
            recipe = types.chosen(f"{name}.weight", info).float8 or float8.recipe
            if recipe != "none" and any(fnmatchcase(name, pattern) for pattern in float8.linears):
                found[name] = Float8Linear(recipe, info)
    return found


def gathered_in_float8(config: Config, spec: ModelSpec, plan: Plan) -> list[float]:
    """Elements of each layer, on one tensor-parallel rank, that ZeRO gathers in fp8."""
    gathers = config.precision.float8.gather and plan.shard > 1
    return float8_elements(config, spec, plan, "tensorwise") if gathers else [0.0] * spec.depth


def float8_elements(config: Config, spec: ModelSpec, plan: Plan, only: str = "") -> list[float]:
    """Elements of each layer, on one tensor-parallel rank, in matrices that multiply in fp8. only: a recipe."""
    found = [0.0] * spec.depth
    for name, (recipe, info) in float8_linears(config.precision, spec).items():
        if only in ("", recipe):
            found[int(name.split(".")[1])] += prod(info.multiplied(plan.tp))
    return found


def can_cast_once(config: Config, spec: ModelSpec, plan: Plan, microbatches: int) -> bool:
    """Whether a step may cast each weight to fp8 once, when it is gathered, and hold the operands of its products
    beside it. Under ZeRO-3 weights are gathered for each pass, and with adapters most are frozen and not gathered.
    Tensor-parallel ranks cast at each use."""
    return (
        microbatches > 1
        and plan.stage < 3
        and (plan.tp, plan.engine, spec.adapter.rank) == (1, "torch", 0)
        and bool(float8_settings(config.precision))
    )


def _projections(index: int, table: Mapping[str, ParameterInfo]) -> Iterator[tuple[str, ParameterInfo]]:
    for name, info in table.items():
        # Experts and adapters multiply in the compute type, routers in fp32.
        if info.role == "matrix" and info.axes[0] != "experts" and not info.adapter:
            yield f"layers.{index}.{name}".removesuffix(".weight"), info


def check_float8(config: Config, spec: ModelSpec | None, plan: Plan, node: int = 0) -> Iterator[str]:
    """What of the chosen linear layers cannot be multiplied in fp8, one sentence each."""
    if spec is None:
        return
    float8, settings = config.precision.float8, float8_settings(config.precision)
    chosen = float8_linears(config.precision, spec)
    if float8.gather:
        yield from _gathering(config, plan, {one.recipe for one in chosen.values()} or {float8.recipe})
    if not settings:
        return
    misplaced = [
        f"{name}={settings[name]}: only matrices multiply in fp8; set {name}=null"
        for role in ROLES
        if (name := f"precision.types.{role}.float8") in settings and role != "matrix"
    ]
    misplaced += _rules(config.precision, spec)
    yield from misplaced
    if not chosen and not misplaced:
        yield (
            f"precision.float8.linears={float8.linears} match no linear layer of the {spec.depth} layers less "
            f"precision.float8.ends={float8.ends} at each end; names look like layers.0.feed_forward.up; set other "
            "patterns, or precision.float8.ends=0"
        )
    yield from _sizes(config, plan, chosen)
    yield from _tokens(config, plan, chosen)


def _rules(precision: PrecisionConfig, spec: ModelSpec) -> Iterator[str]:
    """Rules that give a recipe to no linear layer of the model."""
    names = [
        f"{name}.weight" for index, table in enumerate(layer_tables(spec)) for name, _ in _projections(index, table)
    ]
    for pattern in precision.types.rules:
        name = f"precision.types.rules.{pattern}.float8"
        if name in float8_settings(precision) and not any(fnmatchcase(one, pattern) for one in names):
            yield (
                f"{name}={float8_settings(precision)[name]} matches no matrix of a layer; names look like "
                "layers.0.feed_forward.up.weight; set another pattern, or leave float8 out of the rule"
            )


def _gathering(config: Config, plan: Plan, recipes: set[str]) -> Iterator[str]:
    """What does not go with gathers in fp8."""
    if "tensorwise" not in recipes:
        setting = f"precision.float8.recipe={config.precision.float8.recipe}"
        yield (
            f"precision.float8.gather=true: {setting} has no one scale for a matrix, with which it could travel; set "
            "precision.float8.recipe=tensorwise, or precision.float8.gather=false"
        )
    if not float8_settings(config.precision):
        return
    if config.parallel.zero.collectives == "copy_engine":
        yield (
            f"precision.float8.gather=true: parallel.zero.collectives={config.parallel.zero.collectives} copies "
            "parameters in the compute type; set parallel.zero.collectives=nccl, or precision.float8.gather=false"
        )
    if plan.stage == 0:
        yield (
            "precision.float8.gather=true: parallel.zero.stage=0 gathers nothing; set parallel.zero.stage=1, 2 or 3, "
            "or precision.float8.gather=false"
        )


def _sizes(config: Config, plan: Plan, chosen: Mapping[str, Float8Linear]) -> Iterator[str]:
    """The first matrix whose rows or columns on a rank are no whole blocks, or the tensor cores do not take."""
    for name, (recipe, info) in chosen.items():
        multiple = BLOCK if recipe == BLOCKS else MULTIPLE
        others = "attention" if ".feed_forward." in name else "feed_forward"
        rows, columns = info.multiplied(plan.tp)
        if rows % multiple or columns % multiple:
            yield (
                f"precision.float8.linears={config.precision.float8.linears}: {name} has a matrix of {rows:g} x "
                f"{columns:g} on each of parallel.tp={plan.tp} ranks, and {recipe} needs multiples of {multiple}; "
                f"leave it out, as with precision.float8.linears=[*.{others}.*], or set "
                f"{float8_setting(config.precision)[1]}"
            )
            return


def _tokens(config: Config, plan: Plan, chosen: Mapping[str, Float8Linear]) -> Iterator[str]:
    """Tokens on a rank that weight gradients in fp8 cannot be added up over."""
    if all(one.recipe == WIDE for one in chosen.values()):  # sums over tokens in the compute type
        return
    length, tile = config.batch.sequence_length, config.activation.tile or 0
    name, off = float8_setting(config.precision)
    instead = f"{name.split('=')[0]}={WIDE}, or set {off}"
    if length // plan.cp % MULTIPLE:
        step = MULTIPLE * plan.cp
        yield (
            f"batch.sequence_length={length} over parallel.cp={plan.cp} ranks: fp8 adds up weight gradients over "
            f"multiples of {MULTIPLE} tokens; set batch.sequence_length={-(-length // step) * step}, {instead}"
        )
    if tile * plan.tp % MULTIPLE:
        yield (
            f"activation.tile={tile} on parallel.tp={plan.tp} ranks: fp8 adds up weight gradients over multiples of "
            f"{MULTIPLE} tokens; set activation.tile={-(-tile // MULTIPLE) * MULTIPLE}, {instead}"
        )


def describe_float8(config: Config, spec: ModelSpec, plan: Plan) -> list[tuple[str, str]]:
    """How often weights are cast to fp8, what multiplies otherwise, and what has no effect."""
    unused = config.precision.float8.gather and plan.shard == 1
    found = [("without effect", "precision.float8.gather=true: no ranks share states")] * unused
    if float8_settings(config.precision):
        found.append(("weights", f"cast to fp8 {'once a step' if plan.casts_once else 'at each use'}"))
        others = f"multiply in {config.precision.compute}, other linear layers in fp8"
        found += [("experts", others)] * has_experts(spec)
    if spec.adapter.weights == "fp8":
        experts = f", those of experts in {config.precision.compute}" * has_experts(spec)
        found.append(("frozen matrices", f"in fp8{experts}"))
    return found


FEATURE = Feature("float8", check_plan=check_float8, describe=describe_float8)
