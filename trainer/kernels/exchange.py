"""How programs on several GPUs tell each other that tiles have arrived, in memory that the ranks of a node share.

Every rank has a `SymmetricRegion` of the same layout: a box for tokens or partial sums, in two halves, and flags. A
flag holds the last epoch (number of the call, from 1) of which its tile has arrived, and only grows, so nothing is ever
reset. An epoch uses the half of its parity. Sources release a flag behind their stores; readers acquire it before their
loads.

Why a half may be written again two epochs later, without a barrier: a rank that writes in epoch e + 2 has ended its
reader of e + 1, which waited for a flag of e + 1 of every rank; each rank raised that behind its own reader of e, since
the calls of a rank are in the order of one stream. Hence calls of a region must not overlap, and every reader waits for
all ranks (docs/performance.md)."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def peer_address(table, rank, DTYPE: tl.constexpr):
    """Where a rank's memory begins. Without the hint Triton 3.6 moves two bytes at a time."""
    address = tl.load(table.to(tl.pointer_type(tl.uint64)) + rank)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def signal_peer(flags, rank, place, epoch):
    """Says to `rank` that all that this program has stored so far is there. Triton puts no barrier before an atomic
    operation, and other warps' stores would be missing."""
    tl.debug_barrier()
    tl.atomic_xchg(peer_address(flags, rank, tl.int32) + place, epoch, sem="release", scope="sys")


@triton.jit
def wait_for_flag(flags, rank, source, tile, tiles, epoch, error, LIMIT: tl.constexpr):
    """Until this rank's flag of a tile from `source` has come to the epoch. Adding nothing compiles to a load that
    acquires. After LIMIT looks (0: never) it leaves a note in `error` instead, and nothing waits any more."""
    flag = peer_address(flags, rank, tl.int32) + source * tiles + tile
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if LIMIT == 0:
        while seen < epoch:
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    else:
        looks = tl.where(tl.load(error) == 0, 0, LIMIT)
        while (seen < epoch) & (looks < LIMIT):
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            looks += 1
        if seen < epoch:
            if tl.atomic_cas(error, 0, epoch) == 0:
                tl.store(error + 1, tile)
                tl.store(error + 2, source)
                tl.store(error + 3, seen)


@dataclass(frozen=True)
class SymmetricRegion:
    """Memory of one kind of call, on every rank of a group alike.

    boxes, flags: the address of a table with the addresses of all ranks' boxes, of their flags (int32, 0 at first);
    half: elements of half a box; tickets: int64 [1], 0 at first, and error: int32 [4], this rank's own.
    """

    rank: int
    size: int
    boxes: int
    flags: int
    half: int
    tickets: Tensor
    error: Tensor


def check_error(region: SymmetricRegion) -> None:
    """Raises `RuntimeError` where a reader with a limit gave up. Waits for the device."""
    epoch, tile, source, seen = region.error.tolist()
    if epoch:
        raise RuntimeError(
            f"rank {region.rank} waited in vain for tile {tile} of rank {source} in epoch {epoch}; its flag says {seen}"
        )
