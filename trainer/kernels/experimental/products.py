"""Products of tiles, as the kernels of `tensor_parallel.py` make them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of(tile, DOWN: tl.constexpr, ACROSS: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a tile among DOWN x ACROSS: the columns of GROUP rows at a time, beginning with row FIRST."""
    group = tile // (GROUP * ACROSS)
    inside = tile % (GROUP * ACROSS)
    rows = tl.minimum(DOWN - group * GROUP, GROUP)
    return (group * GROUP + inside % rows + FIRST) % DOWN, inside // rows


@triton.jit
def multiply_tile(
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
):
    """total + a[first:][:ROWS] b[:, column:][:COLUMNS]. a: [lines, DEPTH]; b: [DEPTH, width], or TRANSPOSED. Places
    behind the end of either are others before it."""
    STEPS: tl.constexpr = (DEPTH + STEP - 1) // STEP
    rows, columns = (first + tl.arange(0, ROWS)) % lines, (column + tl.arange(0, COLUMNS)) % width
    for step in range(0, STEPS):
        depth = step * STEP + tl.arange(0, STEP)
        inside = depth < DEPTH
        if DEPTH % STEP == 0:
            left = tl.load(a + rows[:, None] * DEPTH + depth[None, :])
        else:
            left = tl.load(a + rows[:, None] * DEPTH + depth[None, :], mask=inside[None, :], other=0.0)
        if TRANSPOSED:
            of_b = columns[None, :] * DEPTH + depth[:, None]
        else:
            of_b = depth[:, None] * width + columns[None, :]
        if DEPTH % STEP == 0:
            right = tl.load(b + of_b)
        else:
            right = tl.load(b + of_b, mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def add_product(
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
):
    """total and the product of the owner's rows of an operand, if there is one."""
    if DEPTH > 0:
        a = tl.multiple_of(operand + owner.to(tl.int64) * TOKENS * DEPTH, 16)
        total = multiply_tile(*(total, a, weight, first, column, TOKENS, WIDTH, DEPTH, TRANSPOSED, ROWS, COLUMNS, STEP))
    return total
