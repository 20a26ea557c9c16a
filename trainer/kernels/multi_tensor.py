"""Triton kernels that go once over many tensors: squared norms, the updates of the optimizers, and copies and sums of
shards.

One launch takes all tensors of the same types. A program takes one tile of one tensor; tables on the device say which,
and where the tensors lie. Sums have a fixed order: the same tensors give the same bits. Every product is rounded before
it is added, so that torch code of the same formulas has the bits of these kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
NORM = {"TILE": 8192, "num_warps": 4}
UPDATE = {"TILE": 1024, "num_warps": 4, "enable_fp_fusion": False}
"""Elements of a tile, and options of the launch."""
FOLD = 2048
"""Partial sums that are read at a time."""


@triton.jit
def _tile(owners, firsts, counts, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """The tensor of this program, the places of its elements in it, and which of them there are."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    count = tl.load(counts + tensor)
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    places = (program - tl.load(firsts + tensor)).to(tl.int64) * TILE + tl.arange(0, TILE)
    return tensor, places, places < count


@triton.jit
def _pointers(addresses, tensor, places, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointers = tl.load(addresses + tensor).to(tl.pointer_type(DTYPE)) + places
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def _squares(
    addresses, owners, firsts, counts, partial, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr
):
    """Adds up the squares of one tile in fp64."""
    tensor, places, inside = _tile(owners, firsts, counts, TILE, ALIGNED)
    values = tl.load(_pointers(addresses, tensor, places, DTYPE, ALIGNED), mask=inside, other=0.0).to(tl.float64)
    tl.store(partial + tl.program_id(0), tl.sum(values * values, 0))


@triton.jit
def _fold(partial, firsts, out, places, SIZE: tl.constexpr):
    """Adds up the partial sums of one tensor."""
    tensor = tl.program_id(0)
    start, end = tl.load(firsts + tensor), tl.load(firsts + tensor + 1)
    total = tl.zeros((SIZE,), tl.float64)
    while start < end:
        index = start + tl.arange(0, SIZE)
        total += tl.load(partial + index, mask=index < end, other=0.0)
        start += SIZE
    tl.store(out + tl.load(places + tensor), tl.sum(total, 0))


@triton.jit
def _updates(
    addresses,
    tensors,
    owners,
    firsts,
    counts,
    scalars,
    first,
    second,
    epsilon,
    decay,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Updates one tile. addresses: of weights, gradients and moments [3 or 4 x tensors]; scalars: of `update_scalars`;
    first, second: what a moment takes of the new, for sgd what it keeps of the old."""
    if tl.load(scalars) != 0:
        return
    tensor, places, inside = _tile(owners, firsts, counts, TILE, ALIGNED)
    rate, divisor = tl.load(scalars + 1), tl.load(scalars + 2)
    weights = _pointers(addresses, tensor, places, WEIGHT, ALIGNED)
    moments = _pointers(addresses + 2 * tensors, tensor, places, STATE, ALIGNED)
    weight = tl.load(weights, mask=inside, other=0.0).to(tl.float32)
    moment = tl.load(moments, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(_pointers(addresses + tensors, tensor, places, GRADIENT, ALIGNED), mask=inside, other=0.0)
    gradient = tl.div_rn(gradient.to(tl.float32), tl.full((TILE,), 1.0, tl.float32) * divisor)
    if KIND == "adamw":
        step, root = tl.load(scalars + 3), tl.load(scalars + 4)
        squares = _pointers(addresses + 3 * tensors, tensor, places, STATE, ALIGNED)
        square = tl.load(squares, mask=inside, other=0.0).to(tl.float32)
        moment += (gradient - moment) * first
        square += (gradient * gradient - square) * second
        deviation = tl.div_rn(tl.sqrt_rn(square), tl.full((TILE,), 1.0, tl.float32) * root) + epsilon
        weight -= weight * (rate * decay)
        weight -= tl.div_rn(moment, deviation) * step
        tl.store(squares, square.to(STATE), mask=inside)
    elif KIND == "lion":
        average = moment + (gradient - moment) * first
        sign = tl.where(average > 0, 1.0, tl.where(average < 0, -1.0, 0.0))
        weight -= (sign + weight * decay) * rate
        moment += (gradient - moment) * second
    else:
        moment = moment * first + gradient
        weight -= (moment + weight * decay) * rate
    tl.store(weights, weight.to(WEIGHT), mask=inside)
    tl.store(moments, moment.to(STATE), mask=inside)


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The squared norm of each tensor, of any float types, added up in fp64: [tensors]."""
    out = torch.zeros(len(tensors), dtype=torch.float64, device=tensors[0].device)
    for (dtype, aligned), places in _alike([tensors]).items():
        some = [tensors[place] for place in places]
        owners, firsts, counts = _tiling(tuple(tensor.numel() for tensor in some), NORM["TILE"], out.device)
        partial = torch.empty(owners.numel(), dtype=torch.float64, device=out.device)
        table = _table([[tensor.data_ptr() for tensor in some], places], out.device)
        _squares[owners.shape](table, owners, firsts, counts, partial, DTYPE=DTYPES[dtype], ALIGNED=aligned, **NORM)
        _fold[counts.shape](partial, firsts, out, table[1], SIZE=FOLD, num_warps=8)
    return out


def update_scalars(
    rate: Tensor, divisor: Tensor, found_inf: Tensor, number: Tensor, betas: tuple[float, float]
) -> Tensor:
    """What an update reads from the device, in fp32: found-inf, where one nothing changes; the learning rate; what
    gradients are divided by; the rate over the first bias correction of the update with this number, from one on, and
    the root of the second."""
    number = number.double()
    first, second = (1 - beta**number for beta in betas)
    return torch.stack([found_inf, rate, divisor, rate / first, second.sqrt()]).float()


def update_parameters(
    kind: str,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor]],
    scalars: Tensor,
    betas: tuple[float, float],
    epsilon: float,
    decay: float,
) -> None:
    """One update in place, in one pass over what it reads: adamw (arXiv 1711.05101), lion (arXiv 2302.06675), sgd.

    moments: of adamw two for each weight, else one, all of one type. scalars: what `update_scalars` gives."""
    lists = [weights, gradients, *moments]
    for (weight, gradient, state, *_, aligned), places in _alike(lists).items():
        sizes = tuple(weights[place].numel() for place in places)
        tiling = _tiling(sizes, UPDATE["TILE"], scalars.device)
        _updates[tiling[0].shape](
            _table([[tensors[place].data_ptr() for place in places] for tensors in lists], scalars.device),
            len(places),
            *tiling,
            scalars,
            *(betas if kind == "sgd" else (1 - beta for beta in betas)),
            epsilon,
            decay,
            KIND=kind,
            WEIGHT=DTYPES[weight],
            GRADIENT=DTYPES[gradient],
            STATE=DTYPES[state],
            ALIGNED=aligned,
            **UPDATE,
        )


