"""The picture of a predicted plan: the timeline of its schedule, and the memory of the fullest rank over the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from trainer.planning.estimate.memory import CATEGORIES
from trainer.planning.estimate.report import build_memory_timeline
from trainer.planning.estimate.step import GIB, StepEstimate
from trainer.plots.runs import save_figure
from trainer.plots.schedule import draw_schedule
from trainer.util.tables import format_bytes

PARTS = ("#0072B2", "#E69F00", "#CC79A7", "#D55E00", "#56B4E9", "#009E73", "#000000")
"""The palette of Okabe and Ito without its yellow, in the order in which neighbours differ most under every common
colour blindness."""

HATCHES = ("", "////")
"""Of the first parts, as many as there are colours, and of the next ones."""

MIN_SHARE = 0.002
"""Least share of the memory that is drawn."""


def draw_estimate(chosen: StepEstimate, out: Path) -> None:
    """Draws the schedule of a plan with the memory of its fullest rank below. Raises `ConfigError` for a kind of
    picture that cannot be written."""
    name, simulation = name_of(chosen), chosen.simulation
    makespans, below = {name: simulation.makespan}, lambda axes: draw_memory_timeline(axes, chosen)
    save_figure(draw_schedule({name: simulation.spans}, makespans=makespans, below=below), out)


def name_of(found: StepEstimate) -> str:
    layout = found.layout
    pipeline = f", {layout.pipeline.schedule.name}" if layout.plan.pp > 1 else ""
    return (
        f"{layout.plan.describe()}{pipeline}, {found.config.activation.mode}, {layout.batch.micro_size} a micro-batch"
    )


def category_style(place: int) -> dict[str, Any]:
    """How part number `place` is drawn: neighbours differ in colour, all in colour or hatch."""
    return {
        "facecolor": PARTS[place % len(PARTS)],
        "hatch": HATCHES[place // len(PARTS)],
        "edgecolor": "white",
        "linewidth": 0,
    }


def draw_memory_timeline(axes: Axes, found: StepEstimate) -> None:
    """Draws what the fullest rank has allocated over the step, by category, and marks its peak."""
    stretches, peak = build_memory_timeline(found), found.fullest
    times = [time for one in stretches for time in (one.start, one.end)]
    base = [0.0] * len(times)
    for index, name in enumerate(CATEGORIES):
        top = [low + size for low, size in zip(base, [one.categories[name] / GIB for one in stretches for _ in "se"])]
        if any(high - low > MIN_SHARE * peak.allocated / GIB for low, high in zip(base, top)):
            axes.fill_between(times, base, top, label=name, **category_style(index))
        base = top
    highest = max(stretches, key=lambda one: sum(one.categories.values()))
    marked = (highest.start + highest.end) / 2, sum(highest.categories.values()) / GIB
    axes.plot(*marked, marker="v", color="black", clip_on=False)
    text = f"{format_bytes(peak.allocated)} allocated, {format_bytes(peak.reserved)} reserved: {peak.where}"
    axes.annotate(text, marked, xytext=(0, 6), textcoords="offset points", fontsize=7, ha="center")
    axes.axhline(found.hardware.memory - found.hardware.fixed, color="black", linewidth=1, linestyle="--")
    axes.set_ylim(0, 1.12 * max(found.hardware.memory, marked[1]))
    axes.set_title(f"memory of rank {peak.rank} (GiB; dashed: what the device has for the allocator)", fontsize=9)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)
