"""What the layers of a model cost: operations, bytes and seconds from the spec."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import inf
from typing import TYPE_CHECKING

from trainer.planning.cost.stages import LayerCosts

if TYPE_CHECKING:
    from trainer.config import ActivationConfig
    from trainer.config.model import ModelSpec

# Flash attention's backward pass recomputes the scores: five matrix products where the forward pass has two.
ATTENTION_BACKWARD = 2.5

MATMULS = ("matmul", "aten.mm", "aten.addmm", "aten.bmm")


def layer_costs(
    spec: ModelSpec,
    length: int,
    micro_size: float,
    tp: int,
    flops_per_second: float,
    *,
    recompute: ActivationConfig | None = None,
    element_bytes: int = 2,
    tp_bandwidth: float = inf,
    bandwidth: float = inf,
    latency: float = 0.0,
    host: float = 0.0,
    shard: int = 1,
) -> LayerCosts:
    """Costs of a model from its operations, on one of the `tp` ranks that share a layer.

    length: tokens of a sequence; micro_size: sequences of a micro-batch; flops_per_second: what matrix products
    sustain. recompute: settings of activation checkpointing; None keeps everything. element_bytes: size of an element
    of the compute type. tp_bandwidth: bytes per second into a device within its tensor-parallel group; bandwidth: the
    same between pipeline stages and data-parallel ranks. latency: seconds of one transfer, and of each step of a ring.
    host: seconds of one action. shard: ranks that share the parameters (ZeRO): they are gathered and their gradients,
    in fp32, reduced once a step.

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
        i.append(
            rate * (layer.matmul + ATTENTION_BACKWARD * layer.attention + layer.again) + 4 * collective * (1 + share)
        )
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
    return LayerCosts(
        f=tuple(f),
        i=tuple(i),
        w=tuple(w),
        activation=tuple(activation),
        kept=kept,
        host=host,
        transfer=latency + element_bytes * tokens * spec.width / tp / bandwidth,
        unshard=tuple(ring(element_bytes * size, shard, bandwidth, latency) for size in sizes),
        reduce=tuple(ring(4 * size, shard, bandwidth, latency) for size in sizes),
    )


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
        queries, keys, inner = (
            a.heads * a.head_dim / tp,
            max(a.kv_heads / tp, 1) * a.head_dim,
            layer.feed_forward.width / tp,
        )
        gate = {"feed_forward.gate": (width, inner, inner)} if layer.feed_forward.kind == "gated" else {}
        products = {
            "attention.q": (width, queries, queries),
            "attention.k": (width, keys, keys),
            "attention.v": (width, keys, keys),
            "attention.o": (queries, width, stream),
            **gate,
            "feed_forward.up": (width, inner, inner),
            "feed_forward.down": (inner, width, stream),
        }  # in the order in which they run: inputs, outputs, outputs held
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
        self.needed = set(self.flops) - (
            set() if post else {"feed_forward.down"}
        )  # an addition needs none of its terms
        self.input = element_bytes * stream
        streams = (
            2 * (1 + (pre and post) + 1) - spec.parallel_residual
        )  # of each block: input, norm's output, inputs of other norms
        statistics = 2 * (pre + post) * (4.0 if norm.kind == "rms" else 8.0) / tp
        self.everything = (
            streams * self.input
            + self.outputs["attention"]
            + statistics
            + element_bytes
            * (queries + 2 * keys + (queries + keys) * (a.qk_norm != "none") + inner * (4 if gate else 2))
        )
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
        return any(
            fnmatchcase(".".join(parts[:end]), pattern) for end in range(3, len(parts) + 1) for pattern in patterns
        )
