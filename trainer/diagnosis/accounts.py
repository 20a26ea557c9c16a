"""From the traces of a step to its accounts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from trainer.diagnosis import on_device, on_host
from trainer.diagnosis.account import AXES, TimeBreakdown
from trainer.diagnosis.intervals import TimeInterval, class_coverage, first_of
from trainer.diagnosis.ranks import CollectivePart, PipelineIdle, join_collectives, pipeline_idle
from trainer.diagnosis.recording import COMPUTE, StepRecording
from trainer.diagnosis.traces import StepTrace

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
    recordings = [(on_host if trace.device == "cpu" else on_device).record(trace) for trace in traces]
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
