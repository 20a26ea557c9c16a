"""Reads a profiler's trace (Kineto, in Chrome's format) as plain events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer.util.reading import Malformed, read_json, shorten_foreign
from trainer.util.trace_labels import NOTE

# Sweeps over intervals: which of them cover each moment of a window.


class TimeInterval(NamedTuple):
    """From `start` up to `end`, in whole nanoseconds, so that sums are exact."""

    start: int
    end: int


def class_coverage(classes: Iterable[Iterable[TimeInterval]], window: TimeInterval) -> dict[int, int]:
    """Nanoseconds of the window by the set of classes that have an interval there, as a number whose bit i stands for
    the i-th class. They add up to the window exactly; 0 is the time that none covers."""
    edges = sorted(
        edge
        for place, intervals in enumerate(classes)
        for start, end in intervals
        if (clipped := (max(start, window.start), min(end, window.end)))[0] < clipped[1]
        for edge in ((clipped[0], place, 1), (clipped[1], place, -1))
    )
    seconds: dict[int, int] = defaultdict(int)
    open_now: dict[int, int] = defaultdict(int)
    covered, now = 0, window.start
    for moment, place, change in edges:
        if moment > now:
            seconds[covered] += moment - now
            now = moment
        open_now[place] += change
        bit = 1 << place
        covered = covered | bit if open_now[place] else covered & ~bit
    seconds[covered] += window.end - now
    return dict(seconds)


def first_of(covered: int) -> int:
    """The first class of a set as in `class_coverage`; -1 for none."""
    return (covered & -covered).bit_length() - 1


def uncovered_gaps(intervals: Iterable[TimeInterval], window: TimeInterval) -> Iterator[TimeInterval]:
    """The parts of the window that no interval covers, in order."""
    now = window.start
    for start, end in sorted(intervals):
        if start > now:
            yield TimeInterval(now, min(start, window.end))
        now = max(now, end)
        if now >= window.end:
            return
    yield TimeInterval(now, window.end)


LONGEST = 1 << 31
"""Bytes of a trace: some millions of events."""

_NOTE = {
    "rank": int,
    "step": int,
    "place": {str: int},
    "device": str,
    "groups": {str: {"axis": str, "ranks": [int]}},
    "schedule": [str],
    "placement": [int],
    "actions": [[(str, int, float)]],
    "spent": {str: (int, float)},
}
_SHAPE = {"traceEvents": [dict], NOTE: _NOTE}


class TraceGroup(NamedTuple):
    """A process group: the axis of its communication (`account.AXES`), and its ranks."""

    axis: str
    ranks: tuple[int, ...]


class TraceEvent(NamedTuple):
    """Something that was done on a thread of the host, or in a stream of a device (-1 minus its number)."""

    start: int
    end: int
    name: str
    kind: str
    thread: int
    details: dict[str, Any]

    @property
    def interval(self) -> TimeInterval:
        return TimeInterval(self.start, self.end)


@dataclass(frozen=True)
class StepTrace:
    """The trace of a step on a rank, with what the run says of it.

    groups: by name. schedule: of the pipeline, lines of CSV, and its placement; empty without one. actions: notation,
    start and end in seconds from the step's start. spent: seconds a step of `checkpoint` and `evaluation`. events: in
    order of their start, times in nanoseconds; those that begin together, the longest first."""

    rank: int
    step: int
    place: dict[str, int]
    device: str
    groups: dict[str, TraceGroup]
    schedule: tuple[str, ...]
    placement: tuple[int, ...]
    actions: tuple[tuple[str, float, float], ...]
    spent: dict[str, float]
    events: tuple[TraceEvent, ...]

    def axis(self, group: str, unknown: str = "all") -> str:
        """What a group of this name communicates for."""
        return self.groups[group].axis if group in self.groups else unknown

    def labelled(self, label: str) -> list[TraceEvent]:
        """The events of a label that this project gave."""
        return [event for event in self.events if event.name == label and event.kind == "user_annotation"]

    def marked(self, label: str) -> list[tuple[str, TraceEvent]]:
        """The events of a label that has a group's name behind it, with the name."""
        found = (event for event in self.events if event.kind == "user_annotation" and event.name.startswith(label))
        return [(event.name.removeprefix(label), event) for event in found]


def read_trace(path: Path) -> StepTrace:
    """The trace in a file. Raises `OSError`, and `Malformed` for what is no trace of a run."""
    content = read_json(path, _SHAPE, "profile the step again", LONGEST)
    note = content[NOTE]
    try:
        return StepTrace(
            **{name: note[name] for name in ("rank", "step", "place", "device", "spent")},
            groups={name: TraceGroup(group["axis"], tuple(group["ranks"])) for name, group in note["groups"].items()},
            schedule=tuple(note["schedule"]),
            placement=tuple(note["placement"]),
            actions=tuple((str(name), float(start), float(end)) for name, start, end in note["actions"]),
            events=tuple(in_order(content["traceEvents"])),
        )
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise Malformed(f"{path} is no trace of a run: {shorten_foreign(error)}; profile the step again") from None


def in_order(raw: Iterable[dict[str, Any]]) -> list[TraceEvent]:
    """The complete events of a trace; times begin with its first."""
    complete = [event for event in raw if event.get("ph") == "X" and isinstance(event.get("tid"), int)]
    first = min((event["ts"] for event in complete), default=0.0)
    events = (_event(event, first) for event in complete)
    return sorted(events, key=lambda event: (event.start, -event.end))


def _event(raw: dict[str, Any], first: float) -> TraceEvent:
    details, kind = dict(raw.get("args", {})), str(raw.get("cat", ""))
    start = round((raw["ts"] - first) * 1000)
    thread = -1 - int(details["stream"]) if "stream" in details and kind not in HOST_KINDS else raw["tid"]
    return TraceEvent(start, start + round(raw.get("dur", 0) * 1000), str(raw["name"]), kind, thread, details)


HOST_KINDS = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "python_function")
"""Categories of what a thread of the host does."""


class NestedEvent(NamedTuple):
    """An event of the host among those of its thread: the events around it, the outermost first, and the parts of it
    during which no event within it went on."""

    event: TraceEvent
    around: tuple[TraceEvent, ...]
    own: tuple[TimeInterval, ...]


def nest_events(events: Iterable[TraceEvent]) -> Iterator[NestedEvent]:
    """The events of one thread with what surrounds each. They are taken as properly nested: what ends after the event
    around it, by rounding, is cut."""
    stack: list[_Open] = []

    def close() -> NestedEvent:
        done = stack.pop()
        done.rest(done.end)
        if stack:
            stack[-1].now = done.end
        return NestedEvent(done.event, tuple(around.event for around in stack), tuple(done.own))

    for event in events:
        while stack and stack[-1].end <= event.start:
            yield close()
        if stack:
            stack[-1].rest(event.start)
        stack.append(_Open(event, min(event.end, stack[-1].end) if stack else event.end, event.start))
    while stack:
        yield close()


@dataclass
class _Open:
    """An event that has begun. now: up to where its own time is known."""

    event: TraceEvent
    end: int
    now: int
    own: list[TimeInterval] = field(default_factory=list)

    def rest(self, until: int) -> None:
        """Nothing within it went on up to then."""
        if until > self.now:
            self.own.append(TimeInterval(self.now, until))
