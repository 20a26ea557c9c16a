"""Writes the accounts of a step, from the traces that its ranks leave: `python -m trainer.diagnosis.accounts RUN STEP
RANK...`.

A run starts it when it has profiled a step, and goes on: reading traces takes seconds of a processor, which training
should not feel. It waits for the traces of all the ranks; of a rank that leaves none within `PATIENCE`, there is no
account."""

from __future__ import annotations

import json
import os
import sys
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from trainer.diagnosis.time_breakdown import AXES, TimeBreakdown, breakdown_metrics, trace_of
from trainer.diagnosis.traces import (
    COMPUTE,
    HOST_KINDS,
    HostContext,
    KernelTally,
    RecordedCollective,
    StepRecording,
    StepTrace,
    TimeInterval,
    TraceEvent,
    class_coverage,
    find_context,
    find_flag_waits,
    first_of,
    forward_products,
    kind_of,
    nest_events,
    read_trace,
    term_of,
    uncovered_gaps,
)
from trainer.planning.schedules import ir
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.lower import SECONDS
from trainer.planning.schedules.simulate import simulate_schedule
from trainer.util.lines import ACCOUNTS, LineFile
from trainer.util.tables import AWAITS, COLLECTOR, DATA, GROUP, SENDS, STEP, WAIT

# A trace of a CUDA device: kernels compute and communicate, and while none runs, the host tells why.


DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")

LATENCY = 20_000
"""Nanoseconds that a launched kernel may take to start on an idle device; one that takes longer waited for something
else."""


class KernelLaunch(NamedTuple):
    """A call of the driver that made the device do something. operator: the innermost around it."""

    start: int
    thread: int
    about: HostContext
    operator: TraceEvent | None


def record_device(trace: StepTrace) -> StepRecording:
    """What a trace of a device says of its last step. Raises `ValueError` where it has none.

    Hosts run ahead of devices. A step lasts on a device from the end of what was launched before it to the end of what
    was launched in it, and not less than the host took for it."""
    steps = trace.labelled(STEP)
    if not steps:
        raise ValueError(f"the trace of rank {trace.rank} has no step")
    step, before = steps[-1], steps[-2].end if len(steps) > 1 else steps[-1].start
    host = [event for event in trace.events if event.kind in HOST_KINDS]
    threads = {event.thread for event in host}
    done = [one for thread in threads for one in nest_events(event for event in host if event.thread == thread)]
    launches, waits, forward = dict[int, KernelLaunch](), list[TimeInterval](), forward_products(done)
    for one in done:
        if one.event.kind in ("cuda_runtime", "cuda_driver"):
            operator = next((event for event in reversed(one.around) if event.kind == "cpu_op"), None)
            about = find_context(one.around, forward)
            launches[one.event.details.get("correlation", -1)] = KernelLaunch(
                one.event.start, one.event.thread, about, operator
            )
            if "Synchronize" in one.event.name or one.event.name == "cudaMemcpy":
                waits.append(one.event.interval)
    device = [event for event in trace.events if event.kind in DEVICE_KINDS]
    earlier = [event for event in device if _launched(event, launches) < step.start]
    mine = [event for event in device if step.start <= _launched(event, launches) < step.end]
    window = TimeInterval(
        max([before, *(event.end for event in earlier)]), max([step.end, *(event.end for event in mine)])
    )
    found = StepRecording(window)
    share_out(found, mine, launches, trace)
    labelled = {"data": DATA, "host/collector": COLLECTOR}
    found.idle |= {term: [event.interval for event in trace.labelled(label)] for term, label in labelled.items()}
    for term, gap in idle_causes(device, launches, waits, window):
        found.idle[term].append(gap)
    marks = [(group, event) for group, event in trace.marked(AWAITS) if step.start <= event.start < step.end]
    found.collectives += find_flag_waits(trace, flag_waits(marks, device, launches))
    found.synchronisations = sum(step.start <= wait.start < step.end for wait in waits)
    return found


def _launched(event: TraceEvent, launches: dict[int, KernelLaunch]) -> int:
    """When the host launched something; when it began, where the trace does not tell."""
    launch = launches.get(event.details.get("correlation", -2))
    return event.start if launch is None else launch.start


def share_out(
    found: StepRecording, mine: list[TraceEvent], launches: dict[int, KernelLaunch], trace: StepTrace
) -> None:
    """Gives what the device did to its terms and kernels."""
    tally, counts, longest = KernelTally(), Counter[str](), longest_of(mine, launches)
    delays, lengths = [], []
    for event in mine:
        launch = launches.get(event.details.get("correlation", -2))
        nanoseconds = event.end - event.start
        about = launch.about if launch else HostContext(None, False, False)
        if event.name.startswith("nccl"):
            group = event.details.get("Process Group Name", "")
            found.collectives.append(RecordedCollective(group, trace.axis(group), counts[group], event.interval))
            counts[group] += 1
            tally.add(event.name, "communication", nanoseconds)
            continue
        if about.sends is not None:
            found.idle[f"communication/{trace.axis(about.sends)}/transfer"].append(event.interval)
            tally.add(event.name, "communication", nanoseconds)
            continue
        if event.kind == "gpu_memcpy" and "DtoD" not in event.name:
            found.idle["copies"].append(event.interval)
            tally.add(event.name, "copies", nanoseconds)
            continue
        term = term_of(event.name, about)
        found.work[term].append(event.interval)
        operator = launch.operator if launch else None
        if operator is not None and longest[operator.thread, operator.start] is not event:
            operator = None
        repeated = term == "recompute"
        tally.add(
            event.name,
            kind_of(operator.name if operator and repeated else event.name) if repeated else term,
            nanoseconds,
            operator,
        )
        if event.kind == "kernel":
            lengths.append(nanoseconds)
            delays += [event.start - launch.start] if launch else []
    found.kernels, found.launches = tally.kernels(), len(lengths)
    found.kernel_seconds = median(lengths) / 1e9 if lengths else None
    found.launch_delay = median(delays) / 1e9 if delays else None


def flag_waits(
    marks: Iterable[tuple[str, TraceEvent]], device: Iterable[TraceEvent], launches: dict[int, KernelLaunch]
) -> Iterator[tuple[str, TimeInterval]]:
    """For each label of a wait for a flag its group, and how long the stream stood still there: of what was launched
    next, from when it could have begun to when it did."""
    ends, following = dict[int, int](), defaultdict[int, list[tuple[int, TimeInterval]]](list)
    for event in device:
        launch = launches.get(event.details.get("correlation", -2))
        if launch is not None:
            ready = max(launch.start, ends.get(event.thread, launch.start))
            late = event.start - ready > LATENCY
            following[launch.thread].append((launch.start, TimeInterval(ready if late else event.start, event.start)))
        ends[event.thread] = event.end
    for some in following.values():
        some.sort()
    for group, mark in marks:
        after = following[mark.thread]
        place = bisect_left(after, mark.end, key=lambda one: one[0])
        yield group, after[place][1] if place < len(after) else TimeInterval(mark.end, mark.end)


def longest_of(mine: list[TraceEvent], launches: dict[int, KernelLaunch]) -> dict[tuple[int, int], TraceEvent]:
    """Of what each operator made the device do, by the operator's thread and start: it has the operator's operations,
    and not what clears memory before."""
    found: dict[tuple[int, int], TraceEvent] = {}
    for event in mine:
        launch = launches.get(event.details.get("correlation", -2))
        if launch is not None and launch.operator is not None:
            key = launch.operator.thread, launch.operator.start
            if key not in found or event.end - event.start > found[key].end - found[key].start:
                found[key] = event
    return found


def idle_causes(
    device: list[TraceEvent], launches: dict[int, KernelLaunch], waits: list[TimeInterval], window: TimeInterval
) -> Iterator[tuple[str, TimeInterval]]:
    """Why the device had nothing to do: the host had not launched what came next, because it had waited for the device
    before, or because it was slow. What had been launched long before it began is left out: it waited on the device."""
    starts = [event.start for event in device]
    for gap in uncovered_gaps((event.interval for event in device), window):
        place = bisect_left(starts, gap.end)
        late = place == len(device) or _launched(device[place], launches) > gap.start - LATENCY
        if not late and gap.end - gap.start > LATENCY:
            continue
        waited = any(wait.start <= gap.end and gap.start - LATENCY <= wait.end <= gap.end for wait in waits)
        yield "host/synchronisation" if waited else "host/launch", gap


# A trace of a CPU: operators are computation, threads of gloo communicate, and the rest of the host's time is its
# own.


COMPILED = "## Call CompiledFxGraph"
"""Label around the code that the compiler made, whose own kernels are not in traces of CPUs."""

UNKNOWN = "data"
"""The axis of gloo's threads of which no label tells the group: what makes groups of its own sums gradients up."""

LABELS = {COLLECTOR: "host/collector", DATA: "data", WAIT: "bubble"}


def record_host(trace: StepTrace) -> StepRecording:
    """What a trace of a CPU says of its last step. Raises `ValueError` where it has none."""
    steps = trace.labelled(STEP)
    if not steps:
        raise ValueError(f"the trace of rank {trace.rank} has no step")
    step = steps[-1]
    found, tally = StepRecording(step.interval), KernelTally()
    events = [event for event in trace.events if step.start <= event.start]
    # The step's own thread, and that of a pass that runs in turns with another.
    threads = {event.thread for event in events if _computes(event)}
    done = [one for thread in threads for one in nest_events(event for event in events if event.thread == thread)]
    forward = forward_products(done)
    for one in done:
        name = one.event.name
        if not _computes(one.event):
            continue
        about = find_context((*one.around, one.event), forward)
        if about.loading or about.awaits or about.sends is not None:
            continue
        term = term_of(name, about)
        found.work[term] += one.own
        kind = "optimizer" if term == "optimizer" else kind_of(name)
        tally.add(name, kind, sum(end - start for start, end in one.own), one.event)
    for label, term in LABELS.items():
        found.idle[term] += [event.interval for event in trace.labelled(label)]
    found.idle["host/launch"] = [step.interval]
    for group, event in trace.marked(SENDS):
        found.idle[f"communication/{trace.axis(group)}/transfer"].append(event.interval)
    waits = ((group, event.interval) for group, event in trace.marked(AWAITS) if step.start <= event.start < step.end)
    found.collectives = gloo_collectives(trace, step) + find_flag_waits(trace, waits)
    found.kernels = tally.kernels()
    return found


def _computes(event: TraceEvent) -> bool:
    if event.kind == "user_annotation":
        return event.name.startswith(COMPILED)
    return event.kind == "cpu_op" and event.name.startswith(("aten::", "triton", "mkldnn::"))


def gloo_collectives(trace: StepTrace, step: TraceEvent) -> list[RecordedCollective]:
    """What gloo's threads did in the step. A thread belongs to a group, which labels name (`GROUP`)."""
    by_thread: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in trace.events:
        if event.name.startswith("gloo:") and event.thread != step.thread:
            by_thread[event.thread].append(event)
    groups = {
        thread: name
        for name, mark in trace.marked(GROUP)
        for thread, events in by_thread.items()
        if any(mark.start <= event.start < mark.end for event in events)
    }
    counts, found = Counter[str](), []
    for thread, events in by_thread.items():
        group = groups.get(thread, f"thread {thread}")
        axis = trace.axis(group, UNKNOWN)
        for event in events:
            if step.start <= event.start < step.end:
                found.append(RecordedCollective(group, axis, counts[group], TimeInterval(event.start, event.end)))
                counts[group] += 1
    assert all(one.axis in AXES for one in found)
    return found


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
        whole = sum(SECONDS[part.kind] for part in action.computed)
        for part in action.computed:
            times[part.kind][part.stage].append(seconds * SECONDS[part.kind] / whole)
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
    recordings = [(record_host if trace.device == "cpu" else record_device)(trace) for trace in traces]
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


PATIENCE = 120.0
"""Seconds that traces are waited for."""


def main(run: Path, step: int, ranks: list[int]) -> None:
    """Adds the accounts of a step to those of a run, and writes their metrics to standard output, unless no rank has
    left a trace, or the run has ended and nobody reads them."""
    paths, end = [trace_of(run, step, rank) for rank in ranks], time.monotonic() + PATIENCE
    while not all(path.exists() for path in paths) and time.monotonic() < end:
        time.sleep(0.05)
    found = break_down_step([read_trace(path) for path in paths if path.exists()])
    if not found:
        return
    with LineFile(run / ACCOUNTS) as file:
        file.append("".join(f"{account.dumps()}\n" for account in found))
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(breakdown_metrics(found)).encode())


if __name__ == "__main__":
    os.nice(19)
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(rank) for rank in sys.argv[3:]])
