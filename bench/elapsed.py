"""How long work takes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

AHEAD = 4_000_000
"""Clocks, about 2 ms, in which the host launches a call, while the device does nothing."""


def elapsed(work: Callable[[], object], gpu: bool = True, calls: int = 1) -> float:
    """Milliseconds of a call of several one after the other: on the current GPU, without what it takes the host to
    launch them, which in a training step is ahead; or on a CPU."""
    if not gpu:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return 1e3 / calls * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(calls * AHEAD)
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls
