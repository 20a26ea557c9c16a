"""A trace of a CPU: operators are computation, threads of gloo communicate, and the rest of the host's time is its
own."""

from __future__ import annotations

from collections import Counter, defaultdict

from trainer.diagnosis.recording import (
    KernelTally,
    RecordedCollective,
    StepRecording,
    find_context,
    find_flag_waits,
    forward_products,
    kind_of,
    term_of,
)
from trainer.diagnosis.time_breakdown import AXES
from trainer.diagnosis.traces import StepTrace, TimeInterval, TraceEvent, nest_events
from trainer.util.trace_labels import AWAITS, COLLECTOR, DATA, GROUP, SENDS, STEP, WAIT

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
    done = list(
        nest_events(event for event in trace.events if event.thread == step.thread and step.start <= event.start)
    )
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
