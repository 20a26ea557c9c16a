"""Two passes that run in turns: what runs when, and what becomes of errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.distributed.overlap import pass_turn, run_in_turns

THREAD = ThreadPoolExecutor(1)


class Trace:
    """What two passes did, in order: (name, number of the part)."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, int]] = []
        self.exchanges = 0
        self.inside = 0

    def part(self, name: str, number: int) -> None:
        self.inside += 1
        assert self.inside == 1, "both passes run at once"
        self.parts.append((name, number))
        self.inside -= 1

    def exchange(self) -> None:
        self.exchanges += 1

    def run(self, name: str, parts: int, fails_after: int | None = None) -> Callable[[], None]:
        def work() -> None:
            for number in range(parts):
                if number:
                    pass_turn()
                self.part(name, number)
                if number == fails_after:
                    raise ValueError(name)

        return work


def expected(first: int, second: int) -> list[tuple[str, int]]:
    """Part by part, the rest of the longer pass at the end."""
    both = [[("first", number) for number in range(first)], [("second", number) for number in range(second)]]
    found = []
    while any(both):
        for one in both:
            if one:
                found.append(one.pop(0))
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7))
def test_passes_alternate_from_turn_to_turn(first, second):
    trace = Trace()
    run_in_turns(trace.run("first", first), trace.run("second", second), trace.exchange, THREAD)
    assert trace.parts == expected(first, second)
    # Once for each change, and once for the first start of the second pass.
    names = [name for name, _ in trace.parts]
    assert trace.exchanges >= sum(one != other for one, other in zip(names, names[1:]))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from(("first", "second")), st.integers(0, 4))
def test_an_error_of_one_pass_ends_both(first, second, failing, after):
    """The other pass does nothing more: other ranks would not answer."""
    trace, parts = Trace(), {"first": first, "second": second}
    after = min(after, parts[failing] - 1)
    passes = [trace.run(name, parts[name], after if name == failing else None) for name in parts]
    with pytest.raises(ValueError, match=failing):
        run_in_turns(*passes, trace.exchange, THREAD)
    undisturbed = expected(**parts)
    assert trace.parts == undisturbed[: undisturbed.index((failing, after)) + 1]
    pass_turn()  # nothing is left behind


def test_each_pass_has_a_thread_and_its_own_state():
    """The state is exchanged with every turn, and each pass finds what it has left."""
    state, other, seen, threads = ["first"], ["second"], [], {}

    def exchange() -> None:
        state[:], other[:] = other[:], state[:]

    def work(name: str) -> Callable[[], None]:
        def steps() -> None:
            threads[name] = threading.get_ident()
            for number in range(4):
                pass_turn()
                assert state[0].startswith(name)
                state[0] = f"{name} {number}"
                seen.append(state[0])

        return steps

    run_in_turns(work("first"), work("second"), exchange, THREAD)
    assert seen == [f"{name} {number}" for number in range(4) for name in ("first", "second")]
    assert threads["first"] == threading.get_ident() != threads["second"]
