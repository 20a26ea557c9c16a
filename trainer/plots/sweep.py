"""A picture of a sweep: what each swept setting did to loss and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.plots.files import save
from trainer.plots.runs import COLOURS, DASHES, STYLE
from trainer.plots.schedule import plain

LOG = 8.0
"""How many times its smallest a setting's largest value is where its axis is logarithmic."""
TICKS = 8
"""Values that are named on an axis at most, where they are numbers."""
LEGEND = 12
"""Lines that a legend names at most."""
MEASURES = {"loss": "training loss, last step", "eval_loss": "evaluation loss, last", "tokens_per_second": "tokens/s"}


class Trial(NamedTuple):
    """values: of the swept settings, as they were written; measured: by the names of `MEASURES`, None where there is
    none."""

    values: Mapping[str, str]
    measured: Mapping[str, float | None]


def draw_sweep(trials: Sequence[Trial], out: Path) -> bool:
    """A column for each setting that has several values, a row for each measure that any trial has; trials that differ
    in that setting alone are one line. Says whether there is anything to draw. Raises `ConfigError` for a kind of
    picture that cannot be written."""
    names = dict.fromkeys(name for trial in trials for name in trial.values)
    swept = [name for name in names if len({trial.values.get(name) for trial in trials}) > 1]
    known = [name for name in MEASURES if any(trial.measured[name] is not None for trial in trials)]
    if not swept or not known:
        return False
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5 * len(swept), 3.2 * len(known)), layout="constrained")
        for row, axes in zip(known, figure.subplots(len(known), len(swept), squeeze=False)):
            for name, one in zip(swept, axes):
                draw_setting(one, trials, name, row, swept)
    save(figure, out)
    return True


def draw_setting(axes: Axes, trials: Sequence[Trial], name: str, measure: str, swept: Sequence[str]) -> None:
    texts = list(dict.fromkeys(trial.values.get(name, "default") for trial in trials))
    places = {text: number for text in texts if (number := as_number(text)) is not None}
    numbers = len(places) == len(texts)
    if not numbers:
        places = {text: float(place) for place, text in enumerate(texts)}
        axes.set_xticks(range(len(texts)), list(map(plain, texts)))
    elif min(places.values()) > 0 and max(places.values()) >= LOG * min(places.values()):
        axes.set_xscale("log")
    elif len(texts) <= TICKS:
        axes.set_xticks([places[text] for text in texts], texts)
    others = [other for other in swept if other != name]
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for trial in trials:
        label = " ".join(f"{other.split('.')[-1]}={trial.values.get(other, 'default')}" for other in others)
        point = places[trial.values.get(name, "default")], trial.measured[measure]
        lines.setdefault(label, []).append(point)
    for number, (label, points) in enumerate(lines.items()):
        shown = sorted(point for point in points if point[1] is not None)
        axes.plot(
            *([place for place, _ in shown], [value for _, value in shown]),
            marker="o",
            linestyle=DASHES[number // len(COLOURS) % len(DASHES)] if numbers else "none",
            color=COLOURS[number % len(COLOURS)],
            label=plain(label),
        )
    if missing := sorted({place for points in lines.values() for place, value in points if value is None}):
        low = axes.get_xaxis_transform()
        axes.plot(missing, [0.02] * len(missing), "x", color="#888888", transform=low, label="a trial without a result")
    if measure == "tokens_per_second":
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # from zero, and no mark is cut
    axes.set(xlabel=plain(name), ylabel=MEASURES[measure])
    if 1 < len(lines) + bool(missing) <= LEGEND:
        axes.legend(fontsize=7)


def as_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None
