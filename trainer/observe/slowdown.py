"""A run that becomes slower than it was: noticed by its own past, and told with what grew at the same time."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median, mode
from typing import Any

from trainer.config import GuardConfig
from trainer.diagnosis.time_breakdown import AXES, COMPILER, HARDWARE, PLAN, RUNTIME
from trainer.observe.nvml import throttle_reasons

MAX_WINDOWS = 50
"""Windows of logged steps that a new one is compared with."""

NAMES = (
    *("step_seconds", "data_seconds", "straggler", "bubble"),
    *("hardware/clock_mhz", "hardware/alloc_retries", "hardware/host_cpu"),
)
"""What is compared besides reasons for lower clocks, and what profiles tell."""

PROFILED = ("host", *(f"exposed/{axis}" for axis in AXES))
"""What a line repeats of the newest profiled step. Of a slow window it counts where that step is one of its own."""

BUSY, RISE = 0.9, 0.2
"""Share of a machine's processors that is busy, and by how much more than before, for the host to be spoken of."""


class SlowdownAlert:
    """Compares windows of guard.slow_lines logged steps by their medians, so that a few long steps (compilation, an
    evaluation's first, a save in the background) do not count.

    What has been told becomes the past that is compared with: a slow-down is told once, and again if it gets worse by
    as much, or has been over meanwhile."""

    def __init__(self, guard: GuardConfig, hosts: Sequence[str] = ()):
        """hosts: by rank; of a run on one machine they are not named."""
        self.guard, self.hosts = guard, hosts
        self.restart()

    def restart(self) -> None:
        """Steps are to take another time from now on, as under a new schedule."""
        self.windows: deque[dict[str, Any]] = deque(maxlen=MAX_WINDOWS)
        self.lines: list[Mapping[str, Any]] = []

    def add(self, line: Mapping[str, Any]) -> str | None:
        """Takes a step's line of metrics. Returns what is to be told where the run has become slow."""
        self.lines.append(line)
        if len(self.lines) < self.guard.slow_lines:
            return None
        recent, past = (
            median_window(self.lines),
            min(self.windows, key=operator.itemgetter("step_seconds"), default=None),
        )
        self.lines = []
        if past is None or recent["step_seconds"] < self.guard.slow_factor * past["step_seconds"]:
            self.windows.append(recent)
            return None
        self.windows.clear()  # and the next window is the first: this one may have fast steps too
        return describe_slowdown(recent, past, self.hosts)


