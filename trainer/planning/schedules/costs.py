"""What pipeline stages cost: seconds and bytes by stage, summed from costs by layer.

`LayerCosts` knows nothing of a split, `StageCosts` nothing of layers: schedules are simulated on the second, splits are
chosen on the first. Both are plain numbers; a measurement fills the same fields as the formulas of `layers.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

Costs = TypeVar("Costs", "StageCosts", "LayerCosts")


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

    def to_dict(self) -> dict[str, Any]:
        return to_mapping(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StageCosts:
        return restore_costs(cls, values)


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

    def to_dict(self) -> dict[str, Any]:
        return to_mapping(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LayerCosts:
        return restore_costs(cls, values)


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


def to_mapping(costs: StageCosts | LayerCosts) -> dict[str, Any]:
    """Fields as numbers and lists, for YAML and JSON."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(costs).items()}


def restore_costs(cls: type[Costs], values: dict[str, Any]) -> Costs:
    """The inverse of `to_mapping`. Raises `ValueError` for an unknown cost."""
    unknown = sorted(set(values) - {field.name for field in fields(cls)})
    if unknown:
        raise ValueError(f"unknown costs {unknown}; legal: {', '.join(field.name for field in fields(cls))}")
    known: dict[str, Any] = {
        name: tuple(map(float, value)) if isinstance(value, (list, tuple)) else float(value)
        for name, value in values.items()
    }
    return cls(**known)
