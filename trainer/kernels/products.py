"""Products of tiles, as the kernels of `tensor_parallel.py` make them: of operands by address, or by the bulk tensor
copy engine (TMA)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trainer.kernels.tiles import Shape


@triton.jit
def place_of(tile, DOWN: tl.constexpr, ACROSS: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a tile among DOWN x ACROSS: the columns of GROUP rows at a time, beginning with row FIRST."""
    group = tile // (GROUP * ACROSS)
    inside = tile % (GROUP * ACROSS)
    rows = tl.minimum(DOWN - group * GROUP, GROUP)
    return (group * GROUP + inside % rows + FIRST) % DOWN, inside // rows


@triton.jit
def multiplied(
    total,
    a,
    b,
    first,
    column,
    lines,
    width,
    DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    A_DESCRIBED: tl.constexpr,
    B_DESCRIBED: tl.constexpr,
):
    """total + a[first:][:ROWS] b[:, column:][:COLUMNS]. a: [lines, DEPTH]; b: [DEPTH, width], or TRANSPOSED; each a
    pointer, whose places behind the end are others before it, or a descriptor, whose are zeros."""
    STEPS: tl.constexpr = (DEPTH + STEP - 1) // STEP
    rows, columns = (first + tl.arange(0, ROWS)) % lines, (column + tl.arange(0, COLUMNS)) % width
    for step in range(0, STEPS):
        depth = step * STEP + tl.arange(0, STEP)
        inside = depth < DEPTH
        if A_DESCRIBED:
            left = a.load([first, step * STEP])
        elif DEPTH % STEP == 0:
            left = tl.load(a + rows[:, None] * DEPTH + depth[None, :])
        else:
            left = tl.load(a + rows[:, None] * DEPTH + depth[None, :], mask=inside[None, :], other=0.0)
        if TRANSPOSED:
            of_b = columns[None, :] * DEPTH + depth[:, None]
        else:
            of_b = depth[:, None] * width + columns[None, :]
        if B_DESCRIBED and TRANSPOSED:
            right = b.load([column, step * STEP]).T
        elif B_DESCRIBED:
            right = b.load([step * STEP, column])
        elif DEPTH % STEP == 0:
            right = tl.load(b + of_b)
        else:
            right = tl.load(b + of_b, mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def described(
    total,
    a,
    weight0,
    weight1,
    weight2,
    first,
    part,
    column,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """`multiplied` by the weight of `part`, which is a descriptor; so is a if LOCAL. A loop for each: a descriptor is
    no number that could be chosen before one."""
    if part == 0:
        total = multiplied(
            *(total, a, weight0, first, column, TOKENS, WIDTH0, DEPTH, TRANSPOSED, ROWS, COLUMNS, STEP, LOCAL), True
        )
    if WIDTH1 > 0:
        if part == 1:
            total = multiplied(
                *(total, a, weight1, first, column, TOKENS, WIDTH1, DEPTH, TRANSPOSED, ROWS, COLUMNS, STEP, LOCAL), True
            )
    if WIDTH2 > 0:
        if part == 2:
            total = multiplied(
                *(total, a, weight2, first, column, TOKENS, WIDTH2, DEPTH, TRANSPOSED, ROWS, COLUMNS, STEP, LOCAL), True
            )
    return total


@triton.jit
def added(
    total,
    operand,
    weight,
    owner,
    first,
    column,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """total and the product of the owner's rows of an operand, if there is one."""
    if DEPTH > 0:
        a, row = operand, owner * TOKENS + first
        if not DESCRIPTORS:
            a, row = tl.multiple_of(operand + owner.to(tl.int64) * TOKENS * DEPTH, 16), first
        total = multiplied(
            *(total, a, weight, row, column, TOKENS, WIDTH, DEPTH, TRANSPOSED, ROWS, COLUMNS, STEP),
            *(DESCRIPTORS, DESCRIPTORS),
        )
    return total


def block(shape: Shape, transposed: bool) -> list[int]:
    """Of a weight, for a tile."""
    return [shape.columns, shape.step] if transposed else [shape.step, shape.columns]


def taken(shape: Shape, operands: Sequence[Tensor], block: list[int]) -> list[Any]:
    """The operands as kernels of this shape take them: descriptors that load blocks, or as they are."""
    if not shape.descriptors:
        return list(operands)
    return [TensorDescriptor.from_tensor(operand, block) for operand in operands]