def median_window(lines: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians of a window, its steps and most frequent straggler, and the reasons for lower clocks that half of its
    lines have."""
    found: dict[str, Any] = {}
    fresh = [line for line in lines if (line.get("profiled_step") or 0) >= lines[0]["step"]]
    for name, some in (*((name, lines) for name in NAMES), *((name, fresh or lines) for name in PROFILED)):
        values = [value for line in some if (value := line.get(name)) is not None]
        found[name] = median(values) if values else None
    ranks = [line["straggler_rank"] for line in lines if line.get("straggler_rank") is not None]
    rank, reasons = throttled_rank_in(lines)
    return found | {
        "fresh": bool(fresh),
        "throttle": throttle_reasons_in(lines),
        "throttle_rank": rank,
        "throttle_of_rank": reasons,
        "straggler_rank": mode(ranks) if ranks else None,
        "steps": f"{lines[0]['step']} to {lines[-1]['step']}",
    }


def throttle_reasons_in(lines: Sequence[Mapping[str, Any]], key: str = "hardware/throttle") -> int:
    """The reasons for lower clocks that half of the lines have; on any rank, unless `key` says otherwise."""
    bits = [int(line.get(key) or 0) for line in lines]
    often = [bit for bit in (4, 8, 32, 64, 128) if bits and 2 * sum(bool(some & bit) for some in bits) >= len(bits)]
    return functools.reduce(operator.or_, often, 0)


def throttled_rank_in(lines: Sequence[Mapping[str, Any]]) -> tuple[int | None, int]:
    """The rank whose clocks are held down in half of the lines or more, and its reasons; None where no rank is."""
    ranks = [int(rank) for line in lines if (rank := line.get("hardware/throttle_rank")) is not None]
    if 2 * len(ranks) < len(lines) or 2 * ranks.count(rank := mode(ranks or [-1])) < len(lines):
        return None, 0
    own = [line for line in lines if line.get("hardware/throttle_rank") == rank]
    reasons = throttle_reasons_in(own, "hardware/throttle_of_rank")
    return (rank, reasons) if reasons else (None, 0)


def describe_slowdown(recent: Mapping[str, Any], past: Mapping[str, Any], hosts: Sequence[str] = ()) -> str:
    """The slow-down in words, with the causes and the layers that the numbers point to."""
    now, before = recent["step_seconds"], past["step_seconds"]
    changed = [*slowdown_causes(recent, past, hosts), *of_the_hardware(recent, past, hosts)]
    from trainer.diagnosis.verdict import say_more  # not before a run is slow

    blind = "" if recent["fresh"] else f"; {say_more(before)} would tell more"
    why = "; ".join(changed) or f"unknown: nothing that is logged has changed with it{blind}"
    return (
        f"slow: a step takes {now:.4g} s in steps {recent['steps']}, {now / before:.2f} times the {before:.4g} s of "
        f"steps {past['steps']}; {why}"
    )


def both_values(recent: Mapping[str, Any], past: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """A value now and before, where both are known."""
    pair = recent[name], past[name]
    return None if None in pair else pair


def slowdown_causes(recent: Mapping[str, Any], past: Mapping[str, Any], hosts: Sequence[str]) -> Iterator[str]:
    """What takes so much more of a step that it explains half of the time that steps take longer."""
    now, before = recent["step_seconds"], past["step_seconds"]
    half = (now - before) / 2
    if (waits := both_values(recent, past, "data_seconds")) and waits[0] - waits[1] >= half:
        yield f"data ({RUNTIME}): a step waits {waits[0]:.3g} s for its batch, and waited {waits[1]:.3g} s"
    if (shares := both_values(recent, past, "straggler")) and (shares[0] - shares[1]) * before >= half:
        yield (
            f"one rank ({RUNTIME}): {name_rank(recent['straggler_rank'], hosts)} takes {shares[0]:.2f} times "
            "its peers' "
            f"time in forward passes, where the slowest took {shares[1]:.2f} times"
        )
    for name, cause, text in SHARES:
        if name in PROFILED and not recent["fresh"]:
            continue
        if (shares := both_values(recent, past, name)) and shares[0] * now - shares[1] * before >= half:
            yield f"{cause}: {text} {shares[0] * now:.3g} s of a step, and was {shares[1] * before:.3g} s"


SHARES = (
    *(
        (f"exposed/{axis}", f"communication ({PLAN})", f"that of the {axis} axis, which nothing hides, is")
        for axis in AXES
    ),
    ("bubble", f"bubble ({PLAN})", "waiting of pipeline ranks for each other is"),
    ("host", f"host ({COMPILER} or {RUNTIME})", "time in which a device has nothing to do because of its host is"),
)
"""Metrics that are shares of a step, and what is said where one has grown."""


def name_rank(rank: int, hosts: Sequence[str]) -> str:
    """A rank, with its machine where there are several."""
    return f"rank {rank} on {hosts[rank]}" if len(set(hosts)) > 1 and rank < len(hosts) else f"rank {rank}"


def of_the_hardware(recent: Mapping[str, Any], past: Mapping[str, Any], hosts: Sequence[str]) -> Iterator[str]:
    """What has changed of devices and machines."""
    half = (recent["step_seconds"] / past["step_seconds"] - 1) / 2
    added = recent["throttle"] & ~past["throttle"]
    whose = f" on {name_rank(recent['throttle_rank'], hosts)}" if added & recent["throttle_of_rank"] else ""
    reasons = throttle_reasons(added) + whose * bool(added)
    if (clocks := both_values(recent, past, "hardware/clock_mhz")) and clocks[0] and clocks[1] / clocks[0] - 1 >= half:
        because = f" ({reasons})" if reasons else ""
        yield f"{HARDWARE}: clocks fell from {clocks[1]:.0f} to {clocks[0]:.0f} MHz{because}"
    elif reasons:
        yield f"{HARDWARE}: clocks are held down by {reasons}"
    if (busy := both_values(recent, past, "hardware/host_cpu")) and busy[0] >= max(BUSY, busy[1] + RISE):
        yield (
            f"host processors ({HARDWARE}): {busy[0]:.0%} of a machine's are busy, and {busy[1]:.0%} were: look for "
            "other programs there"
        )
    if (retries := both_values(recent, past, "hardware/alloc_retries")) and retries[0] > retries[1]:
        yield (
            f"memory ({HARDWARE}): a GPU's allocator runs out of memory and gives its cache back; set activation=auto "
            "(with a smaller activation.memory where it is set), another batch.micro_size, or "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
