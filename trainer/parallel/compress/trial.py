"""codec=auto: steps are timed with and without quantised gradients, and the faster way is kept.

Whole steps are timed, not reductions: where gradients are sent while backward computes, fewer bytes may save nothing.
"""

from __future__ import annotations

from itertools import combinations

import torch
import torch.distributed as dist

from trainer.parallel.compress.reduction import Compression
from trainer.planning.gradient_comm import MARGIN

STEPS = 3
"""Steps timed with each candidate, after a first one that is not."""


class CodecTrial:
    """Times steps with each combination of quantised hops, of those with codec=auto; the first one quantises none."""

    def __init__(self, compression: Compression, step: int):
        self.compression = compression
        auto_hops = sorted(compression.auto_hops)
        self.candidates = [
            set(chosen) for count in range(len(auto_hops) + 1) for chosen in combinations(auto_hops, count)
        ]
        self.seconds: list[list[float]] = []
        self._begin(step, self.candidates[0])

    def measured(self, step: int, seconds: float) -> None:
        """Notes the duration of a step on this rank."""
        if step > self.first:
            self.seconds[-1].append(seconds)

    def due(self, step: int) -> bool:
        """Whether step number `step` was the last of a candidate."""
        return step >= self.first + STEPS

    def advance(self, step: int) -> str | None:
        """Goes on to the next candidate; after the last one chooses the best, and returns a message that says so.

        All ranks call it together."""
        if len(self.seconds) < len(self.candidates):
            self._begin(step, self.candidates[len(self.seconds)])
            return None
        times = torch.tensor([min(seconds) for seconds in self.seconds], dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.all_reduce(times, dist.ReduceOp.MAX)
        best = int(times.argmin())
        best = best if times[best] <= MARGIN * times[0] else 0
        self.compression.choose(self.candidates[best])
        self.compression.decided = True
        listed = ", ".join(
            f"{' and '.join(sorted(chosen)) or 'none'} {seconds:.4g} s"
            for chosen, seconds in zip(self.candidates, times.tolist())
        )
        return (
            f"gradients: quantised hops {' and '.join(sorted(self.candidates[best])) or 'none'}; a step takes with "
            f"{listed}"
        )

    def _begin(self, step: int, chosen: set[str]) -> None:
        self.compression.choose(chosen)
        self.seconds.append([])
        self.first = step + 1
