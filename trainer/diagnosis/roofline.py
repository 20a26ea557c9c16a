"""The roofline of a run's own kernels: what they reach of the arithmetic and of the memory's bandwidth that there is.

S. Williams, A. Waterman, D. Patterson: Roofline, Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import ConfigError
from trainer.diagnosis.evidence import RunEvidence
from trainer.diagnosis.time_breakdown import KernelTotal, TimeBreakdown
from trainer.planning.estimate.throughput import DeviceRates

COMPUTES = ("products", "attention", "memory_bound", "optimizer")
"""Kinds of kernels that have a place under the roof."""

MAX_POINTS = 8
"""Kernels that are shown by name."""


@dataclass(frozen=True)
class RooflineCeilings:
    """Of a device. peak: FLOP/s of the data sheet; products: what large products reach; bandwidth: bytes/s of the
    memory; memory: what kernels reach of them; ridge: FLOPs for each byte at which both bound as much."""

    peak: float
    products: float
    bandwidth: float
    memory: float

    @property
    def ridge(self) -> float:
        return self.products / self.memory


@dataclass(frozen=True)
class RooflinePoint:
    """Kernels under the roof: one, or all of a kind. flops, bytes: per second, of those calls whose shapes are known;
    intensity: FLOPs for each byte; ceiling: FLOP/s, or bytes/s where bound is `memory`, that the hardware's file says
    are reached at this intensity; reached: share of it. None where it is not known."""

    name: str
    kind: str
    calls: int
    seconds: float
    flops: float | None
    bytes: float | None
    intensity: float | None
    bound: str | None
    ceiling: float | None
    reached: float | None


def find_ceilings(evidence: RunEvidence) -> RooflineCeilings | None:
    """Of the run's machine in the type of its products; None where they are not known."""
    if evidence.hardware is None or evidence.config is None:
        return None
    try:
        pace = DeviceRates.of(evidence.hardware, evidence.config.precision)
    except ConfigError:
        return None
    return RooflineCeilings(pace.peak, pace.products, evidence.hardware.bandwidth * 1e9, pace.memory)


def build_roofline(accounts: Sequence[TimeBreakdown], roof: RooflineCeilings | None) -> list[RooflinePoint]:
    """First each kind of kernels, then those that took most, over the sampled ranks."""
    kernels = [kernel for account in accounts for kernel in account.kernels if kernel.kind in COMPUTES]
    kinds = [kind for kind in COMPUTES if any(kernel.kind == kind for kernel in kernels)]
    points = [kernel_point(kind, [kernel for kernel in kernels if kernel.kind == kind], roof) for kind in kinds]
    names = dict.fromkeys((kernel.name, kernel.kind) for kernel in kernels)
    single = [
        kernel_point(name, [kernel for kernel in kernels if (kernel.name, kernel.kind) == (name, kind)], roof)
        for name, kind in names
    ]
    return points + sorted(single, key=lambda one: -one.seconds)[:MAX_POINTS]


def kernel_point(name: str, kernels: Sequence[KernelTotal], roof: RooflineCeilings | None) -> RooflinePoint:
    """The place of kernels of one kind."""
    counted = [kernel for kernel in kernels if kernel.flops is not None and kernel.seconds > 0]
    moved = [kernel for kernel in kernels if kernel.bytes is not None and kernel.seconds > 0]
    flops, moving = _rate(counted, "flops"), _rate(moved, "bytes")
    intensity = flops / moving if flops and moving else None
    bound = ceiling = reached = None
    if roof is not None:
        by_memory = kernels[0].kind in ("memory_bound", "optimizer")
        by_memory |= intensity is not None and intensity < roof.ridge
        bound, ceiling, rate = ("memory", roof.memory, moving) if by_memory else ("arithmetic", roof.products, flops)
        reached = None if rate is None else rate / ceiling
    calls, seconds = sum(kernel.calls for kernel in kernels), sum(kernel.seconds for kernel in kernels)
    return RooflinePoint(name, kernels[0].kind, calls, seconds, flops, moving, intensity, bound, ceiling, reached)


def _rate(kernels: Sequence[KernelTotal], what: str) -> float | None:
    """FLOPs or bytes per second of kernels that are known to have some."""
    return sum(getattr(kernel, what) for kernel in kernels) / sum(k.seconds for k in kernels) if kernels else None
