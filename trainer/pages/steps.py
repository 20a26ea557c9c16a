"""Where the time of a step went, for the templates: shares of its account, its kernels, and their roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from trainer.diagnosis import time_breakdown
from trainer.diagnosis.time_breakdown import KernelTotal, TimeBreakdown
from trainer.pages.folder import RunFolder
from trainer.util.reading import make_printable

RANKS, KERNELS, LETTERS = 64, 15, 200
"""The most ranks whose account is drawn, the most kernels in the table, and the most letters of a kernel's name."""


class TermPart(NamedTuple):
    """A term of an account. look: the class of its colour; meaning: what it is."""

    name: str
    seconds: float
    share: float
    look: str
    meaning: str


class StepBar(NamedTuple):
    """An account as a bar of its terms. length: of the longest bar beside it, 0 to 1."""

    label: str
    title: str
    seconds: float
    length: float
    parts: list[TermPart]


def _term(name: str) -> str:
    """The entry of `account.TERMS` that a term belongs to."""
    axis = name.split("/")[1] if name.startswith("communication/") else None
    return name if axis is None else name.replace(f"/{axis}/", "/AXIS/")


def describe_term(name: str) -> str:
    """A term for people: `communication, data: transfer`."""
    first, *rest = name.replace("_", "-").split("/")
    return ": ".join([", ".join([first, *rest[:-1]]), *rest[-1:]])


def order_terms(terms: dict[str, float]) -> list[TermPart]:
    """Terms in the order of the table of terms, those of no time left out."""
    total, places = math.fsum(terms.values()), {name: place for place, name in enumerate(time_breakdown.TERMS)}
    found = sorted(terms, key=lambda name: (places[_term(name)], name))
    return [
        TermPart(describe_term(name), terms[name], terms[name] / total, term_colour(name), term_meaning(name))
        for name in found
        if terms[name] > 0 and math.isfinite(total)
    ]


def term_colour(name: str) -> str:
    return "t-" + _term(name).replace("/AXIS", "").replace("/", "-")


def term_meaning(name: str) -> str:
    axis = time_breakdown.AXES.get(name.split("/")[1]) if name.startswith("communication/") else None
    return time_breakdown.TERMS[_term(name)] + (f"; {axis}" if axis else "")


def mean_terms(accounts: Sequence[TimeBreakdown]) -> dict[str, float]:
    """Seconds of each term, the mean over ranks."""
    names = dict.fromkeys(name for one in accounts for name in one.terms)
    return {name: math.fsum(one.terms.get(name, 0.0) for one in accounts) / len(accounts) for name in names}


def term_bars(rows: Sequence[tuple[str, str, dict[str, float]]]) -> list[StepBar]:
    """A bar for each (label, title, terms)."""
    totals = [math.fsum(terms.values()) for *_, terms in rows]
    longest = max(totals, default=0.0) or 1.0
    return [
        StepBar(label, title, total, total / longest, order_terms(terms))
        for (label, title, terms), total in zip(rows, totals)
    ]


def account_of(run: RunFolder) -> dict[str, Any] | None:
    """The account of a run's typical step, a bar for each rank; None without one."""
    if run.profile is None:
        return None
    ranks = run.profile.ranks
    rows = [
        (f"rank {one.rank}", ", ".join(f"{axis} {at}" for axis, at in one.place.items()), one.terms)
        for one in ranks[:RANKS]
    ]
    shares = {describe_term(name): [one.share(name) for one in ranks] for name in mean_terms(ranks)}
    hidden = {axis: max(one.hidden.get(axis, 0.0) for one in ranks) for axis in sorted(ranks[0].hidden)}
    return {
        "steps": run.profile.steps,
        "of": len(ranks),
        "bars": term_bars(rows),
        "terms": sorted(order_terms(mean_terms(ranks)), key=lambda part: -part.seconds),
        "shares": {name: (min(values), max(values)) for name, values in shares.items()},
        "hidden": {axis: seconds for axis, seconds in hidden.items() if seconds > 0},
    }


def accounts_compared(runs: Sequence[RunFolder]) -> dict[str, Any] | None:
    """The accounts of several runs, a bar for each: the mean over its ranks, as long as its step; None without any."""
    found = {run.label: mean_terms(run.profile.ranks) for run in runs if run.profile}
    if not found:
        return None
    rows = [(run.label, f"step {run.profile.steps[-1]}", found[run.label]) for run in runs if run.profile]
    most = {name: max(one.get(name, 0.0) for one in found.values()) for name in set().union(*found.values())}
    terms = [
        (
            TermPart(describe_term(name), 0.0, 0.0, term_colour(name), term_meaning(name)),
            [one.get(name, 0.0) for one in found.values()],
        )
        for name in sorted(most, key=lambda name: (-most[name], name))
        if most[name] > 0
    ]
    return {"bars": term_bars(rows), "labels": list(found), "terms": terms}


def kernels_of(run: RunFolder, place: int) -> dict[str, Any] | None:
    """The kernels that take most of a step, on the rank whose step took longest."""
    found = [one for one in (run.profile.ranks if run.profile else ()) if one.kernels]
    if not found:
        return None
    one = max(found, key=lambda one: one.seconds)
    return {
        "label": run.label,
        "place": place,
        "rank": one.rank,
        "device": one.device,
        "hardware": make_printable(run.hardware),
        "roofline": roofline_data(one, run.diagnosis or {}),
        "kernels": [
            {
                "name": make_printable(kernel.name[:LETTERS]),
                "kind": describe_term(kernel.kind),
                "look": f"t-{kernel.kind}".replace("communication", "communication-transfer"),
                "calls": kernel.calls,
                "seconds": kernel.seconds,
                "share": kernel.seconds / one.seconds if one.seconds else None,
                "rate": _rate(kernel.flops, kernel.seconds),
                "traffic": _rate(kernel.bytes, kernel.seconds),
            }
            for kernel in one.kernels[:KERNELS]
        ],
    }


def _rate(amount: float | None, seconds: float) -> float | None:
    return amount / seconds if amount and seconds > 0 and math.isfinite(amount / seconds) else None


def roofline_data(one: TimeBreakdown, diagnosis: dict[str, Any]) -> dict[str, Any] | None:
    """Points of the kernels whose operations and bytes are known, and roofs: `peak` and `bandwidth` of the data sheet,
    `products` and `memory` that are reached of them; None where there are no points."""
    points = [
        {
            "name": make_printable(kernel.name[:LETTERS]),
            "kind": kernel.kind,
            "calls": kernel.calls,
            "seconds": kernel.seconds,
            "intensity": intensity,
            "rate": rate,
        }
        for kernel in one.kernels
        if (rate := _rate(kernel.flops, kernel.seconds)) and (intensity := _intensity(kernel))
    ]
    given = diagnosis.get("roofline", {}).get("ceilings") or {}
    roofs = {name: given.get(name) for name in ("peak", "bandwidth", "products", "memory")}
    known = all(type(value) in (int, float) and 0 < value < math.inf for value in roofs.values())
    return {"kernels": points, **(roofs if known else dict.fromkeys(roofs))} if points else None


def _intensity(kernel: KernelTotal) -> float | None:
    """Operations for each byte."""
    found = kernel.flops / kernel.bytes if kernel.flops and kernel.bytes else 0.0
    return found if 0 < found < math.inf else None
