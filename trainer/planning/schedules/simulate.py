"""How long a schedule takes and how much memory it needs: an event simulation on the costs of stages. And the files of
timelines, simulated or measured.

A rank computes its actions in order, each as soon as its input has arrived. Transfers between ranks overlap with
computation; what a rank sends, to whichever rank, waits until its link has sent what came before. Parameters are
gathered from the step's start, one stage of a rank after the other, in the order of their first use. Gradients are
reduced one stage after the other, each after the stage's last backward action. Both overlap with computation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import ConfigError
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.ir import COMPUTE, Action, Schedule, parse_action, split_overlaps
from trainer.util.reading import parse_json, read_bytes, shorten_foreign, write_atomic


class ActionSpan(NamedTuple):
    """When an action ran, in seconds from the step's start."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The simulated course of one step.

    makespan: seconds from the first action to the end of the last action or reduction. busy: by rank, seconds of
    computation. memory: by rank, the peak of activations held, in the unit of the costs. actions, ends: by rank, its
    actions (the parts of an OVERLAP_F_B one after the other), and when each ended."""

    makespan: float
    busy: tuple[float, ...]
    memory: tuple[float, ...]
    actions: tuple[tuple[Action, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    costs: StageCosts

    @property
    def bubbles(self) -> tuple[float, ...]:
        """By rank, the share of the step in which it does not compute."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do not compute: 1 - busy / (ranks x makespan)."""
        return sum(self.bubbles) / len(self.busy)

    @cached_property
    def spans(self) -> tuple[tuple[ActionSpan, ...], ...]:
        """By rank, when each action ran."""
        seconds = {"F": self.costs.f, "I": self.costs.i, "W": self.costs.w, "B": self.costs.b}
        return tuple(
            tuple(
                ActionSpan(action, end - seconds[action.kind][action.stage], end) for action, end in zip(actions, ends)
            )
            for actions, ends in zip(self.actions, self.ends)
        )


def activation_change(action: Action, costs: StageCosts, train: bool) -> float:
    """By how much an action changes the activations that its rank holds; 0 in schedules without backward passes."""
    if not train:
        return 0.0
    share = {"F": 1.0, "I": costs.kept - 1.0, "W": -costs.kept, "B": -1.0}[action.kind]
    return share * costs.activation[action.stage]


