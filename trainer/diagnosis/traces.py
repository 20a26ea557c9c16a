"""Reads a profiler's trace (Kineto, in Chrome's format) as plain events, and sums them up in the terms of a step."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from trainer.diagnosis.time_breakdown import KernelTotal
from trainer.util.reading import Malformed, read_json, shorten_foreign
from trainer.util.tables import AWAITS, DATA, NOTE, OPTIMIZER, SENDS

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


# Operations and bytes of an operator, from the shapes that a trace gives of its arguments.


SIZES = {
    "double": 8,
    "long int": 8,
    "long": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "short": 2,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}
"""Bytes of an element, by the name of its type in traces."""

VIEWS = re.compile(
    r"view|reshape|transpose|permute|expand|slice|select|squeeze|detach|alias|strided|split|chunk|unbind|narrow|empty|::t$"
)
"""Operators that move nothing."""

FACTORS = {"mm": 0, "_scaled_mm": 0, "_scaled_mm_v2": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Where the first factor of a product is among the arguments of its operator; the second follows."""


Factors = tuple[tuple[int, ...], ...]
"""Of a product: the shapes of both factors, then their strides."""


def work_of(operator: TraceEvent) -> tuple[float | None, float | None]:
    """Floating-point operations and bytes of one call; None where the trace has no shapes, or of an operator whose
    operations do not count.

    Bytes are each argument once; and the result, which traces do not have, as large as it must be for a product, and as
    the largest argument else. Of a Triton kernel, the results are among the arguments."""
    shapes = operator.details.get("Input Dims")
    if not shapes or VIEWS.search(operator.name):
        return None, None
    name = operator.name.partition("::")[2]
    sizes = [
        SIZES.get(kind, 0) * prod(shape)
        for shape, kind in zip(shapes, operator.details.get("Input type", []))
        if _is_shape(shape)
    ]
    if (place := FACTORS.get(name)) is not None and all(map(_is_shape, shapes[place : place + 2])):
        *batch, m, k = shapes[place]
        n = shapes[place + 1][-1]
        element = SIZES.get(operator.details["Input type"][place], 0)
        return 2.0 * prod(batch) * m * k * n, float(sum(sizes) + element * prod(batch) * m * n)
    result = 0 if operator.name.startswith("triton") else max(sizes, default=0)
    return _attention(name, shapes, operator.details), float(sum(sizes) + result)


def gemm_factors(operator: TraceEvent) -> Factors | None:
    """The shapes and strides of the two factors of a product by a matrix of weights; None for anything else, and where
    the trace has none.

    They tell a forward product from those of backward: the gradient of the input has the matrix as it lies in memory
    where forward has it transposed. Factors in fp8 always lie as the kernel needs them, so that those of a square
    matrix tell nothing."""
    name = operator.name.partition("::")[2]
    place = FACTORS.get(name)
    shapes, strides = (operator.details.get(key, ()) for key in ("Input Dims", "Input Strides"))
    if place is None or name.endswith("bmm") or min(len(shapes), len(strides)) < place + 2:
        return None
    found = [list(values[place : place + 2]) for values in (shapes, strides)]
    if not all(_is_shape(one) for pair in found for one in pair):
        return None
    if name.startswith("_scaled_mm") and len(set(found[0][1])) == 1:
        return None
    return tuple(tuple(one) for pair in found for one in pair)


def _attention(name: str, shapes: list[Any], details: dict[str, Any]) -> float | None:
    """Operations of scaled dot-product attention: two products forward and five backward, of which causal attention
    needs half."""
    if "scaled_dot_product" not in name:
        return None
    backward = "backward" in name
    queries, keys = shapes[backward : backward + 2]
    if not (_is_shape(queries) and _is_shape(keys) and len(queries) == len(keys) == 4):
        return None
    causal = "True" in details.get("Concrete Inputs", [])
    batch, heads, length, width = queries
    return (5 if backward else 2) * 2.0 * batch * heads * length * keys[2] * width * (0.5 if causal else 1.0)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(size, int) for size in value)


# What a trace says of a step, in terms that are the same for CPUs and for devices with streams.


COMPUTE = ("optimizer", "recompute", "attention", "products", "memory_bound")
"""Terms of computation; where several run at once, the first has the time."""

MAX_NAMED = 40
"""Kernels that an account names."""

_ATTENTION = re.compile(r"attention|flash_|fmha|sdpa|_attn_", re.IGNORECASE)
_PRODUCT = re.compile(
    r"(?:^|::|_)(?:mm|addmm|bmm|baddbmm|linear|gemv|matmul)(?:_|$)|gemm|gemv|cutlass|nvjet|xmma|splitkreduce", re.I
)
_FORWARD_OF_ATTENTION = re.compile(r"flash_fwd|fprop|fmha\w*fwd", re.IGNORECASE)
_BACKWARD = "autograd::engine::evaluate_function"


