"""Which linear layers multiply in fp8 (`precision.float8`), and what cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod

from trainer.config import Config, Float8Config, PrecisionConfig
from trainer.config.model import ModelSpec
from trainer.planning.cost.parameters import ParameterInfo, layer_tables
from trainer.planning.plan import Plan

MULTIPLE = 16
"""The tensor cores take fp8 operands whose rows have a multiple of so many elements."""

OFF = "set precision.float8.recipe=none"


def numeric_types(precision: PrecisionConfig) -> str:
    """The types of a run, for people."""
    reduction = [f"{precision.reduce} reduction"] if precision.reduce != "fp32" else []
    products = [f"fp8 products ({precision.float8.recipe})"] if precision.float8.recipe != "none" else []
    return ", ".join([precision.compute, *products, *reduction])


def float8_linears(float8: Float8Config, spec: ModelSpec) -> dict[str, ParameterInfo]:
    """Global name of each linear layer that multiplies in fp8 -> facts of its matrix."""
    if float8.recipe == "none":
        return {}
    tables = layer_tables(spec)
    return {
        name: info
        for index in range(float8.ends, spec.depth - float8.ends)
        for name, info in _projections(index, tables[index])
        if any(fnmatchcase(name, pattern) for pattern in float8.linears)
    }


def gathered_in_float8(config: Config, spec: ModelSpec, plan: Plan) -> list[float]:
    """Elements of each layer, on one tensor-parallel rank, that ZeRO gathers in fp8."""
    found = [0.0] * spec.depth
    if config.precision.float8.gather and plan.shard > 1:
        for name, info in float8_linears(config.precision.float8, spec).items():
            found[int(name.split(".")[1])] += prod(info.multiplied(plan.tp))
    return found


def _projections(index: int, table: Mapping[str, ParameterInfo]) -> Iterator[tuple[str, ParameterInfo]]:
    for name, info in table.items():
        if info.role == "matrix" and len(info.shape) == 2:
            yield f"layers.{index}.{name}".removesuffix(".weight"), info


def check_float8(config: Config, spec: ModelSpec, plan: Plan) -> Iterator[str]:
    """What of the chosen linear layers cannot be multiplied in fp8, one sentence each."""
    float8 = config.precision.float8
    if float8.gather and float8.recipe != "tensorwise":
        yield (
            f"precision.float8.gather=true: precision.float8.recipe={float8.recipe} has no one scale for a "
            "matrix, with which it could travel; set precision.float8.recipe=tensorwise, or "
            "precision.float8.gather=false"
        )
    if float8.recipe == "none":
        return
    if float8.gather and config.parallel.zero.transport != "collectives":
        yield (
            f"precision.float8.gather=true: parallel.zero.transport={config.parallel.zero.transport} copies parameters "
            "in the compute type; set parallel.zero.transport=collectives, or precision.float8.gather=false"
        )
    if float8.gather and plan.stage == 0:
        yield (
            "precision.float8.gather=true: parallel.zero.stage=0 gathers nothing; set parallel.zero.stage=1, 2 or 3, "
            "or precision.float8.gather=false"
        )
    chosen = float8_linears(float8, spec)
    if not chosen:
        yield (
            f"precision.float8.linears={float8.linears} match no linear layer of the {spec.depth} layers less "
            f"precision.float8.ends={float8.ends} at each end; names look like layers.0.feed_forward.up; set other "
            "patterns, or precision.float8.ends=0"
        )
    for name, info in chosen.items():
        others = "attention" if ".feed_forward." in name else "feed_forward"
        rows, columns = info.multiplied(plan.tp)
        if rows % MULTIPLE or columns % MULTIPLE:
            yield (
                f"precision.float8.linears={float8.linears}: {name} has a matrix of {rows:g} x {columns:g} on each of "
                f"parallel.tp={plan.tp} ranks, and fp8 needs multiples of {MULTIPLE}; leave it out, as with "
                f"precision.float8.linears=[*.{others}.*], or {OFF}"
            )
            break
    if float8.recipe == "rowwise_with_gw_hp":  # sums over tokens in the compute type
        return
    length, tile = config.batch.sequence_length, config.activation.tile or 0
    instead = f"precision.float8.recipe=rowwise_with_gw_hp, or {OFF}"
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
