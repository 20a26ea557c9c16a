"""Which layers make a stage: the contiguous split of the model whose slowest stage is fastest.

Costs include the embedding on the first stage, and the final norm, head and loss on the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import Any

from trainer.config import ConfigError
from trainer.planning.schedules.costs import LayerCosts

Split = tuple[range, ...]

ROUNDING = 1e-9  # sums of the same numbers in another order differ by less, relative to their size


def partition_layers(layers: LayerCosts, stages: int, placement: Sequence[int] | None = None) -> Split:
    """The split that minimises the largest stage cost: seconds of a stage's forward and full backward pass.

    Every stage gets at least one layer. Of equal splits, the one with the least sum of squared stage costs is taken.
    The result is exact, by dynamic programming in O(stages x layers^2). placement: by stage, its rank. Where a rank has
    several stages, layers are then moved between stages while that lowers the largest cost of a rank (`balance_ranks`).
    Raises `ConfigError` where there are fewer layers than stages."""
    depth = layers.depth
    if stages > depth:
        raise ConfigError(
            f"parallel.pp x parallel.pipeline.chunks={stages} stages, but model.depth={depth} has a layer for each of "
            f"at most {depth}; lower parallel.pp or parallel.pipeline.chunks"
        )
    if stages == 1:
        return even_split(depth, stages)
    cost = StageSums(layers.total, stages)
    enough = max(cost(stage, part.start, part.stop) for stage, part in enumerate(even_split(depth, stages)))
    largest, _ = solve_split(depth, stages, cost, max, enough)
    _, split = solve_split(depth, stages, cost, lambda before, stage: before + stage**2, largest * (1 + ROUNDING))
    return split if placement is None or len(set(placement)) == stages else balance_ranks(layers, split, placement)


class StageSums:
    """Sums of a quantity over a stage: its layers `start` to `stop`, with the embedding or the head where it has them.

    units: the quantity of the embedding, of each layer, and of the head."""

    def __init__(self, units: Sequence[float], stages: int):
        self.sums, self.first, self.last, self.final = [0.0, *accumulate(units[1:-1])], units[0], units[-1], stages - 1

    def __call__(self, stage: int, start: int, stop: int) -> float:
        return (
            self.sums[stop]
            - self.sums[start]
            + (self.first if stage == 0 else 0.0)
            + (self.last if stage == self.final else 0.0)
        )


def solve_split(
    depth: int, stages: int, cost: Callable[[int, int, int], float], join: Callable[[float, float], float], limit: float
) -> tuple[float, Split]:
    """The split with the least joined cost of its stages, and that least value; among equals the one whose last stages
    start earliest.

    cost: of a stage with the layers `start` to `stop`, which does not grow with `start`. limit: no stage costs more.
    """
    best = [0.0] + [inf] * depth  # by number of layers in the stages so far
    starts: list[list[int]] = []
    for stage in range(stages):
        after, chosen = [inf] * (depth + 1), [0] * (depth + 1)
        for stop in range(stage + 1, depth - (stages - stage - 1) + 1):
            for start in reversed(range(stage, stop)):
                own = cost(stage, start, stop)
                if own > limit:  # and so is that of a stage that starts earlier
                    break
                joined = join(best[start], own)
                if joined <= after[stop]:
                    after[stop], chosen[stop] = joined, start
        best = after
        starts.append(chosen)
    split, stop = [], depth
    for chosen in reversed(starts):
        split.append(range(chosen[stop], stop))
        stop = chosen[stop]
    return best[depth], tuple(reversed(split))


def even_split(depth: int, stages: int) -> Split:
    """As many layers on every stage; the first ones get one more where they do not divide."""
    return from_sizes([depth // stages + (stage < depth % stages) for stage in range(stages)])


def from_sizes(sizes: Sequence[int]) -> Split:
    """The split whose stages have so many layers each."""
    stops = list(accumulate(sizes))
    return tuple(range(stop - size, stop) for size, stop in zip(sizes, stops))


def explicit_split(split: Sequence[int], depth: int, stages: int) -> Split:
    """The split given as numbers of layers by stage. Raises `ConfigError` where it does not fit the model and plan."""
    shown = "parallel.pipeline.split=[" + ",".join(map(str, split)) + "]"
    sizes = list(split)
    legal = (
        "[" + ",".join(str(len(part)) for part in even_split(depth, stages)) + "]"
        if stages <= depth
        else "fewer stages"
    )
    if len(sizes) != stages:
        raise ConfigError(
            f"{shown} has {len(sizes)} entries, but parallel.pp x parallel.pipeline.chunks makes {stages} stages; "
            f"legal: for example {legal}, or balanced"
        )
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        raise ConfigError(f"{shown} must give every stage at least one layer; legal: for example {legal}, or balanced")
    if sum(sizes) != depth:
        raise ConfigError(
            f"{shown} adds up to {sum(sizes)} layers, but model.depth={depth}; legal: for example {legal}, or balanced"
        )
    return from_sizes(sizes)


def balance_ranks(layers: LayerCosts, split: Split, placement: Sequence[int]) -> Split:
    """A split that lowers the largest cost of a rank, all its stages together; `split` itself where none is found.

    Each step moves one layer from one stage to another, which shifts the stages between them by a layer.
    """
    total = StageSums(layers.total, len(split))

    def score(candidate: Split) -> tuple[float, float]:
        ranks = dict.fromkeys(placement, 0.0)
        for stage, part in enumerate(candidate):
            ranks[placement[stage]] += total(stage, part.start, part.stop)
        return max(ranks.values()), sum(cost**2 for cost in ranks.values())

    return improve_split(split, score, layer_transfers)


def improve_split(
    split: Split, score: Callable[[Split], Any], moves: Callable[[Split], list[Split]], steps: int = 1000
) -> Split:
    """Follows the best of `moves(split)` while `score` (a number or tuple of numbers) falls, at most `steps` times."""
    best = score(split)
    for _ in range(steps):
        scored = [(score(move), tuple(map(len, move)), move) for move in moves(split)]
        if not scored or not clearly_less(min(scored)[0], best):
            break
        best, _, split = min(scored)
    return split


def clearly_less(a: Any, b: Any) -> bool:
    """Whether a number, or the first number of a tuple that differs, is lower by more than rounding."""
    for x, y in zip(a if isinstance(a, tuple) else (a,), b if isinstance(b, tuple) else (b,)):
        if abs(x - y) > ROUNDING * max(abs(x), abs(y)):
            return x < y
    return False


def layer_transfers(split: Split) -> list[Split]:
    """All splits with one layer less on one stage and one more on another."""
    sizes = [len(part) for part in split]
    found = []
    for giver in range(len(sizes)):
        for taker in range(len(sizes)):
            if giver != taker and sizes[giver] > 1:
                found.append(
                    from_sizes([size - (stage == giver) + (stage == taker) for stage, size in enumerate(sizes)])
                )
    return found


def boundary_moves(split: Split) -> list[Split]:
    """All splits with one boundary moved by one layer."""
    stops = [part.stop for part in split]
    found = []
    for boundary in range(len(stops) - 1):
        for step in (-1, 1):
            moved = [stop + step * (index == boundary) for index, stop in enumerate(stops)]
            sizes = [stop - start for start, stop in zip([0, *moved], moved)]
            if min(sizes) > 0:
                found.append(from_sizes(sizes))
    return found
