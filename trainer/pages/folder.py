"""What the folder of a run says of it, as plain values. What is missing is left out, and what is damaged is named."""

from __future__ import annotations

import math
import os
import re
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy

from trainer.config import ConfigError, typed
from trainer.diagnosis import time_breakdown
from trainer.diagnosis.time_breakdown import StepProfile, build_profile, ordinary_seconds, scale_profile
from trainer.diagnosis.verdict import to_json
from trainer.observe.diagnose_run import diagnose_run
from trainer.observe.metrics import parse_line
from trainer.planning.schedules.ir import Action
from trainer.planning.schedules.simulate import measure_timeline, read_timeline
from trainer.util.lines import (
    ACCOUNTS,
    DIAGNOSIS,
    EARLIER,
    LOG,
    METRICS_FILE,
    REPLACED,
    RUN_FILES,
    STARTS,
    STATUS,
    count_lines,
    read_json_lines,
    read_lines,
)
from trainer.util.machine import lacks_memory
from trainer.util.reading import (
    MAYBE_NUMBER,
    Shape,
    find_mismatch,
    make_printable,
    read_bytes,
    read_json,
    shorten_foreign,
)

# The metrics of a run, and as few points of them as a chart shows.

PLACES = ("step", "tokens", "time")
"""What a point of a curve may stand over."""

RECENT = 200
"""Steps whose median stands for a run's speed now, as in `step_seconds_p50`."""

NAMES, NAME_LETTERS = 400, 200
"""The most metrics of a run that are looked at, and the most letters of a name: more is no run of ours."""


@dataclass
class MetricPoints:
    """The points of one metric: numbers of lines, and a value for each, NaN where it is null."""

    lines: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    def add(self, line: int, value: float | None) -> None:
        """Of several nulls in a row the first says all."""
        if value is not None or self.values and not math.isnan(self.values[-1]):
            self.lines.append(line)
            self.values.append(math.nan if value is None else value)

    def finite(self) -> numpy.ndarray:
        values = numpy.array(self.values)
        return values[numpy.isfinite(values)]


class MetricCurves:
    """What stands in a run's metrics.jsonl.

    places: by name of `PLACES`, a value for each line. points: by metric. damaged: lines that are none, left out."""

    def __init__(self) -> None:
        self.damaged = 0
        self.places = {name: array("d") for name in PLACES}
        self.points: dict[str, MetricPoints] = {}

    def __len__(self) -> int:
        return len(self.places["step"])

    def read(self, path: Path) -> None:
        """Takes in the lines of a file; a last line without its end is left out. Raises `OSError` and `Malformed`; the
        lines before the fault are then there."""
        for text in read_lines(path):
            record = parse_line(text)
            if record is None:
                self.damaged += 1
            else:
                self._add(record)

    def _add(self, record: dict[str, Any]) -> None:
        line = len(self)
        for name, column in self.places.items():
            value = record.get(name)
            column.append(math.nan if value is None else value)
        for name, value in record.items():
            if name in self.points or len(self.points) < NAMES and len(name) <= NAME_LETTERS:
                self.points.setdefault(name, MetricPoints()).add(line, value)

    def _points(self, name: str) -> MetricPoints:
        return self.points.get(name, MetricPoints())

    @property
    def names(self) -> list[str]:
        """The metrics that have a number anywhere."""
        return [name for name, points in self.points.items() if any(map(math.isfinite, points.values))]

    def last(self, name: str) -> float | None:
        """The newest number of a metric; None where it has none."""
        return next((value for value in reversed(self._points(name).values) if not math.isnan(value)), None)

    def recent(self, name: str) -> float | None:
        """The median of the newest `RECENT` numbers of a metric, without the first, which is a warm-up; None where it
        has none."""
        found = self._points(name).finite()
        found = found[len(found) > 1 :][-RECENT:]
        return float(numpy.median(found)) if len(found) else None

    def best(self, name: str, least: bool) -> float | None:
        """The smallest or the largest number of a metric."""
        found = self._points(name).finite()
        return None if not len(found) else float(found.min() if least else found.max())

    def by_step(self, name: str) -> list[tuple[int, float]]:
        """The numbers of a metric, each with its step."""
        points = self._points(name)
        found = zip((self.places["step"][line] for line in points.lines), points.values, strict=True)
        return [(int(step), value) for step, value in found if math.isfinite(step) and math.isfinite(value)]

    @property
    def seconds(self) -> float | None:
        """Between the first line and the last, pauses included."""
        times = [time for time in self.places["time"] if not math.isnan(time)]
        return times[-1] - times[0] if times else None

    def drawn(self, most: int, left_out: set[str]) -> dict[str, Any]:
        """Curves for a picture, as plain values: `x`, by place the values of the lines that any curve needs, and
        `series`, each with its `name`, the indices `i` of its lines in `x`, and its values `v`, None for a gap. Every
        number is one of the file's: of more than `most` points of a metric, the smallest and the largest of each
        stretch are taken."""
        kept = {name: thin_curve(self.points[name], most) for name in self.names if name not in left_out}
        lines = numpy.unique(numpy.concatenate([lines for lines, _ in kept.values()] or [numpy.empty(0, int)]))
        times = numpy.array(self.places["time"])
        begin = next((time for time in times.tolist() if math.isfinite(time)), math.nan)
        x = {name: numpy.array(self.places[name])[lines] for name in ("step", "tokens")} | {
            "hours": (times[lines] - begin) / 3600
        }
        return {
            "x": {name: plain_numbers(values) for name, values in x.items()},
            "series": [
                {"name": name, "i": numpy.searchsorted(lines, at).tolist(), "v": plain_numbers(values)}
                for name, (at, values) in kept.items()
            ],
        }