def _alike(lists: Sequence[Sequence[Tensor]]) -> dict[tuple, list[int]]:
    """Which places of the lists, empty tensors left out, can be in one launch: by types and alignment to 16 bytes."""
    found: dict[tuple, list[int]] = {}
    for place, tensors in enumerate(zip(*lists)):
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError(f"not contiguous: {[(tensor.shape, tensor.stride()) for tensor in tensors]}")
        size = tensors[0].numel()
        aligned = size % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        if size:
            found.setdefault((*(tensor.dtype for tensor in tensors), aligned), []).append(place)
    return found


@lru_cache(maxsize=64)
def _tiling(sizes: tuple[int, ...], tile: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The tensor that each tile is of; the first tile of each tensor, and their number at the end; the tensors'
    sizes."""
    counts = torch.tensor(sizes)
    tiles = (counts + tile - 1) // tile
    firsts = torch.cat([torch.zeros(1, dtype=torch.int64), tiles.cumsum(0)])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), tiles)
    return owners.int().to(device), firsts.int().to(device), counts.to(device)


def _table(rows: list[list[int]], device: torch.device) -> Tensor:
    """A small table on the device, for whose copy the host does not wait."""
    table = torch.tensor(rows)
    if device.type != "cuda":
        return table
    return table.pin_memory().to(device, non_blocking=True)


# Triton kernels for shards on their way between GPUs (`parallel/zero/copy_engine.py`), each in one pass over memory:
# what is read once and goes to two places, and sums of what several ranks have. Torch's own kernels take two passes
# for both, and its sum over a first dimension of two reaches a fifth of a copy's rate. And one for the gradients of
# micro-batches (`parallel/zero/fsdp_internals.py`): torch adds 16 bits to fp32 element by element.


TILE = 4096
"""Elements of a program."""


@triton.jit
def _places(count, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    return places, places < count


@triton.jit
def _cast(source, first, second, count, TILE: tl.constexpr):
    places, inside = _places(count, TILE)
    values = tl.load(source + places, mask=inside)
    tl.store(first + places, values.to(first.dtype.element_ty), mask=inside)
    tl.store(second + places, values.to(second.dtype.element_ty), mask=inside)


@triton.jit
def _add_up(
    own, arrived, total, count, stride, RANK: tl.constexpr, SIZE: tl.constexpr, ADDS: tl.constexpr, TILE: tl.constexpr
):
    places, inside = _places(count, TILE)
    added = tl.zeros((TILE,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            values = tl.load(own + places, mask=inside, other=0.0)
        else:
            row = arrived + (rank + SIZE - RANK - 1) % SIZE * stride
            values = tl.load(row + places, mask=inside, other=0.0)
        added += values.to(tl.float32)
    if ADDS:
        added += tl.load(total + places, mask=inside)
    tl.store(total + places, added.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _add_in_place(total, gradient, count, TILE: tl.constexpr):
    places, inside = _places(count, TILE)
    added = tl.load(gradient + places, mask=inside).to(total.dtype.element_ty)
    tl.store(total + places, tl.load(total + places, mask=inside) + added, mask=inside)


def add_in_place(total: Tensor, gradient: Tensor) -> None:
    """Adds `gradient` to `total`, in the type of `total`. Both are contiguous, with one number of elements."""
    count = total.numel()
    _add_in_place[(triton.cdiv(count, TILE),)](total, gradient, count, TILE=TILE, num_warps=8)


def cast_twice(source: Tensor, first: Tensor, second: Tensor) -> None:
    """Copies [n] to two places, cast to their types."""
    _cast[(triton.cdiv(len(source), TILE),)](source, first, second, len(source), TILE=TILE, num_warps=8)


def add_up(own: Tensor, arrived: Tensor, total: Tensor, rank: int, adds: bool) -> None:
    """The sum over ranks, added up in fp32 in their order, of what `rank` has itself and what has arrived from the
    others. own, total: [n]; arrived: [ranks - 1, n], of the ranks behind this one in turn, rows of which are contiguous
    and equally far apart. adds: to what `total` holds."""
    sizes = {"RANK": rank, "SIZE": len(arrived) + 1, "ADDS": adds, "TILE": TILE}
    _add_up[(triton.cdiv(len(own), TILE),)](own, arrived, total, len(own), arrived.stride(0), **sizes, num_warps=8)
