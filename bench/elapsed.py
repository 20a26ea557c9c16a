"""How long a GPU takes for some work."""

from __future__ import annotations

from collections.abc import Callable

import torch


def elapsed(work: Callable[[], object]) -> float:
    """Milliseconds on the device, of one call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
