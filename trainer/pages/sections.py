"""What the sections of a page say of a run: its numbers, settings and starts, what bounds it, and where the time of its
steps went."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from trainer.config import typed
from trainer.diagnosis import time_breakdown
from trainer.diagnosis.time_breakdown import TimeBreakdown, mean_terms
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
        run.step_seconds,
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
            took,
            format_duration,
            f"median; 95% within {format_duration(last('step_seconds_p95'))}",
            "the median of the logged steps without the first, and without those that a profiler slows down",
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
        _measure_share("bubble", "bubble", run, recent("bubble")),
        _measure_share("waiting for data", "data", run, waiting),
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


def _measure_share(name: str, kind: str, run: RunFolder, logged: float | None) -> RunNumber:
    """A cost of the step: as the account and the diagnosis tell it, else as metrics do, where they tell any."""
    told = [one.get("share") for one in (run.diagnosis or {"findings": []})["findings"] if one["kind"] == kind]
    found = run.profile.share(kind) if run.profile else [*told, logged][0]
    meaning = time_breakdown.TERMS.get(kind) or METRICS[kind]
    more = f"; {format_percent(logged)} of the schedule" if kind == "bubble" and found != logged else ""
    return _number(name, None if logged is None else found, format_percent, f"of the step{more}", meaning, True)


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


VALUE_LETTERS = 600
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
    return make_printable(text if len(text) <= VALUE_LETTERS else f"{text[:VALUE_LETTERS]}...")


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


# What bounds a run, as diagnosis.json says it.

TOP, LINES = 3, 8
"""Costs, and lines of each kind, that are shown."""


def verdict_context(found: dict[str, Any]) -> dict[str, Any]:
    """A diagnosis for the template. found: of the shape above."""
    predicted = found["step"].get("predicted")
    return {
        "text": make_printable(found["verdict"]["text"]),
        "predicted": predicted and format_duration(predicted),
        "findings": [finding_context(one) for one in found["findings"][:TOP]],
        "stalled": [make_printable(text) for text in found["stalled"][:LINES]],
        "notes": [make_printable(text) for text in found["notes"][:LINES]],
    }


def finding_context(one: dict[str, Any]) -> dict[str, Any]:
    """A cost."""
    share, without = one.get("share"), one.get("without")
    return {
        **{name: make_printable(one[name]) for name in "kind layer title advice".split()},
        "share": share and min(1.0, max(0.0, share)),
        "without": without and format_duration(without),
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


# Where the time of a step went: shares of its account, its kernels, and their roofline.

RANKS, KERNELS, KERNEL_LETTERS = 64, 15, 200
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
    found = {run.label: mean_terms(run.profile.ranks) if run.profile else {} for run in runs}
    if not any(found.values()):
        return None
    rows = [(run.label, f"step {run.profile.steps[-1]}", found[run.label]) for run in runs if run.profile]
    most = {name: max(one.get(name, 0.0) for one in found.values()) for name in set().union(*found.values())}
    terms = [
        (
            TermPart(describe_term(name), 0.0, 0.0, term_colour(name), term_meaning(name)),
            [format_duration(value) if (value := one.get(name)) else NONE for one in found.values()],
        )
        for name in sorted(most, key=lambda name: (-most[name], name))
        if most[name] > 0
    ]
    return {"bars": term_bars(rows), "terms": terms}


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
                "name": make_printable(kernel.name[:KERNEL_LETTERS]),
                "kind": describe_term(kernel.kind),
                "look": f"t-{kernel.kind}".replace("communication", "communication-transfer"),
                "calls": kernel.calls,
                "seconds": kernel.seconds,
                "share": kernel.seconds / one.seconds if one.seconds else None,
                "rate": find_ratio(kernel.flops, kernel.seconds),
                "traffic": find_ratio(kernel.bytes, kernel.seconds),
            }
            for kernel in one.kernels[:KERNELS]
        ],
    }


def find_ratio(amount: float | None, by: float | None) -> float | None:
    """A rate; None where it is not known or is no number above zero."""
    found = amount / by if amount and by else 0.0
    return found if 0 < found < math.inf else None


def roofline_data(one: TimeBreakdown, diagnosis: dict[str, Any]) -> dict[str, Any] | None:
    """Points of the kernels whose operations and bytes are known, and roofs: `peak` and `bandwidth` of the data sheet,
    `products` and `memory` that are reached of them; None where there are no points."""
    points = [
        {
            "name": make_printable(kernel.name[:KERNEL_LETTERS]),
            "kind": kernel.kind,
            "calls": kernel.calls,
            "seconds": kernel.seconds,
            "intensity": intensity,
            "rate": rate,
        }
        for kernel in one.kernels
        if (rate := find_ratio(kernel.flops, kernel.seconds)) and (intensity := find_ratio(kernel.flops, kernel.bytes))
    ]
    given = diagnosis.get("roofline", {}).get("ceilings") or {}
    roofs = {name: given.get(name) for name in "peak bandwidth products memory".split()}
    known = all(type(value) in (int, float) and 0 < value < math.inf for value in roofs.values())
    return {"kernels": points, **(roofs if known else dict.fromkeys(roofs))} if points else None
