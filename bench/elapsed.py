"""How long a GPU takes for some work."""

from __future__ import annotations

from collections.abc import Callable

import torch

AHEAD = 4_000_000
"""Clocks, about 2 ms, in which the host launches all that is measured, while the device does nothing."""


def elapsed(work: Callable[[], object]) -> float:
    """Milliseconds on the device, of one call, without what it takes the host to launch it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(AHEAD)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
