"""Pictures of what the streams of one device do: a panel a variant, a row a stream, a bar a piece of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from trainer.plots.schedule import BAR, STYLE

COLOURS = {"product": "#173f86", "transfer": "#e0921a", "sum": "#009E73"}
INK = {"product": "white", "transfer": "#222222", "sum": "white"}


class Bar(NamedTuple):
    """kind: of `COLOURS`; stream: number of the row; start, end: in the unit of the picture."""

    kind: str
    stream: int
    start: float
    end: float
    text: str = ""


def draw_lanes(variants: Mapping[str, Sequence[Bar]], streams: Sequence[str], unit: str) -> Figure:
    """Each variant as a panel under its name, all on one time axis."""
    last = max(bar.end for bars in variants.values() for bar in bars)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 0.5 + 0.85 * len(variants)), layout="constrained")
        panels = figure.subplots(len(variants), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, bars) in zip(panels, variants.items()):
            _panel(axes, bars, last)
            axes.set_title(name, fontsize=9, loc="left", pad=3)
            axes.set_yticks(range(len(streams)), streams)
            axes.set_ylim(len(streams) - 0.5, -0.5)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(left=False, bottom=axes is panels[-1])
            axes.spines["bottom"].set_visible(axes is panels[-1])
        panels[-1].set_xlim(0, 1.005 * last)
        panels[-1].set_xlabel(unit, color="#444444")
        drawn = {bar.kind for bars in variants.values() for bar in bars}
        kinds = [kind for kind in COLOURS if kind in drawn]
        figure.legend(
            [Patch(facecolor=COLOURS[kind]) for kind in kinds], kinds, ncols=len(kinds), loc="outside upper right"
        )
    return figure


def _panel(axes: Axes, bars: Sequence[Bar], last: float) -> None:
    for bar in bars:
        length = bar.end - bar.start
        axes.barh(*(bar.stream, length, BAR, bar.start), color=COLOURS[bar.kind], edgecolor="white", linewidth=0.7)
        if bar.text and length > 0.0085 * last * len(bar.text):
            middle = bar.start + length / 2
            axes.text(middle, bar.stream, bar.text, color=INK[bar.kind], ha="center", va="center", fontsize=7.5)
