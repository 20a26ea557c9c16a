"""`activation.mode=auto`: which operations each layer keeps for its backward pass.

What an operation's result costs to keep are bytes, and what it saves are seconds of the backward pass; both are those
of the estimate. A layer keeps nothing, or its operations in the order of seconds for a byte, or all (and is not
recomputed at all). Of the equal layers of a pipeline stage some do one, and the rest another: two kinds of layers at
most, so that the compiler has few graphs to make. Among these a rank takes the fastest whose replayed peak fits; of
those that take as long but for `EQUAL`, the one with fewest kinds of layers, and of these the smallest.

Ranks of a pipeline are chosen for apart, since their memories are: early ones hold more micro-batches, and keep less of
each. Within a stage the last layers keep most, whose backward pass is first, before gradients take the memory.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from trainer.config import Config
from trainer.config.hardware import HardwareConfig
from trainer.config.model import CodeSpec
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.planning.estimate.memory import FRAGMENTS, find_peaks
from trainer.planning.estimate.rates import DeviceRates
from trainer.planning.estimate.timing import step_seconds, time_units
from trainer.planning.layer import Program, model_programs
from trainer.planning.recompute import ALL, entries_of
from trainer.planning.resolve import Layout
from trainer.planning.states import ELEMENT_BYTES

SavedOperations = tuple[str, ...]
"""Operations whose results a layer keeps; `(ALL,)`: of which nothing is recomputed."""

EQUAL = 4e-3
"""Of the seconds of a rank's layers: a choice that saves less is worth neither memory nor another graph to compile."""

POINTS = 64
"""Choices of some layers that are combined with those of others, evenly over all where there are more."""

AHEAD = 64
"""Choices behind the largest that was found to fit, of which some may fit too: another moment than the one by which
they are ordered is the fullest in models of few layers."""

FEW = 256
"""Choices that are all tried where there are no more: of equal layers on one rank, up to five of them."""

ROUNDS = 3
"""How often layers are dealt to stages anew after a choice."""


COARSE: SavedOperations = ("attention", "matmul")
"""What layers of transformers' code may keep: their products are not known one by one (`planning/code.py`)."""


class LayerShare(NamedTuple):
    """What equal layers of a stage keep: the last `late` of them `more`, the others `less`."""

    layers: tuple[int, ...]
    less: SavedOperations
    more: SavedOperations
    late: int


class CostPoint(NamedTuple):
    """A choice for some layers: bytes that they hold at the fullest moment, and seconds of a step."""

    size: float
    seconds: float
    shares: tuple[LayerShare, ...]


class RecomputeChoice(NamedTuple):
    """seconds: of a step. peak, host: bytes of the fullest rank, on the device and in host memory."""

    config: Config
    layout: Layout
    seconds: float
    peak: float
    host: float


def decide_recompute(
    config: Config, layout: Layout, hardware: HardwareConfig, limit: float, node: int
) -> RecomputeChoice:
    """The fastest choice whose predicted peak is at most `limit` bytes, or else the one that recomputes all.

    node: processes of a machine."""
    everything = measure_choice(with_uniform_save(config, (ALL,)), layout, hardware, node)
    if everything.peak <= limit:
        return everything
    nothing = measure_choice(with_uniform_save(config, ()), layout, hardware, node)
    if nothing.peak > limit:
        return nothing
    found = [nothing]
    for _ in range(ROUNDS if layout.plan.pp > 1 else 1):
        chosen = choose_recompute(config, layout, hardware, limit, node)
        found.append(measure_choice(chosen, layout, hardware, node))
        if found[-1].layout.pipeline == layout.pipeline:
            break
        layout = found[-1].layout  # the choice has moved layers to other stages
    return min((one for one in found if one.peak <= limit), key=lambda one: one.seconds)


def measure_choice(config: Config, layout: Layout, hardware: HardwareConfig, node: int) -> RecomputeChoice:
    """A choice with its own layout, since pipelines deal out layers by what they cost."""
    if layout.plan.pp > 1:
        layout = replace(layout, pipeline=resolve_pipeline(config, layout.spec, layout.plan, layout.batch))
    timing, pace = time_units(config, layout, hardware), DeviceRates.of(hardware, config.precision)
    _, seconds = step_seconds(config, layout, timing, pace)
    ranks = find_peaks(config, layout, lowered=False, node=node)
    return RecomputeChoice(
        config, layout, seconds, *(max(map(attrgetter(name), ranks)) for name in ("reserved", "host"))
    )


