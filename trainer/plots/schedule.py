"""Pictures of pipeline timelines: what every rank computed and when, planned or measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from trainer.planning.schedules.ir import Action
from trainer.planning.schedules.simulate import ActionSpan, Timeline, idle_gaps, measure_timeline
from trainer.util.reading import make_printable
from trainer.util.tables import format_duration, format_percent


class ActionStyle(NamedTuple):
    """How a kind of action is drawn.

    colour: of the rank's first chunk. lighter: how much lighter the last chunk is, 0 to 1. ink: the colour of
    numbers."""

    name: str
    colour: str
    lighter: float
    ink: str


# The hues differ under the common colour blindnesses, and in lightness, so that grey print shows them too.
ACTION_STYLES = {
    "F": ActionStyle("forward", "#173f86", 0.25, "white"),
    "B": ActionStyle("full backward", "#c24a12", 0.25, "white"),
    "I": ActionStyle("input gradient", "#e0921a", 0.25, "#222222"),
    "W": ActionStyle("weight gradient", "#a8dec6", 0.5, "#222222"),
}
OTHER = ActionStyle("parameters", "#8a8a8a", 0.25, "white")
BUBBLE = {"facecolor": "#f4f4f4", "edgecolor": "#c9c9c9", "hatch": "/////", "linewidth": 0}
STYLE = {
    "figure.dpi": 150,
    "font.size": 9,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "axes.edgecolor": "#888888",
}
BAR = 0.84  # height of a bar, of its row
DIGIT = 0.64  # width of a digit, of the size of its font
SMALLEST_NUMBER = 4.5  # points
MARGINS = 1.3  # inches of the width that the time axis leaves to both sides
MOST = 160  # actions of a rank that can be told apart in one picture


def escape_dollars(text: str) -> str:
    """A foreign text as matplotlib shows it literally: dollar signs would begin mathematics."""
    return make_printable(text).replace("$", r"\$")


def draw_schedule(
    timelines: dict[str, Timeline],
    title: str | None = None,
    seconds: bool = True,
    makespans: dict[str, float] | None = None,
) -> Figure:
    """Draws each timeline as a panel under its name, all on one time axis: a row a rank, a bar an action, bubbles
    hatched.

    A bar's colour is the action's kind, its shade the rank's chunk, its number the micro-batch; numbers that do not fit
    are left out. An overlapped forward and backward share a row, one above the other. At the end of a row stands the
    rank's bubble; the panel's title has makespan and bubble. Of timelines with more than `MOST` actions of a rank, the
    beginning and the end are drawn beside each other, as long as so many actions take.

    seconds: False where times are numbers without a unit. makespans: by name, of timelines whose step lasts longer than
    their last span."""
    measures = {name: measure_timeline(ranks, (makespans or {}).get(name)) for name, ranks in timelines.items()}
    makespan = max(total for total, _, _ in measures.values()) or 1.0
    lengths = _measure_bars(timelines)
    crowd = max(len(spans) for ranks in timelines.values() for spans in ranks)
    whole, part = crowd <= MOST, makespan * MOST / 2 / crowd
    drawn = makespan if whole else 2 * part
    width = min(max(9.0, 0.15 * drawn / min(lengths.values(), default=drawn)), 18.0)
    point = drawn / (72 * (width - MARGINS))  # the time that one point of the axis stands for
    row = min(max(0.22, 1.6 / max(map(len, timelines.values()))), 0.34)  # inches
    heights = [0.3 + row * len(ranks) for ranks in timelines.values()]
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(width, sum(heights) + 0.35 * len(heights) + 0.75 + 0.3 * bool(title)), layout="constrained"
        )
        panels = figure.subplots(
            len(heights), 2 - whole, sharex=whole, sharey="row", squeeze=False, height_ratios=heights
        )
        edge = min(0.6, 0.12 * min(lengths.values(), default=drawn) / point)
        sizes = _number_sizes(timelines, lengths, point, row)
        shown: dict[str, int] = {}
        unit, scale = ("s", 1.0) if makespan >= 2 else ("ms", 1e3) if makespan >= 2e-3 else ("µs", 1e6)
        if not seconds:
            unit, scale = "units", 1.0
        for beside, (name, ranks) in zip(panels, timelines.items()):
            total, lowest = measures[name][0], beside[0] is panels[-1, 0]
            for axes, window in zip(beside, [(0, makespan)] if whole else [(0, part), (total - part, total)]):
                for kind, chunks in _bars(axes, ranks, total, edge).items():
                    shown[kind] = max(chunks, shown.get(kind, 0))
                _numbers(axes, ranks, sizes, point)
                axes.tick_params(left=False, bottom=lowest or not whole)
                axes.spines[["top", "left", "right"]].set_visible(False)
                axes.spines["bottom"].set_visible(lowest or not whole)
                axes.set_xlim(window)
                axes.set_xlabel(f"time ({unit})" if lowest else "", color="#444444")
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value * scale:g}"))
            _describe_timeline(beside, name, *measures[name], seconds)
        if title:
            figure.suptitle(escape_dollars(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
        _legend(figure, shown)
    return figure


def _parts(ranks: Timeline) -> Iterator[tuple[int, ActionSpan, Action, float, float]]:
    """What is drawn: rank, span, action, and the bar's lower edge and height, on rows that are 1 apart.

    The two actions of an overlap are half a bar each."""
    for rank, spans in enumerate(ranks):
        for span in spans:
            actions = span.action.parts or (span.action,)
            for index, action in enumerate(actions):
                yield rank, span, action, rank - BAR / 2 + index * BAR / len(actions), BAR / len(actions)


def _measure_bars(timelines: dict[str, Timeline]) -> dict[str, float]:
    """By kind of action, the lower quartile of its durations: three quarters of its bars are at least this long."""
    lengths: dict[str, list[float]] = {}
    for ranks in timelines.values():
        for _, span, action, _, _ in _parts(ranks):
            if span.end > span.start and action.kind in ACTION_STYLES:
                lengths.setdefault(action.kind, []).append(span.end - span.start)
    return {kind: sorted(values)[len(values) // 4] for kind, values in lengths.items()}


def _number_sizes(
    timelines: dict[str, Timeline], lengths: dict[str, float], point: float, row: float
) -> dict[str, float]:
    """The font size in points, one for all, by the kinds whose bars have numbers.

    A kind has numbers where most of its bars hold the longest number in a readable size: numbers on the first ten
    micro-batches alone would puzzle."""
    lowest = min((height for ranks in timelines.values() for *_, height in _parts(ranks)), default=BAR)
    longest = max(
        (
            len(str(action.microbatch))
            for ranks in timelines.values()
            for _, _, action, _, _ in _parts(ranks)
            if action.kind in ACTION_STYLES
        ),
        default=1,
    )
    sizes = {kind: (length / point - 1) / (DIGIT * longest) for kind, length in lengths.items()}
    readable = {kind: size for kind, size in sizes.items() if size >= SMALLEST_NUMBER}
    return dict.fromkeys(readable, min([8.0, 54 * row * lowest, *readable.values()]))


def _bars(axes: Axes, ranks: Timeline, makespan: float, edge: float) -> dict[str, int]:
    """Draws the bars, separated by lines of `edge` points, and the bubbles. Returns the number of chunks by kind."""
    for rank, spans in enumerate(ranks):
        axes.broken_barh(
            idle_gaps(spans, makespan), (rank - BAR / 2, BAR), **BUBBLE, label="bubble", gid=f"rank{rank}-bubble"
        )
    chunk = _chunks(ranks)
    alike: dict[tuple[int, float, float, str, int], list[tuple[float, float]]] = {}
    for rank, span, action, bottom, height in _parts(ranks):
        kind = action.kind if action.kind in ACTION_STYLES else "other"
        alike.setdefault((rank, bottom, height, kind, chunk[rank, action.stage]), []).append(
            (span.start, span.end - span.start)
        )
    count = max(chunk.values(), default=0) + 1
    for (rank, bottom, height, kind, index), places in alike.items():
        axes.broken_barh(
            places,
            (bottom, height),
            facecolor=_colour(kind, index, count),
            edgecolor="white",
            linewidth=edge,
            label=kind,
            gid=f"rank{rank}-{kind}{index}{'' if height == BAR else '-overlap'}",
        )
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    return dict.fromkeys((kind for _, _, _, kind, _ in alike), count)


def _numbers(axes: Axes, ranks: Timeline, sizes: dict[str, float], point: float) -> None:
    """Writes micro-batches into the bars that are wide enough. point: seconds that a point of the axis stands for."""
    for _, span, action, bottom, height in _parts(ranks):
        text, size = str(action.microbatch), sizes.get(action.kind)
        if size and span.end - span.start >= DIGIT * len(text) * size * point:
            axes.text(
                (span.start + span.end) / 2,
                bottom + height / 2,
                text,
                ha="center",
                va="center_baseline",
                fontsize=size,
                clip_on=True,
                in_layout=False,
                color=ACTION_STYLES[action.kind].ink,
            )


def _chunks(ranks: Timeline) -> dict[tuple[int, int], int]:
    """By rank and stage, the stage's index among the stages of the rank: its chunk."""
    held: list[set[int]] = [set() for _ in ranks]
    for rank, _, action, _, _ in _parts(ranks):
        held[rank].add(action.stage)
    return {(rank, stage): index for rank, stages in enumerate(held) for index, stage in enumerate(sorted(stages))}


