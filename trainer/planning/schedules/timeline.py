"""Timelines of pipelines, and their files: what every rank computed and when, planned or measured.

A timeline holds one sequence of spans for each rank, in seconds from the start of the step. Its makespan is the end of
its last span, or a given later time, since gradients may still be reduced after the last span. A rank's bubble is the
share of the makespan in which the rank does not compute."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.planning.schedules.ir import COMPUTE, parse_action
from trainer.planning.schedules.simulate import ActionSpan
from trainer.util.files import write_atomic
from trainer.util.reading import parse_json, read_bytes, shorten_foreign

LONGEST = 1e9
"""Seconds, some thirty years: no step is longer, and no sum of such numbers is infinite."""

Timeline = Sequence[Sequence[ActionSpan]]


def idle_gaps(spans: Iterable[ActionSpan], makespan: float) -> list[tuple[float, float]]:
    """The gaps (start, length) between the computations of one rank, from 0 to `makespan`."""
    gaps, done = [], 0.0
    computed = [(start, end) for action, start, end in spans if action.parts or action.kind in COMPUTE]
    for start, end in [*sorted(computed), (makespan, makespan)]:
        if start - done > 1e-9 * makespan:  # more than rounding leaves between two actions
            gaps.append((done, start - done))
        done = max(done, end)
    return gaps


def measure_timeline(ranks: Timeline, makespan: float | None = None) -> tuple[float, float, tuple[float, ...]]:
    """A timeline's makespan in seconds (at least `makespan`), its bubble (the mean over ranks), and each rank's bubble.

    Bubbles are shares of the makespan, 0 to 1.
    """
    makespan = max([makespan or 0.0, *(span.end for spans in ranks for span in spans)])
    bubbles = tuple(
        sum(length for _, length in idle_gaps(spans, makespan)) / makespan if makespan else 0.0 for spans in ranks
    )
    return makespan, sum(bubbles) / len(bubbles) if bubbles else 0.0, bubbles


def write_timeline(path: Path, ranks: Timeline, makespan: float | None = None) -> None:
    """Writes one timeline as JSON: makespan, bubble, and by rank its actions with start and end in seconds.

    Raises `OSError` when the file cannot be written.
    """
    makespan, bubble, _ = measure_timeline(ranks, makespan)
    rows = [
        json.dumps(
            [{"action": str(action), "start": start, "end": end} for action, start, end in spans], allow_nan=False
        )
        for spans in ranks
    ]
    numbers = f'"makespan": {json.dumps(makespan)}, "bubble": {json.dumps(bubble)}'
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, f'{{{numbers}, "ranks": [\n' + ",\n".join(rows) + "\n]}\n")


def read_timeline(path: Path) -> tuple[tuple[tuple[ActionSpan, ...], ...], float]:
    """The timeline that `write_timeline` wrote, and its makespan. Raises `ConfigError` naming the file and what is
    wrong."""
    try:
        content = parse_json(read_bytes(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read ({error.strerror})") from None
    except ValueError:
        raise ConfigError(f"{path}: not JSON; the file is damaged") from None
    rows = content.get("ranks") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not any(rows) or not all(isinstance(row, list) for row in rows):
        raise ConfigError(f"{path}: no actions under 'ranks'; the file is damaged")
    ranks = tuple(
        tuple(_span(entry, f"{path}, rank {rank}, action {position}") for position, entry in enumerate(row))
        for rank, row in enumerate(rows)
    )
    makespan, last = content.get("makespan"), measure_timeline(ranks)[0]
    if not isinstance(makespan, (int, float)) or not last <= makespan < LONGEST:
        raise ConfigError(
            f"{path}: makespan {shorten_foreign(makespan)}, but the last action ends at {last}; the file is damaged"
        )
    return ranks, makespan


def _span(entry: Any, where: str) -> ActionSpan:
    try:
        span = ActionSpan(parse_action(entry["action"]), float(entry["start"]), float(entry["end"]))
    except (ConfigError, AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: no action with start and end; the file is damaged") from None
    if not -LONGEST < span.start <= span.end < LONGEST:  # clocks of ranks may put a start before 0
        raise ConfigError(
            f"{where}: {span.action} from {span.start} to {span.end} is no time in a step; the file is damaged"
        )
    return span
