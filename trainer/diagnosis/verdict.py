"""The diagnosis of a run: what bounds it, what that costs, and what to override; with the roofline of its kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from trainer.config import ConfigError
from trainer.diagnosis import rules
from trainer.diagnosis.evidence import RunEvidence
from trainer.diagnosis.oom_report import NOTHING, MemoryOverride
from trainer.diagnosis.rules import MemoryUse, summarise_memory, throttle_costs
from trainer.diagnosis.suggestions import FREED, Suggestions
from trainer.diagnosis.time_breakdown import KernelTotal, TimeBreakdown, cost_share
from trainer.planning.estimate.rates import DeviceRates
from trainer.planning.estimate.step import GIB
from trainer.util.reading import make_printable
from trainer.util.tables import (
    Rows,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_percent,
    print_rows,
    print_sections,
)

# The roofline of a run's own kernels: what they reach of the arithmetic and of the memory's bandwidth that there is.
# S. Williams, A. Waterman, D. Patterson: Roofline, Communications of the ACM 52(4), 2009.


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


# The diagnosis.


FORMAT = 1
"""Of diagnosis.json."""

TOP = 3
"""Costs that are told, with what to do about them."""

UNKNOWN, HANG = "unknown", "hang"
"""Kinds of verdicts beside those of `rules.RULES`: metrics alone do not say, and the run has stalled."""

SILENT = 60.0
"""Seconds, and ten intervals of logging, after which it is said that a run writes nothing."""

FEWEST = 4
"""Steps that are left from which on a profile in the same run is spoken of: the first of a start is not profiled."""

PROFILE_COSTS = 0.3
"""Seconds that a profile takes with all that belongs to it: docs/outputs.md. It may be 1% of the time."""


def say_more(evidence: RunEvidence, seconds: float | None) -> str:
    """What makes a run say where the time of a step goes: as often as costs it 1% at most, and twice in the steps that
    are left at least, or in a new run where none can be. seconds: of a step; without it, of one that takes a quarter of
    a second."""
    least = 100 * PROFILE_COSTS / (seconds or 0.25)
    sizes = (digit * 10**power for power in range(1, 7) for digit in (1, 2, 5))
    every = next((size for size in sizes if size >= least), 10**7)
    if evidence.config is not None:
        steps = evidence.config.run.steps
        left = steps - evidence.status.get("step", 0)
        every = max(1, min(every, (left if left >= FEWEST else steps) // 2))
    return f"logging.profile={every}"


@dataclass(frozen=True)
class Finding:
    """A cost with what to do about it. seconds: of the step without it, in time of steps that are not profiled."""

    cost: rules.RunCost
    seconds: float | None
    overrides: tuple[MemoryOverride, ...] = ()
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """kind: what bounds the run, of `rules.RULES`, or `UNKNOWN`, or `HANG`; text: the same for people. seconds: of an
    ordinary step, None where none has been logged. findings: the costliest first. predicted: seconds of the step that
    the estimator expects, None where it does not know the machine."""

    evidence: RunEvidence
    kind: str
    text: str
    seconds: float | None
    findings: tuple[Finding, ...]
    points: tuple[RooflinePoint, ...]
    roof: RooflineCeilings | None
    memory: MemoryUse | None
    predicted: float | None
    notes: tuple[str, ...]


def diagnose_evidence(evidence: RunEvidence) -> Diagnosis:
    """What the evidence says."""
    profile, seconds, notes = evidence.profile, evidence.pace, list(evidence.notes)
    if seconds is None and profile:
        seconds = profile.seconds
    if profile:
        found = rules.find_costs(profile, evidence, rules.RULES)
    else:
        found = rules.costs_of_metrics(evidence, seconds or 0.0)
        notes.append(
            "no step was profiled, and metrics alone say little: "
            f"a run with {say_more(evidence, seconds)} accounts for its steps"
        )
    notes += _silence(evidence, seconds or 0.0)
    if evidence.lacked:
        found = [rules.ran_out(evidence), *(cost for cost in found if cost.kind != "memory capacity")]
    workshop = None
    if evidence.config is not None and evidence.layout is not None and (seconds or evidence.lacked):
        workshop = Suggestions(evidence, seconds)
    scale = seconds / profile.seconds if profile and seconds and profile.seconds else 1.0
    findings = tuple(_finding(cost, scale, workshop, evidence) for cost in found[:TOP])
    notes += throttle_costs(evidence, " ".join(text for one in findings for text in one.cost.evidence))
    kind, text = _verdict(evidence, findings, bool(profile))
    estimate = workshop.predicted if workshop else None
    roof = find_ceilings(evidence)
    return Diagnosis(
        evidence,
        kind,
        text,
        seconds,
        findings,
        tuple(build_roofline(profile.ranks, roof)) if profile else (),
        roof,
        summarise_memory(evidence, estimate.memory / GIB if estimate else None),
        estimate.seconds if estimate else None,
        tuple(notes),
    )


def _silence(evidence: RunEvidence, seconds: float) -> list[str]:
    """What is to be said of a run that says that it goes on and writes nothing. seconds: of its step."""
    every = evidence.config.logging.every if evidence.config else 1
    if evidence.silent is None or evidence.silent < max(SILENT, 10 * every * seconds):
        return []
    return [
        f"status.json says running, and nothing has been written for {format_duration(evidence.silent)}: the "
        "run was killed, "
        "or it hangs, compiles or evaluates"
    ]


def _verdict(evidence: RunEvidence, findings: tuple[Finding, ...], profiled: bool) -> tuple[str, str]:
    if evidence.stalled:
        return HANG, f"the run stalled: {evidence.stalled[0]}"
    if evidence.lacked:
        step = evidence.status.get("step", 0)
        return findings[0].cost.kind, f"memory capacity ended the run (hardware) after step {step}: {evidence.lacked}"
    first = findings[0].cost if findings and (profiled or findings[0].cost.bounds) else None
    if first is None:
        return UNKNOWN, "metrics alone do not show what bounds the run"
    return (
        first.kind,
        f"{first.kind} bounds the run ({first.layer}): {first.title}, {format_percent(first.share)} of the step",
    )


def _finding(cost: rules.RunCost, scale: float, workshop: Suggestions | None, evidence: RunEvidence) -> Finding:
    ended = bool(evidence.lacked) and (cost.kind, cost.detail) == FREED
    if ended and evidence.shortage:
        overrides = list(evidence.shortage.overrides)
    else:
        overrides = workshop.against(cost.kind, cost.detail) if workshop else []
    advice = NOTHING if ended and not overrides else _advice(cost, evidence)
    return Finding(cost, None if ended else scale * cost.without, tuple(overrides), advice)


def _advice(cost: rules.RunCost, evidence: RunEvidence) -> str:
    """What to do that is no override."""
    if cost.kind == "straggler" and cost.detail != "in turns":
        return (
            f"look at the clocks and other programs of {cost.detail}'s machine: trainer preflight "
            f"check=node gpus={evidence.machine.node}"
        )
    if cost.kind == "data":
        streams = evidence.config is None or any(one.streaming for one in evidence.config.data.sources.values())
        return "a data.cache on a local disk" + "; a download in place of a stream" * streams
    if cost.kind == "host" and cost.detail == "synchronisation":
        return "find what reads from the device in a step: .item(), print, callbacks and metrics of one's own"
    return ""


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The content of diagnosis.json: plain values, times in seconds, shares of one, null for what is not known."""
    evidence, profile = diagnosis.evidence, diagnosis.evidence.profile
    return as_json(
        {
            "format": FORMAT,
            "run": str(evidence.folder),
            "status": evidence.status,
            "verdict": {"kind": diagnosis.kind, "text": diagnosis.text},
            "step": {
                "seconds": diagnosis.seconds,
                "predicted": diagnosis.predicted,
                "profiled": profile.seconds if profile else None,
                "steps": profile.steps if profile else (),
            },
            "findings": [
                {
                    **{name: getattr(finding.cost, name) for name in "kind detail layer title share bounds".split()},
                    "evidence": finding.cost.evidence,
                    "without": finding.seconds,
                    "overrides": finding.overrides,
                    "advice": finding.advice,
                }
                for finding in diagnosis.findings
            ],
            "accounts": [
                {"rank": one.rank, "place": one.place, "seconds": one.seconds, "terms": one.terms, "hidden": one.hidden}
                for one in (profile.ranks if profile else ())
            ],
            "roofline": {"ceilings": diagnosis.roof, "points": diagnosis.points},
            "memory": diagnosis.memory,
            "stalled": evidence.stalled,
            "notes": diagnosis.notes,
        }
    )


