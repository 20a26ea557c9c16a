"""A diagnosis for people: tables on the terminal."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

from rich.console import Console

from trainer.diagnosis.account import Account, share
from trainer.diagnosis.roofline import Point
from trainer.diagnosis.verdict import Diagnosis, Finding
from trainer.util import tables
from trainer.util.reading import printable

RANKS = 8
"""Ranks whose accounts are shown beside the mean."""

LEAST = 0.0005
"""Share of the step of a term that is shown."""

SHAPES = 4
"""Shapes that are spoken of."""


def show(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Prints a diagnosis: the verdict, the account of the step, the costs, the roofline."""
    tables.sections(_sections(diagnosis), console)
    if profile := diagnosis.evidence.profile:
        steps = f"{tables.number(len(profile.steps), 'profiled step')}, the last {profile.steps[-1]}"
        tables.rows(f"account of the step ({steps})", _account(profile.ranks), console)
    if diagnosis.points:
        tables.rows("roofline of the run's kernels", [_point(point) for point in diagnosis.points], console)


def _sections(diagnosis: Diagnosis) -> dict[str, tables.Rows]:
    evidence, memory = diagnosis.evidence, diagnosis.memory
    status = " ".join(str(evidence.status.get(name, "-")) for name in ("status", "step"))
    run = [("folder", evidence.folder), ("status", f"{printable(status)} of {evidence.status.get('steps', '-')}")]
    if evidence.layout:
        run.append(("plan", evidence.layout.plan.describe()))
    run.append(("machine", f"{evidence.machine.processes} x {printable(evidence.machine.device)}"))
    if diagnosis.seconds is not None:
        expected = f", {tables.duration(diagnosis.predicted)} predicted" if diagnosis.predicted else ""
        run.append(("step", tables.duration(diagnosis.seconds) + expected))
    if memory:
        used = f" of {memory.capacity:.3g}" if memory.capacity else ""
        grows = f", {memory.grown:.0%} of it in the second half" if memory.grown >= 0.02 else ""
        run.append(("memory", f"{memory.peak:.3g}{used} GiB at the peak{grows}"))
    found: dict[str, tables.Rows] = {"run": run, "verdict": [("", printable(diagnosis.text))]}
    found["verdict"] = [*found["verdict"], *(("", text) for text in evidence.stalled[1:])]
    for number, finding in enumerate(diagnosis.findings, start=1):
        found[f"{number}. {finding.cost.kind}"] = _finding(finding)
    if diagnosis.shapes:
        found["shapes"] = [(f"{one.waste:.1%}", one.text) for one in diagnosis.shapes[:SHAPES]]
    if diagnosis.notes:
        found["notes"] = [("", printable(text)) for text in diagnosis.notes]
    return found


def _finding(finding: Finding) -> list[tuple[str, Any]]:
    cost = finding.cost
    share = f": {tables.percent(cost.share)}" if finding.seconds is not None else ""
    rows: list[tuple[str, Any]] = [("layer", cost.layer), ("what", f"{cost.title}{share}")]
    rows += [("", printable(text)) for text in cost.evidence]
    if finding.seconds is not None:
        rows.append(("without it", f"a step of {tables.duration(finding.seconds)}"))
    for override in finding.overrides:
        told = f"{tables.duration(override.seconds)} predicted" if override.seconds is not None else ""
        extra = override.told if finding.seconds is None else ", ".join(filter(None, (told, override.note)))
        rows.append(("try", override.text + f"  ({extra})" * bool(extra)))
    return rows + [("do", finding.advice)] * bool(finding.advice)


def _account(ranks: tuple[Account, ...]) -> list[dict[str, Any]]:
    """A row for each term: its share of the step as the mean over ranks, and the seconds of the first of them."""
    names = {name for account in ranks for name in account.terms}
    shares = {name: share(ranks, methodcaller("term", name)) for name in names}
    terms = sorted((name for name in names if shares[name] >= LEAST), key=lambda name: -shares[name])
    rows = []
    for name in [*terms, "step"]:
        seconds = [account.seconds if name == "step" else account.term(name) for account in ranks]
        row: dict[str, Any] = {"term": name, "share": tables.percent(shares.get(name, 1.0))}
        row |= {f"rank {one.rank}": tables.duration(spent) for one, spent in zip(ranks[:RANKS], seconds)}
        rows.append(row)
    return rows


def _point(point: Point) -> dict[str, Any]:
    return {
        "kernels": printable(point.name)[:60],
        "time": tables.duration(point.seconds),
        "calls": point.calls,
        "FLOP/s": tables.count(point.flops),
        "bytes/s": tables.size(point.bytes),
        "FLOP a byte": "-" if point.intensity is None else f"{point.intensity:.3g}",
        "bound by": point.bound or "-",
        "of what is reached": tables.percent(point.reached),
    }
