"""What pipeline stages cost, seconds and bytes by stage, summed from costs by layer; and which layers make a stage.

`LayerCosts` knows nothing of a split, `StageCosts` nothing of layers: schedules are simulated on the second, splits are
chosen on the first. Both are plain numbers; a measurement fills the same fields as `layer_costs` of
`parallel/pipeline/plan.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any

from trainer.config import ConfigError


@dataclass(frozen=True)
class StageCosts:
    """What each stage costs for one micro-batch. All tuples have one entry a stage.

    f, i, w, b: seconds of the forward pass, of the gradient of the input, of the weights, and of both at once.
    activation: bytes (or any unit) held from a micro-batch's forward pass to its backward pass.
    kept: what is held from I to W, as a share of `activation`. Above 1 where recompute in I fills what W reads.
    transfer: seconds of one hop between two ranks; latency: of these, the ones in which the sender's link is free for
    the next. host: seconds before every action that are not computation.
    unshard, reduce: seconds to gather a stage's parameters and to reduce its gradients, once a step; empty means none.
    """

    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    b: tuple[float, ...]
    activation: tuple[float, ...]
    kept: float = 0.5
    transfer: float = 0.0
    host: float = 0.0
    unshard: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    latency: float = 0.0

    def __post_init__(self) -> None:
        check_lengths(self)

    @property
    def stages(self) -> int:
        return len(self.f)

    @property
    def occupied(self) -> float:
        """Seconds in which a hop leaves the sender's link to no other."""
        return max(0.0, self.transfer - self.latency)

    @classmethod
    def uniform(
        cls,
        stages: int,
        f: float = 1.0,
        i: float = 1.0,
        w: float = 1.0,
        b: float | None = None,
        activation: float = 1.0,
        kept: float = 0.5,
        transfer: float = 0.0,
        host: float = 0.0,
        unshard: float = 0.0,
        reduce: float = 0.0,
        latency: float = 0.0,
    ) -> StageCosts:
        """The same cost on every stage; b is i + w unless given."""
        each = {
            "f": f,
            "i": i,
            "w": w,
            "b": i + w if b is None else b,
            "activation": activation,
            "unshard": unshard,
            "reduce": reduce,
        }
        tuples = {name: (value,) * stages for name, value in each.items()}
        return cls(**tuples, kept=kept, transfer=transfer, latency=latency, host=host)

    def share(self, placement: tuple[int, ...]) -> float:
        """What one micro-batch holds of the fullest rank, in the unit of `activation`."""
        return max(
            sum(size for size, place in zip(self.activation, placement) if place == rank) for rank in set(placement)
        )


@dataclass(frozen=True)
class LayerCosts:
    """What each unit of the model costs for one micro-batch.

    Units are the embedding, every layer, and norm, head and loss. The fields mean what those of `StageCosts` mean. An
    empty `b` stands for i + w.
    """

    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    activation: tuple[float, ...]
    b: tuple[float, ...] = ()
    unshard: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    kept: float = 0.5
    transfer: float = 0.0
    host: float = 0.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.b:
            object.__setattr__(self, "b", tuple(i + w for i, w in zip(self.i, self.w)))
        check_lengths(self)
        if self.depth < 1:
            raise ValueError(f"costs of {len(self.f)} units; there are at least the embedding, one layer and the head")

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.f) - 2

    @property
    def total(self) -> tuple[float, ...]:
        """Seconds by unit of one micro-batch's forward and full backward pass."""
        return tuple(f + b for f, b in zip(self.f, self.b))

    def stage(self, split: tuple[range, ...]) -> StageCosts:
        """Costs of stages that hold the layers of `split`; the first also holds the embedding, the last the head."""
        if [layer for part in split for layer in part] != list(range(self.depth)):
            raise ValueError(
                f"split {[len(part) for part in split]} does not cover layers 0 to {self.depth - 1} in order"
            )
        last = len(split) - 1

        def sums(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(
                sum(values[part.start + 1 : part.stop + 1])
                + (values[0] if stage == 0 else 0.0)
                + (values[-1] if stage == last else 0.0)
                for stage, part in enumerate(split)
            )

        return StageCosts(
            f=sums(self.f),
            i=sums(self.i),
            w=sums(self.w),
            b=sums(self.b),
            activation=sums(self.activation),
            kept=self.kept,
            transfer=self.transfer,
            latency=self.latency,
            host=self.host,
            unshard=sums(self.unshard) if self.unshard else (),
            reduce=sums(self.reduce) if self.reduce else (),
        )

    def scaled(self, factor: float) -> LayerCosts:
        """Costs of a micro-batch `factor` times as large, if computation and transfers are proportional to its size.

        Small micro-batches use a device less well than that: measure where the factor is far from one.
        """
        sized = {name: tuple(factor * x for x in getattr(self, name)) for name in ("f", "i", "w", "b", "activation")}
        return LayerCosts(
            **sized,
            unshard=self.unshard,
            reduce=self.reduce,
            kept=self.kept,
            transfer=factor * self.transfer,
            latency=factor * self.latency,
            host=self.host,
        )


def check_lengths(costs: StageCosts | LayerCosts) -> None:
    """Raises `ValueError` where a tuple has not as many entries as `f`, or an entry is negative."""
    for name, value in vars(costs).items():
        entries = value if isinstance(value, tuple) else (value,)
        if (
            isinstance(value, tuple)
            and len(value) != len(costs.f)
            and not (name in ("unshard", "reduce") and not value)
        ):
            raise ValueError(f"{name} has {len(value)} entries, f has {len(costs.f)}")
        if any(entry < 0 for entry in entries):
            raise ValueError(f"{name}={value} must not be negative")


# Which layers make a stage: the contiguous split of the model whose slowest stage is fastest. Costs include the
# embedding on the first stage, and the final norm, head and loss on the last one.


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
