"""A run that becomes slower than it was: noticed by its own past, and told with what grew at the same time."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median, mode
from typing import Any

from trainer.config import GuardConfig
from trainer.observe.nvml import words

KEPT = 50
"""Windows of logged steps that a new one is compared with."""

NAMES = ("step_seconds", "data_seconds", "straggler", "hardware/clock_mhz", "hardware/alloc_retries")
"""What is compared besides reasons for lower clocks."""


class Slowdown:
    """Compares windows of guard.slow_lines logged steps by their medians, so that a few long steps (compilation, an
    evaluation's first, a save in the background) do not count.

    What has been told becomes the past that is compared with: a slow-down is told once, and again if it gets worse by
    as much, or has been over meanwhile."""

    def __init__(self, guard: GuardConfig):
        self.guard = guard
        self.restart()

    def restart(self) -> None:
        """Steps are to take another time from now on, as under a new schedule."""
        self.windows: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.lines: list[Mapping[str, Any]] = []

    def add(self, line: Mapping[str, Any]) -> str | None:
        """Takes a step's line of metrics. Returns what is to be told where the run has become slow."""
        self.lines.append(line)
        if len(self.lines) < self.guard.slow_lines:
            return None
        recent, past = typical(self.lines), min(self.windows, key=operator.itemgetter("step_seconds"), default=None)
        self.lines = []
        if past is None or recent["step_seconds"] < self.guard.slow_factor * past["step_seconds"]:
            self.windows.append(recent)
            return None
        self.windows.clear()  # and the next window is the first: this one may have fast steps too
        return told(recent, past)


def typical(lines: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians of a window, its steps and most frequent straggler, and the reasons for lower clocks that half of its
    lines have."""
    found: dict[str, Any] = {}
    for name in NAMES:
        values = [value for line in lines if (value := line.get(name)) is not None]
        found[name] = median(values) if values else None
    ranks = [line["straggler_rank"] for line in lines if line.get("straggler_rank") is not None]
    return found | {
        "throttle": held_down(lines),
        "straggler_rank": mode(ranks) if ranks else None,
        "steps": f"{lines[0]['step']} to {lines[-1]['step']}",
    }


def held_down(lines: Sequence[Mapping[str, Any]]) -> int:
    """The reasons for lower clocks, on any rank, that half of the lines have."""
    bits = [int(line.get("hardware/throttle") or 0) for line in lines]
    often = [bit for bit in (4, 8, 32, 64, 128) if bits and 2 * sum(bool(some & bit) for some in bits) >= len(bits)]
    return functools.reduce(operator.or_, often, 0)


def told(recent: Mapping[str, Any], past: Mapping[str, Any]) -> str:
    """The slow-down in words, with the layers that the numbers point to."""
    now, before = recent["step_seconds"], past["step_seconds"]
    why = "; ".join(causes(recent, past)) or "unknown: neither data, ranks, clocks nor memory have changed with it"
    return (
        f"slow: a step takes {now:.4g} s in steps {recent['steps']}, {now / before:.2f} times the {before:.4g} s of "
        f"steps {past['steps']}; {why}"
    )


def causes(recent: Mapping[str, Any], past: Mapping[str, Any]) -> Iterator[str]:
    """What has changed enough to explain half of the time that steps take longer."""
    now, before = recent["step_seconds"], past["step_seconds"]
    half = (now / before - 1) / 2

    def both(name: str) -> tuple[float, float] | None:
        pair = recent[name], past[name]
        return None if None in pair else pair

    if (waits := both("data_seconds")) and waits[0] - waits[1] >= half * before:
        yield f"data: a step waits {waits[0]:.3g} s for its batch, and waited {waits[1]:.3g} s"
    if (shares := both("straggler")) and shares[0] - shares[1] >= half:
        yield (
            f"one rank: rank {recent['straggler_rank']} takes {shares[0]:.2f} times its peers' time in forward passes, "
            f"where the slowest took {shares[1]:.2f} times"
        )
    reasons = words(recent["throttle"] & ~past["throttle"])
    if (clocks := both("hardware/clock_mhz")) and clocks[0] and clocks[1] / clocks[0] - 1 >= half:
        because = f" ({reasons})" if reasons else ""
        yield f"hardware: clocks fell from {clocks[1]:.0f} to {clocks[0]:.0f} MHz{because}"
    elif reasons:
        yield f"hardware: clocks are held down by {reasons}"
    if (retries := both("hardware/alloc_retries")) and retries[0] > retries[1]:
        yield (
            "memory: a GPU's allocator runs out of memory and gives its cache back; set activation=auto (with a "
            "smaller activation.memory where it is set), another batch.micro_size, or "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
