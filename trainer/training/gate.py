"""What keeps steps behind a suspicious one from changing the state; see `repeats.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.precision.scaler import LossScale


class UpdateGate:
    """Keeps steps behind a suspicious one from changing the state until the host has looked at that one.

    shut: scalar on the device, 1 from a suspicious step on. active: whether there is a host that looks; without one the
    gate stays open."""

    def __init__(self, scaler: LossScale, device: torch.device):
        self.scaled, self.active, self.shut = scaler.enabled, False, torch.zeros((), device=device)

    def found_inf(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether the update is left out: fp32 scalar, 1 where loss or gradient norm is not finite or the gate is
        shut."""
        found_inf = (~(torch.isfinite(norm) & torch.isfinite(loss))).float()
        if self.active:
            suspicious = (~torch.isfinite(loss)).float() if self.scaled else found_inf
            found_inf = torch.maximum(found_inf, self.shut)
            self.shut.copy_(torch.maximum(suspicious, self.shut))
        return found_inf

    def suspects(self, numbers: Mapping[str, Any]) -> bool:
        """The same of a step whose numbers have been read back."""
        bad = not np.isfinite(numbers["loss"]) if self.scaled else numbers["found_inf"] > 0
        return self.active and bool(bad)

    def open(self) -> None:
        self.shut.zero_()
