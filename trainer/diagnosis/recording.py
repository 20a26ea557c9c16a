"""What a trace says of a step, in terms that are the same for CPUs and for devices with streams."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from trainer.diagnosis.shapes import Factors, gemm_factors, work_of
from trainer.diagnosis.time_breakdown import KernelTotal
from trainer.diagnosis.traces import NestedEvent, StepTrace, TimeInterval, TraceEvent
from trainer.util.trace_labels import AWAITS, DATA, OPTIMIZER, SENDS

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