def _colour(kind: str, chunk: int, chunks: int) -> tuple[float, ...]:
    look = ACTION_STYLES.get(kind, OTHER)
    white = look.lighter * chunk / max(chunks - 1, 1)
    return tuple(part + (1 - part) * white for part in to_rgb(look.colour))


def _describe_timeline(
    panels: Sequence[Axes], name: str, makespan: float, bubble: float, bubbles: Sequence[float], seconds: bool
) -> None:
    """Writes beside and above the panels of a timeline what it is."""
    panels[0].set_title(escape_dollars(name), loc="left", fontsize=10, fontweight="bold")
    panels[0].set_yticks(range(len(bubbles)), [f"rank {rank}" for rank in range(len(bubbles))])
    axes, length = panels[-1], format_duration(makespan) if seconds else f"{makespan:.4g}"
    axes.set_title(f"makespan {length}, bubble {format_percent(bubble)}", loc="right", fontsize=9, color="#444444")
    beside = {"fontsize": 8, "color": "#444444"}
    axes.annotate("by rank", (1.006, 1), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points", **beside)
    for rank, share in enumerate(bubbles):
        axes.text(
            1.006, rank, format_percent(share), transform=axes.get_yaxis_transform(), va="center_baseline", **beside
        )


def _legend(figure: Figure, shown: dict[str, int]) -> None:
    """Draws the legend below the panels: each kind with the shades of its chunks, and the bubble."""
    handles: list[Any] = []
    names = []
    for kind in (*ACTION_STYLES, "other"):
        if kind in shown:
            handles.append(tuple(Patch(facecolor=_colour(kind, chunk, shown[kind])) for chunk in range(shown[kind])))
            names.append(ACTION_STYLES.get(kind, OTHER).name)
    chunks = max(shown.values(), default=1)
    if chunks > 1:
        names[0] += f" (chunks 0{',' if chunks == 2 else ' to'} {chunks - 1})"
    figure.legend(
        [*handles, Patch(**BUBBLE)],
        [*names, "bubble"],
        loc="outside lower center",
        ncols=len(handles) + 1,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        handlelength=2.2,
    )
