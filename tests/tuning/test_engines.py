"""Which plan is measured next: on problems that others have measured, and on problems made up."""

from __future__ import annotations

import random
import runpy
import sys
from collections import defaultdict
from collections.abc import Mapping
from math import exp, log
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.estimates import FITTED, vtrain, vtrain_seconds

from trainer.tuning.study import (
    PlanOption,
    TimeCorrection,
    TrialOutcome,
    correct_predictions,
    fastest_outcome,
    memory_factor,
    untried_plans,
)

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
try:
    ENGINES = runpy.run_path(str(BENCH / "tune.py"))["ENGINES"]  # what trainer tune does, and its baselines
finally:
    sys.path.remove(str(BENCH))

PROBLEM = ("gpus", "size", "width", "heads", "depth", "length")
CHOSEN = ("tp", "dp", "pp", "micro")

Problem = dict[str, tuple[PlanOption, float]]
"""By name, a plan and the seconds that a step of it took."""


def regret(problem: Problem, engine: str, trials: int, seed: int = 0, band: float = 0.2) -> float:
    """How much slower than the best of all plans the best of a few measured ones is."""
    options, outcomes = [option for option, _ in problem.values()], list[TrialOutcome]()
    while len(outcomes) < trials and (chosen := ENGINES[engine](options, outcomes, band, seed)):
        outcomes.append(TrialOutcome(chosen, problem[chosen.name][1]))
    return fastest_outcome(outcomes).seconds / min(measured for _, measured in problem.values()) - 1


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    """Models on a number of A100s, each with all the plans that vTrain's authors measured, where those are more than
    four and no prediction was fitted to one of them."""
    grouped, seen = defaultdict(dict), set()
    for place, (point, measured) in enumerate(vtrain()):
        problem = tuple(point[name] for name in PROBLEM)
        if place < FITTED:
            seen.add(problem)
        grouped[problem][tuple(point[name] for name in CHOSEN)] = point, measured
    found: list[Problem] = []
    for key, plans in grouped.items():
        if len(plans) > 4 and key not in seen:
            one = {}
            for (chosen, (_, measured)), predicted in zip(plans.items(), vtrain_seconds(plans.values())):
                option = PlanOption(" ".join(map(str, chosen)), dict(zip(CHOSEN, chosen)), predicted)
                one[option.name] = option, measured
            found.append(one)
    return found


def share(problems: list[Problem], engine: str, trials: int, seeds: int = 1) -> float:
    """Of the problems, those where the best plan, or one within 1% of it, is found."""
    return mean(regret(one, engine, trials, seed) < 0.01 for one in problems for seed in range(seeds))


def test_the_best_plan_of_published_measurements_is_found_in_four_trials(problems):
    found = {name: share(problems, name, 4, seeds) for name, seeds in (("model", 1), ("random", 10), ("tpe", 10))}
    assert len(problems) >= 60 and found["model"] >= 0.92 and max(found["random"], found["tpe"]) < 0.5, found


# Problems made up

MODES = ("none", "selective", "full")


def plan(tp: int, micro: int, mode: str, memory: float = 0.5) -> PlanOption:
    return PlanOption(
        f"{tp} {micro} {mode}", {"tp": tp, "micro": micro, "recompute": mode}, 1.0 + 0.1 * tp / micro, memory
    )


PLANS = [plan(tp, micro, mode) for tp in (1, 2, 4) for micro in (1, 2, 4, 8) for mode in MODES]


def wrong(options: list[PlanOption], tp: float, full: float) -> Problem:
    """A machine whose tensor parallelism and recompute take longer than predicted."""
    return {
        one.name: (one, one.seconds * one.axes["tp"] ** tp * (full if one.axes["recompute"] == "full" else 1))
        for one in options
    }


@settings(max_examples=20)
@given(st.floats(-0.3, 0.3), st.floats(0.8, 1.3))
def test_what_predictions_get_wrong_by_axis_is_learnt(tp, full):
    """After a dozen trials at least half of what was wrong with all plans is gone."""
    problem, generator = wrong(PLANS, tp, full), random.Random(3)
    outcomes = [TrialOutcome(option, measured) for option, measured in generator.sample([*problem.values()], 12)]
    correct = correct_predictions(PLANS, outcomes, 0.5)
    errors = [log(measured / option.seconds) for option, measured in problem.values()]
    left = [error - correct(option.axes)[0] for error, (option, _) in zip(errors, problem.values())]
    assert mean(map(abs, left)) <= 0.5 * mean(map(abs, errors)) + 1e-9
    assert regret(problem, "model", 6, band=0.5) < 0.01


