"""Schedules that no template builds."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from trainer.planning.schedules.ir import Action, Schedule, split_overlaps


def merge_backward(schedule: Schedule) -> Schedule:
    """Joins each I that is directly followed by its W to a B, so that full and split backwards stand side by side."""

    def merged(order: tuple[Action, ...]) -> tuple[Action, ...]:
        out: list[Action] = []
        for action in order:
            if action.kind == "W" and out and out[-1] == replace(action, kind="I"):
                out[-1] = replace(action, kind="B")
            else:
                out.append(action)
        return tuple(out)

    return replace(schedule, orders=tuple(map(merged, schedule.orders)))


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """By rank, the peak of activations held, each from its F to its B or W.

    The unit is the activations of one micro-batch in all k stages of the rank; those of one stage count 1/k."""
    peaks = []
    for rank, order in enumerate(schedule.orders):
        changes = ({"F": 1, "I": 0, "W": -1, "B": -1}[action.kind] for action in split_overlaps(order))
        peaks.append(max(accumulate(changes), default=0) / max(1, schedule.placement.count(rank)))
    return tuple(peaks)
