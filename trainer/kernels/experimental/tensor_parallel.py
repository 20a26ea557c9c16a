"""Triton kernels that multiply while ranks of a node send each other what is multiplied, or its results: an all-gather
with the product behind it, and a product with the reduce-scatter behind it. How they signal is in
`kernels/exchange.py`.

Why nothing waits in a circle: what raises flags (the copiers of a gather, the product of a reduce-scatter) waits for
nothing, and copiers are the programs that come to run first, whatever their numbers. And tiles are counted by `while`:
Triton takes steps of a `for` ahead, and would wait for tiles behind the last one, which nobody sends."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from trainer.kernels.exchange import SymmetricRegion, peer_address, signal_peer, wait_for_flag
from trainer.kernels.experimental.tiles import TileShape

# Products of tiles, as the kernels below make them.


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


@triton.jit
def _copy(
    x,
    boxes,
    flags,
    tile,
    half,
    epoch,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PULL: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Puts a tile of rows of x into this rank's box (PULL) or all others', and says so to all others."""
    TILES: tl.constexpr = (TOKENS + ROWS - 1) // ROWS
    STEPS: tl.constexpr = (DEPTH + STEP - 1) // STEP
    DTYPE: tl.constexpr = x.dtype.element_ty
    rows = tile * ROWS + tl.arange(0, ROWS)
    for step in range(0, STEPS):
        depth = step * STEP + tl.arange(0, STEP)
        inside = (rows[:, None] < TOKENS) & (depth[None, :] < DEPTH)
        place = rows[:, None] * DEPTH + depth[None, :]
        values = tl.load(x + place, mask=inside, other=0.0)
        if PULL:
            tl.store(peer_address(boxes, RANK, DTYPE) + half + place, values, mask=inside)
        else:
            for ahead in tl.static_range(1, SIZE):
                box = peer_address(boxes, (RANK + ahead) % SIZE, DTYPE) + half + RANK * TOKENS * DEPTH
                tl.store(tl.multiple_of(box, 16) + place, values, mask=inside)
    for ahead in tl.static_range(1, SIZE):
        signal_peer(flags, (RANK + ahead) % SIZE, RANK * TILES + tile, epoch)