def simulate_schedule(schedule: Schedule, costs: StageCosts) -> Simulation:
    """Runs a schedule, with or without backward passes, in time linear in its actions.

    Raises `ValueError` where `costs` have another number of stages, and for a deadlock, with every rank that waits, its
    action, and what the action waits for.
    """
    if costs.stages != schedule.stages:
        raise ValueError(f"costs of {costs.stages} stages for schedule {schedule.name} of {schedule.stages}")
    orders = tuple(tuple(split_overlaps(order)) for order in schedule.orders)
    stages, count, placement = schedule.stages, schedule.microbatches, schedule.placement
    size, last, train = stages * count, stages - 1, schedule.trains
    held = {
        kind: [activation_change(Action(stage, kind, 0), costs, train) for stage in range(stages)] for kind in "FIWB"
    }
    # Whether the result of F, and of I or B, goes to another rank.
    onward = [placement[stage] != placement[stage + 1] for stage in range(last)] + [False]
    back = [False, *onward[:-1]]
    transfer, occupied, links = costs.transfer, costs.occupied, [0.0] * len(orders)
    gathered = gather_ends(orders, costs)
    # When the result of a forward action is there (stage x count + micro-batch), then a gradient.
    done = [-1.0] * (2 * size)
    waiting: dict[int, int] = {}  # what a rank waits for -> the rank
    ends: list[list[float]] = [[] for _ in orders]
    free, busy, memory, peak = [0.0] * len(orders), [0.0] * len(orders), [0.0] * len(orders), [0.0] * len(orders)
    final = [0.0] * stages
    seconds_f, seconds_i, seconds_w, seconds_b, host = costs.f, costs.i, costs.w, costs.b, costs.host
    runnable = list(range(len(orders)))[::-1]
    while runnable:
        rank = runnable.pop()
        order, mine, now, worked, bytes_held, most = (
            orders[rank],
            ends[rank],
            free[rank],
            busy[rank],
            memory[rank],
            peak[rank],
        )
        for position in range(len(mine), len(order)):
            action = order[position]
            kind, stage = action.kind, action.stage
            slot = stage * count + action.microbatch  # type: ignore[operator]  # what computes has one
            if kind == "F":
                need, seconds, own = slot - count, seconds_f[stage], slot
                ready = gathered[stage]
                if stage:
                    arrival = done[need]
                    if arrival < 0:
                        waiting[need] = rank
                        break
                    if arrival > ready:
                        ready = arrival
            else:
                own = size + slot
                if kind == "W":
                    need, seconds = own, seconds_w[stage]
                else:
                    need = own + count if stage < last else slot
                    seconds = seconds_i[stage] if kind == "I" else seconds_b[stage]
                ready = done[need]
                if ready < 0:
                    waiting[need] = rank
                    break
                if kind == "W":  # what it needs ended on this rank
                    ready = 0.0
            end = (ready if ready > now else now) + host + seconds
            now = end
            worked += seconds
            bytes_held += held[kind][stage]
            if bytes_held > most:
                most = bytes_held
            mine.append(end)
            if kind == "W":
                final[stage] = end
                continue
            if kind == "B":
                final[stage] = end
            if onward[stage] if kind == "F" else back[stage]:
                leaves = max(end, links[rank])
                links[rank], end = leaves + occupied, leaves + transfer
            done[own] = end
            if own in waiting:
                runnable.append(waiting.pop(own))
        free[rank], busy[rank], memory[rank], peak[rank] = now, worked, bytes_held, most
    blocked = [rank for rank, order in enumerate(orders) if len(ends[rank]) < len(order)]
    if blocked:
        raise ValueError(describe_deadlock(schedule, orders, {rank: len(ends[rank]) for rank in blocked}))
    makespan = max([*free, *reduce_ends(schedule, costs, final)], default=0.0) if train else max(free, default=0.0)
    return Simulation(makespan, tuple(busy), tuple(peak), orders, tuple(map(tuple, ends)), costs)


def gather_ends(orders: tuple[tuple[Action, ...], ...], costs: StageCosts) -> list[float]:
    """By stage, when its parameters are gathered."""
    ends = [0.0] * costs.stages
    if any(costs.unshard):
        for order in orders:
            now = 0.0
            for stage in dict.fromkeys(action.stage for action in order):
                now += costs.unshard[stage]
                ends[stage] = now
    return ends


def reduce_ends(schedule: Schedule, costs: StageCosts, final: list[float]) -> list[float]:
    """By rank, when its last gradients are reduced. final: by stage, the end of its last backward action."""
    ends = [0.0] * schedule.ranks
    if any(costs.reduce):
        for stage in sorted(range(costs.stages), key=lambda stage: final[stage]):
            rank = schedule.placement[stage]
            ends[rank] = max(ends[rank], final[stage]) + costs.reduce[stage]
    return ends


def describe_deadlock(schedule: Schedule, orders: tuple[tuple[Action, ...], ...], positions: dict[int, int]) -> str:
    """What every blocked rank waits for. positions: by blocked rank, its next action."""
    lines = []
    for rank, position in positions.items():
        action = orders[rank][position]
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            need = str(Action(stage - 1, "F", microbatch))
        elif action.kind == "W":
            need = str(Action(stage, "I", microbatch))
        elif stage == schedule.stages - 1:
            need = str(Action(stage, "F", microbatch))
        else:
            need = f"{Action(stage + 1, 'I', microbatch)} or {Action(stage + 1, 'B', microbatch)}"
        lines.append(f"rank {rank} at position {position}, {action}, waits for {need}")
    return f"schedule {schedule.name} cannot finish: " + "; ".join(lines)


