"""Memory in which the ranks of a group leave each other what they need, call by call.

A call of a group is an epoch. Every rank has a box in two halves, of which an epoch uses that of its parity, and flags,
which hold the last epoch whose part has arrived. Flags only grow, so nothing is ever reset. Why a half may be written
again two epochs later is in docs/kernels.md."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.symmetric_memory import Shared, share


class Boxes:
    """The calls of one kind and type that a group makes: their memory, which grows with them, and their number."""

    shared: Shared

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype):
        self.group, self.dtype = group, dtype
        self.half = self.flags = self.epoch = 0

    def begin(self, elements: int, flags: int, device: torch.device) -> int:
        """The epoch of the next call, for which boxes have room for so many elements and flags."""
        if elements > self.half or flags > self.flags:
            self.grow(max(elements, self.half), max(flags, self.flags), device)
        self.epoch += 1
        return self.epoch

    def grow(self, half: int, flags: int, device: torch.device) -> None:
        """Memory for more, on all ranks together. Epochs begin anew with its flags."""
        if self.half:  # others may still read or write the old
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            dist.barrier(self.group)
        self.bytes = -(-2 * half * self.dtype.itemsize // 256) * 256
        self.shared = share(self.bytes + 4 * flags, device, self.group)
        self.half, self.flags, self.epoch = half, flags, 0

    def box(self, rank: int, shape: tuple[int, int]) -> Tensor:
        """What the half of this epoch holds of `rank`'s box."""
        box = self.shared.parts[rank][: self.bytes].view(self.dtype)
        return box[self.epoch % 2 * self.half :][: shape[0] * shape[1]].view(shape)

    def flag(self, rank: int, place: int) -> Tensor:
        """A flag of `rank`: int32 [1]."""
        return self.shared.parts[rank][self.bytes :].view(torch.int32)[place : place + 1]


@cache
def boxes_of(kind: str, group: dist.ProcessGroup, dtype: torch.dtype) -> Boxes:
    return Boxes(group, dtype)


def others(rank: int, size: int) -> list[int]:
    """The other ranks, beginning with the next one: no two send to one rank at a time, and what comes to a rank first
    is from the one before it."""
    return [(rank + step) % size for step in range(1, size)]
