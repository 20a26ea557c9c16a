"""Notices while a run trains that it has become slower than it was, and which rank is slow. `trainer diagnose` says
why."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from trainer.config import GuardConfig
from trainer.diagnosis.time_breakdown import Straggler, find_straggler, logged_ratios

MAX_WINDOWS = 50
"""Earlier windows that a new one is compared with."""

PAUSES = {"evaluation": "evaluations", "checkpoint": "saves"}
"""What training stands still for between steps, as in the metrics NAME_seconds, and what a message calls it."""

STEP = "step_seconds"
"""Metric: seconds of a step, without pauses."""

COMPARED = 3
"""Pauses in a window: the median leaves out a single long one, such as the first, which compiles."""


class PauseTimes:
    """Seconds that training has stood still, by name, for any number of readers that each count by themselves."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PAUSES, 0.0)
        self.seen: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def spent(self, name: str) -> Iterator[None]:
        """Counts the time inside the context."""
        before = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - before

    def since(self, reader: str) -> dict[str, float]:
        """Seconds by name since the reader asked last."""
        before = self.seen.get(reader, dict.fromkeys(PAUSES, 0.0))
        self.seen[reader] = dict(self.seconds)
        return {name: seconds - before[name] for name, seconds in self.seconds.items()}


class Rise(NamedTuple):
    """since: the first slow step; now, before: seconds a step."""

    since: int
    now: float
    before: float


class LevelAlert:
    """Compares windows of `size` values by their medians, so that a few long steps (compilation, a save in the
    background) do not count, with the lowest earlier window.

    A window that is reported becomes the past that is compared with: a slowdown is reported once, and again if it gets
    worse by the same factor, or has been over meanwhile."""

    def __init__(self, size: int, factor: float):
        self.size, self.factor = size, factor
        self.windows: deque[tuple[float, float]] = deque(maxlen=MAX_WINDOWS)
        self.values: list[tuple[int, float, float]] = []

    def add(self, step: int, seconds: float, rest: float = 0.0) -> Rise | None:
        """Returns a rise of `seconds` that makes a whole step, `seconds` and `rest`, `factor` times as long."""
        self.values.append((step, seconds, rest))
        if len(self.values) < self.size:
            return None
        steps, *parts = zip(*self.values)
        now, others = map(median, parts)
        before, self.values = min(self.windows, default=None), []
        if before is None or now - before[0] < (self.factor - 1) * sum(before):
            self.windows.append((now, others))
            return None
        self.windows.clear()  # and the next window is the first: this one may have fast steps too
        return Rise(steps[0], now + others, sum(before))


class SlowdownAlert:
    """Reads the metrics of logged steps, and reports steps, evaluations and saves that have become slower by
    guard.slow_factor, and a rank that is slower than its peers by as much.

    folder: of the run; hosts: by rank, which are named where there are several."""

    def __init__(self, guard: GuardConfig, folder: str, hosts: Sequence[str] = ()):
        self.guard, self.hosts = guard, hosts
        self.way_on = f"trainer diagnose {shlex.quote(folder)}"
        self.restart()

    def restart(self) -> None:
        """Forgets the past: steps are to take another time from now on, as under a new schedule."""
        self.steps = LevelAlert(self.guard.slow_lines, self.guard.slow_factor)
        self.pauses = {name: LevelAlert(COMPARED, self.guard.slow_factor) for name in PAUSES}
        self.lines: list[Mapping[str, Any]] = []
        self.sums = {name: [0, 0.0, 0.0] for name in PAUSES}  # steps since the last pause, seconds in it and in steps
        self.last: int | None = None
        self.straggler: int | None = None

    def add(self, line: Mapping[str, Any]) -> list[str]:
        """Takes the metrics of a logged step. Returns messages, one for each thing that has become slow."""
        self.lines.append(line)
        steps, self.last = 0 if self.last is None else line["step"] - self.last, line["step"]
        found = self.steps.add(line["step"], line[STEP])
        rises = {what: self._add_pause(name, line, steps) for name, what in PAUSES.items()}
        said = [self._describe(rise, what) for what, rise in rises.items() if rise]
        if len(self.lines) < self.guard.slow_lines:
            return said
        slow, self.lines = find_straggler(logged_ratios(self.lines)), []
        slow = slow if slow and slow.is_slow(self.guard.slow_factor) else None
        if found:
            said.append(self._describe(found, straggler=slow))
        elif slow and slow.rank != self.straggler:
            said.append(f"slow: {self._name(slow)}: {self.way_on}")
        self.straggler = slow.rank if slow else None
        return said

    def _add_pause(self, name: str, line: Mapping[str, Any], steps: int) -> Rise | None:
        """Spreads a pause over the steps since the last one, however many they are."""
        pause = line.get(f"{name}_seconds") or 0.0
        sums = self.sums[name] = [
            sum(pair) for pair in zip(self.sums[name], (steps, steps * pause, steps * line[STEP]))
        ]
        if not pause or not sums[0]:
            return None
        self.sums[name] = [0, 0.0, 0.0]
        return self.pauses[name].add(line["step"] - int(sums[0]) + 1, sums[1] / sums[0], sums[2] / sums[0])

    def _describe(self, rise: Rise, pauses: str = "", straggler: Straggler | None = None) -> str:
        what = f" with {pauses}" if pauses else ""
        who = f"; {self._name(straggler)}" if straggler else ""
        more = rise.now / rise.before - 1
        return (
            f"slow: a step{what} takes {rise.now:.4g} s since step {rise.since}, {more:.0%} above the "
            f"{rise.before:.4g} s before{who}: {self.way_on}"
        )

    def _name(self, slow: Straggler) -> str:
        several = len(set(self.hosts)) > 1 and slow.rank < len(self.hosts)
        where = f" on {self.hosts[slow.rank]}" if several else ""
        return f"rank {slow.rank}{where} takes {slow.ratio:.2f} times its peers' time in forward passes"
