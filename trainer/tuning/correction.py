"""What measurements say about predictions: how much longer than predicted a plan takes, by its degrees and modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot

import numpy

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
