"""A run that becomes slow says so once, and what grew with it; one that does not is silent."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import GuardConfig
from trainer.observe.hardware import over_ranks
from trainer.observe.slowdown import SlowdownAlert

LINES, HOSTS = 8, ["a", "b", "b", "c"]
QUIET = {
    "data_seconds": 0.01,
    "straggler": 1.02,
    "straggler_rank": 1,
    "hardware/clock_mhz": 1980,
    "hardware/throttle": 4,
    "hardware/alloc_retries": 0,
    "hardware/host_cpu": 0.3,
    "bubble": 0.1,
    "profiled_step": 4,
    "host": 0.02,
    "exposed/data": 0.1,
    "exposed/tensor": 0.05,
}
NEW = {"profiled_step": 34}
"""The profiled step is one of the slow ones."""


def told(*parts, lines=LINES, factor=1.25):
    """What is said of steps that are given as (number, seconds, changes of their lines)."""
    slowdown, said, step = SlowdownAlert(GuardConfig(slow_factor=factor, slow_lines=lines), HOSTS), [], 0
    for count, seconds, changes in parts:
        for _ in range(count):
            step += 1
            text = slowdown.add({"step": step, "step_seconds": seconds, **QUIET, **changes})
            said += [text] if text else []
    return said


@pytest.mark.parametrize(
    "changes, layer",
    [
        ({"data_seconds": 0.39}, "data (runtime orchestration): a step waits 0.39 s for its batch, and waited 0.01 s"),
        ({"straggler": 1.4, "straggler_rank": 3}, "one rank (runtime orchestration): rank 3 on c takes 1.40 times"),
        ({"hardware/clock_mhz": 1300}, "hardware: clocks fell from 1980 to 1300 MHz"),
        (
            {"hardware/clock_mhz": 1300, "hardware/throttle": 68},
            "clocks fell from 1980 to 1300 MHz (hardware thermal slowdown)",
        ),
        (
            {"hardware/clock_mhz": 1300, **over_ranks([{"throttle": 4}, {"throttle": 68, "clock_mhz": 1300}])},
            "hardware: clocks fell from 1980 to 1300 MHz (hardware thermal slowdown on rank 1 on b)",
        ),
        ({"hardware/clock_mhz": None, "hardware/throttle": 128}, "hardware: clocks are held down by power brake"),
        ({"hardware/alloc_retries": 9}, "memory (hardware): a GPU's allocator runs out of memory"),
        (
            {"exposed/data": 0.35, **NEW},
            "communication (parallelisation): that of the data axis, which nothing hides, is 0.49 s of a step, and was "
            "0.1 s",
        ),
        ({"exposed/tensor": 0.3, **NEW}, "communication (parallelisation): that of the tensor axis"),
        ({"bubble": 0.35}, "bubble (parallelisation): waiting of pipeline ranks for each other is 0.49 s of a step"),
        ({"host": 0.3, **NEW}, "host (compilation or runtime orchestration): time in which a device has nothing to do"),
        ({"hardware/host_cpu": 0.97}, "host processors (hardware): 97% of a machine's are busy, and 30% were"),
        ({}, "unknown: nothing that is logged has changed with it; logging.profile=50 would tell more"),
        (NEW, "unknown: nothing that is logged has changed with it"),
        ({"exposed/data": 0.35, "host": 0.3}, "unknown"),  # of a step that was profiled before
        ({"exposed/data": 0.12, "bubble": 0.12, "host": 0.05, "hardware/host_cpu": 0.45, **NEW}, "unknown"),
        ({"data_seconds": 0.02, "straggler": 1.05, "hardware/clock_mhz": 1950}, "unknown"),
    ],
)
def test_the_layer_that_the_numbers_point_to_is_named(changes, layer):
    [text] = told((4 * LINES, 1.0, {}), (6 * LINES, 1.4, changes))
    assert layer in text and "a step takes 1.4 s in steps 33 to 40, 1.40 times the 1 s of steps 1 to 8" in text
    assert layer.startswith("unknown") or "unknown" not in text


def test_each_slow_down_is_told_once():
    assert len(told((50, 1.0, {}), (500, 1.5, {}))) == 1
    assert len(told((50, 1.0, {}), (50, 1.5, {}), (50, 2.5, {}))) == 2, "worse by as much again"
    assert len(told((50, 1.0, {}), (50, 1.5, {}), (50, 1.0, {}), (50, 1.5, {}))) == 2, "over meanwhile"
    creeping = [(LINES, 1.01**number, {}) for number in range(30)]
    assert len(told(*creeping)) == 1


def test_without_the_values_nothing_is_wrong():
    nothing = dict.fromkeys(QUIET)
    [text] = told((2 * LINES, 1.0, nothing), (LINES, 2.0, nothing))
    assert "unknown" in text


@given(st.integers(0, 10**6), st.floats(1e-3, 100))
def test_noise_and_rare_long_steps_are_no_slow_down(seed, seconds):
    """Compilation in the first step, evaluations and saves beside every third step at most."""
    draw, slowdown = random.Random(seed), SlowdownAlert(GuardConfig(slow_lines=LINES))
    for step in range(1, 20 * LINES):
        long = draw.choice([1, 1, 10]) if step % 3 == 0 else 1
        line = {"step": step, "step_seconds": seconds * draw.uniform(1, 1.2) * long * (100 if step == 1 else 1)}
        assert slowdown.add({**QUIET, **line}) is None


def test_another_schedule_begins_anew():
    slowdown = SlowdownAlert(GuardConfig(slow_lines=LINES))
    for step in range(1, 8 * LINES):
        if step == 4 * LINES:
            slowdown.restart()
        line = {"step": step, "step_seconds": 1.0 if step < 4 * LINES else 3.0, **QUIET}
        assert slowdown.add(line) is None
