"""Learning-rate schedules, computed on the device from the number of updates.

A skipped step does not advance them, and no step waits for the device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.config import LearningRateConfig
from trainer.config.registry import SCHEDULES


class ScheduleProgress(NamedTuple):
    """Where a schedule stands, for registered ones too. done: share of the way from the end of the warm-up to the last
    step, 0 to 1; update: the number of the update, from 1; both scalar tensors. warmup, steps: of the run."""

    done: Tensor
    update: Tensor
    warmup: int
    steps: int


def learning_rate(config: LearningRateConfig, steps: int, updates: Tensor) -> Tensor:
    """The learning rate of the update that follows `updates` finished ones (a scalar tensor), in a run of `steps`.

    Linear warm-up over `warmup` updates, then: cosine to final x peak (arXiv 1608.03983); linear to it; constant; or
    wsd, constant and then linear to it over the last `decay` updates (arXiv 2404.06395); or what is registered."""
    number = updates.float() + 1
    warm = (number / max(config.warmup, 1)).clamp(max=1.0)
    length = max(steps - config.warmup, 1)
    if config.schedule == "wsd":
        length = config.decay or max(steps // 5, 1)
    start = steps - length if config.schedule == "wsd" else config.warmup
    progress = ((number - start) / length).clamp(0.0, 1.0)
    if config.schedule in SCHEDULES.registered:
        entry = SCHEDULES[config.schedule]
        share = entry.made(entry.chosen(config.settings), ScheduleProgress(progress, number, config.warmup, steps))
    elif config.schedule == "cosine":
        share = (1 + torch.cos(math.pi * progress)) / 2
    elif config.schedule == "constant":
        share = torch.ones_like(progress)
    else:
        share = 1 - progress
    return config.peak * torch.where(number <= config.warmup, warm, config.final + (1 - config.final) * share)
