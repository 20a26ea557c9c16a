"""Plots of runs, from their folders."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as pyplot
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from trainer.config import ConfigError
from trainer.observe import metrics
from trainer.planning.schedules.timeline import read_timeline
from trainer.plots.files import save, trace
from trainer.plots.schedule import draw_schedule, plain
from trainer.util.run_folder import labels, of_sweeps
from trainer.util.tables import count

# The palette of Okabe and Ito, distinct under every common colour blindness, without its yellow. More runs differ in
# their dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":", "-.")
STYLE = {
    "figure.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "lines.linewidth": 1.5,
    "legend.frameon": False,
}
HELD_OUT = {"linewidth": 1.0, "marker": "o", "markersize": 4.5, "markerfacecolor": "white"}
BY_NAME = {"loss": "loss by source", "eval_loss": "evaluation loss by set"}
X_LABELS = {"step": "optimizer step", "tokens": "tokens", "hours": "hours since the first line, pauses included"}
TIMELINES = ("planned", "measured")
"""Files RUN/schedule/NAME.json of a run with a pipeline, in the order of the panels."""
RUN_OPTIONS = ("x", "smooth")


def curve(records: Sequence[dict[str, Any]], x: str, y: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The points of metric `y` over `x`, a key of `X_LABELS`.

    Lines without `x`, or without the key `y`, are left out. A null becomes NaN, which is drawn as a gap."""
    points = [(record[x], record[y]) for record in records if y in record and record.get(x) is not None]
    return numpy.array([point[0] for point in points], float), numpy.array([point[1] for point in points], float)


