"""Memory that the ranks of a group read and write directly: of the GPUs of a node by torch's symmetric memory, which is
private, and of processes on CPUs by files that all of them map."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import ConfigError


class Shared(NamedTuple):
    """parts: every rank's bytes, zeros at first, as this rank reaches them; handle: keeps them mapped."""

    parts: list[Tensor]
    handle: Any

    @property
    def addresses(self) -> list[int]:
        return [part.data_ptr() for part in self.parts]


def share(size: int, device: torch.device, group: dist.ProcessGroup) -> Shared:
    """`size` bytes on every rank of a group. All ranks call it together. Raises `ConfigError` where the devices cannot
    reach each other."""
    if device.type != "cuda":
        return share_on_host(size, group)
    from torch.distributed import _symmetric_memory as symmetric

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # of which nothing is used
    try:
        own = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(own, group)
        parts = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(dist.get_world_size(group))]
    except RuntimeError as error:
        raise ConfigError(
            f"the GPUs of a group cannot share memory ({str(error).splitlines()[0]}); set parallel.fusion=off or "
            "chunks and parallel.zero.transport=collectives, which need NCCL alone"
        ) from error
    if parts[dist.get_rank(group)].data_ptr() != own.data_ptr():
        raise ConfigError(
            f"torch {torch.__version__} does not say where shared memory begins; set parallel.fusion=off or chunks and "
            "parallel.zero.transport=collectives"
        )
    own.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return Shared(parts, (own, handle))


def share_on_host(size: int, group: dist.ProcessGroup) -> Shared:
    """The same for processes of one machine. The files are gone when all have them mapped."""
    rank, folder = dist.get_rank(group), [tempfile.mkdtemp() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(folder, group=group, group_src=0)
    names = [f"{folder[0]}/{number}" for number in range(dist.get_world_size(group))]
    own = torch.from_file(names[rank], shared=True, size=size, dtype=torch.uint8)
    dist.barrier(group)
    parts = [
        own if number == rank else torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
        for number, name in enumerate(names)
    ]
    dist.barrier(group)
    if rank == 0:
        shutil.rmtree(folder[0])
    return Shared(parts, None)
