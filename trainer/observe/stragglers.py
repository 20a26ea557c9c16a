"""Stragglers: which rank is slower than the ranks that do the same work, and for how many steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainer.config import GuardConfig


def find_straggler(seconds: Sequence[float], roles: Sequence[int]) -> tuple[float | None, int | None]:
    """The straggler's time as a multiple of the median of the ranks with its role, and its rank.

    seconds, roles: by rank. None where no rank shares its role with another. Of an even number of times the lower
    median counts, so that of two ranks the slower one is compared with the other."""
    peers: dict[int, list[float]] = {}
    for time, role in zip(seconds, roles):
        peers.setdefault(role, []).append(time)
    medians = {role: statistics.median_low(times) for role, times in peers.items() if len(times) > 1}
    shares = [
        (time / medians[role], rank) for rank, (time, role) in enumerate(zip(seconds, roles)) if medians.get(role)
    ]
    return max(shares, default=(None, None))


class StragglerAlert:
    """Counts in how many logged steps in a row the same rank has been slow."""

    def __init__(self, guard: GuardConfig):
        self.guard, self.rank, self.count = guard, -1, 0

    def add(self, share: float | None, rank: int | None) -> bool:
        """Takes what `find_straggler` found in a logged step; True when one rank has been slow for
        guard.slow_lines logged steps in a row."""
        slow = share is not None and share >= self.guard.slow_factor
        self.count = (self.count + 1 if rank == self.rank else 1) if slow else 0
        self.rank = rank if slow else -1
        return self.count == self.guard.slow_lines