# Timelines of pipelines, and their files: what every rank computed and when, planned or measured. A timeline holds
# one sequence of spans for each rank, in seconds from the start of the step. Its makespan is the end of its last
# span, or a given later time, since gradients may still be reduced after the last span. A rank's bubble is the share
# of the makespan in which the rank does not compute.


LONGEST = 1e9
"""Seconds, some thirty years: no step is longer, and no sum of such numbers is infinite."""

Timeline = Sequence[Sequence[ActionSpan]]


def idle_gaps(spans: Iterable[ActionSpan], makespan: float) -> list[tuple[float, float]]:
    """The gaps (start, length) between the computations of one rank, from 0 to `makespan`."""
    gaps, done = [], 0.0
    computed = [(start, end) for action, start, end in spans if action.parts or action.kind in COMPUTE]
    for start, end in [*sorted(computed), (makespan, makespan)]:
        if start - done > 1e-9 * makespan:  # more than rounding leaves between two actions
            gaps.append((done, start - done))
        done = max(done, end)
    return gaps


def measure_timeline(ranks: Timeline, makespan: float | None = None) -> tuple[float, float, tuple[float, ...]]:
    """A timeline's makespan in seconds (at least `makespan`), its bubble (the mean over ranks), and each rank's bubble.

    Bubbles are shares of the makespan, 0 to 1.
    """
    makespan = max([makespan or 0.0, *(span.end for spans in ranks for span in spans)])
    bubbles = tuple(
        sum(length for _, length in idle_gaps(spans, makespan)) / makespan if makespan else 0.0 for spans in ranks
    )
    return makespan, sum(bubbles) / len(bubbles) if bubbles else 0.0, bubbles


def write_timeline(path: Path, ranks: Timeline, makespan: float | None = None) -> None:
    """Writes one timeline as JSON: makespan, bubble, and by rank its actions with start and end in seconds.

    Raises `OSError` when the file cannot be written.
    """
    makespan, bubble, _ = measure_timeline(ranks, makespan)
    rows = [
        json.dumps(
            [{"action": str(action), "start": start, "end": end} for action, start, end in spans], allow_nan=False
        )
        for spans in ranks
    ]
    numbers = f'"makespan": {json.dumps(makespan)}, "bubble": {json.dumps(bubble)}'
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, f'{{{numbers}, "ranks": [\n' + ",\n".join(rows) + "\n]}\n")


def read_timeline(path: Path) -> tuple[tuple[tuple[ActionSpan, ...], ...], float]:
    """The timeline that `write_timeline` wrote, and its makespan. Raises `ConfigError` naming the file and what is
    wrong."""
    try:
        content = parse_json(read_bytes(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read ({error.strerror})") from None
    except ValueError:
        raise ConfigError(f"{path}: not JSON; the file is damaged") from None
    rows = content.get("ranks") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not any(rows) or not all(isinstance(row, list) for row in rows):
        raise ConfigError(f"{path}: no actions under 'ranks'; the file is damaged")
    ranks = tuple(
        tuple(_span(entry, f"{path}, rank {rank}, action {position}") for position, entry in enumerate(row))
        for rank, row in enumerate(rows)
    )
    makespan, last = content.get("makespan"), measure_timeline(ranks)[0]
    if not isinstance(makespan, (int, float)) or not last <= makespan < LONGEST:
        raise ConfigError(
            f"{path}: makespan {shorten_foreign(makespan)}, but the last action ends at {last}; the file is damaged"
        )
    return ranks, makespan


def _span(entry: Any, where: str) -> ActionSpan:
    try:
        span = ActionSpan(parse_action(entry["action"]), float(entry["start"]), float(entry["end"]))
    except (ConfigError, AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: no action with start and end; the file is damaged") from None
    if not -LONGEST < span.start <= span.end < LONGEST:  # clocks of ranks may put a start before 0
        raise ConfigError(
            f"{where}: {span.action} from {span.start} to {span.end} is no time in a step; the file is damaged"
        )
    return span
