"""Sweeps over intervals: which of them cover each moment of a window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class TimeInterval(NamedTuple):
    """From `start` up to `end`, in whole nanoseconds, so that sums are exact."""

    start: int
    end: int


def class_coverage(classes: Iterable[Iterable[TimeInterval]], window: TimeInterval) -> dict[int, int]:
    """Nanoseconds of the window by the set of classes that have an interval there, as a number whose bit i stands for
    the i-th class. They add up to the window exactly; 0 is the time that none covers."""
    edges = sorted(
        edge
        for place, intervals in enumerate(classes)
        for start, end in intervals
        if (clipped := (max(start, window.start), min(end, window.end)))[0] < clipped[1]
        for edge in ((clipped[0], place, 1), (clipped[1], place, -1))
    )
    seconds: dict[int, int] = defaultdict(int)
    open_now: dict[int, int] = defaultdict(int)
    covered, now = 0, window.start
    for moment, place, change in edges:
        if moment > now:
            seconds[covered] += moment - now
            now = moment
        open_now[place] += change
        bit = 1 << place
        covered = covered | bit if open_now[place] else covered & ~bit
    seconds[covered] += window.end - now
    return dict(seconds)


def first_of(covered: int) -> int:
    """The first class of a set as in `class_coverage`; -1 for none."""
    return (covered & -covered).bit_length() - 1


def uncovered_gaps(intervals: Iterable[TimeInterval], window: TimeInterval) -> Iterator[TimeInterval]:
    """The parts of the window that no interval covers, in order."""
    now = window.start
    for start, end in sorted(intervals):
        if start > now:
            yield TimeInterval(now, min(start, window.end))
        now = max(now, end)
        if now >= window.end:
            return
    yield TimeInterval(now, window.end)