@triton.jit(do_not_specialize=["epoch"])
def _gather_matmul(
    x,
    boxes,
    flags,
    tickets,
    error,
    epoch,
    weight0,
    weight1,
    weight2,
    product0,
    product1,
    product2,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PULL: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    COPIERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """COPIERS programs send x, the others multiply. Widths of 0: no such weight."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    TILES: tl.constexpr = (TOKENS + ROWS - 1) // ROWS
    ACROSS0: tl.constexpr = (WIDTH0 + COLUMNS - 1) // COLUMNS
    ACROSS1: tl.constexpr = (WIDTH1 + COLUMNS - 1) // COLUMNS
    ACROSS: tl.constexpr = ACROSS0 + ACROSS1 + (WIDTH2 + COLUMNS - 1) // COLUMNS
    half = (epoch % 2).to(tl.int64) * HALF
    ticket = (tl.atomic_add(tickets, 1) % (COPIERS + PROGRAMS)).to(tl.int32)
    if ticket < COPIERS:
        while ticket < TILES:
            _copy(x, boxes, flags, ticket, half, epoch, TOKENS, DEPTH, RANK, SIZE, PULL, ROWS, STEP)
            ticket += COPIERS
    else:
        tile = ticket - COPIERS
        while tile < SIZE * TILES * ACROSS:
            row, column = place_of(tile, SIZE * TILES, ACROSS, RANK * TILES, GROUP)
            source, first = row // TILES, row % TILES * ROWS
            # Where rows lie is decided before the loop over them, or Triton would not load them ahead.
            if source == RANK:
                a = tl.multiple_of(x, 16)
            else:
                wait_for_flag(flags, RANK, source, row % TILES, TILES, epoch, error, LIMIT)
                if PULL:
                    a = tl.multiple_of(peer_address(boxes, source, DTYPE) + half, 16)
                else:
                    place = half + source.to(tl.int64) * (TOKENS * DEPTH)
                    a = tl.multiple_of(peer_address(boxes, RANK, DTYPE) + place, 16)
            weight, product, width = weight0, product0, WIDTH0
            if WIDTH1 > 0:
                width = tl.where(column < ACROSS0, WIDTH0, tl.where(column < ACROSS0 + ACROSS1, WIDTH1, WIDTH2))
                width = tl.multiple_of(width, 16)
                if column >= ACROSS0 + ACROSS1:
                    weight, product, column = weight2, product2, column - ACROSS0 - ACROSS1
                elif column >= ACROSS0:
                    weight, product, column = weight1, product1, column - ACROSS0
            column = column * COLUMNS
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            total = multiply_tile(
                *(total, a, weight, first, column, TOKENS, width, DEPTH, TRANSPOSED, ROWS, COLUMNS, STEP)
            )
            rows, columns = first + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
            out = product + (source.to(tl.int64) * TOKENS + first) * width
            out += tl.arange(0, ROWS)[:, None] * width + columns[None, :]
            tl.store(out, total.to(DTYPE), mask=(rows[:, None] < TOKENS) & (columns[None, :] < width))
            tile += PROGRAMS


@triton.jit(do_not_specialize=["epoch"])
def _matmul_scatter(
    operand0,
    operand1,
    operand2,
    weight0,
    weight1,
    weight2,
    boxes,
    flags,
    epoch,
    DEPTH0: tl.constexpr,
    DEPTH1: tl.constexpr,
    DEPTH2: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Each tile of the partial sums goes to the box of the rank that has its tokens: the next rank's first, this one's
    last. Depths of 0: no such operand. Waits for nothing."""
    DTYPE: tl.constexpr = operand0.dtype.element_ty
    TILES: tl.constexpr = (TOKENS + ROWS - 1) // ROWS
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    half = (epoch % 2).to(tl.int64) * HALF
    tile = tl.program_id(0)
    while tile < SIZE * TILES * ACROSS:
        row, column = place_of(tile, SIZE * TILES, ACROSS, (RANK + 1) % SIZE * TILES, GROUP)
        owner, first = row // TILES, row % TILES * ROWS
        column = column * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        total = add_product(
            *(total, operand0, weight0, owner, first, column, TOKENS, WIDTH, DEPTH0, TRANSPOSED, ROWS, COLUMNS, STEP)
        )
        total = add_product(
            *(total, operand1, weight1, owner, first, column, TOKENS, WIDTH, DEPTH1, TRANSPOSED, ROWS, COLUMNS, STEP)
        )
        total = add_product(
            *(total, operand2, weight2, owner, first, column, TOKENS, WIDTH, DEPTH2, TRANSPOSED, ROWS, COLUMNS, STEP)
        )
        rows, columns = first + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        box = tl.multiple_of(peer_address(boxes, owner, DTYPE) + half + RANK * TOKENS * WIDTH, 16)
        inside = (rows[:, None] < TOKENS) & (columns[None, :] < WIDTH)
        tl.store(box + rows[:, None] * WIDTH + columns[None, :], total.to(DTYPE), mask=inside)
        signal_peer(flags, owner, (RANK * TILES + row % TILES) * ACROSS + column // COLUMNS, epoch)
        tile += PROGRAMS


@triton.jit(do_not_specialize=["epoch"])
def _sum_received(
    out,
    boxes,
    flags,
    error,
    epoch,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
):
    """The sum over ranks in fp32, in their order, of what `_matmul_scatter` sent; PART rows of a tile at a time."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    TILES: tl.constexpr = (TOKENS + ROWS - 1) // ROWS
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    box = peer_address(boxes, RANK, DTYPE) + (epoch % 2).to(tl.int64) * HALF
    tile = tl.program_id(0)
    while tile < TILES * ACROSS:
        for source in tl.static_range(SIZE):
            wait_for_flag(flags, RANK, source, tile, TILES * ACROSS, epoch, error, LIMIT)
        columns = tile % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
        for part in range(0, ROWS // PART):
            rows = tile // ACROSS * ROWS + part * PART + tl.arange(0, PART)
            inside = (rows[:, None] < TOKENS) & (columns[None, :] < WIDTH)
            place = rows[:, None] * WIDTH + columns[None, :]
            total = tl.zeros((PART, COLUMNS), tl.float32)
            for source in tl.static_range(SIZE):
                partial = tl.multiple_of(box + source * TOKENS * WIDTH, 16)
                total += tl.load(partial + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + place, total.to(DTYPE), mask=inside)
        tile += PROGRAMS


def gather_matmul(
    region: SymmetricRegion,
    shape: TileShape,
    epoch: int,
    x: Tensor,
    weights: Sequence[Tensor],
    transposed: bool,
    pull: bool,
) -> list[Tensor]:
    """The products of all ranks' x [tokens, n] with up to three weights, [outputs, n] where `transposed`, else
    [n, outputs] -> [ranks x tokens, outputs] each. pull: readers fetch from the source's box; else sources write to
    all boxes. Dimensions are multiples of 16."""
    tokens, depth = x.shape
    widths = [weight.shape[0 if transposed else 1] for weight in weights]
    products = [x.new_empty(region.size * tokens, width) for width in widths]
    _check(region, region.size * tokens * depth, [depth, *widths])
    _gather_matmul[(shape.copiers + shape.programs,)](
        x,
        region.boxes,
        region.flags,
        region.tickets,
        region.error,
        epoch,
        *_padded(weights),
        *_padded(products),
        *[*widths, 0, 0][:3],
        TOKENS=tokens,
        DEPTH=depth,
        HALF=region.half,
        RANK=region.rank,
        SIZE=region.size,
        PULL=pull,
        TRANSPOSED=transposed,
        COPIERS=shape.copiers,
        PROGRAMS=shape.programs,
        LIMIT=shape.limit,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        STEP=shape.step,
        GROUP=shape.group,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return products


def matmul_scatter(
    region: SymmetricRegion,
    shape: TileShape,
    epoch: int,
    operands: Sequence[Tensor],
    weights: Sequence[Tensor],
    transposed: bool,
) -> None:
    """Sends the sum of the products of up to three operands [ranks x tokens, n] with their weights (see
    `gather_matmul`) to the ranks that have the tokens."""
    depths, width = [operand.shape[1] for operand in operands], weights[0].shape[0 if transposed else 1]
    tokens = len(operands[0]) // region.size
    _check(region, region.size * tokens * width, [width, *depths])
    programs = shape.programs + shape.copiers  # it waits for nothing
    _matmul_scatter[(programs,)](
        *_padded(operands),
        *_padded(weights),
        region.boxes,
        region.flags,
        epoch,
        *[*depths, 0, 0][:3],
        TOKENS=tokens,
        WIDTH=width,
        HALF=region.half,
        RANK=region.rank,
        SIZE=region.size,
        TRANSPOSED=transposed,
        PROGRAMS=programs,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        STEP=shape.step,
        GROUP=shape.group,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def sum_received(region: SymmetricRegion, shape: TileShape, epoch: int, out: Tensor) -> Tensor:
    """Fills out [tokens, width] with the sum over ranks of what each sent in this epoch."""
    tokens, width = out.shape
    _sum_received[(shape.programs,)](
        out,
        region.boxes,
        region.flags,
        region.error,
        epoch,
        TOKENS=tokens,
        WIDTH=width,
        HALF=region.half,
        RANK=region.rank,
        SIZE=region.size,
        PROGRAMS=shape.programs,
        LIMIT=shape.limit,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        PART=min(16, shape.rows),
        num_warps=shape.warps,
    )
    return out


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Three, the first again for those that are not there."""
    return [*tensors, *[tensors[0]] * (3 - len(tensors))]


def _check(region: SymmetricRegion, elements: int, dimensions: list[int]) -> None:
    if odd := [size for size in dimensions if size % 16]:
        raise ValueError(f"{odd[0]} is no multiple of 16")
    if elements > region.half:
        raise ValueError(f"{elements} elements do not fit into half a box of {region.half}")
