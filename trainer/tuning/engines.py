"""Which plan is measured next. Pure: what has been measured goes in, a plan comes out, or that none can win any more.

The choice is a function of all plans and of what has been measured. It keeps nothing from one call to the next, so that
a search that was interrupted goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, hypot, log
from statistics import NormalDist

import numpy

# What measurements say about predictions: how much longer than predicted a plan takes, by its degrees and modes.


Axes = Mapping[str, float | str]

COMMON, DOUBLING, MODE, OWN = 1.0, 0.25, 0.5, 0.35
"""Standard deviations of log(measured / predicted) over the band of the predictions, before anything is measured: of
what all plans share (the machine), of each doubling of a degree, of each mode, and of a plan by itself."""


class TimeCorrection:
    """Ridge regression of log(measured / predicted) on the axes of plans.

    Numbers (degrees, sizes) enter by their logarithm, words (modes) one by one, and a constant. Each weight is drawn
    towards zero by its own prior deviation, so a single measurement already says something, and the posterior says how
    uncertain the rest is (Bishop, Pattern Recognition and Machine Learning, 3.3). Axes in which no two plans differ are
    left out.

    known: axes of all plans; measured: axes and measured over predicted seconds; band: relative error that predictions
    are known to have."""

    def __init__(self, known: Sequence[Axes], measured: Sequence[tuple[Axes, float]], band: float):
        band = max(band, 1e-3)
        self.columns = _columns(known)
        self.own = OWN * band
        prior = numpy.array([COMMON, *(DOUBLING if word is None else MODE for _, word, _ in self.columns)]) * band
        self.mean, self.covariance = numpy.zeros(len(prior)), numpy.diag(prior**2)
        if measured:
            rows = numpy.array([self._row(axes) for axes, _ in measured])
            ratios = numpy.log([ratio for _, ratio in measured])
            spread = self.covariance @ rows.T
            gain = spread @ numpy.linalg.inv(rows @ spread + self.own**2 * numpy.eye(len(rows)))
            self.mean, self.covariance = gain @ ratios, self.covariance - gain @ spread.T

    def __call__(self, axes: Axes) -> tuple[float, float]:
        """The expected log(measured / predicted) of a plan, and its standard deviation."""
        row = self._row(axes)
        shared = float(row @ self.covariance @ row)
        return float(row @ self.mean), hypot(max(0.0, shared) ** 0.5, self.own)

    def _row(self, axes: Axes) -> numpy.ndarray:
        values = [
            (float(axes.get(name) == word) if word is not None else numpy.log2(float(axes.get(name, 1)))) - centre
            for name, word, centre in self.columns
        ]
        return numpy.array([1.0, *values])


def _columns(known: Sequence[Axes]) -> list[tuple[str, str | None, float]]:
    """Of each column but the constant: its axis, the word that it is 1 for, or None for a number, and what is taken off
    so that it has a mean of zero over all plans."""
    found: list[tuple[str, str | None, float]] = []
    for name in {name: None for axes in known for name in axes}:
        values = [axes.get(name, 1) for axes in known]
        if len(set(values)) == 1:
            continue
        if any(isinstance(value, str) for value in values):
            found += [(name, word, values.count(word) / len(values)) for word in sorted(set(map(str, values)))]
        else:
            found.append((name, None, float(numpy.mean(numpy.log2(values)))))
    return found


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