class RecordedCollective(NamedTuple):
    """A collective, a transfer, or a wait for a flag on this rank. number: its place in the step among those of its
    group that are, or are not, waits for flags."""

    group: str
    axis: str
    number: int
    interval: TimeInterval
    flag: bool = False


class HostContext(NamedTuple):
    """What the host was about when it computed or launched a kernel."""

    term: str | None
    """What the labels and operators around it say; None where they leave it open."""
    backward: bool
    loading: bool
    sends: str | None = None
    """The group between whose ranks it copies."""
    awaits: bool = False
    """Whether it waits for what another rank copies."""


@dataclass
class StepRecording:
    """A step on a rank, in nanoseconds from the trace's start.

    work: by term of `COMPUTE`. idle: by the other terms that are known by when they happen, and `bubble`, of which a
    part is known so (all of what a host waits for)."""

    window: TimeInterval
    work: dict[str, list[TimeInterval]] = field(default_factory=lambda: defaultdict(list))
    idle: dict[str, list[TimeInterval]] = field(default_factory=lambda: defaultdict(list))
    collectives: list[RecordedCollective] = field(default_factory=list)
    kernels: tuple[KernelTotal, ...] = ()
    launches: int = 0
    launch_delay: float | None = None
    kernel_seconds: float | None = None
    synchronisations: int = 0


def find_context(around: Sequence[TraceEvent], forward: Container[Factors | None]) -> HostContext:
    """What a moment of the host belongs to, by the events around it, the outermost first. forward: the products of
    forward passes.

    Backward runs without gradients of its own, so an operator in it that has a number in the graph is a forward pass
    that is repeated; and so is a product of forward's, which a compiled layer repeats without one."""
    backward = attention = product = repeated = optimizer = loading = awaits = False
    sends = None
    for event in around:
        name = event.name
        if event.kind == "user_annotation":
            optimizer |= name == OPTIMIZER
            loading |= name == DATA
            awaits |= name.startswith(AWAITS)
            if name.startswith(SENDS):
                sends = name.removeprefix(SENDS)
        elif name.startswith(_BACKWARD):
            backward = True
        elif name.startswith("aten::"):
            repeated |= backward and (event.details.get("Sequence number", -1) >= 0 or gemm_factors(event) in forward)
            attention |= kind_of(name) == "attention"
            product |= kind_of(name) == "products"
    found = ("optimizer", optimizer), ("recompute", repeated), ("attention", attention), ("products", product)
    return HostContext(next((term for term, holds in found if holds), None), backward, loading, sends, awaits)


def find_flag_waits(trace: StepTrace, waits: Iterable[tuple[str, TimeInterval]]) -> list[RecordedCollective]:
    """What a rank waits for in memory that it shares, by the group that shares it, in the program's order: it is the
    same on all ranks."""
    counts, found = Counter[str](), []
    for group, interval in waits:
        found.append(RecordedCollective(group, trace.axis(group), counts[group], interval, True))
        counts[group] += 1
    return found


def forward_products(events: Iterable[NestedEvent]) -> set[Factors]:
    """The products outside of backward."""
    found = ((gemm_factors(one.event), one.around) for one in events)
    return {
        product
        for product, around in found
        if product is not None and not any(outer.name.startswith(_BACKWARD) for outer in around)
    }


def term_of(name: str, about: HostContext) -> str:
    """The term of `COMPUTE` that an operator or a kernel belongs to."""
    if about.term in ("optimizer", "recompute"):
        return about.term
    if about.backward and _FORWARD_OF_ATTENTION.search(name):
        return "recompute"  # of a compiled layer, whose element-wise kernels are not told apart
    return about.term or kind_of(name)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """What an operator or a kernel computes, by its name."""
    return "attention" if _ATTENTION.search(name) else "products" if _PRODUCT.search(name) else "memory_bound"


class KernelTally:
    """Sums up kernels by name."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str], KernelTotal] = {}

    def add(self, name: str, kind: str, nanoseconds: int, operator: TraceEvent | None = None) -> None:
        """Counts a call; operator: the one whose work it does, where that has not been counted yet."""
        before = self.sums.get((name, kind), KernelTotal(name[:200], kind, 0, 0.0))
        flops, size = work_of(operator) if operator is not None else (None, None)
        self.sums[name, kind] = KernelTotal(
            before.name,
            kind,
            before.calls + 1,
            before.seconds + nanoseconds / 1e9,
            _sum(before.flops, flops),
            _sum(before.bytes, size),
        )

    def kernels(self) -> tuple[KernelTotal, ...]:
        """Those that took most time."""
        return tuple(sorted(self.sums.values(), key=lambda kernel: kernel.seconds, reverse=True)[:MAX_NAMED])


def _sum(before: float | None, more: float | None) -> float | None:
    return before if more is None else (before or 0.0) + more
