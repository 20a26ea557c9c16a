"""A diagnosis for people: tables on the terminal."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

from rich.console import Console

from trainer.diagnosis.roofline import RooflinePoint
from trainer.diagnosis.time_breakdown import TimeBreakdown, cost_share
from trainer.diagnosis.verdict import Diagnosis, Finding
from trainer.util import tables
from trainer.util.reading import make_printable

RANKS = 8
"""Ranks whose accounts are shown beside the mean."""

LEAST = 0.0005
"""Share of the step of a term that is shown."""

SHAPES = 4
"""Shapes that are spoken of."""


def print_diagnosis(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Prints a diagnosis: the verdict, the account of the step, the costs, the roofline."""
    tables.print_sections(_sections(diagnosis), console)
    if profile := diagnosis.evidence.profile:
        steps = f"{tables.format_number(len(profile.steps), 'profiled step')}, the last {profile.steps[-1]}"
        tables.print_rows(f"account of the step ({steps})", _account(profile.ranks), console)
    if diagnosis.points:
        tables.print_rows("roofline of the run's kernels", [_point(point) for point in diagnosis.points], console)


def _sections(diagnosis: Diagnosis) -> dict[str, tables.Rows]:
    evidence, memory = diagnosis.evidence, diagnosis.memory
    status = " ".join(str(evidence.status.get(name, "-")) for name in ("status", "step"))
    run = [("folder", evidence.folder), ("status", f"{make_printable(status)} of {evidence.status.get('steps', '-')}")]
    if evidence.layout:
        run.append(("plan", evidence.layout.plan.describe()))
    run.append(("machine", f"{evidence.machine.processes} x {make_printable(evidence.machine.device)}"))
    if diagnosis.seconds is not None:
        expected = f", {tables.format_duration(diagnosis.predicted)} predicted" if diagnosis.predicted else ""
        run.append(("step", tables.format_duration(diagnosis.seconds) + expected))
    if memory:
        used = f" of {memory.capacity:.3g}" if memory.capacity else ""
        grows = f", {memory.grown:.0%} of it in the second half" if memory.grown >= 0.02 else ""
        run.append(("memory", f"{memory.peak:.3g}{used} GiB at the peak{grows}"))
    found: dict[str, tables.Rows] = {"run": run, "verdict": [("", make_printable(diagnosis.text))]}
    found["verdict"] = [*found["verdict"], *(("", text) for text in evidence.stalled[1:])]
    for number, finding in enumerate(diagnosis.findings, start=1):
        found[f"{number}. {finding.cost.kind}"] = _finding(finding)
    if diagnosis.shapes:
        found["shapes"] = [(f"{one.waste:.1%}", one.text) for one in diagnosis.shapes[:SHAPES]]
    if diagnosis.notes:
        found["notes"] = [("", make_printable(text)) for text in diagnosis.notes]
    return found


def _finding(finding: Finding) -> list[tuple[str, Any]]:
    cost = finding.cost
    share = f": {tables.format_percent(cost.share)}" if finding.seconds is not None else ""
    rows: list[tuple[str, Any]] = [("layer", cost.layer), ("what", f"{cost.title}{share}")]
    rows += [("", make_printable(text)) for text in cost.evidence]
    if finding.seconds is not None:
        rows.append(("without it", f"a step of {tables.format_duration(finding.seconds)}"))
    for override in finding.overrides:
        told = f"{tables.format_duration(override.seconds)} predicted" if override.seconds is not None else ""
        extra = override.told if finding.seconds is None else ", ".join(filter(None, (told, override.note)))
        rows.append(("try", override.text + f"  ({extra})" * bool(extra)))
    return rows + [("do", finding.advice)] * bool(finding.advice)


def _account(ranks: tuple[TimeBreakdown, ...]) -> list[dict[str, Any]]:
    """A row for each term: its share of the step as the mean over ranks, and the seconds of the first of them."""
    names = {name for account in ranks for name in account.terms}
    shares = {name: cost_share(ranks, methodcaller("term", name)) for name in names}
    terms = sorted((name for name in names if shares[name] >= LEAST), key=lambda name: -shares[name])
    rows = []
    for name in [*terms, "step"]:
        seconds = [account.seconds if name == "step" else account.term(name) for account in ranks]
        row: dict[str, Any] = {"term": name, "share": tables.format_percent(shares.get(name, 1.0))}
        row |= {f"rank {one.rank}": tables.format_duration(spent) for one, spent in zip(ranks[:RANKS], seconds)}
        rows.append(row)
    return rows


def _point(point: RooflinePoint) -> dict[str, Any]:
    return {
        "kernels": make_printable(point.name)[:60],
        "time": tables.format_duration(point.seconds),
        "calls": point.calls,
        "FLOP/s": tables.format_count(point.flops),
        "bytes/s": tables.format_bytes(point.bytes),
        "FLOP a byte": "-" if point.intensity is None else f"{point.intensity:.3g}",
        "bound by": point.bound or "-",
        "of what is reached": tables.format_percent(point.reached),
    }
