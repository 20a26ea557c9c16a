"""Dynamic loss scaling for fp16, with the state of `torch.amp.GradScaler` and one found-inf for the whole mesh."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.config import PrecisionConfig


class LossScale(Protocol):
    """What the training step and checkpoints need of a loss scale. enabled: whether it scales at all. can_hold: whether
    `update` can leave the scale unchanged. value: scalar on the run's device."""

    enabled: bool
    can_hold: bool

    @property
    def value(self) -> Tensor: ...

    def scale(self, loss: Tensor) -> Tensor: ...

    def update(self, found_inf: Tensor, held: Tensor | None = None) -> None:
        """Adapts the scale after a step. found_inf: scalar, 1 where the update was skipped on all ranks. held: scalar,
        1 where the scale must stay as it is, because the step will be run again or had no target; None: never."""

    def state_dict(self) -> dict[str, Any]:
        """The keys of torch.amp.GradScaler's state; empty where the loss is not scaled."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the scale from `state`. An empty state changes nothing."""


GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
"""Factors of the loss scale after as many good steps, and after an overflow, as in torch.amp.GradScaler."""


class GradScaler:
    """The loss scale, kept on the device: it is halved after an overflow and doubled after `GROWTH_INTERVAL` good
    steps (Micikevicius et al., arXiv 1710.03740).

    It differs from torch.amp.GradScaler in what counts as an overflow. The caller passes one `found_inf` that is equal
    on all ranks. torch's scaler looks at local gradients, so ranks with different stages or shards could disagree and
    diverge. Where precision.compute is not fp16, the scale is always one.
    """

    can_hold = True

    def __init__(self, precision: PrecisionConfig, device: torch.device):
        self.enabled = precision.compute == "fp16"
        self.value = torch.full((), precision.loss_scale if self.enabled else 1.0, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value if self.enabled else loss

    def update(self, found_inf: Tensor, held: Tensor | None = None) -> None:
        """found_inf: fp32 scalar, 1 where the step overflowed on any rank."""
        if self.enabled:
            previous = self.value.clone(), self.growth_tracker.clone()
            # torch's own operator reads and writes device scalars, so the host does not learn here whether the step
            # overflowed.
            torch._amp_update_scale_(self.value, self.growth_tracker, found_inf, GROWTH, BACKOFF, GROWTH_INTERVAL)
            if held is not None:
                # Whether to hold is known on the device only, so the update is made first and undone by selection.
                for value, before in zip((self.value, self.growth_tracker), previous):
                    value.copy_(torch.where(held > 0, before, value))

    def state_dict(self) -> dict[str, Any]:
        if not self.enabled:
            return {}
        return {
            "scale": self.value.item(),
            "growth_factor": GROWTH,
            "backoff_factor": BACKOFF,
            "growth_interval": GROWTH_INTERVAL,
            "_growth_tracker": self.growth_tracker.item(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.enabled and state:
            self.value.fill_(state["scale"])
            self.growth_tracker.fill_(state["_growth_tracker"])
