"""GPUs for workers of several ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from trainer.config import RunConfig
from trainer.distributed.world import local_device


def shared_device() -> torch.device:
    """This rank's GPU. Ranks that are more than the GPUs share them: each has its turn, and collectives go by gloo, as
    NCCL takes a GPU once only."""
    gpus = torch.cuda.device_count()
    if int(os.environ["WORLD_SIZE"]) <= gpus:
        return local_device(RunConfig())
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    dist.init_process_group("gloo")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
