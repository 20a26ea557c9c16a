"""Pictures of runs: `python -m trainer.plot RUN... [--out FILE] [--x step|tokens] [--smooth N]`."""
from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any, Sequence

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
from trainer.observe.tables import count

# Okabe and Ito's palette, told apart under every common colour blindness, without its yellow; then other dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":", "-.")
STYLE = {
    "figure.dpi": 150, "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.grid": True,
    "grid.color": "#e6e6e6", "grid.linewidth": 0.7, "axes.axisbelow": True,
    "xtick.color": "#444444", "ytick.color": "#444444", "lines.linewidth": 1.5, "legend.frameon": False,
}
HELD_OUT = {"linewidth": 1.0, "marker": "o", "markersize": 4.5, "markerfacecolor": "white"}
X_LABELS = {"step": "optimizer step", "tokens": "tokens"}


def curve(records: Sequence[dict[str, Any]], x: str, y: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The points of metric `y` over `x` ('step' or 'tokens'); lines without `x` or without the key `y` are passed over,
    null becomes NaN, which is drawn as a gap."""
    points = [(record[x], record[y]) for record in records if y in record and record.get(x) is not None]
    return numpy.array([point[0] for point in points], float), numpy.array([point[1] for point in points], float)


def smooth(values: numpy.ndarray, window: int) -> numpy.ndarray:
    """Centred running mean over `window` points; NaN stays NaN and does not spread. The window is narrow at the start,
    where curves are steep, and cut off at the end, where they are flat and a narrow one would show noise."""
    known = numpy.isfinite(values)
    sums = numpy.concatenate([[0.0], numpy.cumsum(numpy.where(known, values, 0.0))])
    counts = numpy.concatenate([[0], numpy.cumsum(known)])
    index = numpy.arange(len(values))
    reach = numpy.minimum(index, (window - 1) // 2)
    first, last = index - reach, numpy.minimum(index + reach + 1, len(values))
    return numpy.where(known, (sums[last] - sums[first]) / numpy.maximum(counts[last] - counts[first], 1), numpy.nan)


def labels(folders: Sequence[Path]) -> list[str]:
    """A short name for each run: as many trailing parts of its path as tell it from the others."""
    parts = [(folder.parent if folder.is_file() else folder).resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts))):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def draw_metrics(runs: dict[str, Sequence[dict[str, Any]]], x: str = "step", window: int = 1) -> Figure:
    """Loss, learning rate, gradient norm and throughput of the runs, by name, over `x` ('step' or 'tokens').

    With `window` above 1, loss, gradient norm and throughput are running means over that many logged steps, drawn over
    the faint original.
    """
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(2, 2, figsize=(10, 6.4), sharex=True, layout="constrained")
        loss, rate, norm, speed = panels.flat
        held_out = False
        for index, (name, records) in enumerate(runs.items()):
            look = _look(index)
            _line(loss, *curve(records, x, "loss"), window, look)
            _line(rate, *curve(records, x, "lr"), 1, look)
            _line(norm, *curve(records, x, "grad_norm"), window, look)
            _line(speed, *curve(records, x, "tokens_per_second"), window, look)
            steps, values = curve(records, x, "eval_loss")
            loss.plot(steps, values, **look, **HELD_OUT, zorder=3)
            held_out |= len(values) > 0
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
        for axes in panels[1]:
            axes.set_xlabel(X_LABELS[x])
            axes.xaxis.set_major_formatter(FuncFormatter(_count_tick))
            axes.xaxis.get_major_locator().set_params(integer=True)
        if held_out:
            keys = [Line2D([], [], color="#555555"), Line2D([], [], color="#555555", **HELD_OUT)]
            loss.legend(keys, ["training", "held-out"], loc="upper right")
        columns = max(1, min(len(runs), 100 // (max(map(len, runs)) + 6)))
        figure.legend([Line2D([], [], **_look(index)) for index in range(len(runs))], list(runs),
                      loc="outside lower center", ncols=columns)
    return figure


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


def save(figure: Figure, path: Path) -> None:
    """Writes the figure, in the format of the suffix, and closes it. Raises `ConfigError` when that cannot be done."""
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise ConfigError(f"--out {path}: unknown format; legal: {', '.join('.' + name for name in sorted(formats))}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{os.getpid()}-{path.name}")
        figure.savefig(beside)
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot write ({error.strerror})") from None
    finally:
        pyplot.close(figure)


def load(folders: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """The lines of all runs by label. Raises one `ConfigError` that names every run which cannot be drawn."""
    problems, runs = [], {}
    for name, folder in zip(labels(folders), folders):
        try:
            runs[name] = metrics.read(folder)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is 0, or 2 after one message about what cannot be drawn."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.plot",
        description="Draw loss, learning rate, gradient norm and throughput of one or more runs.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folder, or a metrics.jsonl")
    parser.add_argument("--out", type=Path,
                        help="picture to write (default: RUN/metrics.png, or ./metrics.png for several runs)")
    parser.add_argument("--x", choices=tuple(X_LABELS), default="step", help="horizontal axis (default: step)")
    parser.add_argument("--smooth", metavar="N", type=int, default=1,
                        help="running mean over N logged steps (default: 1, none)")
    given = parser.parse_args(arguments)
    try:
        if given.smooth < 1:
            raise ConfigError(f"--smooth {given.smooth}: give a number of logged steps, 1 or more")
        run = given.runs[0].parent if given.runs[0].is_file() else given.runs[0]
        out = given.out or (run if len(given.runs) == 1 else Path()) / "metrics.png"
        save(draw_metrics(load(given.runs), given.x, given.smooth), out)
    except ConfigError as error:
        print(f"trainer.plot: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
