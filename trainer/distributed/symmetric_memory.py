"""Memory that the GPUs of a group read and write directly: torch's symmetric memory, which is private."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import ConfigError


class Shared(NamedTuple):
    """own: this rank's bytes, zeros at first; addresses: of every rank's, as this rank reaches them; handle: keeps them
    mapped."""

    own: Tensor
    addresses: list[int]
    handle: Any


def share(size: int, device: torch.device, group: dist.ProcessGroup) -> Shared:
    """`size` bytes on every rank of a group. All ranks call it together. Raises `ConfigError` where the devices cannot
    reach each other."""
    from torch.distributed import _symmetric_memory as symmetric

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # of which nothing is used
    try:
        own = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(own, group)
        addresses = list(handle.buffer_ptrs)
    except RuntimeError as error:
        raise ConfigError(
            f"parallel.fusion: the GPUs of a tensor group cannot share memory ({str(error).splitlines()[0]}); set "
            "parallel.fusion=chunks, which needs NCCL alone, or parallel.fusion=off"
        ) from error
    if addresses[dist.get_rank(group)] != own.data_ptr():
        raise ConfigError(
            f"parallel.fusion: torch {torch.__version__} does not say where shared memory begins; set "
            "parallel.fusion=chunks or parallel.fusion=off"
        )
    own.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return Shared(own, addresses, handle)
