"""Memory that the ranks of a group read and write directly. On the GPUs of a node it is torch's symmetric memory, a
private module of torch. For processes on CPUs it is files that all of them map."""

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
from trainer.util.tables import AWAITS, SENDS

WITHOUT = (
    "parallel.tp_overlap=off, parallel.zero.collectives=nccl and parallel.ep_dispatch=auto, which need no shared memory"
)

Made = TypeVar("Made")


class SymmetricMemory(NamedTuple):
    """parts: every rank's bytes, initially zero, as this rank addresses them. handle: keeps the memory mapped."""

    parts: list[Tensor]
    handle: Any

    @property
    def addresses(self) -> list[int]:
        return [part.data_ptr() for part in self.parts]


def agree_on_failure(group: dist.ProcessGroup, failure: str = "") -> None:
    """Waits for all ranks of a group. If any of them passes a failure, all raise `ConfigError`, which names the ranks
    that failed."""
    failures: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group)
    failed = [f"rank {dist.get_global_rank(group, rank)}: {text}" for rank, text in enumerate(failures) if text]
    if failed:
        raise ConfigError("; ".join(failed[:3]))


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def run_on_all(group: dist.ProcessGroup, step: Callable[[], Made]) -> Made:
    """The result of `step`, which all ranks of a group run. If it fails on one, all raise: a rank that went on alone
    would wait for the others forever."""
    failure = ""
    try:
        made = step()
    except (RuntimeError, OSError) as error:
        failure = f"cannot share memory ({first_line(error)}); set {WITHOUT}"
    agree_on_failure(group, failure)
    return made


def allocate_symmetric(size: int, device: torch.device, group: dist.ProcessGroup) -> SymmetricMemory:
    """Shares `size` bytes of every rank of a group. All ranks call it together. Where it fails on one, all raise
    `ConfigError`."""
    if device.type != "cuda":
        return share_on_host(size, group)
    from torch.distributed import _symmetric_memory as symmetric

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # NVLink multicast is not used
    # Each step that may fail on one rank is agreed on before the next, which is a collective.
    own = run_on_all(group, lambda: symmetric.empty(size, dtype=torch.uint8, device=device))
    handle = run_on_all(group, lambda: symmetric.rendezvous(own, group))

    def reach() -> list[Tensor]:
        parts = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(dist.get_world_size(group))]
        # Kernels and copies compute addresses from the start of each part, so `get_buffer` has to return exactly what
        # was allocated.
        if parts[dist.get_rank(group)].data_ptr() != own.data_ptr():
            raise RuntimeError(f"torch {torch.__version__} maps this rank's own memory at another address")
        # Flags have to be zero before any rank raises one. The agreement in `run_on_all` follows, so none does so
        # earlier.
        own.zero_()
        torch.cuda.synchronize(device)
        return parts

    return SymmetricMemory(run_on_all(group, reach), (own, handle))


