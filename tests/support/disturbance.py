"""Causes of slowness of known kind, as settings of a loss term: `imports=[support.disturbance]`, and
`loss.terms.disturbance.NAME=VALUE`."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from support.names import LACKING, TERM

from trainer import option, register
from trainer.data.batches import BatchLoader

__all__ = ["TERM"]
BALLAST: list[torch.Tensor] = []
CALLS = [0]


@dataclass
class Disturbance:
    """Work beside each chunk of a micro-batch's loss."""

    products: int = option(0, "matrix products")
    size: int = option(384, "rows and columns of their matrices")
    copies: int = option(0, "passes over a large tensor")
    sums: int = option(0, "of that tensor over all ranks, none of which may be left out")
    elements: int = option(1 << 21, "of that tensor")
    reads: int = option(0, "numbers that the host waits for")
    sleep: float = option(0.0, "without any operator", unit="seconds")
    loading: float = option(0.0, "the same, of the loader before each step from the second on", unit="seconds")
    held: int = option(0, "more memory", unit="MiB")
    lacking: int = option(0, "the call at which memory runs out; 0: never")
    rank: int = option(-1, "the only rank; -1 means all")


@register.loss_term("disturbance", Disturbance)
def disturbance(settings, scores, targets):
    BatchLoader.slow = settings.loading
    with torch.no_grad():
        if settings.rank in (-1, dist.get_rank()):
            device = scores.device
            square = torch.ones(settings.size, settings.size, device=device, dtype=scores.dtype)
            large = torch.ones(settings.elements, device=device)
            for _ in range(settings.products):
                square @ square
            for _ in range(settings.copies):
                large.add_(1.0)
            for _ in range(settings.sums):
                dist.all_reduce(large)
            for _ in range(settings.reads):
                large[:1].sum().item()
            time.sleep(settings.sleep)
            CALLS[0] += 1
            if settings.lacking == CALLS[0]:
                raise torch.OutOfMemoryError(LACKING)
            if settings.held and not BALLAST:
                BALLAST.append(torch.ones(settings.held << 18, device=device))
    return scores.sum(-1) * 0


def slow(step=BatchLoader._step):
    def _step(self, position):
        time.sleep(self.slow)
        return step(self, position)

    return _step


BatchLoader.slow, BatchLoader._step = 0.0, slow()