def smooth(values: numpy.ndarray, window: int) -> numpy.ndarray:
    """Centred running mean over `window` points; NaN stays NaN and does not spread.

    At the start, where curves are steep, the window is narrowed on both sides. At the end, where curves are flat and a
    narrow window would show noise, it is only cut off."""
    known = numpy.isfinite(values)
    sums = numpy.concatenate([[0.0], numpy.cumsum(numpy.where(known, values, 0.0))])
    counts = numpy.concatenate([[0], numpy.cumsum(known)])
    index = numpy.arange(len(values))
    reach = numpy.minimum(index, (window - 1) // 2)
    first, last = index - reach, numpy.minimum(index + reach + 1, len(values))
    return numpy.where(known, (sums[last] - sums[first]) / numpy.maximum(counts[last] - counts[first], 1), numpy.nan)


def draw_metrics(runs: dict[str, Sequence[dict[str, Any]]], x: str = "step", window: int = 1) -> Figure:
    """Loss, learning rate, gradient norm and throughput of the runs, by name, over `x`, a key of `X_LABELS`; and the
    losses by source and by set, where a run has them.

    With `window` above 1, loss, gradient norm and throughput are running means over that many logged steps, drawn over
    the faint original.
    """
    named = {kind: _names(runs, kind) for kind in BY_NAME}
    rows = 2 + any(named.values())
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(rows, 2, figsize=(10, 3.2 * rows), sharex=True, layout="constrained")
        loss, rate, norm, speed, *more = panels.flat
        held_out = False
        for index, records in enumerate(runs.values()):
            look = _look(index)
            _line(loss, *curve(records, x, "loss"), window, look)
            _line(rate, *curve(records, x, "lr"), 1, look)
            _line(norm, *curve(records, x, "grad_norm"), window, look)
            _line(speed, *curve(records, x, "tokens_per_second"), window, look)
            steps, values = curve(records, x, "eval_loss")
            loss.plot(steps, values, **look, **HELD_OUT, zorder=3)
            held_out |= bool(numpy.isfinite(values).any())
        _describe(loss, "loss", "nats per token")
        _describe(rate, "learning rate", "")
        _describe(norm, "gradient norm", "before clipping")
        _describe(speed, "throughput", "tokens per second, all ranks")
        for axes in (rate, norm, speed):
            axes.set_ylim(bottom=0)
        if _spread(norm) > 30:
            norm.set_yscale("log")
        rate.yaxis.set_major_formatter(FuncFormatter(_power_tick))
        speed.yaxis.set_major_formatter(FuncFormatter(_count_tick))
        for axes, (kind, names) in zip(more, named.items()):
            _draw_by_name(axes, runs, x, kind, names, window)
        for axes in panels[-1]:
            axes.set_xlabel(X_LABELS[x])
            axes.xaxis.set_major_formatter(FuncFormatter(_count_tick))
            axes.xaxis.get_major_locator().set_params(integer=x != "hours")
        if held_out:
            keys = [Line2D([], [], color="#555555"), Line2D([], [], color="#555555", **HELD_OUT)]
            loss.legend(keys, ["training", "held-out"], loc="upper right")
        columns = max(1, min(len(runs), 100 // (max(map(len, runs)) + 6)))
        figure.legend(
            [Line2D([], [], **_look(index)) for index in range(len(runs))],
            list(map(plain, runs)),
            loc="outside lower center",
            ncols=columns,
        )
    return figure


def _names(runs: dict[str, Sequence[dict[str, Any]]], kind: str) -> list[str]:
    """The sources or sets of which any run has a loss of this kind."""
    lines = (line for records in runs.values() for line in records)
    return list(dict.fromkeys(name for line in lines for name in metrics.of_names(line, kind)))


def _draw_by_name(
    axes: Axes, runs: dict[str, Sequence[dict[str, Any]]], x: str, kind: str, names: list[str], window: int
) -> None:
    """One kind of loss by source or set, which have colours; runs differ in their dashes."""
    for number, name in enumerate(names):
        for index, records in enumerate(runs.values()):
            look = {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}
            points = curve(records, x, f"{kind}/{name}")
            if kind == "loss":
                _line(axes, *points, window, look)
            else:
                axes.plot(*points, **look, **HELD_OUT)
    _describe(axes, BY_NAME[kind], "nats per token")
    colours = [Line2D([], [], color=COLOURS[number % len(COLOURS)]) for number in range(len(names))]
    axes.legend(colours, list(map(plain, names)), loc="upper right")


def _look(index: int) -> dict[str, str]:
    """Colour and dashes of the run at `index`."""
    turn, colour = divmod(index, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": DASHES[turn % len(DASHES)]}


def _line(axes: Axes, x: numpy.ndarray, y: numpy.ndarray, window: int, look: dict[str, Any]) -> None:
    """One curve; a point with no neighbours is shown as a dot, since a line of one point is invisible."""
    marker = {"marker": "o", "markersize": 4} if numpy.isfinite(y).sum() == 1 else {}
    if window > 1:
        axes.plot(x, y, **look | {"linestyle": "-"}, alpha=0.25, linewidth=0.8)
        y = smooth(y, window)
    axes.plot(x, y, **look, **marker)


def _describe(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_ylabel(unit, color="#444444")


def _power_tick(value: float, position: int) -> str:
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-") if value else "0"


def _count_tick(value: float, position: int) -> str:
    number, unit = re.fullmatch(r"([-.\d]+)(\D*)", count(value)).groups()
    return (number.rstrip("0").rstrip(".") if "." in number else number) + unit


def _spread(axes: Axes) -> float:
    """Largest over smallest positive value drawn, 1 where there is none."""
    values = numpy.concatenate([numpy.asarray(line.get_ydata(), float) for line in axes.lines] or [numpy.ones(1)])
    values = values[numpy.isfinite(values) & (values > 0)]
    return float(values.max() / values.min()) if len(values) else 1.0


def read_runs(folders: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """The lines of all runs by label, with their `hours`. Raises one `ConfigError` that names every run that cannot be
    read."""
    problems, runs = [], {}
    for name, folder in zip(labels(folders), folders):
        try:
            lines = metrics.read(folder)
            times = [line.get("time") for line in lines]  # absent in runs of 0.1.0
            begin = next(filter(None, times), None)
            for line, time in zip(lines, times):
                line["hours"] = time and (time - begin) / 3600
            runs[name] = lines
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return runs


def draw_runs(given: argparse.Namespace) -> list[Path]:
    """Draws the metrics of the runs and, of a single one, its pipeline's timelines; returns the files written."""
    smooth = 1 if given.smooth is None else given.smooth
    if smooth < 1:
        raise ConfigError(f"--smooth {smooth}: give a number of logged steps, 1 or more")
    found = of_sweeps(given.runs)
    run = given.runs[0].parent if given.runs[0].is_file() else given.runs[0]
    single = len(given.runs) == 1
    files = {name: run / "schedule" / f"{name}.json" for name in TIMELINES if single}
    read = {name: read_timeline(path) for name, path in files.items() if path.exists()}
    if given.trace and not read:
        raise ConfigError(
            f"--trace {given.trace}: {run} has no timeline (schedule/measured.json)"
            if single
            else f"--trace {given.trace}: give one run, not {len(given.runs)}"
        )
    out = given.out or (run if single else Path()) / "metrics.png"
    save(draw_metrics(read_runs(found), given.x or "step", smooth), out)
    if not read:
        return [out]
    timelines = {name: ranks for name, (ranks, _) in read.items()}
    beside = out.with_name(f"{out.stem}-schedule{out.suffix}") if given.out else run / "schedule.png"
    save(
        draw_schedule(timelines, labels([run])[0], makespans={name: makespan for name, (_, makespan) in read.items()}),
        beside,
    )
    return [out, beside, *trace(timelines, given.trace)]