def can_share_memory(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether the ranks of a group read what the others have written into memory that they share. All ranks call it
    together, and get the same answer."""
    try:
        memory = allocate_symmetric(1, device, group)  # whose handle has to outlive the reads
        parts = memory.parts
        run_on_all(group, lambda: int(parts[dist.get_rank(group)].fill_(dist.get_rank(group) + 1)))  # and waits for it
        seen = run_on_all(group, lambda: [int(part) for part in parts])
        agree_on_failure(group, "" if seen == [*range(1, len(parts) + 1)] else "reads other bytes than were written")
    except ConfigError:
        return False
    return True


def share_on_host(size: int, group: dist.ProcessGroup) -> SymmetricMemory:
    """The same for processes of one machine. The files are removed as soon as all ranks have mapped them."""
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


# Flags by which streams of GPUs in one node signal each other. The driver writes and waits, without a kernel, so a
# waiting stream occupies no multiprocessor. On CPUs the process itself does both.


POLL_SECONDS = 20e-6
"""Seconds between a CPU's polls of a flag."""
MAX_POLLS = 0
"""Number of polls after which a wait raises an error, in kernels too; 0: never. Tests of the protocol set it. The host
then polls on GPUs too, and waits for every kernel."""
AT_LEAST = WITH_BARRIER = 0
"""Options of the driver's calls, both zero. AT_LEAST: wait until the flag has at least the value. WITH_BARRIER: write
the flag after all earlier writes of the stream are visible to all GPUs."""


def raise_flag(flag: Tensor, epoch: int) -> None:
    """Sets a flag (int32 [1]) of any rank to an epoch, after all earlier work of the current stream."""
    if flag.is_cuda:
        stream_command("cuStreamWriteValue32_v2", flag, epoch, WITH_BARRIER)
    else:
        flag.fill_(epoch)


def await_flag(flag: Tensor, epoch: int) -> None:
    """Makes the current stream wait until this rank's flag has reached the epoch. Raises `TimeoutError` after
    `MAX_POLLS`."""
    if flag.is_cuda and not MAX_POLLS:
        stream_command("cuStreamWaitValue32_v2", flag, epoch, AT_LEAST)
        return
    for number in itertools.count(1):
        if read_flags(flag).item() >= epoch:
            return
        if number == MAX_POLLS:
            raise TimeoutError(f"after {MAX_POLLS} polls")
        time.sleep(POLL_SECONDS)


def read_flags(flags: Tensor) -> Tensor:
    """The present values of flags, on the host."""
    # On a stream of its own: the current stream may be waiting for just these flags, and a copy behind that wait would
    # never run.
    with torch.cuda.stream(side_stream(flags.device)) if flags.is_cuda else contextlib.nullcontext():
        return flags.to("cpu", copy=True)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def stream_command(name: str, flag: Tensor, value: int, how: int) -> None:
    stream = torch.cuda.current_stream(flag.device).cuda_stream
    error = driver_function(name)(stream, flag.data_ptr(), value, how)
    if error:
        raise RuntimeError(f"{name} ends with CUDA error {error}; set {WITHOUT}")


@cache
def driver_function(name: str) -> Callable[..., int]:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return function


# Buffers in which the ranks of a group leave each other data, call by call. The number of a call is its epoch. Each
# rank has a buffer of two halves, which epochs use in turn, and flags, which hold the last epoch whose part has
# arrived. Flags only grow, so nothing is ever reset. docs/performance.md (The protocol of shared memory) explains why
# a half may be overwritten two epochs later.


class SymmetricBuffers:
    """The buffers of one kind and element type of a group, which grow with the calls' sizes, and the number of calls so
    far. All ranks of the group make the same calls in the same order."""

    shared: SymmetricMemory | None = None

    def __init__(self, kind: str, group: dist.ProcessGroup, dtype: torch.dtype):
        self.kind, self.group, self.dtype = kind, group, dtype
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.half = self.flags = self.epoch = 0

    def begin(self, elements: int, flags: int, device: torch.device) -> int:
        """Starts the next call, with room for so many elements and flags on each rank. Returns its epoch."""
        if elements > self.half or flags > self.flags:
            # Sizes are equal on all ranks, so all of them grow at the same call.
            self.grow(max(elements, self.half), max(flags, self.flags), device)
        self.epoch += 1
        return self.epoch

    def grow(self, half: int, flags: int, device: torch.device) -> None:
        """Allocates larger buffers, on all ranks together. Epochs restart, since the new flags are zero."""
        self.free()
        # Two halves of elements, rounded up so that the flags behind them are aligned.
        self.bytes = -(-2 * half * self.dtype.itemsize // 256) * 256
        self.shared = allocate_symmetric(self.bytes + 4 * flags, device, self.group)
        self.half, self.flags, self.epoch = half, flags, 0

    def free(self) -> None:
        """Frees the memory, on all ranks together."""
        if self.shared is None:
            return
        if self.shared.parts[self.rank].is_cuda:
            # Kernels and copies of this rank may still access other ranks' memory. Only when all ranks have come here
            # is it safe to unmap.
            torch.cuda.synchronize(self.shared.parts[self.rank].device)
        agree_on_failure(self.group)
        self.shared = None
        self.half = self.flags = self.epoch = 0

    def buffer(self, rank: int, shape: tuple[int, int]) -> Tensor:
        """The part of `rank`'s buffer that this epoch uses, as a tensor of `shape`."""
        whole = self.shared.parts[rank][: self.bytes].view(self.dtype)
        return whole[self.epoch % 2 * self.half :][: shape[0] * shape[1]].view(shape)

    def flag(self, rank: int, place: int) -> Tensor:
        """Flag number `place` of `rank`: int32 [1]."""
        return self.flags_of(rank)[place : place + 1]

    def flags_of(self, rank: int) -> Tensor:
        return self.shared.parts[rank][self.bytes :].view(torch.int32)

    def signal(self, to: int) -> None:
        """Tells rank `to` that everything that the current stream has written so far, in its own memory or in that of
        `to`, may be read. A rank has one flag for each source."""
        raise_flag(self.flag(to, self.rank), self.epoch)

    def wait(self, source: int) -> None:
        """Makes the current stream wait until what rank `source` sends in this epoch has arrived. Raises `RuntimeError`
        where that does not happen within `MAX_POLLS`."""
        try:
            with self.label_in_profile(AWAITS):
                await_flag(self.flag(self.rank, source), self.epoch)
        except TimeoutError as error:
            raise RuntimeError(f"{self.describe_missing(source)} {error}") from error

    def label_sends(self) -> AbstractContextManager:
        """Context that labels the copies inside of it in a profile as transfers from one rank to another."""
        return self.label_in_profile(SENDS)

    def label_in_profile(self, words: str) -> AbstractContextManager:
        return record_function(words + self.group.group_name) if _profiler_enabled() else nullcontext()

    def describe_missing(self, source: int) -> str:
        """A sentence that says that nothing of this epoch has arrived from rank `source`."""
        ranks = [dist.get_global_rank(self.group, rank) for rank in (self.rank, source)]
        return (
            f"rank {ranks[0]} waits for {self.kind} ({str(self.dtype)[6:]}) of rank {ranks[1]} in epoch {self.epoch}; "
            f"its flag says {read_flags(self.flag(self.rank, source)).item()}"
        )

    def list_missing(self) -> list[str]:
        """A sentence for each rank of which nothing has arrived in this epoch. For reports of the watchdog."""
        if self.shared is None or not self.epoch:
            return []
        seen = read_flags(self.flags_of(self.rank)).tolist()
        return [
            self.describe_missing(source) for source in other_ranks(self.rank, self.size) if seen[source] < self.epoch
        ]


ALL_BUFFERS: dict[tuple[Any, ...], SymmetricBuffers] = {}
"""All buffers of this process."""

Kind = TypeVar("Kind", bound=SymmetricBuffers)


def buffers_of(kind: str, group: dist.ProcessGroup, dtype: torch.dtype, make: type[Kind] = SymmetricBuffers) -> Kind:
    key = make, kind, group, dtype
    if key not in ALL_BUFFERS:
        ALL_BUFFERS[key] = make(kind, group, dtype)
    return ALL_BUFFERS[key]


def pending_waits() -> list[str]:
    """A sentence for each transfer that this process waits for."""
    return [text for buffers in list(ALL_BUFFERS.values()) for text in buffers.list_missing()]


def other_ranks(rank: int, size: int) -> list[int]:
    """The other ranks, beginning with the next one. If all ranks send in this order, no two send to the same rank at a
    time, and a rank receives first from the rank before it."""
    return [(rank + step) % size for step in range(1, size)]
