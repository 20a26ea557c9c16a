"""The known pipeline schedules by name, built for any number of ranks and micro-batches.

A template gives each rank an order of forwards and backwards. Zero-bubble templates order F and I only, and state how
many activations a rank may hold; `greedy.list_schedule` then places W, as if F, I and W took equally long."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import Literal

from trainer.config import ConfigError
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.greedy import Line, fits_cap, least_cap, list_schedule
from trainer.planning.schedules.ir import Action, Schedule, pair_actions


@dataclass(frozen=True)
class ScheduleTemplate:
    """A schedule that can be built for any number of ranks.

    build: makes the schedule from ranks, micro-batches and chunks.
    placement: how stages lie on ranks, see `place_stages`.
    chunks: legal numbers of stages per rank, the default first; None for any number, by default 2.
    splits: whether I and W are separate actions, so that linear layers have to defer weight gradients.
    """

    build: Callable[[int, int, int], Schedule]
    placement: Literal["loop", "v"]
    chunks: tuple[int, ...] | None
    splits: bool


def place_stages(ranks: int, chunks: int, style: Literal["loop", "v"]) -> tuple[int, ...]:
    """The placement: by stage, the rank that holds it.

    "loop" goes through the ranks again for each chunk. "v" turns at the ends, so that the stages on both sides of a
    turn share a rank."""
    return tuple(
        ranks - 1 - rank if style == "v" and chunk % 2 else rank for chunk in range(chunks) for rank in range(ranks)
    )


def build_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The named template. Raises `ConfigError` naming the setting and a legal value."""
    problems = []
    template = TEMPLATES.get(name)
    if ranks < 1:
        problems.append(f"parallel.pp={ranks} must be at least 1")
    if microbatches < 1:
        problems.append(f"batch.accumulation={microbatches} must be at least 1: a step has a micro-batch or more")
    if template is None:
        problems.append(f"parallel.pipeline.schedule={name} is not a template; legal: {', '.join(TEMPLATES)}")
        raise ConfigError(problems)
    if chunks is None:
        chunks = template.chunks[0] if template.chunks else 2
    if template.chunks and chunks not in template.chunks:
        problems.append(
            f"parallel.pipeline.chunks={chunks}: schedule={name} places {template.chunks[0]} on each rank; legal: "
            f"{', '.join(map(str, template.chunks))}"
            + (", or parallel.pipeline.schedule=interleaved" if chunks > 0 else "")
        )
    elif chunks < 1:
        problems.append(f"parallel.pipeline.chunks={chunks} must be at least 1")
    if problems:
        raise ConfigError(problems)
    return template.build(ranks, microbatches, chunks)


