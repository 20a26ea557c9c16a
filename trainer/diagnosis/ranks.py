"""What only several ranks together tell: who waited for whom in a collective, and how much of a pipeline's waiting is
its schedule's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer.diagnosis.recording import RecordedCollective, StepRecording
from trainer.diagnosis.traces import StepTrace
from trainer.planning.cost.stages import StageCosts
from trainer.planning.schedules import ir
from trainer.planning.schedules.simulate import simulate_schedule

NOISE = 50_000
"""Nanoseconds by which ranks that join a collective together may differ."""


class CollectivePart(NamedTuple):
    """How a rank took part in a collective. transfer: what the rank took that came last; last: whether this one did;
    None where no other rank was seen, or nobody waited."""

    transfer: int
    last: bool | None


def join_collectives(traces: Sequence[StepTrace], recordings: Sequence[StepRecording]) -> list[list[CollectivePart]]:
    """By rank, for each of its collectives, what the others in it tell.

    Compared by group and number, not by clocks, which differ among machines: the rank that came last waited for nobody,
    so its time is the transfer's."""
    seconds: dict[tuple, list[int]] = defaultdict(list)

    def key(trace: StepTrace, one: RecordedCollective) -> tuple:
        ranks = trace.groups[one.group].ranks if one.group in trace.groups else (trace.rank,)
        return one.group, ranks, one.flag, one.number

    for trace, recording in zip(traces, recordings):
        for one in recording.collectives:
            seconds[key(trace, one)].append(one.interval.end - one.interval.start)
    joined = []
    for trace, recording in zip(traces, recordings):
        mine = []
        for one in recording.collectives:
            all_of_it, own = seconds[key(trace, one)], one.interval.end - one.interval.start
            differ = max(all_of_it) - min(all_of_it) > NOISE
            mine.append(CollectivePart(min(all_of_it), own == min(all_of_it) if differ else None))
        joined.append(mine)
    return joined


class PipelineIdle(NamedTuple):
    """Seconds that a pipeline rank has nothing to do, from replays of its step. own: with stages of equal costs, the
    schedule's own; measured: with those that were measured; tail: of these, after its last action."""

    own: float
    measured: float
    tail: float


def pipeline_idle(traces: Sequence[StepTrace]) -> dict[int, PipelineIdle]:
    """By rank, the idle time that its pipeline's schedule explains; only ranks of whose pipeline all stages were
    seen."""
    members: dict[tuple, list[StepTrace]] = defaultdict(list)
    for trace in traces:
        if trace.schedule:
            members[tuple(place for name, place in sorted(trace.place.items()) if name != "pp")].append(trace)
    return {rank: idle for pipeline in members.values() for rank, idle in replay_pipeline(pipeline).items()}


def replay_pipeline(pipeline: Sequence[StepTrace]) -> dict[int, PipelineIdle]:
    """The same of one pipeline's ranks; empty where a stage was not seen."""
    first = pipeline[0]
    schedule = ir.parse_schedule("\n".join(first.schedule), first.placement)
    actions = ((ir.parse_action(name), end - start) for trace in pipeline for name, start, end in trace.actions)
    idle = idle_of(schedule, actions)
    return {trace.rank: idle[trace.place["pp"]] for trace in pipeline} if idle else {}


def idle_of(schedule: ir.Schedule, actions: Iterable[tuple[ir.Action, float]]) -> list[PipelineIdle]:
    """By pipeline rank, from the seconds that actions took on all of them; empty where a stage was not seen."""
    times: dict[str, list[list[float]]] = {kind: [[] for _ in schedule.placement] for kind in ir.COMPUTE}
    for action, seconds in actions:
        times[action.kind][action.stage].append(seconds)
    wanted = {action.kind for order in schedule.orders for action in ir.split_overlaps(order)}
    if not all(times[kind][stage] for kind in wanted for stage in range(schedule.stages)):
        return []
    by_stage = {kind: [mean_value(some) for some in stages] for kind, stages in times.items()}
    measured = simulate_schedule(schedule, stage_costs(by_stage))
    equal = simulate_schedule(
        schedule, stage_costs({kind: [mean_value(stages)] * len(stages) for kind, stages in by_stage.items()})
    )
    return [
        PipelineIdle(
            equal.makespan - equal.busy[place],
            measured.makespan - measured.busy[place],
            measured.makespan - measured.ends[place][-1],
        )
        for place in range(schedule.ranks)
    ]


def stage_costs(seconds: dict[str, list[float]]) -> StageCosts:
    """Of stages, from seconds by kind of action and stage."""
    f, i, w, b = (tuple(seconds[kind]) for kind in ("F", "I", "W", "B"))
    return StageCosts(f, i, w, b, activation=(0.0,) * len(f))


def mean_value(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