def thin_curve(points: MetricPoints, most: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Lines and values of at most `most` points: the first, the last, and of each stretch the least and the largest."""
    lines, values = numpy.array(points.lines), numpy.array(points.values)
    if len(values) <= most:
        return lines, values
    edges = numpy.linspace(1, len(values) - 1, max(1, most // 2 - 1) + 1).astype(int)
    stretches = [(values[begin:end], begin) for begin, end in zip(edges, edges[1:]) if end > begin]
    picked = {0, len(values) - 1}
    for stretch, begin in stretches:
        if numpy.isnan(stretch).all():
            picked.add(begin)
        else:
            picked |= {begin + int(numpy.nanargmin(stretch)), begin + int(numpy.nanargmax(stretch))}
    chosen = numpy.array(sorted(picked))
    return lines[chosen], values[chosen]


def plain_numbers(values: numpy.ndarray) -> list[float | int | None]:
    """Numbers for JSON: whole ones without a point, NaN as None."""
    return [
        None if not math.isfinite(value) else int(value) if value.is_integer() and abs(value) < 2**53 else value
        for value in values.tolist()
    ]


# Files of a folder that others write.


class FolderFiles:
    """Some files of a folder. sources: by name what reads one.

    values: by name, of the files that are there and undamaged. problems: what is damaged, and left out."""

    def __init__(self, folder: Path, sources: dict[str, Callable[[Path], Any]]):
        self.folder = folder
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        for name, read in sources.items():
            try:
                (folder / name).stat()  # of a file that is not there, some readers say that it is damaged
                self.values[name] = read(folder / name)
            except FileNotFoundError:
                continue
            except (OSError, ConfigError, ValueError) as error:
                self.problems.append(f"{name}: {shorten_foreign(error)}")


# The folder of a run: what its files hold.


DIAGNOSIS_SHAPE: Shape = {
    "verdict": {"kind": str, "text": str},
    "step": {"predicted": MAYBE_NUMBER},
    "findings": [
        {
            **dict.fromkeys("kind layer title advice".split(), str),
            **dict.fromkeys(("share", "without"), MAYBE_NUMBER),
            "evidence": [str],
            "overrides": [{"text": str, "seconds": MAYBE_NUMBER, "note": str}],
        }
    ],
    "roofline": {"ceilings": (dict, type(None))},
    "stalled": [str],
    "notes": [str],
}
"""Of diagnosis.json, as far as the page shows it."""
START: Shape = {"time": str, "step": int, "processes": int, "settings": dict}
"""What a line of starts.jsonl has to have to be shown."""
TABLE: Shape = {str: [[str]]}
"""What a start printed: titled sections of rows, each a label and a value."""
STATUS_SHAPE: Shape = {"status": str, "step": int, "steps": int, "reason": (str, type(None))}
NOTICE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  (?! *step +\d+/\d)(.+)")
"""A line of console.log that is no line of metrics."""
TIMELINES = ("planned", "measured")
TAIL = 4 << 20
STARTS_SHOWN, SPANS, NOTICES, LETTERS = 100, 20_000, 300, 600
"""The most starts, the most actions of a timeline, the most notices, and the most letters of one, that a page shows."""


class RunFolder(FolderFiles):
    """A run as its folder has it.

    label: a short name. hardware: a file of `configs/hardware`, or its path, whose peaks it is held against; '': that
    of its device. curves: of metrics.jsonl. starts: the lines of starts.jsonl, with the `table` that each start
    printed. notices: what the console said besides metrics, with its time, the newest last. replaced: lines of metrics
    whose steps were trained again. earlier: folders of earlier runs in the same place. timelines: of the pipeline's
    schedule, as the page draws them."""

    def __init__(self, label: str, folder: Path, hardware: str = ""):
        self.label, self.hardware, self.curves = label, hardware, MetricCurves()
        sources: dict[str, Callable[[Path], Any]] = {
            METRICS_FILE: self.curves.read,
            STATUS: lambda path: read_json(path, STATUS_SHAPE, "it is left out"),
            STARTS: read_starts,
            LOG: read_notices,
            REPLACED: count_lines,
            EARLIER: lambda path: sorted((found.name for found in path.iterdir() if found.name.isdecimal()), key=int),
            DIAGNOSIS: lambda path: read_json(path, DIAGNOSIS_SHAPE, "trainer diagnose writes it anew"),
            ACCOUNTS: lambda path: build_profile(time_breakdown.read_breakdowns(path.parent)),
            **{f"schedule/{name}.json": partial(drawn_timeline, name) for name in TIMELINES},
        }
        super().__init__(folder, sources)
        if self.curves.damaged:
            self.problems.insert(0, f"{METRICS_FILE}: {self.curves.damaged} damaged lines are left out")
        self.starts: list[dict[str, Any]] = self.values.get(STARTS, [])
        self.notices: list[tuple[str, str]] = self.values.get(LOG, [])
        self.replaced: int = self.values.get(REPLACED, 0)
        self.earlier: list[str] = self.values.get(EARLIER, [])
        self.timelines = [found for name in TIMELINES if (found := self.values.get(f"schedule/{name}.json"))]

    @property
    def exists(self) -> bool:
        """Whether the folder is one of a run: any start, line of metrics or status."""
        return any(os.path.exists(self.folder / name) for name in RUN_FILES)

    @property
    def status(self) -> dict[str, Any]:
        """What status.json holds; `status` and `reason` are None where it does not say. `said` is the status in words:
        a run may have failed for lack of memory."""
        found = {"status": None, "reason": None} | self.values.get(STATUS, {})
        lacking = found["status"] == "failed" and lacks_memory(found["reason"] or "")
        return found | {"said": "out of memory" if lacking else found["status"]}

    @property
    def profile(self) -> StepProfile | None:
        """The typical step of the newest profiled ones, at the pace of the others; None without any."""
        profile = self.values.get(ACCOUNTS)
        return profile and scale_profile(profile, self.step_seconds)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of an ordinary step, without pauses; None where none is logged."""
        return ordinary_seconds(self.curves.by_step("step_seconds"), self.values.get(ACCOUNTS))

    @cached_property
    def diagnosis(self) -> dict[str, Any] | None:
        """What bounds the run: as diagnosis.json says it, unless there are newer accounts, or they are to be held
        against other hardware. None without both."""
        said, accounts = self.values.get(DIAGNOSIS), self.values.get(ACCOUNTS)
        if accounts is None or said and not self.hardware and self._changed(DIAGNOSIS) >= self._changed(ACCOUNTS):
            return said
        try:
            return to_json(diagnose_run(self.folder, self.hardware))
        except (ConfigError, OSError, ValueError):  # what is damaged is named by whoever reads it
            return None

    def _changed(self, name: str) -> float:
        return os.path.getmtime(self.folder / name)

    @property
    def start(self) -> dict[str, Any]:
        """The last start that trained; empty where none is known."""
        return self.starts[-1] if self.starts else {}

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the last start, and its processes, as {name: value}."""
        return (
            {"processes": self.start["processes"]} | typed.flatten_values(self.start["settings"]) if self.starts else {}
        )

    @property
    def steps(self) -> tuple[int, int | None]:
        """Steps done, and steps in all where they are known."""
        return max(int(self.curves.last("step") or 0), self.status.get("step", 0)), self.status.get("steps")


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The lines of a starts.jsonl that can be shown."""
    starts = deque(read_json_lines(path, START), STARTS_SHOWN)
    return [line | {"table": table_of(line.get("table"))} for line in starts]


def table_of(value: Any) -> dict[str, list[list[str]]]:
    """The table of a start; empty where it has none, or something else."""
    rows = [] if find_mismatch(value, TABLE) else [row for section in value.values() for row in section]
    return value if rows and all(len(row) == 2 for row in rows) else {}


def read_notices(path: Path) -> list[tuple[str, str]]:
    """What the console said besides lines of metrics, with the time of day: the newest `NOTICES` of the last `TAIL`
    bytes."""
    text = read_bytes(path, start=max(0, path.stat().st_size - TAIL)).decode(errors="replace")
    found = [match for line in text.splitlines() if (match := NOTICE.fullmatch(line))]
    return [(match[1], make_printable(match[2][:LETTERS])) for match in found[-NOTICES:]]


def drawn_timeline(name: str, path: Path) -> dict[str, Any]:
    """The timeline of a file as the page draws it: by rank, [kind, chunk, micro-batch, start, end, stage, part] of each
    action. An overlap is two actions, the parts 1 and 2; any other is part 0. Of many ranks the first are taken."""
    ranks, makespan = read_timeline(path)
    _, bubble, bubbles = measure_timeline(ranks, makespan)
    rows: list[list[list[Any]]] = []
    left = SPANS
    for spans in ranks:
        if rows and len(spans) > left:
            break
        left -= len(spans)
        stages = sorted({action.stage for span in spans for action in span.action.parts or (span.action,)})
        chunk = {stage: index for index, stage in enumerate(stages)}
        rows.append([])
        for span in spans[:SPANS]:
            parts: tuple[Action, ...] = span.action.parts
            rows[-1] += [
                [one.kind, chunk[one.stage], one.microbatch, span.start, span.end, one.stage, part]
                for part, one in (enumerate(parts, 1) if parts else [(0, span.action)])
            ]
    numbers = {"name": name, "makespan": makespan, "bubble": bubble, "bubbles": list(bubbles[: len(rows)])}
    return numbers | {"ranks": rows, "of": len(ranks)}
