"""Triton kernels for shards on their way between GPUs (`parallel/zero/copy_engine.py`), each in one pass over memory:
what is read once and goes to two places, and sums of what several ranks have. Torch's own kernels take two passes for
both, and its sum over a first dimension of two reaches a fifth of a copy's rate."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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
def _add_up(own, arrived, total, count, stride, RANK: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr):
    places, inside = _places(count, TILE)
    added = tl.zeros((TILE,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            values = tl.load(own + places, mask=inside, other=0.0)
        else:
            row = arrived + (rank + SIZE - RANK - 1) % SIZE * stride
            values = tl.load(row + places, mask=inside, other=0.0)
        added += values.to(tl.float32)
    tl.store(total + places, added.to(total.dtype.element_ty), mask=inside)


def cast_twice(source: Tensor, first: Tensor, second: Tensor) -> None:
    """Copies [n] to two places, cast to their types."""
    _cast[(triton.cdiv(len(source), TILE),)](source, first, second, len(source), TILE=TILE, num_warps=8)


def add_up(own: Tensor, arrived: Tensor, total: Tensor, rank: int) -> None:
    """The sum over ranks, added up in fp32 in their order, of what `rank` has itself and what has arrived from the
    others. own, total: [n]; arrived: [ranks - 1, n], of the ranks behind this one in turn, rows of which are contiguous
    and equally far apart."""
    _add_up[(triton.cdiv(len(own), TILE),)](
        *(own, arrived, total, len(own), arrived.stride(0)), RANK=rank, SIZE=len(arrived) + 1, TILE=TILE, num_warps=8
    )
