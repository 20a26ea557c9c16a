"""Which plan is measured next. Pure: what has been measured goes in, a plan comes out, or that none can win any more.

An engine is a function of all plans, of what has been measured, and of a seed. It keeps nothing from one call to the
next, so that a search that was interrupted goes on as if it had not been."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, log, log2
from statistics import NormalDist

from trainer.tuning.correction import Correction

RISKY = 1.05
"""Plans whose predicted memory is above so many times the device's are not tried. Those just below are: the fastest
plans are the ones that nearly fill it."""

DEVIATIONS = 2.0
"""Below a plan's expected time, how many standard deviations it is given the benefit of the doubt."""

GOOD = 0.25
"""Share of the measured plans that the Parzen estimator takes for good ones."""

DRAWN = 2
"""Plans that it draws at random before it has a model."""


@dataclass(frozen=True)
class Option:
    """A plan that can be tried. axes: its degrees and modes by name; seconds: predicted of a step; memory: predicted,
    as a share of what a device has."""

    name: str
    axes: Mapping[str, float | str]
    seconds: float
    memory: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a trial. seconds: measured of a step, None where there was none."""

    option: Option
    seconds: float | None = None
    out_of_memory: bool = False


Engine = Callable[[Sequence[Option], Sequence[Outcome], float, int], Option | None]
"""Of all plans, outcomes so far, the band of the predictions (their relative error) and a seed."""


def untried(options: Sequence[Option], outcomes: Sequence[Outcome]) -> list[Option]:
    """The plans that have no outcome and may fit into memory."""
    tried, factor = {outcome.option.name for outcome in outcomes}, memory_factor(outcomes)
    return [one for one in options if one.name not in tried and one.memory * factor <= RISKY]


def memory_factor(outcomes: Sequence[Outcome]) -> float:
    """How many times the predicted memory plans need: at least what a lack of memory shows, at most what plans that ran
    do."""
    least = [1 / one.option.memory for one in outcomes if one.out_of_memory and one.option.memory]
    most = [1 / one.option.memory for one in outcomes if one.seconds is not None and one.option.memory]
    return max(1.0, min([max(least, default=1.0), *most]))


def fastest(outcomes: Sequence[Outcome]) -> Outcome | None:
    return min((one for one in outcomes if one.seconds is not None), key=lambda one: one.seconds or 0.0, default=None)


def by_model(options: Sequence[Option], outcomes: Sequence[Outcome], band: float, seed: int) -> Option | None:
    """First the plan that is predicted to be the fastest; then the one whose expected improvement on the fastest
    measured one is the largest (Jones et al., Efficient Global Optimization, 1998), by the predictions as corrected by
    what has been measured; None where none is likely to be faster."""
    left, best = untried(options, outcomes), fastest(outcomes)
    if best is None or best.seconds is None or not left:
        return min(left, key=lambda one: one.seconds, default=None)
    correction, limit = corrected(options, outcomes, band), log(best.seconds)
    times = {}
    for one in left:
        mean, spread = correction(one.axes)
        times[one.name] = NormalDist(log(one.seconds) + mean, spread)
    if all(time.mean - DEVIATIONS * time.stdev >= limit for time in times.values()):
        return None
    return max(left, key=lambda one: improvement(times[one.name], limit))


def improvement(time: NormalDist, limit: float) -> float:
    """The mean of what a time lies below a limit, counted as zero where it does not."""
    return (limit - time.mean) * time.cdf(limit) + time.variance * time.pdf(limit)


def corrected(options: Sequence[Option], outcomes: Sequence[Outcome], band: float) -> Correction:
    """The correction of the predictions by all that has been measured."""
    return Correction(
        [one.axes for one in options],
        [(one.option.axes, one.seconds / one.option.seconds) for one in outcomes if one.seconds is not None],
        band,
    )


def expected(options: Sequence[Option], outcomes: Sequence[Outcome], band: float, option: Option) -> float:
    """Seconds that a plan is expected to take, by all that has been measured."""
    return option.seconds * exp(corrected(options, outcomes, band)(option.axes)[0])


def at_random(options: Sequence[Option], outcomes: Sequence[Outcome], band: float, seed: int) -> Option | None:
    """Any plan that has not been tried: a baseline."""
    left = untried(options, outcomes)
    return random.Random(f"{seed} {len(outcomes)}").choice(left) if left else None


def by_parzen(options: Sequence[Option], outcomes: Sequence[Outcome], band: float, seed: int) -> Option | None:
    """The plan whose values are frequent among the fastest measured ones and rare among the others, axis by axis: the
    tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011) on a finite set. A baseline: it predicts nothing.
    """
    left = untried(options, outcomes)
    if len(outcomes) < DRAWN or not left:
        return at_random(options, outcomes, band, seed)
    ordered = sorted(outcomes, key=lambda one: (one.seconds is None, one.seconds or 0.0))
    count = ceil(GOOD * len(ordered))
    score = dict.fromkeys((one.name for one in left), 0.0)
    for axis in {name: None for one in options for name in one.axes}:
        values = list({one.axes[axis]: None for one in options if axis in one.axes})
        good, bad = (
            _density(values, [one.option.axes[axis] for one in some if axis in one.option.axes])
            for some in (ordered[:count], ordered[count:])
        )
        for one in left:
            if axis in one.axes:
                score[one.name] += log2(good[one.axes[axis]] / bad[one.axes[axis]])
    most = max(score.values())
    return random.Random(f"{seed} {len(outcomes)}").choice([one for one in left if score[one.name] == most])


def _density(values: Sequence[float | str], seen: Sequence[float | str]) -> dict[float | str, float]:
    """How probable each value of an axis is, where `seen` were seen: neighbours of those too, and each a little."""
    weights = {value: 1 / len(values) + sum(_near(value, other) for other in seen) for value in values}
    return {value: weight / sum(weights.values()) for value, weight in weights.items()}


def _near(one: float | str, other: float | str) -> float:
    if isinstance(one, str) or isinstance(other, str):
        return float(one == other)
    return 4.0 ** -abs(log2(one) - log2(other))


ENGINES: dict[str, Engine] = {"model": by_model, "random": at_random, "tpe": by_parzen}