def choose_recompute(config: Config, layout: Layout, hardware: HardwareConfig, limit: float, node: int) -> Config:
    """The settings of the choice that is fastest for the stages of a layout, or of the one that keeps nothing."""
    table = _Table(config, layout, hardware)
    flights, pipeline = in_flight(layout), layout.pipeline
    choices = [
        [list(table.groups(layers, flights[stage])) for stage, layers in pipeline.stages(rank).items()]
        for rank in range(layout.plan.pp)
    ]

    def fit(points: Sequence[CostPoint]) -> list[bool]:
        replayed = find_peaks(table.settings(points), layout, lowered=False, node=node)
        return [peak.reserved <= limit for peak in replayed]

    match choices:
        case [[[points]]] if len(points) <= FEW:
            return table.settings([fastest_fitting(points, lambda point: all(fit([point])))])
    fronts = [pareto_front(stages) for stages in choices]

    def fitting(places: Sequence[int]) -> list[bool]:
        return fit([points[place] for points, place in zip(fronts, places)])

    low, high = [0] * len(fronts), [len(points) - 1 for points in fronts]
    while low != high:
        middle = [(below + above + 1) // 2 for below, above in zip(low, high)]
        for rank, fits in enumerate(fitting(middle)):
            if low[rank] == high[rank]:
                continue
            if fits:
                low[rank] = middle[rank]
            else:
                high[rank] = middle[rank] - 1
    behind = max(len(points) - 1 - place for place, points in zip(high, fronts))
    for ahead in range(1, min(AHEAD, behind) + 1):
        further = [min(place + ahead, len(points) - 1) for place, points in zip(high, fronts)]
        low = [there if fits else place for place, there, fits in zip(low, further, fitting(further))]
    simpler = [simplest_equals(points[: place + 1]) for points, place in zip(fronts, low)]
    chosen: dict[int, int] = {}
    while len(chosen) < len(fronts):  # the last of each is `low`'s at the latest, which fits
        places = [chosen.get(rank, left[0]) for rank, left in enumerate(simpler)]
        for rank, (place, fits) in enumerate(zip(places, fitting(places))):
            if fits or place == low[rank]:
                chosen.setdefault(rank, place)
            else:
                simpler[rank] = simpler[rank][1:]
    return table.settings([points[chosen[rank]] for rank, points in enumerate(fronts)])


class _Table:
    """Seconds and bytes of each layer by what it keeps."""

    def __init__(self, config: Config, layout: Layout, hardware: HardwareConfig):
        self.config, self.layout, self.hardware = config, layout, hardware
        element = ELEMENT_BYTES[config.precision.compute]
        length, tp, parallel = layout.batch.sequence_length, layout.plan.tp, config.parallel
        self.programs = model_programs(layout.spec, length, tp, element, parallel.tp_overlap, room=parallel.ep_capacity)
        self.known: dict[SavedOperations, tuple[list[float], tuple[float, ...]]] = {}
        self.kinds: dict[int, list[int]] = defaultdict(list)  # layers that are equal
        for layer, program in enumerate(self.programs):
            self.kinds[id(program)].append(layer)
        names = (name for program in self.programs for name in program.gemms)
        self.order = [*dict.fromkeys((*COARSE, *names)), ALL]
        self.ladders = {
            kind: list(self.ladder(self.programs[layers[0]], layers[len(layers) // 2]))
            for kind, layers in self.kinds.items()
        }

    def of(self, kept: SavedOperations) -> tuple[list[float], tuple[float, ...]]:
        """Seconds of a step and bytes of a micro-batch, of each layer where all keep the same."""
        if kept not in self.known:
            timing = time_units(with_uniform_save(self.config, kept), self.layout, self.hardware)
            microbatches = self.layout.pipeline.schedule.microbatches
            seconds = [
                microbatches * sum(sum(terms.values()) for terms in (unit.forward, unit.input, unit.weight))
                + unit.gather
                + unit.reduce
                for unit in timing.units[1:-1]
            ]
            self.known[kept] = seconds, timing.costs.activation[1:-1]
        return self.known[kept]

    def ladder(self, program: Program, layer: int) -> Iterator[SavedOperations]:
        """What a layer may keep, in the order of bytes. Steps that save no time are left out."""
        (seconds, sizes), gains = self.of(()), {}
        names = [name for name, op in program.computed.items() if op.read]
        for name in COARSE if isinstance(self.layout.spec, CodeSpec) else names:
            faster, larger = self.of((name,))
            if faster[layer] < seconds[layer] and larger[layer] > sizes[layer]:
                gains[name] = (seconds[layer] - faster[layer]) / (larger[layer] - sizes[layer])
        order = sorted(gains, key=lambda name: -float(f"{gains[name]:.2e}"))  # of equal ones the first
        rungs = [tuple(order[:count]) for count in range(len(order) + 1)]
        fastest = float("inf")
        for kept in sorted([*rungs, (ALL,)], key=lambda kept: self.of(kept)[1][layer]):
            if self.of(kept)[0][layer] < fastest:
                fastest = self.of(kept)[0][layer]
                yield kept

    def groups(self, layers: range, flight: int) -> Iterator[list[CostPoint]]:
        """The choices of the layers of a stage, of which `flight` micro-batches are held, for each kind of layer."""
        for kind, members in self.kinds.items():
            if mine := tuple(layer for layer in members if layer in layers):
                rungs = self.ladders[kind]
                shares = [LayerShare(mine, *both, late) for both in combinations(rungs, 2) for late in range(len(mine))]
                shares.append(LayerShare(mine, rungs[-1], rungs[-1], 0))
                yield [self.point(share, flight, layers.stop - 1 in mine) for share in shares]

    def point(self, share: LayerShare, flight: int, last: bool) -> CostPoint:
        """last: whether the stage's last layer is among them. At the fullest moment, when its backward pass begins, all
        of it is there, whether it was kept or is computed again."""
        layers, less, more, late = share
        first, (some, others) = len(layers) - late, (self.of(less), self.of(more))
        seconds, size = (
            sum(one[layer] for layer in layers[:first]) + sum(other[layer] for layer in layers[first:])
            for one, other in zip(some, others)
        )
        latest = (others if late else some)[1][layers[-1]] * last
        return CostPoint((1 + FRAGMENTS) * flight * size - latest, seconds, (share,))

    def settings(self, points: Iterable[CostPoint]) -> Config:
        """The configuration of one choice of each rank."""
        kept: dict[int, SavedOperations] = {}
        for layers, less, more, late in (share for point in points for share in point.shares):
            first = len(layers) - late
            kept |= dict.fromkeys(layers[:first], less) | dict.fromkeys(layers[first:], more)
        return with_saved_operations(self.config, [kept[layer] for layer in range(len(self.programs))], self.order)


def pareto_front(groups: Iterable[Iterable[list[CostPoint]]]) -> list[CostPoint]:
    """Of all combinations of a choice from each group, those than which no other is both smaller and faster, from the
    smallest to the fastest."""

    def joined(one: list[CostPoint], other: list[CostPoint]) -> list[CostPoint]:
        pairs = [(a.size + b.size, a.seconds + b.seconds, (a, b)) for a in thin_points(one) for b in thin_points(other)]
        return [CostPoint(size, seconds, a.shares + b.shares) for size, seconds, (a, b) in drop_dominated(pairs)]

    return reduce(joined, (drop_dominated(group) for stage in groups for group in stage))


def drop_dominated(points: Iterable[Any]) -> list[Any]:
    """Those of which no other is both smaller and faster, by size. points: tuples that begin with both."""
    found: list[Any] = []
    for point in sorted(points, key=itemgetter(0, 1)):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found


def fastest_fitting(points: list[CostPoint], fits: Callable[[CostPoint], bool]) -> CostPoint:
    """Of those that fit, of which there is one; of what is as fast but for `EQUAL` the simplest."""
    slower = sorted(points, key=attrgetter("seconds"), reverse=True)
    while not fits(slower[-1]):
        slower.pop()
    return next(slower[place] for place in simplest_equals(slower) if fits(slower[place]))


def thin_points(points: list[CostPoint]) -> list[CostPoint]:
    """At most `POINTS` of them."""
    last = len(points) - 1
    return points if last < POINTS else [points[place * last // (POINTS - 1)] for place in range(POINTS)]


def simplest_equals(points: list[CostPoint]) -> list[int]:
    """Places of those that take as long as the last, the fastest, but for `EQUAL`: fewest kinds of layers first, then
    fewest bytes."""
    equal = [place for place, point in enumerate(points) if point.seconds <= (1 + EQUAL) * points[-1].seconds]
    return sorted(
        equal, key=lambda place: (sum(1 + bool(share.late) for share in points[place].shares), points[place].size)
    )


def in_flight(layout: Layout) -> dict[int, int]:
    """Micro-batches of each stage that its rank holds at the moment when it holds activations of most layers."""
    pipeline, fullest = layout.pipeline, {}
    ends = {action.stage for order in pipeline.schedule.orders for action in order if action.kind == "W"}
    for rank, order in enumerate(pipeline.schedule.orders):
        stages = pipeline.stages(rank)
        held, most = dict.fromkeys(stages, 0), 0
        fullest.update(held)
        # Of passes that run in turns, one frees what the other one takes.
        turned = layout.plan.overlaps
        for action in (part for one in order for part in (one.computed[::-1] if turned else one.computed)):
            if action.kind == "F":
                held[action.stage] += 1
            elif action.kind == ("W" if action.stage in ends else "B"):
                held[action.stage] -= 1
            layers = sum(count * len(stages[stage]) for stage, count in held.items())
            if layers > most:
                most = layers
                fullest.update(held)
    return fullest


def with_uniform_save(config: Config, kept: SavedOperations) -> Config:
    """The settings with which every layer keeps the same operations."""
    if kept == (ALL,):
        return _with(config, mode="none", offload=False)
    return _with(config, mode="selective", save=list(kept)) if kept else _with(config, mode="full")


def with_saved_operations(config: Config, kept: Sequence[SavedOperations], order: Sequence[str]) -> Config:
    """The settings with which each layer keeps its operations. order: of all operations."""
    if set(kept) in ({()}, {(ALL,)}):
        return with_uniform_save(config, kept[0])
    return _with(config, mode="selective", save=entries_of(kept, order))


def with_section(config: Config, section: str, **values: Any) -> Config:
    """The configuration with other values in one section."""
    changed = copy.copy(config)
    setattr(changed, section, replace(getattr(config, section), **values))
    return changed


def _with(config: Config, **values: Any) -> Config:
    """The configuration with nothing left to choose in its section `activation`."""
    return with_section(config, "activation", **values, memory=None, hardware=None)
