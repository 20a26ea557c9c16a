"""Shapes that do not fill a device's matrix units, from the settings alone.

Matrix units work on tiles: a product of [tokens, outputs] is cut into tiles of 128 x 128, which the multiprocessors
compute in waves. A part of a tile, and a wave that not all of them take part in, cost as much as whole ones; rows that
do not begin at multiples of 16 bytes are read by slower kernels (NVIDIA, Deep Learning Performance Guide, Matrix
Multiplication)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.planning.cost.devices import multiprocessor_count
from trainer.planning.cost.memory import ELEMENT_BYTES
from trainer.planning.cost.parameters import layer_specs
from trainer.planning.layer import head_program, model_programs
from trainer.planning.plan import Plan
from trainer.planning.resolve import Layout
from trainer.util.tables import format_number

TILE = 128
"""Rows and columns of a tile of the fastest kernels."""

ALIGNED = 16
"""Bytes at multiples of which rows begin that are read fastest."""

HEADS = (32, 64, 96, 128, 256)
"""Sizes of heads that flash attention computes without padding (FlashAttention-2 and -3)."""

FILLED, WAVES = 0.95, 0.85
"""Shares of tiles and of waves below which a shape is spoken of."""

MATTERS = 0.02
"""Share of a step's arithmetic that a product has to have to be spoken of."""


@dataclass(frozen=True)
class ShapeAdvice:
    """setting: what the shape follows from; text: what is wrong with it, and what would be right; waste: share of the
    model's arithmetic that is lost by it, at most."""

    setting: str
    text: str
    waste: float


@dataclass(frozen=True)
class GEMMShape:
    """A product of a layer or of the head on one rank. setting: what its columns follow from; columns: of the matrix's
    part that the rank has; share: of the model's arithmetic."""

    setting: str
    name: str
    columns: int
    share: float


def advise_shapes(config: Config, layout: Layout, device: str) -> list[ShapeAdvice]:
    """What is to be said of the shapes of a plan's products, the most wasteful first. device: its name."""
    spec, plan, batch = layout.spec, layout.plan, layout.batch
    element = ELEMENT_BYTES[config.precision.compute]
    tokens = batch.micro_size * batch.sequence_length // plan.cp
    parts, attention = list_gemms(spec, plan, batch.sequence_length, element)
    found = [*_heads(spec, plan, attention)]
    for product in parts:
        if product.share >= MATTERS:
            found += _filling(product, plan.tp, element, tokens, multiprocessor_count(device))
    return sorted({one.text: one for one in found}.values(), key=lambda one: -one.waste)


def list_gemms(spec: ModelSpec, plan: Plan, length: int, element: int) -> tuple[list[GEMMShape], float]:
    """The products of the model on a rank, equal ones together and the head's last; and attention's share of the
    model's arithmetic."""
    programs = *model_programs(spec, length, plan.tp, element), head_program(spec, plan.tp, element)
    total = sum(program.flops for program in programs)
    sums: dict[tuple[str, int], float] = defaultdict(float)
    for gemm in (gemm for program in programs for gemm in program.gemms.values()):
        sums[gemm.name, round(gemm.shape[0])] += gemm.flops
    found = [GEMMShape(_setting(name), name, columns, flops / total) for (name, columns), flops in sums.items()]
    return found, sum(program.total("flops", "attention") for program in programs) / total


def _setting(name: str) -> str:
    if name == "head":
        return "model.vocab_size"
    block, _, matrix = name.partition(".")
    if block == "feed_forward" and matrix != "down":
        return "model.feed_forward.width"
    return {"q": "model.attention.heads"}.get(matrix, "model.attention.kv_heads" if matrix in "kv" else "model.width")


def _filling(product: GEMMShape, tp: int, element: int, tokens: int, units: int | None) -> Iterator[ShapeAdvice]:
    """Of one product: its columns, and its waves."""
    columns, of = product.columns, f" on each of {tp} tensor ranks" * (tp > 1)
    if columns * element % ALIGNED and product.setting != "model.vocab_size":
        step = ALIGNED // element * tp
        yield ShapeAdvice(
            product.setting,
            f"{product.name} has {columns} columns{of}, whose rows do not begin at multiples of {ALIGNED} bytes: "
            f"{product.setting} such that it is a multiple of {step}",
            product.share,
        )
    filled = columns / (TILE * ceil(columns / TILE))
    if filled < FILLED:
        yield ShapeAdvice(
            product.setting,
            f"{product.name} has {columns} columns{of}: {filled:.0%} of its tiles of {TILE} is filled, multiples of "
            f"{TILE}{f' x {tp}' * (tp > 1)} would fill them",
            product.share * (1 - filled),
        )
    if units is None:
        return
    tiles = ceil(tokens / TILE) * ceil(columns / TILE)
    waves = tiles / units / ceil(tiles / units)
    if waves < WAVES:
        rounds = ceil(tiles / units)
        yield ShapeAdvice(
            "batch.micro_size",
            f"{product.name}: {format_number(tiles, 'tile')} of {tokens} tokens on {units} multiprocessors are "
            f"{rounds} "
            f"wave{'s' * (rounds > 1)}, {waves:.0%} full; more tokens a micro-batch fill them",
            product.share * (1 - waves),
        )


def _heads(spec: ModelSpec, plan: Plan, share: float) -> Iterator[ShapeAdvice]:
    """Of each kind of attention. share: of attention in the model's arithmetic."""
    for size, keys in {(layer.attention.head_dim, layer.attention.kv_heads) for layer in layer_specs(spec)}:
        if size not in HEADS:
            above = min((one for one in HEADS if one > size), default=0)
            cost = f"is padded to {above}" if above else "is more than flash attention takes"
            waste = share * (1 - size / above if above else 1.0)
            yield ShapeAdvice("model.attention.head_dim", f"a head of {size} {cost}; {_or(HEADS)} are not", waste)
        if plan.tp > keys:
            yield ShapeAdvice(
                "parallel.tp",
                f"parallel.tp={plan.tp} exceeds model.attention.kv_heads={keys}: {plan.tp // keys} ranks each compute "
                "the same keys and values",
                0.0,
            )


def _or(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"