def forward_only(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """Forwards only, for evaluation: micro-batches flow through the ranks without a gap, the latest stage first."""
    return list_schedule("forward_only", StageCosts.uniform(len(placement)), placement, microbatches, trains=False)[0]


def build_greedy(
    costs: StageCosts,
    placement: tuple[int, ...],
    microbatches: int,
    cap: float | None = None,
    split: bool = True,
    patience: float = 0.5,
) -> Schedule:
    """The fastest schedule that list scheduling finds for measured costs, under a memory cap.

    It tries ranks that start whatever is ready, and ranks that keep to an order of forwards and backwards known to suit
    the placement, each with split and with full backwards. cap: the most activation a rank may hold, in the unit of
    `costs.activation`; a cap below one micro-batch raises `ConfigError`. split: False for full backwards only.
    patience: a W does not start if an F or I is due within this share of the W's duration."""
    found = []
    for splits in (True, False) if split else (False,):
        if splits and cap is not None and cap < least_cap(costs, placement):
            continue  # with much recompute an I leaves more than fits, where a full backward leaves nothing
        lines = _lines_for(placement, microbatches, "I" if splits else "B")
        options = [None, *(line for line in lines if fits_cap(line, costs, placement, cap))]
        found += [
            list_schedule(
                "greedy", costs, placement, microbatches, cap=cap, split=splits, patience=patience, lines=option
            )
            for option in options
        ]
    return min(found, key=lambda result: result[1])[0]


def _lines_for(placement: tuple[int, ...], microbatches: int, backward: str) -> Iterator[list[Line]]:
    ranks = max(placement) + 1
    chunks = len(placement) // ranks
    if placement == place_stages(ranks, 2, "v"):
        yield from (_wave(ranks, microbatches, block, backward) for block in BUILDING_BLOCKS)
    if placement == place_stages(ranks, chunks, "loop"):
        yield _interleave(ranks, microbatches, chunks, max(1, min(ranks, microbatches)), backward)
    if placement == place_stages(ranks, 1, "loop"):
        yield _interleave(ranks, microbatches, 1, 1, backward, warmup=2)


def pair_passes(schedule: Schedule) -> Schedule:
    """1F1B of one stage, with each backward pass beside the forward pass of the next micro-batch."""
    (order,) = schedule.orders
    first, *forwards = order[::2]
    *backwards, last = order[1::2]
    return replace(schedule, orders=((first, *map(pair_actions, forwards, backwards), last),))


def _gpipe(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """GPipe: all forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965). Activations of all micro-batches
    are held."""
    orders = tuple(tuple(Action(rank, kind, m) for kind in "FB" for m in range(microbatches)) for rank in range(ranks))
    return Schedule("gpipe", orders, place_stages(ranks, 1, "loop"), microbatches)


def _one_forward_one_backward(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B: a rank at distance d from the last holds d + 1 micro-batches (Narayanan et al. 2019)."""
    lines = _interleave(ranks, microbatches, 1, 1, "B")
    return Schedule("1f1b", tuple(map(tuple, lines)), place_stages(ranks, 1, "loop"), microbatches)


def _interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): the bubble of 1F1B divided by the
    chunks.

    Micro-batches pass the ranks in groups: all of a group through one chunk, then all through the next. Groups have as
    many micro-batches as there are ranks, or more, and are as equal as possible, so that any number is legal."""
    lines = _interleave(ranks, microbatches, chunks, ranks, "B")
    return Schedule("interleaved", tuple(map(tuple, lines)), place_stages(ranks, chunks, "loop"), microbatches)


def _interleave(
    ranks: int, microbatches: int, chunks: int, group_size: int, backward: str, warmup: int | None = None
) -> list[Line]:
    """1F1B with groups of micro-batches passing through the chunks, as one line for each rank.

    Each rank first does the forwards that keep the last rank busy until its first backward comes back, then forwards
    and backwards in turn. warmup: forwards done ahead for each rank that follows. 1 is enough for one chunk. Several
    chunks need 2, since each rank on the way then does a backward between two forwards."""
    count = max(1, microbatches // group_size)
    # The largest groups come first: a rank can start the backwards of a group only if its warm-up reaches the last
    # chunk.
    sizes = [microbatches // count + (n < microbatches % count) for n in range(count)]
    groups = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes))]
    warmup = warmup or (1 if chunks == 1 else 2)
    lines = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(stage, "F", m) for group in groups for stage in stages for m in group]
        backwards = [Action(stage, backward, m) for group in groups for stage in reversed(stages) for m in group]
        ahead = (chunks - 1) * sizes[0] + warmup * (ranks - 1 - rank)
        pairs = zip_longest(forwards[ahead:], backwards)
        lines.append(forwards[:ahead] + [action for pair in pairs for action in pair if action])
    return lines


def _zero_bubble(name: str, warmup: int) -> Callable[[int, int, int], Schedule]:
    """ZB-H1 and ZB-H2 (Qi et al. 2023, arXiv 2401.10241): 1F1B with W in the gaps.

    warmup: forwards ahead for each rank that follows. With 1, every rank holds as much as the first rank under 1F1B.
    With 2, no rank idles between its first and last action."""

    def build(ranks: int, microbatches: int, chunks: int) -> Schedule:
        lines = _interleave(ranks, microbatches, 1, 1, "I", warmup)
        return _fill(name, place_stages(ranks, 1, "loop"), microbatches, lines, warmup * (ranks - 1) + 1)

    return build


@dataclass(frozen=True)
class BuildingBlock:
    """A building block: the course of one micro-batch through a V of two chunks per rank, in slots of one F, I or W.

    Every rank spends six slots on a micro-batch, so the next micro-batch follows six slots later. No two passes may
    meet on a rank, that is, have equal times modulo six. hops: slots from one rank to the next in the four passes:
    forward down (chunk 0) and up (chunk 1), backward down (chunk 1) and up (chunk 0). turns: slots lost between these
    passes, as a function of the number of ranks. The sum of the hops sets the memory, since activations live on each
    rank from the forward to the backward: with a sum of twelve, a rank holds as many micro-batches as there are
    ranks."""

    hops: tuple[int, int, int, int]
    turns: Callable[[int], tuple[int, int, int]]

    def times(self, rank: int, ranks: int) -> tuple[int, int, int, int]:
        """When the rank does F of chunk 0, F of chunk 1, I of chunk 1, I of chunk 0 for micro-batch 0."""
        times, start = [], 0
        for number, (hop, turn) in enumerate(zip(self.hops, (*self.turns(ranks), 0))):
            times.append(start + hop * (rank if number % 2 == 0 else ranks - 1 - rank))
            start += hop * (ranks - 1) + 1 + turn
        first, second, third, fourth = times
        return first, second, third, fourth


BUILDING_BLOCKS = (
    BuildingBlock((2, 4, 2, 4), lambda ranks: (0, 0, 0)),
    BuildingBlock((1, 2, 1, 2), lambda ranks: (0, 0, 1) if ranks % 2 else (3, 1, 3)),
    BuildingBlock((1, 1, 1, 1), lambda ranks: (0, 0, 0) if ranks % 3 else (2, 0, 2)),
)
"""By falling memory and rising bubble: V-ZB, V-half, V-min (Qi et al. 2024, arXiv 2405.15362, section 3)."""


def _wave(ranks: int, microbatches: int, block: BuildingBlock, backward: str) -> list[Line]:
    lines = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        passes = list(zip(block.times(rank, ranks), ((down, "F"), (up, "F"), (up, backward), (down, backward))))
        timed = sorted((time + 6 * m, stage, kind, m) for m in range(microbatches) for time, (stage, kind) in passes)
        lines.append([Action(stage, kind, m) for _, stage, kind, m in timed])
    return lines


def _wave_schedule(name: str, memory: Callable[[int], int]) -> Callable[[int, int, int], Schedule]:
    """The V schedule of the smallest bubble within `memory(ranks)` micro-batches' activations."""

    def build(ranks: int, microbatches: int, chunks: int) -> Schedule:
        costs, placement, cap = _unit_costs(2 * ranks), place_stages(ranks, 2, "v"), 2 * memory(ranks)
        lines = next(
            lines
            for block in BUILDING_BLOCKS
            if fits_cap(lines := _wave(ranks, microbatches, block, "I"), costs, placement, cap)
        )
        return _fill(name, placement, microbatches, lines, cap)

    return build


def _fill(name: str, placement: tuple[int, ...], microbatches: int, lines: list[Line], cap: float) -> Schedule:
    """Places W into the lines, for F, I and W of one length and a cap in activations of one stage."""
    return list_schedule(name, _unit_costs(len(placement)), placement, microbatches, cap=cap, lines=lines)[0]


def _unit_costs(stages: int) -> StageCosts:
    """Activations count until W, as published peak memories do."""
    return StageCosts.uniform(stages, kept=1.0)


def _dualpipe_v(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """DualPipeV (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, halved to a V): forwards paired with backwards of
    other micro-batches, which run in turns with `parallel.ep_dispatch=alltoall_overlap`, and else one after the other.

    It is made for two micro-batches a rank or more. With fewer, the missing ones are left out of the same order.
    """
    orders = []
    for rank in range(ranks):
        after, order, steps = ranks - 1 - rank, [], _DualPipeSteps(rank, 2 * ranks - 1 - rank)
        order += [steps.forward(0) for _ in range(2 * after)]
        for _ in range(rank + 1):
            order += steps.forward(0), steps.forward(1)
        for _ in range(after):
            order += steps.backward(1, split=True), steps.weight(), steps.forward(1)
        for number in range(max(microbatches, 2 * ranks) - 2 * ranks + rank + 1):
            pair = steps.forward(0), steps.backward(1)
            # On the last rank the forward of this backward's micro-batch has only just ended. Overlapped, both passes
            # would wait for its gradient.
            order += pair if number == 0 and after == 0 else [pair_actions(*pair)]
            order.append(pair_actions(steps.forward(1), steps.backward(0)))
        for _ in range(after):
            order += steps.backward(1), pair_actions(steps.forward(1), steps.backward(0))
        for number in range(2 * (rank + 1)):
            order.append(steps.backward(1 - number % 2, split=number > rank))
        for _ in range(after):
            order += steps.weight(), steps.backward(0, split=True)
        order += [steps.weight() for _ in range(rank + 1)]
        orders.append(tuple(kept for action in order for kept in _within(action, microbatches)))
    return Schedule("dualpipe_v", tuple(orders), place_stages(ranks, 2, "v"), microbatches)


class _DualPipeSteps:
    """Counts out the actions on the two stages of a rank: each call gives the next one of its kind."""

    def __init__(self, *stages: int):
        self.stages, self.next, self.weights = stages, Counter[tuple[str, int]](), deque[Action]()

    def forward(self, chunk: int) -> Action:
        return self._take("F", chunk, "F")

    def backward(self, chunk: int, split: bool = False) -> Action:
        action = self._take("B", chunk, "I" if split else "B")
        if split:
            self.weights.append(replace(action, kind="W"))
        return action

    def weight(self) -> Action:
        return self.weights.popleft()

    def _take(self, counter: str, chunk: int, kind: str) -> Action:
        self.next[counter, chunk] += 1
        return Action(self.stages[chunk], kind, self.next[counter, chunk] - 1)


def _within(action: Action, microbatches: int) -> tuple[Action, ...]:
    """The action, if its micro-batch exists; of an overlapped pair the parts whose micro-batch exists."""
    kept = tuple(part for part in action.computed if part.microbatch in range(microbatches))
    return (action,) if action.parts and kept == action.parts else kept


TEMPLATES = {
    "gpipe": ScheduleTemplate(_gpipe, "loop", (1,), splits=False),
    "1f1b": ScheduleTemplate(_one_forward_one_backward, "loop", (1,), splits=False),
    "interleaved": ScheduleTemplate(_interleaved, "loop", None, splits=False),
    "zb_h1": ScheduleTemplate(_zero_bubble("zb_h1", 1), "loop", (1,), splits=True),
    "zb_h2": ScheduleTemplate(_zero_bubble("zb_h2", 2), "loop", (1,), splits=True),
    "zb_v": ScheduleTemplate(_wave_schedule("zb_v", lambda ranks: ranks), "v", (2,), splits=True),
    "v_half": ScheduleTemplate(_wave_schedule("v_half", lambda ranks: (ranks + 2) // 2), "v", (2,), splits=True),
    "v_min": ScheduleTemplate(_wave_schedule("v_min", lambda ranks: (ranks + 4) // 3), "v", (2,), splits=True),
    "dualpipe_v": ScheduleTemplate(_dualpipe_v, "v", (2,), splits=True),
}
"""By the value of `parallel.pipeline.schedule`."""
