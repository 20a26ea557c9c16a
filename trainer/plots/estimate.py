"""Pictures of predicted plans: memory by rank and over the step, time by plan, communication by axis, and the timeline
of a pipeline's schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.planning.estimate.course import course
from trainer.planning.estimate.memory import CATEGORIES
from trainer.planning.estimate.step import GIB, Estimate
from trainer.planning.estimate.timing import AXES
from trainer.plots.files import save
from trainer.plots.runs import STYLE
from trainer.plots.schedule import draw_schedule
from trainer.util.tables import size

PARTS = ("#0072B2", "#E69F00", "#CC79A7", "#D55E00", "#56B4E9", "#009E73", "#000000")
"""The palette of curves, in the order in which neighbours differ most under every common colour blindness."""

HATCHES = ("", "////", "....")
"""Of the first parts of a bar, as many as there are colours, of the next ones, and of the last."""

SHOWN = 0.002
"""Least share of a bar that is drawn."""


def draw(found: Sequence[Estimate], chosen: Estimate, out: Path) -> list[Path]:
    """Draws the memory of the chosen plan's ranks, the time of all plans and the communication of the chosen one;
    beside it, its timeline with the memory of the fullest rank below.

    Returns the files written. Raises `ConfigError` for a kind of picture that cannot be written.
    """
    save(draw_bars(found, chosen), out)
    beside = out.with_name(f"{out.stem}-schedule{out.suffix}")
    name, simulation = name_of(chosen), chosen.simulation
    makespans, below = {name: simulation.makespan}, lambda axes: draw_course(axes, chosen)
    save(draw_schedule({name: simulation.spans}, makespans=makespans, below=below), beside)
    return [out, beside]


def name_of(found: Estimate) -> str:
    layout = found.layout
    pipeline = f", {layout.pipeline.schedule.name}" if layout.plan.pp > 1 else ""
    return (
        f"{layout.plan.describe()}{pipeline}, {found.config.activation.mode}, {layout.batch.micro_size} a micro-batch"
    )


def draw_bars(found: Sequence[Estimate], chosen: Estimate) -> Figure:
    """Three panels: gibibytes by pipeline rank of the chosen plan, seconds by plan, in parts, and seconds of the
    chosen plan's communication by axis, exposed and hidden."""
    hardware = chosen.hardware
    memory = {
        f"rank {peak.rank}": {
            **{name: size / GIB for name, size in peak.categories.items()},
            "allocator's pools": peak.pools / GIB,
            "outside of it": hardware.fixed,
        }
        for peak in chosen.ranks
    }
    moved = {axis: {"exposed": chosen.exposed[axis], "hidden": chosen.hidden[axis]} for axis in chosen.communication}
    heights = [0.6 + 0.35 * len(part) for part in (memory, found, moved or AXES)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, sum(heights) + 2.0), layout="constrained")
        upper, middle, lower = figure.subplots(3, 1, height_ratios=heights)
        bars(upper, memory)
        upper.axvline(hardware.memory, color="black", linewidth=1, linestyle="--")
        upper.set_title(f"memory (GiB; expected error {100 * hardware.memory_band:.0f}%; dashed: that of the device)")
        bars(middle, {f"plan {number}": one.terms for number, one in enumerate(found, start=1)})
        error = f"expected error {100 * hardware.band:.0f}%"
        middle.set_title(f"time of a step (s; {error})")
        bars(lower, moved)
        lower.set_title(f"communication of a step (s; {error})" if moved else "no communication")
        figure.suptitle(name_of(chosen), x=0.01, ha="left", fontsize=10)
    return figure


def look(place: int) -> dict[str, Any]:
    """How part number `place` of a bar is drawn: neighbours differ in colour, all in colour or hatch."""
    return {
        "facecolor": PARTS[place % len(PARTS)],
        "hatch": HATCHES[place // len(PARTS)],
        "edgecolor": "white",
        "linewidth": 0,
    }


def bars(axes: Axes, parts: Mapping[str, Mapping[str, float]]) -> None:
    """Stacked horizontal bars, the first on top; parts that are nowhere visible are left out."""
    names = list(dict.fromkeys(name for one in parts.values() for name in one))
    for index, name in enumerate(names):
        values = [one.get(name, 0.0) for one in parts.values()]
        if any(value > SHOWN * sum(one.values()) for value, one in zip(values, parts.values())):
            left = [sum(one.get(before, 0.0) for before in names[:index]) for one in parts.values()]
            axes.barh(list(parts), values, left=left, label=name, height=0.7, **look(index))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    if names:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)


def draw_course(axes: Axes, found: Estimate) -> None:
    """Draws what the fullest rank has allocated over the step, by category, and marks its peak."""
    stretches, peak = course(found), found.fullest
    times = [time for one in stretches for time in (one.start, one.end)]
    base = [0.0] * len(times)
    for index, name in enumerate(CATEGORIES):
        top = [low + size for low, size in zip(base, [one.categories[name] / GIB for one in stretches for _ in "se"])]
        if any(high - low > SHOWN * peak.allocated / GIB for low, high in zip(base, top)):
            axes.fill_between(times, base, top, label=name, **look(index))
        base = top
    highest = max(stretches, key=lambda one: sum(one.categories.values()))
    marked = (highest.start + highest.end) / 2, sum(highest.categories.values()) / GIB
    axes.plot(*marked, marker="v", color="black", clip_on=False)
    text = f"{size(peak.allocated)} allocated, {size(peak.reserved)} reserved: {peak.where}"
    axes.annotate(text, marked, xytext=(0, 6), textcoords="offset points", fontsize=7, ha="center")
    axes.axhline(found.hardware.memory - found.hardware.fixed, color="black", linewidth=1, linestyle="--")
    axes.set_ylim(0, 1.12 * max(found.hardware.memory, marked[1]))
    axes.set_title(f"memory of rank {peak.rank} (GiB; dashed: what the device has for the allocator)", fontsize=9)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)
