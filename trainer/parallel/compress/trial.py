"""codec=auto: steps are timed with and without quantised gradients, and what is faster stays.

Only whole steps tell. Where gradients travel while backward computes, as on one node's links, fewer bytes save nothing.
"""

from __future__ import annotations

from itertools import combinations

import torch
import torch.distributed as dist

from trainer.parallel.compress.reduction import Compression

STEPS = 3
"""Steps that are timed of each candidate, after one that is not."""

MARGIN = 0.97
"""A candidate has to take at most this share of the time without it: quantisation is not free of noise."""


class CodecTrial:
    """The measurement of `compression`'s hops that are left to it, candidate by candidate: first none of them
    quantised."""

    def __init__(self, compression: Compression, step: int):
        self.compression = compression
        left_open = sorted(compression.left_open)
        self.candidates = [
            set(chosen) for count in range(len(left_open) + 1) for chosen in combinations(left_open, count)
        ]
        self.seconds: list[list[float]] = []
        self._begin(step, self.candidates[0])

    def measured(self, step: int, seconds: float) -> None:
        """A step has taken so long on this rank."""
        if step > self.first:
            self.seconds[-1].append(seconds)

    def due(self, step: int) -> bool:
        """Whether step number `step` was the last of a candidate."""
        return step >= self.first + STEPS

    def advance(self, step: int) -> str | None:
        """Goes on to the next candidate, or to the best, which is then returned in words. All ranks call it
        together."""
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
        told = ", ".join(
            f"{' and '.join(sorted(chosen)) or 'none'} {seconds:.4g} s"
            for chosen, seconds in zip(self.candidates, times.tolist())
        )
        return (
            f"gradients: quantised hops {' and '.join(sorted(self.candidates[best])) or 'none'}; a step takes "
            f"with {told}"
        )

    def _begin(self, step: int, chosen: set[str]) -> None:
        self.compression.choose(chosen)
        self.seconds.append([])
        self.first = step + 1
