"""Memory that the ranks of a group read and write directly: of the GPUs of a node by torch's symmetric memory, which is
private, and of processes on CPUs by files that all of them map."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from trainer.config import ConfigError
from trainer.util.trace_labels import AWAITS, SENDS

WITHOUT = "parallel.tp_overlap=off and parallel.zero.collectives=nccl, which need no shared memory"

Made = TypeVar("Made")


class SymmetricMemory(NamedTuple):
    """parts: every rank's bytes, zeros at first, as this rank reaches them; handle: keeps them mapped."""

    parts: list[Tensor]
    handle: Any

    @property
    def addresses(self) -> list[int]:
        return [part.data_ptr() for part in self.parts]


def agree_on_failure(group: dist.ProcessGroup, failure: str = "") -> None:
    """Waits for all ranks of a group. If one comes with a failure, all raise `ConfigError`, which says whose it was."""
    said: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(said, failure, group)
    failed = [f"rank {dist.get_global_rank(group, rank)}: {text}" for rank, text in enumerate(said) if text]
    if failed:
        raise ConfigError("; ".join(failed[:3]))


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def run_on_all(group: dist.ProcessGroup, step: Callable[[], Made]) -> Made:
    """What a step gives that all ranks of a group make, unless it fails on one: then none goes on without it."""
    failure = ""
    try:
        made = step()
    except (RuntimeError, OSError) as error:
        failure = f"cannot share memory ({first_line(error)}); set {WITHOUT}"
    agree_on_failure(group, failure)
    return made


def allocate_symmetric(size: int, device: torch.device, group: dist.ProcessGroup) -> SymmetricMemory:
    """`size` bytes on every rank of a group. All ranks call it together. Where one cannot, all raise `ConfigError`."""
    if device.type != "cuda":
        return share_on_host(size, group)
    from torch.distributed import _symmetric_memory as symmetric

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # of which nothing is used
    own = run_on_all(group, lambda: symmetric.empty(size, dtype=torch.uint8, device=device))
    handle = run_on_all(group, lambda: symmetric.rendezvous(own, group))

    def reach() -> list[Tensor]:
        parts = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(dist.get_world_size(group))]
        if parts[dist.get_rank(group)].data_ptr() != own.data_ptr():
            raise RuntimeError(f"torch {torch.__version__} does not say where it begins")
        own.zero_()
        torch.cuda.synchronize(device)
        return parts

    return SymmetricMemory(run_on_all(group, reach), (own, handle))


def share_on_host(size: int, group: dist.ProcessGroup) -> SymmetricMemory:
    """The same for processes of one machine. The files are gone when all have them mapped."""
    rank = dist.get_rank(group)
    folder = [run_on_all(group, lambda: tempfile.mkdtemp() if rank == 0 else None)]
    dist.broadcast_object_list(folder, group=group, group_src=0)
    names = [f"{folder[0]}/{number}" for number in range(dist.get_world_size(group))]

    def reach(number: int) -> Tensor:
        return torch.from_file(names[number], shared=True, size=size, dtype=torch.uint8)

    try:
        own = run_on_all(group, lambda: reach(rank))
        parts = run_on_all(group, lambda: [own if number == rank else reach(number) for number in range(len(names))])
    finally:
        if rank == 0:
            shutil.rmtree(folder[0])
    return SymmetricMemory(parts, None)


# Flags that a GPU's streams raise and wait for, between the GPUs of a node: by the driver, without a kernel. A stream
# that waits keeps no multiprocessor. On CPUs the process itself does both.


LOOK = 20e-6
"""Seconds between a CPU's looks at a flag."""
MAX_POLLS = 0
"""Looks at a flag after which a wait ends with an error, in kernels too; 0: never. Tests of the protocol set it: the
host then looks on GPUs too, and waits for every kernel."""
AT_LEAST = WITH_BARRIER = 0
"""The driver's flags: wait for the value or a later one; write when all before is visible to all GPUs."""


def raise_flag(flag: Tensor, epoch: int) -> None:
    """Sets any rank's flag, int32 [1], to an epoch, behind all that the current stream has done before."""
    if flag.is_cuda:
        stream_command("cuStreamWriteValue32_v2", flag, epoch, WITH_BARRIER)
    else:
        flag.fill_(epoch)


def await_flag(flag: Tensor, epoch: int) -> None:
    """Has the current stream go on when this rank's flag has come to the epoch. Raises `TimeoutError` after
    `MAX_POLLS`."""
    if flag.is_cuda and not MAX_POLLS:
        stream_command("cuStreamWaitValue32_v2", flag, epoch, AT_LEAST)
        return
    for number in itertools.count(1):
        if read_flags(flag).item() >= epoch:
            return
        if number == MAX_POLLS:
            raise TimeoutError(f"after {MAX_POLLS} looks")
        time.sleep(LOOK)


def read_flags(flags: Tensor) -> Tensor:
    """What flags say now, on the host, whatever the current stream waits for."""
    with torch.cuda.stream(side_stream(flags.device)) if flags.is_cuda else contextlib.nullcontext():
        return flags.to("cpu", copy=True)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def stream_command(name: str, flag: Tensor, value: int, how: int) -> None:
    stream = torch.cuda.current_stream(flag.device).cuda_stream
    error = driver_function(name)(stream, flag.data_ptr(), value, how)
    if error:
        raise RuntimeError(
            f"{name} ends with CUDA error {error}; set parallel.tp_overlap=off and parallel.zero.collectives=nccl"
        )


@cache
def driver_function(name: str) -> Callable[..., int]:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return function


# Memory in which the ranks of a group leave each other what they need, call by call. A call of a group is an epoch.
# Every rank has a box in two halves, of which an epoch uses that of its parity, and flags, which hold the last epoch
# whose part has arrived. Flags only grow, so nothing is ever reset. Why a half may be written again two epochs later
# is in docs/performance.md.


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
