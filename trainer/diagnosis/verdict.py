"""The diagnosis of a run: what bounds it, what that costs, and what to override."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from trainer.diagnosis import rules
from trainer.diagnosis.advice import ShapeAdvice, advise_shapes
from trainer.diagnosis.evidence import RunEvidence
from trainer.diagnosis.oom_report import NOTHING, MemoryOverride
from trainer.diagnosis.roofline import RooflineCeilings, RooflinePoint, build_roofline, find_ceilings
from trainer.diagnosis.rules import MemoryUse, summarise_memory, throttle_costs
from trainer.diagnosis.suggestions import FREED, Suggestions
from trainer.planning.estimate.step import GIB
from trainer.util.tables import format_duration, format_percent

FORMAT = 1
"""Of diagnosis.json."""

TOP = 3
"""Costs that are told, with what to do about them."""

UNKNOWN, HANG = "unknown", "hang"
"""Kinds of verdicts beside those of `rules.RULES`: metrics alone do not say, and the run has stalled."""

SILENT = 60.0
"""Seconds, and ten intervals of logging, after which it is said that a run writes nothing."""

PROFILE_COSTS = 0.3
"""Seconds that a profile takes with all that belongs to it: docs/outputs.md. It may be 1% of the time."""


def say_more(seconds: float | None) -> str:
    """What makes a run say where the time of a step goes, as often as costs it 1% at most. seconds: of a step; without
    it, of one that takes a quarter of a second."""
    least = 100 * PROFILE_COSTS / (seconds or 0.25)
    sizes = (digit * 10**power for power in range(1, 7) for digit in (1, 2, 5))
    return f"logging.profile={next((size for size in sizes if size >= least), 10**7)}"


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
    shapes: tuple[ShapeAdvice, ...]
    predicted: float | None
    notes: tuple[str, ...]


def diagnose_evidence(evidence: RunEvidence) -> Diagnosis:
    """What the evidence says."""
    profile, seconds, notes = evidence.profile, evidence.pace, list(evidence.notes)
    if seconds is None and profile:
        seconds = profile.seconds
    found = rules.find_costs(profile, evidence) if profile else []
    if not profile:
        found = rules.costs_of_metrics(evidence, seconds) if seconds else []
        notes.append(
            f"no step was profiled, and metrics alone say little: with {say_more(seconds)} a run accounts for its steps"
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
    roof, shapes = find_ceilings(evidence), tuple[ShapeAdvice, ...]()
    device = evidence.hardware.device if evidence.hardware else evidence.machine.device
    if evidence.config is not None and evidence.layout is not None and device != "CPU":
        shapes = tuple(advise_shapes(evidence.config, evidence.layout, device))
    return Diagnosis(
        evidence,
        kind,
        text,
        seconds,
        findings,
        tuple(build_roofline(profile.ranks, roof)) if profile else (),
        roof,
        summarise_memory(evidence, estimate.memory / GIB if estimate else None),
        shapes,
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
        return UNKNOWN, f"metrics alone do not show what bounds the run; go on with {say_more(evidence.pace)}"
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
            f"look at the clocks and other programs of {cost.detail}'s machine: python -m trainer.preflight "
            f"check=node gpus={evidence.machine.node}"
        )
    if cost.kind == "data":
        return "a data.cache on a local disk; a download in place of a stream"
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
            "status": dict(evidence.status),
            "verdict": {"kind": diagnosis.kind, "text": diagnosis.text},
            "step": {
                "seconds": diagnosis.seconds,
                "predicted": diagnosis.predicted,
                "profiled": profile.seconds if profile else None,
                "steps": list(profile.steps) if profile else [],
            },
            "findings": [
                {
                    **{
                        name: getattr(finding.cost, name)
                        for name in ("kind", "detail", "layer", "title", "share", "bounds")
                    },
                    "evidence": list(finding.cost.evidence),
                    "without": finding.seconds,
                    "overrides": [dataclasses.asdict(override) for override in finding.overrides],
                    "advice": finding.advice,
                }
                for finding in diagnosis.findings
            ],
            "accounts": [
                {"rank": one.rank, "place": one.place, "seconds": one.seconds, "terms": one.terms, "hidden": one.hidden}
                for one in (profile.ranks if profile else ())
            ],
            "roofline": {
                "ceilings": diagnosis.roof and dataclasses.asdict(diagnosis.roof),
                "points": [dataclasses.asdict(point) for point in diagnosis.points],
            },
            "memory": diagnosis.memory and dataclasses.asdict(diagnosis.memory),
            "shapes": [dataclasses.asdict(one) for one in diagnosis.shapes],
            "stalled": list(evidence.stalled),
            "notes": list(diagnosis.notes),
        }
    )


def as_json(value: Any) -> Any:
    """Values as JSON takes them: what is no finite number is null."""
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
