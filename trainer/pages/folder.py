"""What the folder of a run says of it, as plain values. What is missing is left out, and what is damaged is named."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import ConfigError, typed
from trainer.diagnosis import time_breakdown
from trainer.diagnosis.time_breakdown import StepProfile, build_profile, ordinary_seconds, scale_profile
from trainer.diagnosis.verdict import to_json
from trainer.observe.diagnose_run import diagnose_run
from trainer.pages import verdict
from trainer.pages.curves import MetricCurves
from trainer.planning.schedules.ir import Action
from trainer.planning.schedules.timeline import measure_timeline, read_timeline
from trainer.util.lines import count_lines, read_lines
from trainer.util.machine import lacks_memory
from trainer.util.reading import (
    Shape,
    find_mismatch,
    make_printable,
    parse_json,
    read_bytes,
    read_json,
    shorten_foreign,
)
from trainer.util.run_folder import DIAGNOSIS, EARLIER, LOG, METRICS_FILE, REPLACED, RUN_FILES, STARTS, STATUS

# Files of a folder that others write, read again when they have changed.


class FoundFile(NamedTuple):
    """What a file was when it was looked at: a stamp that grows with it, None where there is none; its value, None
    where there is none or it is damaged; and the problem with it."""

    stamp: tuple[int, ...] | None = None
    value: Any = None
    problem: str | None = None


class WatchedFiles:
    """Some files of a folder. sources: by name what reads one. `read` looks again at what has changed since."""

    def __init__(self, folder: Path, sources: dict[str, Callable[[Path], Any]]):
        self.folder, self._sources = folder, sources
        self._found = dict.fromkeys(sources, FoundFile())

    def read(self) -> bool:
        """Reads the files that have changed since the last call, and says whether any has."""
        before = self._found
        self._found = {name: self._look(name, before[name]) for name in self._sources}
        return any(self._found[name] is not before[name] for name in before)

    def _look(self, name: str, before: FoundFile) -> FoundFile:
        path, stamp = self.folder / name, None
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            return before if stamp == before.stamp else FoundFile(stamp, self._sources[name](path))
        except FileNotFoundError:
            return FoundFile() if before.stamp else before
        except (OSError, ConfigError, ValueError) as error:
            return FoundFile(stamp, None, f"{name}: {shorten_foreign(error)}")

    @property
    def problems(self) -> list[str]:
        """What is damaged, and left out."""
        return [found.problem for found in self._found.values() if found.problem]


def json_lines(path: Path, shape: Shape, most: int) -> list[dict[str, Any]]:
    """The last `most` lines of a file that are JSON of a shape; others are passed over."""
    found = deque[dict[str, Any]](maxlen=most)
    for text in read_lines(path, rest=True):
        try:
            line = parse_json(text)
        except ValueError:
            continue
        if not find_mismatch(line, shape):
            found.append(line)
    return [*found]


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


class RunFolder(WatchedFiles):
    """A run as its folder has it.

    label: a short name. curves: of metrics.jsonl. hardware: a file of `configs/hardware`, or its path, whose peaks it
    is held against; '': that of its device."""

    def __init__(self, label: str, folder: Path, hardware: str = ""):
        self.label, self.hardware, self.curves = label, hardware, MetricCurves(folder)
        sources: dict[str, Callable[[Path], Any]] = {
            METRICS_FILE: lambda path: self.curves.read(),
            STATUS: lambda path: read_json(path, STATUS_SHAPE, "it is left out"),
            STARTS: read_starts,
            LOG: read_notices,
            REPLACED: count_lines,
            EARLIER: lambda path: sorted((found.name for found in path.iterdir() if found.name.isdecimal()), key=int),
            DIAGNOSIS: lambda path: read_json(path, verdict.SHAPE, "python -m trainer.diagnose writes it anew"),
            time_breakdown.ACCOUNTS: lambda path: build_profile(time_breakdown.read_breakdowns(path.parent)),
            **{f"schedule/{name}.json": partial(drawn_timeline, name) for name in TIMELINES},
        }
        super().__init__(folder, sources)
        self._examined: tuple[FoundFile, dict[str, Any] | None] = (FoundFile(), None)

    @property
    def exists(self) -> bool:
        """Whether the folder is one of a run: any start, line of metrics or status."""
        return any(self._found[name].stamp for name in RUN_FILES)

    @property
    def problems(self) -> list[str]:
        """What is damaged, and left out."""
        lines = f"{METRICS_FILE}: {self.curves.damaged} damaged lines are left out"
        return [lines] * bool(self.curves.damaged) + super().problems

    @property
    def status(self) -> dict[str, Any]:
        """What status.json holds; `status` and `reason` are None where it does not say. `said` is the status in words:
        a run may have failed for lack of memory."""
        found = {"status": None, "reason": None} | (self._found[STATUS].value or {})
        lacking = found["status"] == "failed" and lacks_memory(found["reason"] or "")
        return found | {"said": "out of memory" if lacking else found["status"]}

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The lines of starts.jsonl, with the `table` that each start printed."""
        return self._found[STARTS].value or []

    @property
    def notices(self) -> list[tuple[str, str]]:
        """What the console said besides metrics, with its time; the newest last."""
        return self._found[LOG].value or []

    @property
    def replaced(self) -> int:
        """Lines of metrics whose steps were trained again."""
        return self._found[REPLACED].value or 0

    @property
    def earlier(self) -> list[str]:
        """Folders of earlier runs in the same place."""
        return self._found[EARLIER].value or []

    @property
    def profile(self) -> StepProfile | None:
        """The typical step of the newest profiled ones, at the pace of the others; None without any."""
        profile = self._found[time_breakdown.ACCOUNTS].value
        return profile and scale_profile(profile, ordinary_seconds(self.curves.by_step("step_seconds"), profile))

    @property
    def diagnosis(self) -> dict[str, Any] | None:
        """What bounds the run: as diagnosis.json says it, unless there are newer accounts, or they are to be held
        against other hardware. None without both."""
        said, accounts = self._found[DIAGNOSIS], self._found[time_breakdown.ACCOUNTS]
        if accounts.value is None or said.value and said.stamp >= accounts.stamp and not self.hardware:
            return said.value
        if self._examined[0] is not accounts:
            self._examined = (accounts, self._examine())
        return self._examined[1]

    def _examine(self) -> dict[str, Any] | None:
        try:
            return to_json(diagnose_run(self.folder, self.hardware))
        except (ConfigError, OSError, ValueError):  # what is damaged is named by whoever reads it
            return None

    @property
    def timelines(self) -> list[dict[str, Any]]:
        """Of the pipeline's schedule, as the page draws them."""
        return [found.value for name in TIMELINES if (found := self._found[f"schedule/{name}.json"]).value]

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
    return [line | {"table": table_of(line.get("table"))} for line in json_lines(path, START, STARTS_SHOWN)]


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
