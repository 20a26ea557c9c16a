"""Sweeps: they leave out no moment and count none twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.diagnosis.traces import TimeInterval, TraceEvent, class_coverage, first_of, nest_events, uncovered_gaps

WINDOW = TimeInterval(0, 30)
INTERVALS = st.lists(
    st.tuples(st.integers(-5, 35), st.integers(0, 12)).map(lambda pair: TimeInterval(pair[0], sum(pair))), max_size=6
)


def covers(interval: TimeInterval, moment: int) -> bool:
    return interval.start <= moment < interval.end


@given(st.lists(INTERVALS, min_size=1, max_size=4))
def test_coverage_is_that_of_each_moment(classes):
    expected: dict[int, int] = {}
    for moment in range(WINDOW.start, WINDOW.end):
        there = sum(1 << i for i, some in enumerate(classes) if any(covers(one, moment) for one in some))
        expected[there] = expected.get(there, 0) + 1
    found = {there: length for there, length in class_coverage(classes, WINDOW).items() if length}
    assert found == expected
    for there in found:
        assert first_of(there) == next((i for i in range(4) if there >> i & 1), -1)


@given(INTERVALS)
def test_gaps_are_what_nothing_covers(intervals):
    empty = [m for m in range(WINDOW.start, WINDOW.end) if not any(covers(one, m) for one in intervals)]
    assert [moment for gap in uncovered_gaps(intervals, WINDOW) for moment in range(*gap)] == empty


def tree(start: int, end: int, depth: int = 0):
    """Events one within the other: each a name, and the parts of it that have children."""
    if depth == 3 or end - start < 2:
        return st.just([(start, end)])
    inside = st.lists(st.integers(start, end), min_size=2, max_size=4, unique=True).map(sorted)
    return inside.flatmap(
        lambda cuts: st.tuples(*(tree(a, b, depth + 1) for a, b in zip(cuts[::2], cuts[1::2]))).map(
            lambda children: [(start, end), *(event for child in children for event in child)]
        )
    )


@given(tree(0, 40))
def test_own_parts_of_nested_events_are_all_of_their_thread(spans):
    events = [TraceEvent(start, end, str(number), "cpu_op", 1, {}) for number, (start, end) in enumerate(spans)]
    events.sort(key=lambda event: (event.start, -event.end))
    own = {one.event.name: one.own for one in nest_events(events)}
    moments = sorted(moment for parts in own.values() for part in parts for moment in range(*part))
    assert moments == list(range(40))
    for name, parts in own.items():
        start, end = spans[int(name)]
        assert all(start <= part.start < part.end <= end for part in parts)


def test_an_event_that_ends_late_by_rounding_is_cut():
    events = [TraceEvent(0, 10, "outer", "cpu_op", 1, {}), TraceEvent(4, 12, "inner", "cpu_op", 1, {})]
    inner, outer = nest_events(events)
    assert inner.own == (TimeInterval(4, 10),) and outer.own == (TimeInterval(0, 4),)
    assert inner.around == (events[0],) and outer.around == ()
