"""What makes errors in protocols over shared memory show: late ranks, memory that is full of NaN, parts left out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.boxes import Boxes
from trainer.distributed.symmetric_memory import Shared, share


def poisoned(size: int, device: torch.device, group: dist.ProcessGroup) -> Shared:
    """Memory of NaN, and flags of -1."""
    shared = share(size, device, group)
    shared.parts[dist.get_rank(group)].fill_(0xFF)
    dist.barrier(group)
    return shared


def late(function: Callable, rank: int) -> Callable:
    """The function after a while, which is another one on each rank."""
    draw = random.Random(rank)

    def later(*arguments: object) -> object:
        time.sleep(draw.choice((0, 0, 0, 3e-4, 3e-3)))
        return function(*arguments)

    return later


def one_half(box: Callable) -> Callable:
    """Of a box, for all epochs."""

    def same(self: Boxes, *arguments: object) -> Tensor:
        with patch.object(self, "epoch", 0):
            return box(self, *arguments)

    return same
