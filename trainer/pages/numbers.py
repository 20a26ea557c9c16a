"""The numbers that a run is known by, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainer.observe.metrics import METRICS
from trainer.pages.folder import RunFolder
from trainer.util.tables import format_bytes, format_count, format_duration, format_percent

NONE = "–"
GIB = 2**30


class RunNumber(NamedTuple):
    """One number of a run for people. value: what it says, None where it is not known; least: whether small is good,
    None where neither is."""

    name: str
    value: float | None
    text: str
    note: str = ""
    meaning: str = ""
    least: bool | None = None


def run_numbers(run: RunFolder) -> list[RunNumber]:
    """The numbers that a run is known by, the same ones for every run; of speeds the medians of the newest steps."""
    last, recent, best = run.curves.last, run.curves.recent, run.curves.best
    speed, peak, waited, took = (
        recent("tokens_per_second"),
        best("memory_gib", False),
        recent("data_seconds"),
        recent("step_seconds"),
    )
    waiting = waited / took if waited is not None and took else None
    held = best("eval_loss", True)
    eta = last("eta_seconds") if run.status.get("status") == "running" else None
    processes = run.start.get("processes")
    return [
        _number("loss", last("loss"), format_exact, "nats per token", METRICS["loss"], True),
        _number(
            "evaluation loss", last("eval_loss"), format_exact, f"best {format_exact(held)}", METRICS["eval_loss"], True
        ),
        _number(
            "tokens/s",
            speed,
            format_count,
            f"{format_count(speed / processes)} a process" if speed and processes else "",
            METRICS["tokens_per_second"],
            False,
        ),
        _number(
            "step time",
            last("step_seconds_p50") or took,
            format_duration,
            f"95% within {format_duration(last('step_seconds_p95'))}",
            METRICS["step_seconds_p50"],
            True,
        ),
        _number(
            "MFU",
            recent("mfu"),
            format_percent,
            f"{format_percent(recent('mfu_full'))} with full attention",
            METRICS["mfu"],
            False,
        ),
        _number("peak memory", peak and peak * GIB, format_bytes, "of the fullest rank", METRICS["memory_gib"], True),
        _number("bubble", recent("bubble"), format_percent, "of the step", METRICS["bubble"], True),
        _number("waiting for data", waiting, format_percent, "of the step", METRICS["data_seconds"], True),
        _number("tokens", last("tokens"), format_count, "", METRICS["tokens"]),
        _number(
            "time",
            run.curves.seconds,
            format_duration,
            f"{format_duration(eta)} to go" if eta else "first line to last",
            "between the first line of metrics and the last, pauses included",
        ),
    ]


def _number(
    name: str, value: float | None, form: Callable[[float], str], note: str, meaning: str, least: bool | None = None
) -> RunNumber:
    return RunNumber(name, value, NONE if value is None else form(value), note, meaning, least)


def format_exact(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"


def best_of(rows: Sequence[Sequence[RunNumber]]) -> dict[str, set[str]]:
    """By name, the texts of the best numbers of several runs; empty where no run is better than another."""
    found: dict[str, set[str]] = {}
    for column in zip(*rows):
        known = [number for number in column if number.value is not None and number.least is not None]
        texts = {number.text for number in known}
        order = sorted(known, key=lambda number: number.value * (1 if number.least else -1))
        found[column[0].name] = {order[0].text} if len(texts) > 1 else set()
    return found
