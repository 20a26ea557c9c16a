"""What bounds a run, as diagnosis.json says it, for the templates."""

from __future__ import annotations

from typing import Any

from trainer.util.reading import Shape, printable
from trainer.util.tables import duration, percent

NUMBER = (int, float, type(None))
SHAPE: Shape = {
    "verdict": {"kind": str, "text": str},
    "step": {"seconds": NUMBER, "predicted": NUMBER},
    "findings": [
        {
            **dict.fromkeys(("kind", "layer", "title", "advice"), str),
            **dict.fromkeys(("share", "without"), NUMBER),
            "evidence": [str],
            "overrides": [{"text": str, "seconds": NUMBER, "note": str}],
        }
    ],
    "roofline": {"ceilings": (dict, type(None))},
    "shapes": [{"text": str, "waste": NUMBER}],
    "stalled": [str],
    "notes": [str],
}
"""Of diagnosis.json, as far as the page shows it."""
TOP, LINES = 3, 8
"""Costs, and lines of each kind, that are shown."""


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """A diagnosis for the template. found: of the shape above."""
    seconds, predicted = found["step"].get("seconds"), found["step"].get("predicted")
    return {
        "text": printable(found["verdict"]["text"]),
        "step": duration(seconds),
        "predicted": predicted and duration(predicted),
        "findings": [finding(one, seconds) for one in found["findings"][:TOP]],
        "shapes": [(percent(one.get("waste")), printable(one["text"])) for one in found["shapes"][:LINES]],
        "stalled": [printable(text) for text in found["stalled"][:LINES]],
        "notes": [printable(text) for text in found["notes"][:LINES]],
    }


def finding(one: dict[str, Any], seconds: float | None) -> dict[str, Any]:
    """A cost. seconds: of the step that has it."""
    share, without = one.get("share"), one.get("without")
    return {
        **{name: printable(one[name]) for name in ("kind", "layer", "title", "advice")},
        "share": share and min(1.0, max(0.0, share)),
        "without": without and duration(without),
        "faster": percent(1 - without / seconds) if without and seconds and without < seconds else None,
        "evidence": [printable(text) for text in one["evidence"][:LINES]],
        "overrides": [{"text": printable(other["text"]), "told": _told(other)} for other in one["overrides"][:TOP]],
    }


def _told(override: dict[str, Any]) -> str:
    seconds = override.get("seconds")
    predicted = f"{duration(seconds)} a step predicted" if seconds else ""
    return ", ".join(filter(None, [predicted, printable(override["note"])]))
