"""Pictures of a search for the fastest plan: predicted beside measured, and memory beside speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.pages.sweeps import front
from trainer.plots.files import save
from trainer.plots.runs import COLOURS, STYLE

MEASURED, FRONT, FAILED, UNTRIED = COLOURS[0], COLOURS[1], COLOURS[3], "#bbbbbb"


class Point(NamedTuple):
    """A plan: seconds of a step as predicted, as expected when it was chosen or, if it was not, at the end, and as
    measured, if a trial has shown any; GiB of a device, of which a measured plan's is the measured one; tokens of a
    step."""

    predicted: float
    expected: float
    measured: float | None
    memory: float | None
    tokens: float


def draw_search(tried: Sequence[Point], untried: Sequence[Point], out: Path) -> None:
    """Writes a picture with two panels. Raises `ConfigError` for a kind of picture that cannot be written."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_predictions(left, tried)
        draw_front(right, tried, untried)
    save(figure, out)


def draw_predictions(axes: Axes, tried: Sequence[Point]) -> None:
    """Measured over predicted and over expected times; plans without a time stand at the lower edge."""
    timed = [one for one in tried if one.measured is not None]
    measured = [one.measured for one in timed]
    axes.plot([one.expected for one in timed], measured, "o", color=MEASURED, label="expected, by the trials before")
    axes.plot(
        [one.predicted for one in timed], measured, "o", color=MEASURED, markerfacecolor="white", label="predicted"
    )
    if failed := [one.expected for one in tried if one.measured is None]:
        axes.plot(
            failed, [0] * len(failed), "x", color=FAILED, clip_on=False, label="no time: out of memory, failed, hung"
        )
    most = max([0.0, *(second for one in tried for second in one[:3] if second is not None)])
    axes.plot([0, most], [0, most], color="#888888", linewidth=1)
    axes.set(xlabel="foretold (s)", ylabel="measured (s)", xlim=(0, None), ylim=(0, None))
    axes.set_title("time of a step")
    axes.legend(fontsize=7)


def draw_front(axes: Axes, tried: Sequence[Point], untried: Sequence[Point]) -> None:
    """Tokens/s over memory, with the measured plans than which none is faster in less memory."""
    speeds = [one.tokens / one.expected for one in untried]
    axes.plot([one.memory for one in untried], speeds, ".", color=UNTRIED, label="expected, not tried")
    points = [
        (one.memory, one.tokens / one.measured) for one in tried if one.measured is not None and one.memory is not None
    ]
    if points:
        axes.plot(*zip(*points), "o", color=MEASURED, label="measured")
        axes.step(*zip(*front(points)), where="post", color=FRONT, label="Pareto front of the measured")
    axes.set(xlabel="GiB of a device (measured: allocated; not tried: reserved)", ylabel="tokens/s", ylim=(0, None))
    axes.set_title("memory and speed")
    axes.legend(fontsize=7)
