"""The numbers of a run's metrics, read as far as they have been written, and as few of them as a picture shows."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from trainer.observe.metrics import parse_line
from trainer.util.lines import read_lines
from trainer.util.run_folder import METRICS_FILE

PLACES = ("step", "tokens", "time")
"""What a point of a curve may stand over."""

RECENT = 200
"""Steps whose median stands for a run's speed now, as in `step_seconds_p50`."""

NAMES, LETTERS = 400, 200
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
    """What stands in a run's metrics.jsonl. `read` goes on where it stopped, so that a run can be followed.

    places: by name of `PLACES`, a value for each line. points: by metric. damaged: lines that are none, left out."""

    def __init__(self, folder: Path):
        self.path, self.identity = folder / METRICS_FILE, (0, 0)
        self._begin()

    def _begin(self) -> None:
        self.position, self.line, self.damaged = 0, b"", 0
        self.places = {name: array("d") for name in PLACES}
        self.points: dict[str, MetricPoints] = {}

    def __len__(self) -> int:
        return len(self.places["step"])

    def read(self) -> bool:
        """Takes in the lines that were added since the last call, and says whether there were any; a last line without
        its end waits for the next call. A file that no longer has the last line that was read, as a resumed run cuts
        and continues it, is read anew. Raises `OSError` and `Malformed`."""
        status = self.path.stat()
        identity = (status.st_dev, status.st_ino)
        if identity != self.identity or status.st_size < self.position or not self._goes_on():
            self._begin()
            self.identity = identity
        before = self.position
        for text in read_lines(self.path, self.position):
            self.position, self.line = self.position + len(text) + 1, text
            record = parse_line(text)
            if record is None:
                self.damaged += 1
            else:
                self._add(record)
        return self.position > before

    def _goes_on(self) -> bool:
        """Whether the last line that was read still stands where it stood."""
        if not self.position:
            return True
        return next(read_lines(self.path, self.position - len(self.line) - 1), None) == self.line

    def _add(self, record: dict[str, Any]) -> None:
        line = len(self)
        for name, column in self.places.items():
            value = record.get(name)
            column.append(math.nan if value is None else value)
        for name, value in record.items():
            if name in self.points or len(self.points) < NAMES and len(name) <= LETTERS:
                self.points.setdefault(name, MetricPoints()).add(line, value)

    @property
    def names(self) -> list[str]:
        """The metrics that have a number anywhere."""
        return [name for name, points in self.points.items() if any(map(math.isfinite, points.values))]

    def last(self, name: str) -> float | None:
        """The newest number of a metric; None where it has none."""
        values = self.points[name].values if name in self.points else ()
        return next((value for value in reversed(values) if not math.isnan(value)), None)

    def recent(self, name: str) -> float | None:
        """The median of the newest `RECENT` numbers of a metric; None where it has none."""
        found = self.points[name].finite()[-RECENT:] if name in self.points else numpy.empty(0)
        return float(numpy.median(found)) if len(found) else None

    def best(self, name: str, least: bool) -> float | None:
        """The smallest or the largest number of a metric."""
        found = self.points[name].finite() if name in self.points else numpy.empty(0)
        return None if not len(found) else float(found.min() if least else found.max())

    def by_step(self, name: str) -> list[tuple[int, float]]:
        """The numbers of a metric, each with its step."""
        points = self.points.get(name, MetricPoints())
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
