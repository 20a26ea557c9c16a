"""Times of work on a device, without a wait of the host in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from trainer.distributed.mesh import World
from trainer.observe.deferred import TimePoint

LEAST, MOST = 3, 30
"""Repeats."""

SHORT = 1e-3
"""Seconds that a repeat lasts at least: shorter work is done several times in it."""


class Stopwatch:
    """Takes the median of repeats, and of several ranks the slowest's, for which the others would wait. All ranks call
    it together, with the same work."""

    def __init__(self, world: World):
        self.world = world

    def seconds(self, work: Callable[[], Any], limit: float) -> float:
        """Of one call of `work`. limit: seconds to measure in, about; three repeats are made in any case."""
        self.together(*self._run(work, 1, 1))  # compiles, allocates, connects
        trial = self.together(*self._run(work, 1, 1))
        calls = max(1, min(1000, round(SHORT / max(trial, 1e-9))))
        repeats = max(LEAST, min(MOST, int(limit / max(calls * trial, 1e-9))))
        return self.together(median(self._run(work, calls, repeats)))

    def together(self, seconds: float) -> float:
        """The longest of all ranks' times."""
        if self.world.size == 1:
            return seconds
        longest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()

    def _run(self, work: Callable[[], Any], calls: int, repeats: int) -> list[float]:
        moments = [TimePoint(self.world.device)]
        for _ in range(repeats):
            for _ in range(calls):
                work()
            moments.append(TimePoint(self.world.device))
        moments[-1].wait()
        return [before.seconds_to(after) / calls for before, after in itertools.pairwise(moments)]