def test_a_search_ends_when_nothing_can_win():
    """Predictions that are right to 2% leave few plans that could be faster; those of no use leave all."""
    problem = wrong(PLANS, 0.0, 1.0)
    options = [option for option, _ in problem.values()]

    def trials(band: float) -> int:
        outcomes: list[TrialOutcome] = []
        while chosen := ENGINES["model"](options, outcomes, band, 0):
            outcomes.append(TrialOutcome(chosen, problem[chosen.name][1]))
        assert fastest_outcome(outcomes).seconds == min(measured for _, measured in problem.values())
        return len(outcomes)

    assert trials(0.001) <= 4 < trials(0.02) < trials(0.7) == len(options)


def test_lack_of_memory_teaches_a_factor():
    small, middle, large, huge = (plan(1, 2**n, "none", share) for n, share in enumerate((0.3, 0.6, 0.9, 1.04)))
    options = [small, middle, large, huge, plan(2, 1, "none", 1.06)]
    assert untried_plans(options, []) == options[:4]  # what nearly fills the memory is tried
    lacking = TrialOutcome(middle, out_of_memory=True)
    assert memory_factor([lacking]) == pytest.approx(1 / 0.6) and untried_plans(options, [lacking]) == [small]
    # A larger plan that ran shows that the first has lacked memory for a reason of its own.
    assert untried_plans(options, [lacking, TrialOutcome(large, 1.0)]) == [small]
    assert memory_factor([lacking, TrialOutcome(large, 1.0)]) == pytest.approx(1 / 0.9)
    assert memory_factor([TrialOutcome(small, 1.0), TrialOutcome(large)]) == 1.0


@pytest.mark.parametrize("engine", ENGINES)
def test_what_brings_no_time_is_not_tried_again_and_does_not_end_the_search(engine):
    """Whatever becomes of trials, every plan is tried at most once, and the same outcomes lead to the same plan."""
    outcomes: list[TrialOutcome] = []
    for turn in range(len(PLANS)):
        chosen = ENGINES[engine](PLANS, outcomes, 0.7, 5)
        assert chosen == ENGINES[engine](PLANS, outcomes, 0.7, 5)
        outcomes.append(TrialOutcome(chosen, None if turn % 3 else chosen.seconds))
    assert {one.option.name for one in outcomes} == {one.name for one in PLANS}
    assert ENGINES[engine](PLANS, outcomes, 0.7, 5) is None


@given(
    st.dictionaries(st.sampled_from(["tp", "pp", "mode"]), st.sampled_from([1, 2, 4]), min_size=3), st.floats(0.5, 2)
)
def test_a_correction_is_drawn_to_what_was_measured(axes: Mapping[str, float], ratio: float):
    """One measurement moves its own plan most of the way, and makes it less uncertain; without any, nothing moves."""
    known = [{"tp": tp, "pp": pp, "mode": mode} for tp in (1, 2, 4) for pp in (1, 2, 4) for mode in (1, 2, 4)]
    before, after = TimeCorrection(known, [], 0.3), TimeCorrection(known, [(axes, ratio)], 0.3)
    assert before(axes)[0] == 0 < after(axes)[1] < before(axes)[1]
    assert exp(after(axes)[0]) == pytest.approx(ratio ** (log(ratio) and after(axes)[0] / log(ratio)))
    assert 0.6 * abs(log(ratio)) <= abs(after(axes)[0]) <= abs(log(ratio))


def test_the_parzen_estimator_prefers_what_was_fast():
    outcomes = [TrialOutcome(one, 1.0 if one.axes["recompute"] == "none" else 3.0) for one in PLANS[::2]]
    chosen = {ENGINES["tpe"](PLANS, outcomes, 0.2, seed).axes["recompute"] for seed in range(10)}
    assert chosen == {"none"}
