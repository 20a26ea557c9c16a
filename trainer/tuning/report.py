"""A search for people: a table of its trials, and a page."""

from __future__ import annotations

import json
from math import exp
from typing import Any

from trainer.pages import page
from trainer.planning.estimate.step import GIB
from trainer.tuning.engines import DEVIATIONS, correct_predictions
from trainer.tuning.study import TuningStudy, seconds_of
from trainer.util import tables
from trainer.util.files import write_atomic
from trainer.util.reading import make_printable, shorten_foreign
from trainer.util.run_folder import REPORT, SEARCH


def print_study(study: TuningStudy) -> None:
    """Prints the trials, the fastest first; those without a time last."""
    lines = [(line, study.plans[name]) for name, line in study.results.lines.items() if name in study.plans]
    timed = [(seconds_of(line, plan), line, plan) for line, plan in lines]
    timed.sort(key=lambda row: (row[0] is None, row[0] or 0.0))
    rows = [
        {
            "trial": line["trial"],
            "status": line["status"].replace("_", " "),
            "step": tables.format_duration(line["step_seconds_p50"]),
            "expected": tables.format_duration(line["expected_seconds"]),
            "predicted": tables.format_duration(line["predicted_seconds"]),
            "tokens/s": tables.format_count(
                plan.found.layout.batch.tokens / line["step_seconds_p50"] if seconds else None
            ),
            "memory": tables.format_bytes(line["memory_gib"] and line["memory_gib"] * GIB),
            "predicted ": tables.format_bytes(plan.found.memory),
            "reason": make_printable(line["reason"] or ""),
        }
        for seconds, line, plan in timed
    ]
    tables.print_rows(f"{len(rows)} trials of {len(study.plans)} plans", rows)


def write_page(study: TuningStudy, band: float, about: dict[str, Any]) -> str:
    """Writes search.json and the page of the search; says where, or why not: a search goes on without. band: of the
    predictions; about: what search.json says besides."""
    path = study.folder / REPORT
    try:
        write_atomic(study.folder / SEARCH, json.dumps(about | {"foretold": predicted_times(study, band)}) + "\n")
        page.write_page([study.folder], path)
    except Exception as error:  # whatever is wrong with the page
        return f"{path} was not written: {shorten_foreign(error)}; python -m trainer.report {study.folder} tries again"
    return f"page: {path}"


def predicted_times(study: TuningStudy, band: float) -> list[dict[str, Any]]:
    """What was foretold of every plan: of one that was tried by what was measured before, of others by all of it."""
    tried = [outcome.option.name for outcome in study.outcomes]
    found = []
    for name, plan in study.plans.items():
        before = study.outcomes[: tried.index(name) if name in tried else None]
        correction, deviation = correct_predictions(study.options, before, band)(plan.option.axes)
        expected = study.results.lines.get(name, {}).get("expected_seconds") or plan.found.seconds * exp(correction)
        found.append(
            {
                "plan": name,
                "predicted": plan.found.seconds,
                "expected": expected,
                "low": expected * exp(-DEVIATIONS * deviation),
                "high": expected * exp(DEVIATIONS * deviation),
                "memory_gib": plan.found.memory / GIB,
                "tokens": plan.found.layout.batch.tokens,
            }
        )
    return found
