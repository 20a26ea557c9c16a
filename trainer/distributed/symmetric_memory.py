"""Memory that the ranks of a group read and write directly: of the GPUs of a node by torch's symmetric memory, which is
private, and of processes on CPUs by files that all of them map."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import ConfigError

WITHOUT = "parallel.fusion=off and parallel.zero.transport=collectives, which need no shared memory"

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
