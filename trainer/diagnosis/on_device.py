"""A trace of a CUDA device: kernels compute and communicate, and while none runs, the host tells why."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

from trainer.diagnosis.recording import (
    HostContext,
    KernelTally,
    RecordedCollective,
    StepRecording,
    find_context,
    find_flag_waits,
    forward_products,
    kind_of,
    term_of,
)
from trainer.diagnosis.traces import HOST_KINDS, StepTrace, TimeInterval, TraceEvent, nest_events, uncovered_gaps
from trainer.util.trace_labels import AWAITS, COLLECTOR, DATA, STEP

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
