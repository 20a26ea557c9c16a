"""Where the time of a step went, for the templates: shares of its account, its kernels, and their roofline."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

from trainer.config.compose import CONFIGS
from trainer.diagnosis import account
from trainer.diagnosis.account import Account, Kernel
from trainer.pages.folder import Run
from trainer.planning.cost.devices import DTYPES, peak_flops
from trainer.planning.estimate.hardware import load_hardware
from trainer.util.reading import printable

RANKS, KERNELS, LETTERS = 64, 25, 200
"""The most ranks whose account is drawn, the most kernels in the table, and the most letters of a kernel's name."""


class Part(NamedTuple):
    """A term of an account. look: the class of its colour; least, most: shares over ranks."""

    name: str
    seconds: float
    share: float
    look: str
    meaning: str = ""
    least: float = 0.0
    most: float = 0.0


def parts(one: Account) -> list[Part]:
    """An account's terms in the order of the table of terms, those of no time left out."""
    places = {name: place for place, name in enumerate(account.TERMS)}
    found = sorted(one.terms, key=lambda name: (places[_term(name)], name))
    return [
        Part(name, one.terms[name], one.terms[name] / one.seconds, look(name))
        for name in found
        if one.terms[name] > 0 and math.isfinite(one.seconds)
    ]


def _term(name: str) -> str:
    """The entry of `account.TERMS` that a term belongs to."""
    axis = name.split("/")[1] if name.startswith("communication/") else None
    return name if axis is None else name.replace(f"/{axis}/", "/AXIS/")


def look(name: str) -> str:
    return "t-" + _term(name).replace("/AXIS", "").replace("/", "-")


def account_of(run: Run) -> dict[str, Any] | None:
    """The account of a run's newest profiled step, for the template; None without one."""
    if not run.accounts:
        return None
    rows, names = run.accounts[:RANKS], list(dict.fromkeys(name for one in run.accounts for name in one.terms))
    shares = {name: [one.share(name) for one in run.accounts] for name in names}
    terms = [
        Part(
            name,
            sum(one.terms.get(name, 0.0) for one in run.accounts) / len(run.accounts),
            sum(shares[name]) / len(run.accounts),
            look(name),
            _meaning(name),
            min(shares[name]),
            max(shares[name]),
        )
        for name in names
    ]
    axes = sorted({axis for one in run.accounts for axis in one.hidden})
    hidden = [(axis, max(one.hidden.get(axis, 0.0) for one in run.accounts)) for axis in axes]
    return {
        "label": run.label,
        "step": rows[0].step,
        "of": len(run.accounts),
        "rows": [
            {
                "rank": one.rank,
                "place": ", ".join(f"{axis} {at}" for axis, at in one.place.items()),
                "seconds": one.seconds,
                "parts": parts(one),
            }
            for one in rows
        ],
        "terms": sorted((term for term in terms if term.seconds > 0), key=lambda term: -term.share),
        "hidden": [(axis, seconds) for axis, seconds in hidden if seconds > 0],
    }


def _meaning(name: str) -> str:
    axis = account.AXES.get(name.split("/")[1]) if name.startswith("communication/") else None
    return account.TERMS[_term(name)] + (f"; {axis}" if axis else "")


def kernels_of(run: Run, place: int) -> dict[str, Any] | None:
    """The kernels that take most of a step, on the rank whose step took longest."""
    found = [one for one in run.accounts if one.kernels]
    if not found:
        return None
    one = max(found, key=lambda one: one.seconds)
    return {
        "label": run.label,
        "place": place,
        "rank": one.rank,
        "device": one.device,
        "roofline": roofline(one, run.settings),
        "kernels": [
            {
                "name": printable(kernel.name[:LETTERS]),
                "kind": kernel.kind,
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


def roofline(one: Account, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Points and roofs of the kernels whose operations and bytes are known; None where there are none."""
    points = [
        {
            "name": printable(kernel.name[:LETTERS]),
            "kind": kernel.kind,
            "calls": kernel.calls,
            "seconds": kernel.seconds,
            "intensity": intensity,
            "rate": rate,
        }
        for kernel in one.kernels
        if (rate := _rate(kernel.flops, kernel.seconds)) and (intensity := _intensity(kernel))
    ]
    if not points:
        return None
    kind = settings.get("precision.compute")
    kind = "tf32" if kind == "fp32" and settings.get("precision.matmul") == "high" else kind
    peak = peak_flops(one.device, kind) if kind in DTYPES else None
    return {"kernels": points, "peak": peak, "bandwidth": bandwidths().get(one.device.lower())}


def _intensity(kernel: Kernel) -> float | None:
    """Operations for each byte."""
    found = kernel.flops / kernel.bytes if kernel.flops and kernel.bytes else 0.0
    return found if 0 < found < math.inf else None


@cache
def bandwidths() -> dict[str, float]:
    """By the name of a shipped kind of device, bytes/s of its memory."""
    kinds = [load_hardware(path.stem) for path in sorted((CONFIGS / "hardware").glob("*.yaml"))]
    return {kind.device.lower(): 1e9 * kind.bandwidth for kind in kinds if kind.device != "CPU"}
