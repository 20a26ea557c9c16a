"""Schedules that no template builds."""

from __future__ import annotations

from dataclasses import replace

from trainer.planning.schedules.ir import Action, Schedule


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
