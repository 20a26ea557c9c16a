"""Pictures of predicted plans: memory by rank, time by plan, and the timeline of a pipeline's schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.planning.estimate.step import GIB, Estimate
from trainer.plots.files import save
from trainer.plots.runs import STYLE
from trainer.plots.schedule import draw_schedule

COLOURS = matplotlib.colormaps["tab20"].colors
SHOWN = 0.002
"""Least share of a bar that is drawn."""


def draw(found: Sequence[Estimate], chosen: Estimate, out: Path) -> list[Path]:
    """Draws the memory of the first plan's ranks and the time of all plans; of a pipeline, its timeline beside it.

    Returns the files written. Raises `ConfigError` for a kind of picture that cannot be written.
    """
    save(draw_bars(found), out)
    first = found[0]
    if first.layout.plan.pp == 1:
        return [out]
    beside = out.with_name(f"{out.stem}-schedule{out.suffix}")
    makespan = first.simulation.makespan
    figure = draw_schedule({name_of(first): first.simulation.spans}, makespans={name_of(first): makespan})
    save(figure, beside)
    return [out, beside]


def name_of(found: Estimate) -> str:
    layout = found.layout
    pipeline = f", {layout.pipeline.schedule.name}" if layout.plan.pp > 1 else ""
    return (
        f"{layout.plan.describe()}{pipeline}, {found.config.activation.mode}, {layout.batch.micro_size} a micro-batch"
    )


def draw_bars(found: Sequence[Estimate]) -> Figure:
    """Two panels: gibibytes by pipeline rank of the first plan, seconds by plan, in parts."""
    first = found[0]
    memory = {
        f"rank {peak.rank}": {
            **{name: size / GIB for name, size in peak.categories.items()},
            "allocator's pools": peak.pools / GIB,
            "outside of it": first.hardware.fixed,
        }
        for peak in first.ranks
    }
    heights = [0.6 + 0.35 * len(memory), 0.6 + 0.35 * len(found)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, sum(heights) + 1.6), layout="constrained")
        upper, lower = figure.subplots(2, 1, height_ratios=heights)
        bars(upper, memory)
        upper.axvline(first.hardware.memory, color="black", linewidth=1, linestyle="--")
        upper.set_title("memory (GiB; dashed: that of the device)")
        bars(lower, {f"plan {number}": one.terms for number, one in enumerate(found, start=1)})
        lower.set_title(f"time of a step (s; expected error {100 * first.hardware.band:.0f}%)")
        figure.suptitle(name_of(first), x=0.01, ha="left", fontsize=10)
    return figure


def bars(axes: Axes, parts: Mapping[str, Mapping[str, float]]) -> None:
    """Stacked horizontal bars, the first on top; parts that are nowhere visible are left out."""
    names = list(dict.fromkeys(name for one in parts.values() for name in one))
    for index, name in enumerate(names):
        values = [one.get(name, 0.0) for one in parts.values()]
        if any(value > SHOWN * sum(one.values()) for value, one in zip(values, parts.values())):
            left = [sum(one.get(before, 0.0) for before in names[:index]) for one in parts.values()]
            axes.barh(list(parts), values, left=left, label=name, color=COLOURS[index % len(COLOURS)], height=0.7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)
