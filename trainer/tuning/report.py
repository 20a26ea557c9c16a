"""A search for people: a table of its trials, and a picture."""

from __future__ import annotations

from trainer.config import ConfigError
from trainer.planning.estimate.step import GIB
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


def draw(study: Study) -> str:
    """Draws predicted against measured, and memory against speed; says where, or why not."""
    try:
        from trainer.plots.tune import Point, draw_search
    except ConfigError as error:
        return str(error)
    tried = [
        Point(line["predicted_seconds"], seconds_of(line, plan), line["memory_gib"], plan.found.layout.batch.tokens)
        for name, line in study.results.lines.items()
        if line["status"] in ENDED and (plan := study.plans.get(name))
    ]
    untried = [
        Point(plan.found.seconds, None, plan.found.memory / GIB, plan.found.layout.batch.tokens)
        for name, plan in study.plans.items()
        if name not in study.results.lines
    ]
    path = study.folder / "tune.png"
    draw_search(tried, untried, path)
    return f"picture: {path}"
