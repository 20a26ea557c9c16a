"""What training stands still for between steps: evaluations and saves. How long, and whether it has become too long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

from trainer.config import GuardConfig
from trainer.diagnosis.time_breakdown import RUNTIME
from trainer.util.tables import format_duration

PAUSES = {
    "evaluation": ("evaluations", "eval.every, eval.sequences"),
    "checkpoint": ("saves", "checkpoint.every, checkpoint.asynchronous, the disk of run.dir"),
}
"""Name of a pause, as in the metrics NAME_seconds: what it is for, and what decides how long it takes."""

COMPARED = 3
"""Pauses whose median counts, so that a single long one (the first, which compiles; a disk that was busy) does not."""


class PauseTimes:
    """Seconds that training has stood still, by name, for any number of readers that each count by themselves."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PAUSES, 0.0)
        self.seen: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def spent(self, name: str) -> Iterator[None]:
        """Counts what goes on meanwhile."""
        before = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - before

    def since(self, reader: str) -> dict[str, float]:
        """Seconds by name since the reader asked last."""
        before = self.seen.get(reader, dict.fromkeys(PAUSES, 0.0))
        self.seen[reader] = dict(self.seconds)
        return {name: seconds - before[name] for name, seconds in self.seconds.items()}


class PauseSegment(NamedTuple):
    """The steps up to a pause, its own share of them and theirs, in seconds a step."""

    first: int
    last: int
    pause: float
    step: float


class PauseGrowth:
    """Whether pauses of one kind slow a run down: by guard.slow_factor against the stretches in which they took least.

    Each stretch ends with a pause, however many steps lie between two. It is told once, and again if it gets worse by
    as much."""

    def __init__(self, name: str, guard: GuardConfig):
        self.name, self.guard = name, guard
        self.lines: list[Mapping[str, Any]] = []
        self.stretches: list[PauseSegment] = []
        self.least: PauseSegment | None = None

    def add(self, line: Mapping[str, Any]) -> str | None:
        """Takes a step's line of metrics. Returns what is to be told."""
        self.lines.append(line)
        if not line.get(f"{self.name}_seconds") or len(self.lines) == 1:
            return None
        self.stretches.append(self.stretch())
        self.lines = [line]  # whose step is the one before the next stretch
        if len(self.stretches) < COMPARED:
            return None
        parts, self.stretches = self.stretches, []
        recent = PauseSegment(
            parts[0].first, parts[-1].last, median(one.pause for one in parts), median(one.step for one in parts)
        )
        past = self.least
        if past is not None and recent.pause - past.pause >= (self.guard.slow_factor - 1) * (past.pause + past.step):
            self.least = recent
            return self.told(recent, past)
        self.least = min((recent, past or recent), key=lambda one: one.pause)
        return None

    def stretch(self) -> PauseSegment:
        """Of the lines since the last pause, the first of which only says where they begin."""
        before, lines = self.lines[0]["step"], self.lines[1:]
        steps = lines[-1]["step"] - before
        weighed = [(line["step"] - last["step"], line) for last, line in zip(self.lines, lines)]
        pause, step = (sum(count * (line.get(key) or 0.0) for count, line in weighed) / steps for key in self.keys)
        return PauseSegment(before + 1, lines[-1]["step"], pause, step)

    @property
    def keys(self) -> tuple[str, str]:
        return f"{self.name}_seconds", "step_seconds"

    def told(self, recent: PauseSegment, past: PauseSegment) -> str:
        what, settings = PAUSES[self.name]
        now, before = recent.pause + recent.step, past.pause + past.step
        return (
            f"slow: a step takes {now:.4g} s with the {what} beside it in steps {recent.first} to {recent.last}, and "
            f"took {before:.4g} s in steps {past.first} to {past.last}; {self.name} ({RUNTIME}): "
            f"{format_duration(recent.pause)} of it for {what}, {recent.pause / now:.0%}, and before "
            f"{format_duration(past.pause)}, "
            f"{past.pause / before:.0%}; look at {settings}"
        )