def as_json(value: Any) -> Any:
    """Values as JSON takes them: dataclasses are mappings, and what is no finite number is null."""
    if hasattr(value, "__dataclass_fields__"):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# A diagnosis for people: tables on the terminal.


RANKS = 8
"""Ranks whose accounts are shown beside the mean."""

LEAST = 0.0005
"""Share of the step of a term that is shown."""


def print_diagnosis(diagnosis: Diagnosis, console: Console | None) -> None:
    """Prints a diagnosis: the verdict, the account of the step, the costs, the roofline."""
    print_sections(_sections(diagnosis), console)
    if profile := diagnosis.evidence.profile:
        steps = f"{format_number(len(profile.steps), 'profiled step')}, the last {profile.steps[-1]}"
        print_rows(f"account of the step ({steps})", _account(profile.ranks), console)
    if diagnosis.points:
        rows = [
            {
                "kernels": make_printable(point.name)[:60],
                "time": format_duration(point.seconds),
                "calls": point.calls,
                "FLOP/s": format_count(point.flops),
                "bytes/s": format_bytes(point.bytes),
                "FLOP a byte": "-" if point.intensity is None else f"{point.intensity:.3g}",
                "bound by": point.bound or "-",
                "of what is reached": format_percent(point.reached),
            }
            for point in diagnosis.points
        ]
        print_rows("roofline of the kernels of the last profiled step, over the profiled ranks", rows, console)


