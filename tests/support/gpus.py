"""GPUs for workers of several ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import RunConfig
from trainer.distributed.c10d_internals import list_groups
from trainer.distributed.mesh import local_device


def shared_device() -> torch.device:
    """This rank's GPU. Ranks that are more than the GPUs share them: each has its turn, and collectives go by gloo, as
    NCCL takes a GPU once only."""
    gpus = torch.cuda.device_count()
    if int(os.environ["WORLD_SIZE"]) <= gpus:
        return local_device(RunConfig())
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    dist.init_process_group("gloo")
    send_by_host("CUDA")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)


def send_by_host(key: str) -> None:
    """From now on functional collectives of tensors with a dispatch key go through host memory: gloo's own end torch
    2.11 with a segmentation fault on GPUs."""

    def parts(x: Tensor, name: str) -> list[Tensor]:
        """Of every rank."""
        group, mine = list_groups()[name], x.cpu().contiguous()
        found = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather([one.view(torch.uint8) for one in found], mine.view(torch.uint8), group)
        return [one.to(x.device) for one in found]

    def scattered(x: Tensor, reduction: str, size: int, name: str) -> Tensor:
        own = dist.get_rank(list_groups()[name])
        return torch.stack([part.tensor_split(size)[own] for part in parts(x, name)]).sum(0)

    library.impl("all_gather_into_tensor", lambda x, size, name: torch.cat(parts(x, name)), key)
    library.impl("reduce_scatter_tensor", scattered, key)
    library.impl("all_reduce", lambda x, reduction, name: torch.stack(parts(x, name)).sum(0), key)
    library.impl("wait_tensor", lambda x: x, key)


library = torch.library.Library("_c10d_functional", "IMPL")
