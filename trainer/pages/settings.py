"""What a run was asked to do, and its starts, for the templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from trainer.config import typed
from trainer.observe.metrics import METRICS
from trainer.pages.folder import RunFolder
from trainer.util.reading import make_printable
from trainer.util.tables import format_bytes, format_count, format_duration, format_percent

# The numbers that a run is known by, for people.


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


LETTERS = 600
"""The most of a value that is shown."""
NAMES = ("run.name", "run.dir")
"""Settings in which runs differ anyway."""


@cache
def default_settings() -> dict[str, Any]:
    """Every setting of the schema with its default, as JSON has it; those of entries by the word for their name."""
    entries = [setting for path in typed.ENTRIES for setting in typed.entry_settings(path)]
    return {setting.path: json.loads(json.dumps(setting.default)) for setting in (*typed.list_settings(), *entries)}


def default_of(name: str) -> Any:
    """The default of a setting, also of one of an entry such as `data.sources.mine.weight`; the setting's name itself
    where it has none, which no setting is worth."""
    for path, (word, _) in typed.ENTRIES.items():
        if name.startswith(f"{path}."):
            name = ".".join([path, word, *name.removeprefix(f"{path}.").split(".")[1:]])
    return default_settings().get(name, name)


def format_value(value: Any) -> str:
    """A setting for people, on one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return make_printable(text if len(text) <= LETTERS else f"{text[:LETTERS]}...")


def all_settings(run: RunFolder) -> list[tuple[str, str]]:
    """All settings of a run."""
    return [(make_printable(name), format_value(value)) for name, value in run.settings.items()]


def changed_settings(run: RunFolder) -> list[tuple[str, str]]:
    """The settings of a run that are not the default, but for its name and folder."""
    return [
        (make_printable(name), format_value(value))
        for name, value in run.settings.items()
        if name not in (*NAMES, "processes") and default_of(name) != value
    ]


Rows = list[tuple[str, list[str]]]
"""A name, and the value of each run for people."""


def differing_settings(runs: Sequence[RunFolder]) -> tuple[Rows, Rows]:
    """The settings in which runs differ, with the value of each; names and folders differ anyway. And those that some
    runs do not have, as other versions wrote them, and in which the others agree."""
    everyone = [run.settings for run in runs]
    names = dict.fromkeys(name for settings in everyone for name in settings if name not in NAMES)
    differ: Rows = []
    lacking: Rows = []
    for name in names:
        known = [settings[name] for settings in everyone if name in settings]
        row = (
            make_printable(name),
            [format_value(settings[name]) if name in settings else NONE for settings in everyone],
        )
        if any(value != known[0] for value in known):
            differ.append(row)
        elif len(known) < len(everyone):
            lacking.append(row)
    return differ, lacking


def merge_tables(tables: Sequence[Sequence[Sequence[str]]], alike: bool = True) -> Rows:
    """Tables of labels and values as one, with a value of each run. alike: with the rows in which all agree."""
    given = [{label: value for label, value in table} for table in tables]
    labels = dict.fromkeys(label for one in given for label in one)
    rows = [(label, [one.get(label, NONE) for one in given]) for label in labels]
    return [row for row in rows if alike or len(set(row[1])) > 1]


def list_starts(run: RunFolder) -> list[dict[str, Any]]:
    """The starts of a run, for the template."""
    return [
        {
            **{name: format_value(start[name]) for name in ("time", "step")},
            **{name: format_value(start.get(name) or "") for name in ("resumed", "set_aside", "job")},
            "places": "; ".join(dict.fromkeys(map(count_names, (start.get("hosts"), start.get("devices"))))),
            "code": short_commit(start.get("code")),
            "changes": [
                (make_printable(name), *map(format_value, pair))
                for name, pair in as_mapping(start.get("changed")).items()
                if isinstance(pair, list) and len(pair) == 2
            ],
        }
        for start in run.starts
    ]


def as_mapping(value: Any) -> dict[str, Any]:
    """A value that should be a mapping; empty where it is something else."""
    return value if isinstance(value, dict) else {}


def count_names(value: Any) -> str:
    """How often each name occurs: `8 x NVIDIA H200`."""
    return ", ".join(f"{format_value(number)} x {format_value(name)}" for name, number in as_mapping(value).items())


def short_commit(code: Any) -> str:
    """The version of the code, short."""
    known = as_mapping(code)
    return f"{format_value(known.get('commit', ''))[:10]}{' + changes' if known.get('dirty') else ''}"


def describe_run(run: RunFolder) -> str:
    """A line under a run's name: model, plan and devices, as it said at its start."""
    table = run.start.get("table", {})
    model, plan = dict(table.get("model", [])), dict(table.get("plan", []))
    parameters = f"{model['parameters']} parameters" if "parameters" in model else None
    return " · ".join(filter(None, [model.get("name"), parameters, plan.get("processes"), plan.get("plan")]))
