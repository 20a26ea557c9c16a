"""A run that becomes slow says so once, names the slow rank, and points to `trainer diagnose`; one that does not is
silent."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import GuardConfig
from trainer.diagnosis.time_breakdown import find_straggler, logged_ratios, peer_ratios
from trainer.observe.slowdown import PAUSES, PauseTimes, SlowdownAlert

LINES, HOSTS, EVERY = 8, ["a", "b", "b", "c"], 10
RUN = "runs/my run"


def told(*parts, lines=LINES, factor=1.25, hosts=HOSTS):
    """The messages about steps that are given as (number, seconds, changes of their metrics)."""
    alert, said, step = SlowdownAlert(GuardConfig(slow_factor=factor, slow_lines=lines), RUN, hosts), [], 0
    for count, seconds, changes in parts:
        for _ in range(count):
            step += 1
            said += alert.add({"step": step, "step_seconds": seconds, **changes})
    return said


def told_of_pauses(*parts, name="evaluation", lines=1):
    """The messages about (number of pauses, seconds of a step, seconds of each pause). lines: steps between lines."""
    alert, said, step, waiting = SlowdownAlert(GuardConfig(slow_lines=10**6), RUN), [], 0, 0.0
    for count, seconds, pause in parts:
        for _ in range(count * EVERY):
            step += 1
            if step % lines == 0:
                said += alert.add({"step": step, "step_seconds": seconds, f"{name}_seconds": waiting / lines})
                waiting = 0.0
            if step % EVERY == 0:  # after its line
                waiting += pause
    return said


def test_a_slow_down_is_told_with_where_it_begins_and_what_to_do():
    [text] = told((4 * LINES, 1.0, {}), (6 * LINES, 1.4, {}))
    assert text == "slow: a step takes 1.4 s since step 33, 40% above the 1 s before: trainer diagnose 'runs/my run'"


@pytest.mark.parametrize("hosts, where", [(HOSTS, "rank 3 on c"), (["a"] * 4, "rank 3"), ([], "rank 3")])
def test_the_rank_that_slows_a_run_down_is_named(hosts, where):
    usual, late = ({"straggler": ratio, "straggler_rank": rank} for ratio, rank in ((1.02, 1), (1.4, 3)))
    [text] = told((4 * LINES, 1.0, usual), (6 * LINES, 1.4, late), hosts=hosts)
    assert f"above the 1 s before; {where} takes 1.40 times its peers' time in forward passes: trainer" in text
    [text] = told((8 * LINES, 1.4, late), hosts=hosts)  # slow from the start, so nothing rises
    assert text.startswith(f"slow: {where} takes 1.40 times its peers' time")


@pytest.mark.parametrize("share, named", [(1.0, True), (0.7, True), (0.4, False)])
@pytest.mark.parametrize("ratio", [1.1, 1.5])
def test_a_rank_is_named_that_is_slow_in_most_steps(share, ratio, named):
    alert, said = SlowdownAlert(GuardConfig(slow_factor=1.25, slow_lines=10), RUN, HOSTS), []
    for step in range(1, 100):
        late = step % 10 < 10 * share
        values = {"straggler": ratio + 0.001 * (step % 3), "straggler_rank": 2 if late else step % 2}
        said += alert.add({"step": step, "step_seconds": 1.0, **values})
    assert len(said) == (named and ratio > 1.25), said


def test_each_slow_down_is_told_once():
    assert len(told((50, 1.0, {}), (500, 1.5, {}))) == 1
    assert len(told((50, 1.0, {}), (50, 1.5, {}), (50, 2.5, {}))) == 2, "worse by as much again"
    assert len(told((50, 1.0, {}), (50, 1.5, {}), (50, 1.0, {}), (50, 1.5, {}))) == 2, "over meanwhile"
    creeping = [(LINES, 1.01**number, {}) for number in range(30)]
    assert len(told(*creeping)) == 1


@given(st.integers(0, 10**6), st.floats(1e-3, 100))
def test_noise_and_rare_long_steps_are_no_slow_down(seed, seconds):
    """Compilation in the first step, evaluations and saves beside every third step at most; ranks late in turns."""
    draw, alert = random.Random(seed), SlowdownAlert(GuardConfig(slow_lines=LINES), RUN, HOSTS)
    for step in range(1, 20 * LINES):
        long = draw.choice([1, 1, 10]) if step % 3 == 0 else 1
        line = {"step": step, "step_seconds": seconds * draw.uniform(1, 1.2) * long * (100 if step == 1 else 1)}
        line |= {"straggler": draw.uniform(1, 1.2), "straggler_rank": draw.randrange(4)}
        assert not alert.add(line)


def test_another_schedule_begins_anew():
    alert = SlowdownAlert(GuardConfig(slow_lines=LINES), RUN)
    for step in range(1, 8 * LINES):
        if step == 4 * LINES:
            alert.restart()
        assert not alert.add({"step": step, "step_seconds": 1.0 if step < 4 * LINES else 3.0})


@pytest.mark.parametrize("lines", [1, 5, 20])
@pytest.mark.parametrize("name", PAUSES)
def test_a_pause_that_takes_a_growing_share_is_told(name, lines):
    [text] = told_of_pauses((12, 1.0, 1.0), (36, 1.0, 5.0), name=name, lines=lines)
    assert text.startswith(f"slow: a step with {PAUSES[name]} takes 1.5 s since step ")
    assert text.endswith("36% above the 1.1 s before: trainer diagnose 'runs/my run'")


def test_of_pauses_that_come_more_often_as_well():
    alert, said = SlowdownAlert(GuardConfig(slow_lines=10**6), RUN), []
    for step in range(1, 400):
        due = step % (4 if step > 200 else 50) == 1
        said += alert.add({"step": step, "step_seconds": 1.0, "checkpoint_seconds": 2.0 * due})
    assert len(said) == 1 and "a step with saves takes 1.5 s since" in said[0]


def test_each_pause_is_told_once():
    assert len(told_of_pauses((12, 1.0, 1.0), (60, 1.0, 5.0))) == 1
    assert len(told_of_pauses((12, 1.0, 1.0), (60, 1.0, 5.0), (60, 1.0, 20.0))) == 2, "worse by as much again"
    again = (12, 1.0, 1.0), (30, 1.0, 5.0), (30, 1.0, 1.0), (30, 1.0, 5.0)
    assert len(told_of_pauses(*again)) == 2, "over meanwhile"


def test_a_longer_pause_that_hardly_slows_the_run_down_is_not_told():
    assert not told_of_pauses((12, 1.0, 0.1), (60, 1.0, 2.0)), "twenty times as long, and a fifth of a step"
    assert not told_of_pauses((12, 1.0, 5.0), (60, 0.2, 5.0)), "faster steps, so that its share is larger"
    assert not told_of_pauses((1, 1.0, 50.0), (60, 1.0, 1.0)), "the first compiles"


@given(st.integers(0, 10**6), st.floats(0.01, 10), st.sampled_from([1, 3, 10, 30]))
def test_noise_of_pauses_is_no_growth(seed, seconds, every):
    """Pauses that vary by a fifth, and a rare one that takes ten times as long."""
    draw, alert = random.Random(seed), SlowdownAlert(GuardConfig(slow_lines=10**6), RUN)
    recent = [False] * 2  # a rare one has two usual ones beside it
    for step in range(1, 600):
        pause = 0.0
        if step % every == 0:
            rare = not any(recent) and draw.random() < 0.2
            recent = [*recent[1:], rare]
            pause = seconds * draw.uniform(1, 1.2) * (10 if rare else 1)
        line = {"step": step, "step_seconds": seconds * draw.uniform(1, 1.2), "evaluation_seconds": pause}
        assert not alert.add(line)


def test_readers_of_pauses_count_by_themselves():
    pauses = PauseTimes()
    with pauses.spent("evaluation"):
        pass
    first = pauses.since("log")
    with pauses.spent("evaluation"):
        pass
    second, whole = pauses.since("log"), pauses.since("profiles")
    assert whole["evaluation"] == pytest.approx(first["evaluation"] + second["evaluation"]) and first["evaluation"] > 0
    assert whole["checkpoint"] == 0 and pauses.since("log") == {"evaluation": 0, "checkpoint": 0}


def test_a_rank_is_compared_with_the_ranks_that_do_the_same_work():
    def ratios(seconds, roles):
        return peer_ratios(dict(enumerate(seconds)), dict(enumerate(roles)))

    assert ratios([1.0, 1.0, 3.0, 2.0], [0, 0, 1, 1]) == {0: 1, 1: 1, 2: 1.5, 3: 1}  # stages differ by right
    assert ratios([1.0, 1.0, 1.1, 2.0], [0] * 4)[3] == pytest.approx(2.0)
    assert not ratios([5.0, 1.0], [0, 1]) and not ratios([0.0, 0.0], [0, 0])


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(1, 10)), min_size=1, max_size=30))
def test_the_straggler_is_the_rank_that_most_steps_name(steps):
    found = find_straggler(logged_ratios({"straggler_rank": rank, "straggler": ratio} for rank, ratio in steps))
    counts = [[rank for rank, _ in steps].count(rank) for rank in range(4)]
    own = [ratio for rank, ratio in steps if rank == found.rank]
    assert counts[found.rank] == max(counts) and found.steadily == pytest.approx(max(counts) / len(steps))
    assert min(own) <= found.ratio <= max(own)
    assert found.certain <= (len(own) > 1)


def test_without_peers_there_is_no_straggler():
    assert find_straggler([{}, {}]) is None
    assert not logged_ratios([{"straggler": None, "straggler_rank": None}, {"step": 1}])
