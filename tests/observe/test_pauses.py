"""Evaluations and saves that slow a run down are told with their layer; those that stay as they are never."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import GuardConfig
from trainer.observe.pauses import PAUSES, PauseGrowth, PauseTimes

EVERY = 10
"""Steps between two pauses."""


def told(*parts, name="evaluation", every=EVERY, lines=1, factor=1.25):
    """What is said of (number of pauses, seconds of a step, seconds of each pause). lines: steps of a line."""
    growth, said, step, waiting = PauseGrowth(name, GuardConfig(slow_factor=factor)), [], 0, 0.0
    for count, seconds, pause in parts:
        for _ in range(count * every):
            step += 1
            if step % lines == 0:
                text = growth.add({"step": step, "step_seconds": seconds, f"{name}_seconds": waiting / lines})
                waiting = 0.0
                said += [text] if text else []
            if step % every == 0:  # after its line
                waiting += pause
    return said


@pytest.mark.parametrize("lines", [1, 5, 20])
@pytest.mark.parametrize("name", PAUSES)
def test_a_pause_that_takes_a_growing_share_is_told_with_its_layer(name, lines):
    [text] = told((12, 1.0, 1.0), (36, 1.0, 5.0), name=name, lines=lines)
    assert f"{name} (runtime orchestration): 500 ms of it" in text and "33%, and before 100 ms, 9%" in text
    assert "slow: a step takes 1.5 s with" in text and "and took 1.1 s in steps" in text
    assert ("checkpoint.every" in text) == (name == "checkpoint") and ("eval.every" in text) == (name == "evaluation")


def test_of_pauses_that_come_more_often_as_well():
    growth, said = PauseGrowth("checkpoint", GuardConfig()), []
    for step in range(1, 400):
        due = step % (4 if step > 200 else 50) == 1
        line = {"step": step, "step_seconds": 1.0, "checkpoint_seconds": 2.0 * due}
        said += filter(None, [growth.add(line)])
    assert len(said) == 1 and "500 ms of it for saves" in said[0]


def test_each_is_told_once():
    assert len(told((12, 1.0, 1.0), (60, 1.0, 5.0))) == 1
    assert len(told((12, 1.0, 1.0), (60, 1.0, 5.0), (60, 1.0, 20.0))) == 2, "worse by as much again"
    assert len(told((12, 1.0, 1.0), (30, 1.0, 5.0), (30, 1.0, 1.0), (30, 1.0, 5.0))) == 2, "over meanwhile"


def test_a_longer_pause_that_hardly_slows_the_run_down_is_not_told():
    assert not told((12, 1.0, 0.1), (60, 1.0, 2.0)), "twenty times as long, and a fifth of a step"
    assert not told((12, 1.0, 5.0), (60, 0.2, 5.0)), "the steps have become faster, so that its share is larger"
    assert not told((1, 1.0, 50.0), (60, 1.0, 1.0)), "the first compiles"


@given(st.integers(0, 10**6), st.floats(0.01, 10), st.sampled_from([1, 3, 10, 30]))
def test_noise_is_no_growth(seed, seconds, every):
    """Pauses that vary by a fifth, and a rare one that takes ten times as long."""
    draw, growth = random.Random(seed), PauseGrowth("evaluation", GuardConfig())
    recent = [False] * 2  # a rare one has two usual ones beside it
    for step in range(1, 600):
        pause = 0.0
        if step % every == 0:
            rare = not any(recent) and draw.random() < 0.2
            recent = [*recent[1:], rare]
            pause = seconds * draw.uniform(1, 1.2) * (10 if rare else 1)
        line = {"step": step, "step_seconds": seconds * draw.uniform(1, 1.2), "evaluation_seconds": pause}
        assert growth.add(line) is None


def test_readers_count_by_themselves():
    pauses = PauseTimes()
    with pauses.spent("evaluation"):
        pass
    first = pauses.since("log")
    with pauses.spent("evaluation"):
        pass
    second, whole = pauses.since("log"), pauses.since("profiles")
    assert whole["evaluation"] == pytest.approx(first["evaluation"] + second["evaluation"]) and first["evaluation"] > 0
    assert whole["checkpoint"] == 0 and pauses.since("log") == {"evaluation": 0, "checkpoint": 0}