def _sections(diagnosis: Diagnosis) -> dict[str, Rows]:
    evidence, memory = diagnosis.evidence, diagnosis.memory
    status = " ".join(str(evidence.status.get(name, "-")) for name in ("status", "step"))
    run = [("folder", evidence.folder), ("status", f"{make_printable(status)} of {evidence.status.get('steps', '-')}")]
    if evidence.layout:
        run.append(("plan", evidence.layout.plan.describe()))
    run.append(("machine", f"{evidence.machine.processes} x {make_printable(evidence.machine.device)}"))
    if diagnosis.seconds is not None:
        expected = f", {format_duration(diagnosis.predicted)} predicted" if diagnosis.predicted else ""
        run.append(("step", format_duration(diagnosis.seconds) + expected))
    if memory:
        used = f" of {format_bytes(GIB * memory.capacity)}" if memory.capacity else ""
        grows = f", {memory.grown:.0%} of it gained in the second half" if memory.grown >= 0.02 else ""
        run.append(("memory", f"{format_bytes(GIB * memory.peak)}{used} at the peak{grows}"))
    found: dict[str, Rows] = {"run": run, "verdict": [("", make_printable(diagnosis.text))]}
    found["verdict"] = [*found["verdict"], *(("", text) for text in evidence.stalled[1:])]
    for number, finding in enumerate(diagnosis.findings, start=1):
        found[f"{number}. {finding.cost.kind}"] = _print_finding(finding)
    if diagnosis.notes:
        found["notes"] = [("", make_printable(text)) for text in diagnosis.notes]
    return found


def _print_finding(finding: Finding) -> list[tuple[str, Any]]:
    cost = finding.cost
    share = f": {format_percent(cost.share)}" if finding.seconds is not None else ""
    rows: list[tuple[str, Any]] = [("layer", cost.layer), ("what", f"{cost.title}{share}")]
    rows += [("", make_printable(text)) for text in cost.evidence]
    if finding.seconds is not None:
        rows.append(("without it", f"a step of {format_duration(finding.seconds)}"))
    for override in finding.overrides:
        told = f"{format_duration(override.seconds)} predicted" if override.seconds is not None else ""
        extra = override.told if finding.seconds is None else ", ".join(filter(None, (told, override.note)))
        rows.append(("try", override.text + f"  ({extra})" * bool(extra)))
    return rows + [("do", finding.advice)] * bool(finding.advice)


def _account(ranks: tuple[TimeBreakdown, ...]) -> list[dict[str, Any]]:
    """A row for each term: its share of the step as the mean over ranks, and the seconds of the first of them."""
    names = {name for account in ranks for name in account.terms}
    shares = {name: cost_share(ranks, name) for name in names}
    terms = sorted((name for name in names if shares[name] >= LEAST), key=lambda name: -shares[name])
    rows = []
    for name in [*terms, "step"]:
        seconds = [account.seconds if name == "step" else account.spent(name) for account in ranks]
        row: dict[str, Any] = {"term": name, "share": format_percent(shares.get(name, 1.0))}
        row |= {f"rank {one.rank}": format_duration(spent) for one, spent in zip(ranks[:RANKS], seconds)}
        rows.append(row)
    return rows
