"""From the traces of a step to its accounts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer.diagnosis import on_device, on_host
from trainer.diagnosis.recording import COMPUTE, RecordedCollective, StepRecording
from trainer.diagnosis.time_breakdown import AXES, TimeBreakdown
from trainer.diagnosis.traces import StepTrace, TimeInterval, class_coverage, first_of
from trainer.planning.schedules import ir
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.simulate import simulate_schedule

# What only several ranks together tell: who waited for whom in a collective, and how much of a pipeline's waiting is
# its schedule's.


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


TRANSFERS = tuple(f"communication/{axis}/transfer" for axis in AXES)
WAITING = tuple(f"communication/{axis}/waiting" for axis in AXES)
ORDER = (
    *COMPUTE,
    *TRANSFERS,
    *WAITING,
    "copies",
    "data",
    "bubble",
    "host/collector",
    "host/synchronisation",
    "host/launch",
    "other",
)
"""What has a moment in which several things go on: the first."""

PIPELINE, ALL = "communication/pipeline/waiting", "communication/all/waiting"


def break_down_step(traces: Sequence[StepTrace]) -> list[TimeBreakdown]:
    """The accounts of a step on the ranks that were profiled, in order of rank. Raises `ValueError` for a trace without
    a step."""
    traces = sorted(traces, key=lambda trace: trace.rank)
    recordings = [
        (on_host.record_host if trace.device == "cpu" else on_device.record_device)(trace) for trace in traces
    ]
    bubbles = pipeline_idle(traces)
    return [
        break_down_rank(trace, recording, joined, bubbles.get(trace.rank))
        for trace, recording, joined in zip(traces, recordings, join_collectives(traces, recordings))
    ]


def break_down_rank(
    trace: StepTrace, recording: StepRecording, joined: Sequence[CollectivePart], bubble: PipelineIdle | None
) -> TimeBreakdown:
    """The account of one rank, which knows what the other ranks tell."""
    intervals: dict[str, list[TimeInterval]] = defaultdict(list, {**recording.work, **recording.idle})
    last: dict[str, list[int]] = {}
    for one, (transfer, was_last) in zip(recording.collectives, joined):
        arrived = one.interval.end - transfer  # a collective waits first, and transfers when all are there
        intervals[f"communication/{one.axis}/waiting"].append(TimeInterval(one.interval.start, arrived))
        intervals[f"communication/{one.axis}/transfer"].append(TimeInterval(arrived, one.interval.end))
        if was_last is not None:
            counts = last.setdefault(one.axis, [0, 0])
            counts[0] += was_last
            counts[1] += 1
    covered = class_coverage([intervals[term] for term in ORDER[:-1]], recording.window)
    terms = dict.fromkeys(ORDER, 0)
    for classes, nanoseconds in covered.items():
        terms[ORDER[first_of(classes)]] += nanoseconds
    split_bubble(terms, bubble)
    work = sum(1 << ORDER.index(term) for term in COMPUTE)
    hidden = {
        axis: sum(ns for classes, ns in covered.items() if classes & work and classes >> ORDER.index(term) & 1) / 1e9
        for axis, term in zip(AXES, TRANSFERS)
    }
    seconds = {term: ns / 1e9 for term, ns in terms.items() if ns} | trace.spent
    window = recording.window
    return TimeBreakdown(
        trace.rank,
        trace.step,
        trace.place,
        trace.device,
        (window.end - window.start) / 1e9 + sum(trace.spent.values()),
        seconds,
        {axis: value for axis, value in hidden.items() if value},
        {axis: (was_last, compared) for axis, (was_last, compared) in last.items()},
        recording.launches,
        recording.launch_delay,
        recording.kernel_seconds,
        recording.synchronisations,
        recording.kernels,
    )


def split_bubble(terms: dict[str, int], idle: PipelineIdle | None) -> None:
    """Makes of waiting in a pipeline what replays of its schedule explain: first by the schedule, then by stages that
    differ. What is left is the transfers'. A rank that is done with its actions waits for the others in sums over all
    ranks. Without a replay, all is the schedule's."""
    waited = terms.pop("bubble") + terms.pop(PIPELINE)
    if idle is None:
        terms["bubble/schedule"] = waited
        return
    tail = min(round(idle.tail * 1e9), terms[ALL])
    terms[ALL] -= tail
    waited += tail
    own = min(round(min(idle.own, idle.measured) * 1e9), waited)
    imbalance = min(max(round(idle.measured * 1e9) - own, 0), waited - own)
    terms["bubble/schedule"], terms["bubble/imbalance"] = own, imbalance
    terms["communication/pipeline/transfer"] += waited - own - imbalance
