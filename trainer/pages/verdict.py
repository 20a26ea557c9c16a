"""What bounds a run, as diagnosis.json says it, for the templates."""

from __future__ import annotations

from typing import Any

from trainer.util.reading import Shape, make_printable
from trainer.util.tables import format_duration, format_percent

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


def verdict_context(found: dict[str, Any]) -> dict[str, Any]:
    """A diagnosis for the template. found: of the shape above."""
    seconds, predicted = found["step"].get("seconds"), found["step"].get("predicted")
    return {
        "text": make_printable(found["verdict"]["text"]),
        "step": format_duration(seconds),
        "predicted": predicted and format_duration(predicted),
        "findings": [finding_context(one, seconds) for one in found["findings"][:TOP]],
        "shapes": [(format_percent(one.get("waste")), make_printable(one["text"])) for one in found["shapes"][:LINES]],
        "stalled": [make_printable(text) for text in found["stalled"][:LINES]],
        "notes": [make_printable(text) for text in found["notes"][:LINES]],
    }


def finding_context(one: dict[str, Any], seconds: float | None) -> dict[str, Any]:
    """A cost. seconds: of the step that has it."""
    share, without = one.get("share"), one.get("without")
    return {
        **{name: make_printable(one[name]) for name in ("kind", "layer", "title", "advice")},
        "share": share and min(1.0, max(0.0, share)),
        "without": without and format_duration(without),
        "faster": format_percent(1 - without / seconds) if without and seconds and without < seconds else None,
        "evidence": [make_printable(text) for text in one["evidence"][:LINES]],
        "overrides": [
            {"text": make_printable(other["text"]), "told": _describe_finding(other)}
            for other in one["overrides"][:TOP]
        ],
    }


def _describe_finding(override: dict[str, Any]) -> str:
    seconds = override.get("seconds")
    predicted = f"{format_duration(seconds)} a step predicted" if seconds else ""
    return ", ".join(filter(None, [predicted, make_printable(override["note"])]))
