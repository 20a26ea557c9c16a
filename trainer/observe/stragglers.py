"""Which rank is slower than those that do the same work, and since when."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainer.config import GuardConfig


def slowest(seconds: Sequence[float], roles: Sequence[int]) -> tuple[float | None, int | None]:
    """The largest of the ranks' times as a multiple of the median in its rank's role, and that rank; None where no rank
    has peers.

    seconds, roles: by rank. Of an even number the lower median counts: of two ranks, the other one's.
    """
    peers: dict[int, list[float]] = {}
    for time, role in zip(seconds, roles):
        peers.setdefault(role, []).append(time)
    medians = {role: statistics.median_low(times) for role, times in peers.items() if len(times) > 1}
    shares = [
        (time / medians[role], rank) for rank, (time, role) in enumerate(zip(seconds, roles)) if medians.get(role)
    ]
    return max(shares, default=(None, None))


class Stragglers:
    """Counts in how many logged steps in a row the same rank has been slow."""

    def __init__(self, guard: GuardConfig):
        self.guard, self.rank, self.count = guard, -1, 0

    def add(self, share: float | None, rank: int | None) -> bool:
        """Takes what `slowest` found in a logged step; True when it has been the same for guard.straggler_lines of
        them."""
        slow = share is not None and share >= self.guard.straggler_factor
        self.count = (self.count + 1 if rank == self.rank else 1) if slow else 0
        self.rank = rank if slow else -1
        return self.count == self.guard.straggler_lines
