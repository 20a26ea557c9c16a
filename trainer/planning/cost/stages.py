"""What pipeline stages cost: seconds and bytes by stage, summed from costs by layer, which are measured or follow from FLOPs.

`LayerCosts` knows nothing of a split, `StageCosts` nothing of layers: schedules are simulated on the second, splits are
chosen on the first. Both are plain numbers; a measurement fills the same fields as the formulas here.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config import ActivationConfig
    from trainer.config.model import ModelSpec

# Flash attention's backward pass recomputes the scores: five matrix products where the forward pass has two.
ATTENTION_BACKWARD = 2.5
MATMULS = ("matmul", "aten.mm", "aten.addmm", "aten.bmm")


@dataclass(frozen=True)
class StageCosts:
    """What each stage costs for one micro-batch. All tuples have one entry a stage.

    f, i, w, b: seconds of the forward pass, of the gradient of the input, of the weights, and of both at once.
    activation: bytes (or any unit) held from a micro-batch's forward pass to its backward pass.
    kept: what is held from I to W, as a share of `activation`. Above 1 where recompute in I fills what W reads.
    transfer: seconds of one hop between two ranks. host: seconds before every action that are not computation.
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

    def __post_init__(self) -> None:
        check_lengths(self)

    @property
    def stages(self) -> int:
        return len(self.f)

    @classmethod
    def uniform(cls, stages: int, f: float = 1.0, i: float = 1.0, w: float = 1.0, b: float | None = None, activation: float = 1.0,
                kept: float = 0.5, transfer: float = 0.0, host: float = 0.0, unshard: float = 0.0, reduce: float = 0.0) -> StageCosts:
        """The same cost on every stage; b is i + w unless given."""
        each = {"f": f, "i": i, "w": w, "b": i + w if b is None else b, "activation": activation, "unshard": unshard, "reduce": reduce}
        return cls(**{name: (value,) * stages for name, value in each.items()}, kept=kept, transfer=transfer, host=host)

    def share(self, placement: tuple[int, ...]) -> float:
        """What one micro-batch holds of the fullest rank, in the unit of `activation`."""
        return max(sum(size for size, place in zip(self.activation, placement) if place == rank) for rank in set(placement))

    def to_dict(self) -> dict[str, Any]:
        return plain(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StageCosts:
        return restore(cls, values)


@dataclass(frozen=True)
class LayerCosts:
    """What each unit of the model costs for one micro-batch; units are the embedding, every layer, and norm, head and loss.

    The fields mean what those of `StageCosts` mean. An empty `b` stands for i + w.
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
            raise ValueError(f"split {[len(part) for part in split]} does not cover layers 0 to {self.depth - 1} in order")
        last = len(split) - 1

        def sums(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(sum(values[part.start + 1:part.stop + 1]) + (values[0] if stage == 0 else 0.0)
                         + (values[-1] if stage == last else 0.0) for stage, part in enumerate(split))

        return StageCosts(f=sums(self.f), i=sums(self.i), w=sums(self.w), b=sums(self.b), activation=sums(self.activation),
                          kept=self.kept, transfer=self.transfer, host=self.host, unshard=sums(self.unshard) if self.unshard else (),
                          reduce=sums(self.reduce) if self.reduce else ())

    def scaled(self, factor: float) -> LayerCosts:
        """Costs of a micro-batch `factor` times as large, if computation and transfers are proportional to its size.

        Small micro-batches use a device less well than that: measure where the factor is far from one.
        """
        sized = {name: tuple(factor * x for x in getattr(self, name)) for name in ("f", "i", "w", "b", "activation")}
        return LayerCosts(**sized, unshard=self.unshard, reduce=self.reduce, kept=self.kept, transfer=factor * self.transfer,
                          host=self.host)

    def to_dict(self) -> dict[str, Any]:
        return plain(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LayerCosts:
        return restore(cls, values)


def check_lengths(costs: StageCosts | LayerCosts) -> None:
    """Raises `ValueError` where a tuple has not as many entries as `f`, or an entry is negative."""
    for name, value in vars(costs).items():
        entries = value if isinstance(value, tuple) else (value,)
        if isinstance(value, tuple) and len(value) != len(costs.f) and not (name in ("unshard", "reduce") and not value):
            raise ValueError(f"{name} has {len(value)} entries, f has {len(costs.f)}")
        if any(entry < 0 for entry in entries):
            raise ValueError(f"{name}={value} must not be negative")


def plain(costs: StageCosts | LayerCosts) -> dict[str, Any]:
    """Fields as numbers and lists, for YAML and JSON."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(costs).items()}


def restore(cls: type, values: dict[str, Any]) -> Any:
    unknown = sorted(set(values) - {field.name for field in fields(cls)})
    if unknown:
        raise ValueError(f"unknown costs {unknown}; legal: {', '.join(field.name for field in fields(cls))}")
    return cls(**{name: tuple(map(float, value)) if isinstance(value, (list, tuple)) else float(value)
                  for name, value in values.items()})


def layer_costs(spec: ModelSpec, length: int, micro_size: float, tp: int, flops_per_second: float, *,
                recompute: ActivationConfig | None = None, element_bytes: int = 2, tp_bandwidth: float = inf, bandwidth: float = inf,
                latency: float = 0.0, host: float = 0.0, shard: int = 1) -> LayerCosts:
    """Costs of a model from its operations, on one of the `tp` ranks that share a layer.

    length: tokens of a sequence; micro_size: sequences of a micro-batch; flops_per_second: what matrix products sustain.
    recompute: settings of activation checkpointing; None keeps everything.
    element_bytes: size of an element of the compute type.
    tp_bandwidth: bytes per second into a device within its tensor-parallel group; bandwidth: the same between pipeline
    stages and data-parallel ranks. latency: seconds of one transfer, and of each step of a ring. host: seconds of one action.
    shard: ranks that share the parameters (ZeRO): they are gathered and their gradients, in fp32, reduced once a step.

    Counted are matrix products and attention (causal, within its window), saved activations of a layer with sequence
    parallelism that gathers its inputs again in backward, and exposed collectives; not element-wise operations.
    """
    tokens = length * micro_size
    collective = ring(element_bytes * tokens * spec.width, tp, tp_bandwidth, latency)
    layers = [Layer(spec, index, length, tp, element_bytes) for index in range(spec.depth)]
    for layer in layers:
        layer.recompute(recompute)
    rate = tokens / flops_per_second
    head = 2.0 * spec.width * spec.vocab_size / tp
    f, i, w, activation, sizes = [collective], [0.0], [collective], [8.0 * tokens], [spec.vocab_size * spec.width / tp]
    for layer in layers:
        share = layer.again / layer.forward
        # Two gathers and two reduce-scatters each way; the inputs gathered again in backward overlap with its products.
        f.append(rate * layer.forward + 4 * collective)
        i.append(rate * (layer.matmul + ATTENTION_BACKWARD * layer.attention + layer.again) + 4 * collective * (1 + share))
        w.append(rate * layer.matmul)
        activation.append(tokens * layer.saved)
        sizes.append(layer.matmul / 2)
    f.append(rate * head + collective)
    i.append(rate * head + collective)
    w.append(rate * head)
    # Input and output of the final norm, and the logits, which become their own gradient.
    activation.append(tokens * element_bytes * (2 * spec.width + spec.vocab_size) / tp)
    sizes.append(head / 2)  # a tied head too: the last stage holds a copy
    kept = sum(layer.deferred for layer in layers) / sum(layer.saved for layer in layers)
    return LayerCosts(f=tuple(f), i=tuple(i), w=tuple(w), activation=tuple(activation), kept=kept, host=host,
                      transfer=latency + element_bytes * tokens * spec.width / tp / bandwidth,
                      unshard=tuple(ring(element_bytes * size, shard, bandwidth, latency) for size in sizes),
                      reduce=tuple(ring(4 * size, shard, bandwidth, latency) for size in sizes))


def ring(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Seconds of a ring all-gather or reduce-scatter whose whole tensor has `size` bytes."""
    return (ranks - 1) * (latency + size / ranks / bandwidth)


class Layer:
    """FLOPs and saved bytes of one token in one layer, on one of `tp` ranks.

    matmul, attention: forward FLOPs of projections and of attention; again: those that the backward pass repeats.
    saved: bytes held for backward; deferred: bytes held for the weight gradients, inputs and gradients of outputs.
    """

    def __init__(self, spec: ModelSpec, index: int, length: int, tp: int, element_bytes: int):
        from trainer.planning.cost.flops import seen_keys  # which needs torch, unlike everything else here
        layer = spec.layer(index)
        a, norm, width, self.index, self.element = layer.attention, layer.norm, spec.width, index, element_bytes
        stream = width / tp  # of the residual stream, whose sequence is shared
        queries, keys, inner = a.heads * a.head_dim / tp, max(a.kv_heads / tp, 1) * a.head_dim, layer.feed_forward.width / tp
        gate = {"feed_forward.gate": (width, inner, inner)} if layer.feed_forward.kind == "gated" else {}
        products = {"attention.q": (width, queries, queries), "attention.k": (width, keys, keys), "attention.v": (width, keys, keys),
                    "attention.o": (queries, width, stream), **gate, "feed_forward.up": (width, inner, inner),
                    "feed_forward.down": (inner, width, stream)}  # in the order in which they run: inputs, outputs, outputs held
        self.flops = {name: 2.0 * inputs * outputs for name, (inputs, outputs, _) in products.items()}
        self.matmul = sum(self.flops.values())
        self.attention = 4.0 * queries * seen_keys(length, a.window)
        self.forward = self.matmul + self.attention
        self.flops["attention"] = self.attention
        self.outputs = {name: element_bytes * held for name, (_, _, held) in products.items()}
        scores = 4.0 * a.heads / tp  # log-sum-exp of each head's scores, fp32
        outputs = sum(self.outputs.values())
        # What the projections read: the norms' outputs, attention's output, the feed-forward block's hidden state.
        self.deferred = outputs + element_bytes * (2 * stream + queries + inner)
        self.outputs["attention"] = element_bytes * queries + scores
        pre, post = norm.placement in ("pre", "both"), norm.placement in ("post", "both")
        self.needed = set(self.flops) - (set() if post else {"feed_forward.down"})  # an addition needs none of its terms
        self.input = element_bytes * stream
        streams = 2 * (1 + (pre and post) + 1) - spec.parallel_residual  # of each block: input, norm's output, inputs of other norms
        statistics = 2 * (pre + post) * (4.0 if norm.kind == "rms" else 8.0) / tp
        self.everything = (streams * self.input + self.outputs["attention"] + statistics + element_bytes * (
            queries + 2 * keys + (queries + keys) * (a.qk_norm != "none") + inner * (4 if gate else 2)))
        self.saved, self.again = self.everything, 0.0

    def recompute(self, config: ActivationConfig | None) -> None:
        """Sets `saved` and `again` to what a recompute policy leaves (see `checkpointing/activation.py`)."""
        if config is None or config.mode == "none" or (config.mode != "budget" and self.index % config.every):
            return
        if config.mode == "selective" and config.modules:
            again = [name for name in self.flops if self.matches(name, config.modules)]
            self.saved -= sum(self.outputs[name] for name in again if name in self.needed)
        else:
            kept = [name for name in self.flops if config.mode == "selective" and self.selected(name, config.save)]
            self.saved = self.input + sum(self.outputs[name] for name in kept)
            again = [name for name in self.flops if name not in kept]
        self.again = sum(self.flops[name] for name in again if name in self.needed)
        if config.mode == "budget":  # which operations the compiler keeps is not known: between all and none
            self.saved += config.budget * (self.everything - self.saved)
            self.again *= 1 - config.budget

    def selected(self, name: str, entries: list[str]) -> bool:
        """Whether `activation.save` keeps an operation; of every n calls the last is kept."""
        for entry in entries:
            target, _, every = entry.partition("/")
            if name == "attention":
                call, kind = 1, target == "attention" or "attention" in target.rpartition(".")[2]
            else:
                call, kind = list(self.flops).index(name) + 1, target in MATMULS
            if kind and call % int(every or 1) == 0:
                return True
        return False

    def matches(self, name: str, patterns: list[str]) -> bool:
        """Whether a projection, or a module around it, is one of those that `activation.modules` recomputes."""
        parts = f"layers.{self.index}.{name}".split(".")
        return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(3, len(parts) + 1) for pattern in patterns)
