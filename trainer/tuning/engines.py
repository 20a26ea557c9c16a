"""Which plan is measured next. Pure: what has been measured goes in, a plan comes out, or that none can win any more.

The choice is a function of all plans and of what has been measured. It keeps nothing from one call to the next, so that
a search that was interrupted goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist

from trainer.tuning.correction import TimeCorrection

RISKY = 1.05
"""Plans whose predicted memory is above so many times the device's are not tried. Those just below are: the fastest
plans are the ones that nearly fill it."""

DEVIATIONS = 2.0
"""Below a plan's expected time, how many standard deviations it is given the benefit of the doubt."""


@dataclass(frozen=True)
class PlanOption:
    """A plan that can be tried. axes: its degrees and modes by name; seconds: predicted of a step; memory: predicted,
    as a share of what a device has."""

    name: str
    axes: Mapping[str, float | str]
    seconds: float
    memory: float = 0.0


@dataclass(frozen=True)
class TrialOutcome:
    """What became of a trial. seconds: measured of a step, None where there was none."""

    option: PlanOption
    seconds: float | None = None
    out_of_memory: bool = False


def untried_plans(options: Sequence[PlanOption], outcomes: Sequence[TrialOutcome]) -> list[PlanOption]:
    """The plans that have no outcome and may fit into memory."""
    tried, factor = {outcome.option.name for outcome in outcomes}, memory_factor(outcomes)
    return [one for one in options if one.name not in tried and one.memory * factor <= RISKY]


def memory_factor(outcomes: Sequence[TrialOutcome]) -> float:
    """How many times the predicted memory plans need: at least what a lack of memory shows, at most what plans that ran
    do."""
    least = [1 / one.option.memory for one in outcomes if one.out_of_memory and one.option.memory]
    most = [1 / one.option.memory for one in outcomes if one.seconds is not None and one.option.memory]
    return max(1.0, min([max(least, default=1.0), *most]))


def fastest_outcome(outcomes: Sequence[TrialOutcome]) -> TrialOutcome | None:
    return min((one for one in outcomes if one.seconds is not None), key=lambda one: one.seconds or 0.0, default=None)


def choose_next(options: Sequence[PlanOption], outcomes: Sequence[TrialOutcome], band: float) -> PlanOption | None:
    """First the plan that is predicted to be the fastest; then the one whose expected improvement on the fastest
    measured one is the largest (Jones et al., Efficient Global Optimization, 1998), by the predictions as corrected by
    what has been measured; None where none is likely to be faster. band: the relative error of the predictions."""
    left, best = untried_plans(options, outcomes), fastest_outcome(outcomes)
    if best is None or best.seconds is None or not left:
        return min(left, key=lambda one: one.seconds, default=None)
    correction, limit = correct_predictions(options, outcomes, band), log(best.seconds)
    times = {}
    for one in left:
        mean, spread = correction(one.axes)
        times[one.name] = NormalDist(log(one.seconds) + mean, spread)
    if all(time.mean - DEVIATIONS * time.stdev >= limit for time in times.values()):
        return None
    return max(left, key=lambda one: expected_improvement(times[one.name], limit))


def expected_improvement(time: NormalDist, limit: float) -> float:
    """The mean of what a time lies below a limit, counted as zero where it does not."""
    return (limit - time.mean) * time.cdf(limit) + time.variance * time.pdf(limit)


def correct_predictions(options: Sequence[PlanOption], outcomes: Sequence[TrialOutcome], band: float) -> TimeCorrection:
    """The correction of the predictions by all that has been measured."""
    return TimeCorrection(
        [one.axes for one in options],
        [(one.option.axes, one.seconds / one.option.seconds) for one in outcomes if one.seconds is not None],
        band,
    )


def expected_seconds(
    options: Sequence[PlanOption], outcomes: Sequence[TrialOutcome], band: float, option: PlanOption
) -> float:
    """Seconds that a plan is expected to take, by all that has been measured."""
    return option.seconds * exp(correct_predictions(options, outcomes, band)(option.axes)[0])
