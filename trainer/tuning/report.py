"""A search for people: a table of its trials, and a picture."""

from __future__ import annotations

from math import exp

from trainer.config import ConfigError
from trainer.planning.estimate.step import GIB
from trainer.tuning.engines import corrected
from trainer.tuning.study import ENDED, Study, seconds_of
from trainer.util import tables
from trainer.util.reading import printable


def show(study: Study) -> None:
    """Prints the trials, the fastest first; those without a time last."""
    lines = [(line, study.plans[name]) for name, line in study.results.lines.items() if name in study.plans]
    timed = [(seconds_of(line, plan), line, plan) for line, plan in lines]
    timed.sort(key=lambda row: (row[0] is None, row[0] or 0.0))
    rows = [
        {
            "trial": line["trial"],
            "status": line["status"].replace("_", " "),
            "step": tables.duration(line["step_seconds_p50"]),
            "expected": tables.duration(line["expected_seconds"]),
            "predicted": tables.duration(line["predicted_seconds"]),
            "tokens/s": tables.count(plan.found.layout.batch.tokens / line["step_seconds_p50"] if seconds else None),
            "memory": tables.size(line["memory_gib"] and line["memory_gib"] * GIB),
            "predicted ": tables.size(plan.found.memory),
            "reason": printable(line["reason"] or ""),
        }
        for seconds, line, plan in timed
    ]
    tables.rows(f"{len(rows)} trials of {len(study.plans)} plans", rows)


def draw(study: Study, band: float) -> str:
    """Draws predicted against measured, and memory against speed; says where, or why not. band: of the predictions."""
    try:
        from trainer.plots.tune import Point, draw_search
    except ConfigError as error:
        return str(error)
    tried = [
        Point(
            line["predicted_seconds"],
            line["expected_seconds"],
            line["step_seconds_p50"] if line["status"] == "done" else None,
            line["memory_gib"],
            plan.found.layout.batch.tokens,
        )
        for name, line in study.results.lines.items()
        if line["status"] in ENDED and (plan := study.plans.get(name))
    ]
    correct = corrected(study.options, study.outcomes, band)
    untried = [
        Point(seconds, seconds * exp(correct(plan.option.axes)[0]), None, plan.found.memory / GIB, tokens)
        for name, plan in study.plans.items()
        if name not in study.results.lines
        for seconds, tokens in [(plan.found.seconds, plan.found.layout.batch.tokens)]
    ]
    path = study.folder / "tune.png"
    draw_search(tried, untried, path)
    return f"picture: {path}"
