"""Memory in which the ranks of a group leave each other what they need, call by call.

A call of a group is an epoch. Every rank has a box in two halves, of which an epoch uses that of its parity, and flags,
which hold the last epoch whose part has arrived. Flags only grow, so nothing is ever reset. Why a half may be written
again two epochs later is in docs/kernels.md."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from trainer.diagnosis.traces import AWAITS, SENDS
from trainer.distributed.flags import await_flag, raise_flag, read_flags
from trainer.distributed.symmetric_memory import SymmetricMemory, agree_on_failure, allocate_symmetric


class SymmetricBuffers:
    """The calls of one kind and type that a group makes: their memory, which grows with them, and their number."""

    shared: SymmetricMemory | None = None

    def __init__(self, kind: str, group: dist.ProcessGroup, dtype: torch.dtype):
        self.kind, self.group, self.dtype = kind, group, dtype
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.half = self.flags = self.epoch = 0

    def begin(self, elements: int, flags: int, device: torch.device) -> int:
        """The epoch of the next call, for which boxes have room for so many elements and flags."""
        if elements > self.half or flags > self.flags:
            self.grow(max(elements, self.half), max(flags, self.flags), device)
        self.epoch += 1
        return self.epoch

    def grow(self, half: int, flags: int, device: torch.device) -> None:
        """Memory for more, on all ranks together. Epochs begin anew with its flags."""
        self.free()
        self.bytes = -(-2 * half * self.dtype.itemsize // 256) * 256
        self.shared = allocate_symmetric(self.bytes + 4 * flags, device, self.group)
        self.half, self.flags, self.epoch = half, flags, 0

    def free(self) -> None:
        """Gives the memory back, on all ranks together: others may still read or write it."""
        if self.shared is None:
            return
        if self.shared.parts[self.rank].is_cuda:
            torch.cuda.synchronize(self.shared.parts[self.rank].device)
        agree_on_failure(self.group)
        self.shared = None
        self.half = self.flags = self.epoch = 0

    def box(self, rank: int, shape: tuple[int, int]) -> Tensor:
        """What the half of this epoch holds of `rank`'s box."""
        box = self.shared.parts[rank][: self.bytes].view(self.dtype)
        return box[self.epoch % 2 * self.half :][: shape[0] * shape[1]].view(shape)

    def flag(self, rank: int, place: int) -> Tensor:
        """A flag of `rank`: int32 [1]."""
        return self.flags_of(rank)[place : place + 1]

    def flags_of(self, rank: int) -> Tensor:
        return self.shared.parts[rank][self.bytes :].view(torch.int32)

    def signal(self, to: int) -> None:
        """Says to a rank that all that the current stream has written so far is there. Flags stand by source."""
        raise_flag(self.flag(to, self.rank), self.epoch)

    def wait(self, source: int) -> None:
        """Has the current stream go on when what a rank sends in this epoch is there. Raises `RuntimeError` where
        that does not come within `flags.MAX_POLLS`."""
        try:
            with self.labelled(AWAITS):
                await_flag(self.flag(self.rank, source), self.epoch)
        except TimeoutError as error:
            raise RuntimeError(f"{self.missing(source)} {error}") from error

    def sends(self) -> AbstractContextManager:
        """Says in a profile that what is copied within goes from a rank to another."""
        return self.labelled(SENDS)

    def labelled(self, words: str) -> AbstractContextManager:
        return record_function(words + self.group.group_name) if _profiler_enabled() else nullcontext()

    def missing(self, source: int) -> str:
        """That nothing of this epoch has come from a rank, in words."""
        ranks = [dist.get_global_rank(self.group, rank) for rank in (self.rank, source)]
        return (
            f"rank {ranks[0]} waits for {self.kind} ({str(self.dtype)[6:]}) of rank {ranks[1]} in epoch {self.epoch}; "
            f"its flag says {read_flags(self.flag(self.rank, source)).item()}"
        )

    def late(self) -> list[str]:
        """What has not come, in words, by source."""
        if self.shared is None or not self.epoch:
            return []
        said = read_flags(self.flags_of(self.rank)).tolist()
        return [self.missing(source) for source in other_ranks(self.rank, self.size) if said[source] < self.epoch]


ALL_BUFFERS: dict[tuple[Any, ...], SymmetricBuffers] = {}
"""All that this process has made."""

Kind = TypeVar("Kind", bound=SymmetricBuffers)


def buffers_of(kind: str, group: dist.ProcessGroup, dtype: torch.dtype, make: type[Kind] = SymmetricBuffers) -> Kind:
    key = make, kind, group, dtype
    if key not in ALL_BUFFERS:
        ALL_BUFFERS[key] = make(kind, group, dtype)
    return ALL_BUFFERS[key]


def pending_waits() -> list[str]:
    """What this process waits for, in words."""
    return [text for boxes in list(ALL_BUFFERS.values()) for text in boxes.late()]


def other_ranks(rank: int, size: int) -> list[int]:
    """The other ranks, beginning with the next one: no two send to one rank at a time, and what comes to a rank first
    is from the one before it."""
    return [(rank + step) % size for step in range(1, size)]
