"""What a run was asked to do, and its starts, for the templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from trainer.config import typed
from trainer.pages.folder import RunFolder
from trainer.pages.numbers import NONE
from trainer.util.reading import make_printable

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
