"""The numbers of the rules by which a diagnosis is made, in one place."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """From which share of the step on a cost is called what bounds the run; other numbers of the rules."""

    data: float = 0.05
    straggler: float = 0.05
    host: float = 0.10
    host_on_cpus: float = 0.25
    """CPUs have no queue: every moment between two operators is the host's."""
    communication: float = 0.15
    bubble: float = 0.10
    checkpoint: float = 0.05
    evaluation: float = 0.10
    turns: float = 0.20
    """Ranks that are late in turns: shares of waiting that even the rank has which waits least."""
    slower: float = 1.10
    """A straggler's own work, as a multiple of the lower median of the ranks with the same layers."""
    steadily: float = 0.60
    """Share of the profiled steps in which it is the slowest."""
    full: float = 0.92
    """Share of a device's memory that is used at the peak."""
    recompute: float = 0.15
    """Share of the computation."""
    compute: float = 0.60
    """Share of the step that products and attention take."""
    memory_bound: float = 0.35
    """Share of the computation that kernels take which the memory's bandwidth bounds."""
    spoken_of: float = 0.01
    """Share of the step that a cost has to have to be spoken of."""


LIMITS = Limits()
