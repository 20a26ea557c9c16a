"""What the layers of a model cost, from their operations: seconds by pass and bytes held for backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from math import inf, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from trainer.config import registry
from trainer.config.model import LayerSpec, ModelSpec
from trainer.planning.cost.flops import attention_flops, gemm_flops, seen_keys
from trainer.planning.cost.parameters import by_value, head_matrix, head_rows, layer_specs, layer_table
from trainer.planning.cost.saved import ALL, MATMULS, SaveEntry, by_layer, saved_in
from trainer.planning.schedules.costs import LayerCosts

if TYPE_CHECKING:
    from trainer.config.schema import ActivationConfig

# Flash attention's backward pass recomputes the scores: five matrix products where the forward pass has two.
ATTENTION_BACKWARD = 2.5


def layer_costs(
    spec: ModelSpec,
    length: int,
    micro_size: float,
    tp: int,
    flops_per_second: float,
    *,
    recompute: ActivationConfig | None = None,
    loss_tile: int | None = 0,
    element_bytes: int = 2,
    tp_bandwidth: float = inf,
    bandwidth: float = inf,
    latency: float = 0.0,
    host: float = 0.0,
    shard: int = 1,
    cp: int = 1,
    tp_overlap: str = "off",
    compiled: bool = False,
) -> LayerCosts:
    """Costs of a model from its operations, on one of the `tp` ranks that share a layer.

    length: tokens of a sequence. micro_size: sequences of a micro-batch.
    flops_per_second: what matrix products sustain.
    recompute: settings of activation checkpointing; None keeps everything. loss_tile: `loss.tile`.
    element_bytes: size of an element of the compute type.
    tp_bandwidth: bytes per second into a device within its tensor-parallel group.
    bandwidth: the same between pipeline stages and data-parallel ranks.
    latency: seconds of one transfer, and of each step of a ring. host: seconds of one action.
    shard: ranks that share the parameters (ZeRO): they are gathered and their gradients, in fp32, reduced once a step.
    cp: ranks that share each sequence, attention evenly too; what they send is not counted.
    tp_overlap: `parallel.tp_overlap`, by which it depends what recompute can keep. compiled: of compiled layers.

    Counted are matrix products and attention (causal, within its window), saved activations of a layer with sequence
    parallelism that gathers its inputs again in backward, and exposed collectives; not element-wise operations.
    """
    tokens = length * micro_size / cp
    collective = ring_seconds(element_bytes * tokens * spec.width, tp, tp_bandwidth, latency)
    rate = tokens / flops_per_second
    rows, columns = head_matrix(spec).multiplied(tp)
    table = rows * columns  # elements of the head, and of the embedding, which has its shape
    f, i, w, activation, sizes = [collective], [0.0], [collective], [8.0 * tokens], [table]
    layers = model_work(spec, length, tp, element_bytes, tp_overlap)
    remaining = left_by_recompute(layers, recompute, compiled)
    tiled = recompute is not None and bool(recompute.tile)
    for layer, left in zip(layers, remaining, strict=True):
        # Two gathers and two reduce-scatters each way; the inputs gathered again in backward overlap with its products.
        again = sum(share * layer.flops[name] for name, share in left.again.items())
        backward = layer.matmul + ATTENTION_BACKWARD * layer.attention + again
        f.append(rate * layer.forward + 4 * collective)
        i.append(rate * backward + 4 * collective * (1 + again / layer.forward))
        w.append(rate * layer.matmul)
        activation.append(tokens * left.saved)
        sizes.append(layer.weights)
    logits = gemm_flops(head_matrix(spec), tp)
    behind = not loss_tile  # with tiles the gradients are computed in the forward pass
    f.append(rate * logits * (1 if behind else 3) + collective * (1 if behind else 2))
    i.append((rate * logits + collective) * behind)
    w.append(rate * logits * behind)
    # Input and output of the final norm, or its gradient; and the logits, which become their own gradient, or the
    # weight's gradient in fp32.
    streams = tokens * element_bytes * 2 * spec.width / tp
    activation.append(
        streams + (tokens * element_bytes * head_rows(rows) if behind else 4.0 * head_rows(rows) * columns)
    )
    sizes.append(table)  # a tied head too: the last stage holds a copy
    return LayerCosts(
        f=tuple(f),
        i=tuple(i),
        w=tuple(w),
        activation=tuple(activation),
        kept=sum(layer.deferred - layer.feed_deferred * tiled for layer in layers)
        / sum(left.saved for left in remaining),
        host=host,
        transfer=latency + element_bytes * tokens * spec.width / tp / bandwidth,
        latency=latency,
        unshard=tuple(ring_seconds(element_bytes * size, shard, bandwidth, latency) for size in sizes),
        reduce=tuple(ring_seconds(4 * size, shard, bandwidth, latency) for size in sizes),
    )


def ring_seconds(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Seconds of a ring all-gather or reduce-scatter whose whole tensor has `size` bytes."""
    return (ranks - 1) * (latency + size / ranks / bandwidth)


@dataclass(frozen=True)
class LayerWork:
    """FLOPs and bytes of one token in one layer, on one of the tensor-parallel ranks that share it.

    flops: forward FLOPs by operation: the projections, by name and in the order in which they run, then `attention`.
    outputs: bytes of each operation's result, as it is held where it is kept for backward.
    needed: operations whose result the backward pass reads.
    shapes: of the matrix of each projection, [outputs, inputs].
    gathers, reduces: projections by what ranks that share the layer communicate: those of one input, which is gathered
        for all of them, and those whose results are summed.
    summed: those of `reduces` whose sums selective recompute keeps in any case, which are cheaper kept than sent again.
    together: whether projections that share an input are one operation to recompute.
    partial: bytes of a product of `reduces` before its sum, where that is an operation of its own.
    spread: bytes that eager layers keep beside `saved` of norms of queries and keys whose heads ranks share.
    weights: elements of the projections' matrices.
    input: bytes of the layer's input.
    saved: bytes held for backward where nothing is recomputed. blocks: those inside of attention and feed-forward.
    fused: those of `saved` that a compiled layer computes again in any case, as a part of another kernel.
    deferred: bytes held for the weight gradients: inputs of the projections and gradients of their outputs.
    between: bytes of the input of the layer's second half, its feed-forward block and norms; 0 where that is the
    layer's. feed, feed_deferred: what `saved`, beside `between`, and `deferred` have of the second half.
    """

    flops: Mapping[str, float]
    outputs: Mapping[str, float]
    needed: frozenset[str]
    shapes: Mapping[str, tuple[float, ...]]
    gathers: tuple[tuple[str, ...], ...]
    reduces: tuple[str, ...]
    summed: frozenset[str]
    together: bool
    partial: float
    spread: float
    weights: float
    input: float
    saved: float
    fused: float
    blocks: Mapping[str, float]
    deferred: float
    between: float
    feed: float
    feed_deferred: float

    @property
    def attention(self) -> float:
        return self.flops["attention"]

    @cached_property
    def matmul(self) -> float:
        """Forward FLOPs of the projections."""
        return sum(flops for name, flops in self.flops.items() if name != "attention")

    @property
    def forward(self) -> float:
        return self.matmul + self.attention


@by_value
def model_work(
    spec: ModelSpec, length: int, tp: int, element_bytes: int, tp_overlap: str = "off"
) -> tuple[LayerWork, ...]:
    """The work of each layer; layers that are equal share one. tp_overlap: `parallel.tp_overlap`."""
    common = spec.width, spec.parallel_residual, length, tp, element_bytes, tp_overlap
    return tuple(layer_work(layer, *common) for layer in layer_specs(spec))


@by_value
def layer_work(
    layer: LayerSpec, width: int, parallel_residual: bool, length: int, tp: int, element_bytes: int, tp_overlap: str
) -> LayerWork:
    """The work of one layer. width: of the residual stream. length: tokens of a sequence."""
    a, table = layer.attention, layer_table(layer, width)
    matrices = {name.removesuffix(".weight"): info for name, info in table.items() if info.role == "matrix"}
    shapes = {name: info.multiplied(tp) for name, info in matrices.items()}
    by_rows = tuple(name for name, info in matrices.items() if info.cut == 1)
    by_columns = groupby((name for name in matrices if name not in by_rows), lambda name: name.partition(".")[0])
    stream = element_bytes * width / tp  # of the residual stream, whose tokens the ranks share
    flops = {name: gemm_flops(info, tp) for name, info in matrices.items()}
    flops["attention"] = attention_flops(a, seen_keys(length, a.window), tp)
    outputs = {name: stream if name in by_rows else element_bytes * rows for name, (rows, _) in shapes.items()}
    # What the projections read: the norms' outputs, attention's output, the feed-forward block's hidden state.
    deferred = sum(outputs.values()) + 2 * stream + sum(element_bytes * shapes[name][1] for name in by_rows)
    inner = [name for name in shapes if is_feed_forward(name)]
    feed_deferred = stream + sum(outputs[name] for name in inner)
    feed_deferred += sum(element_bytes * shapes[name][1] for name in inner if name in by_rows)
    # Attention holds its output and, in fp32, the log-sum-exp of each head's scores; a registered one need have none.
    outputs["attention"] = outputs["attention.q"] + 4.0 * a.heads / tp if a.kind in ATTENTION_SAVED else stream
    pre, post = layer.norm.placement in ("pre", "both"), layer.norm.placement in ("post", "both")
    # Of each block: input, norm's output, inputs of other norms.
    streams = 2 * (1 + (pre and post) + 1) - parallel_residual
    statistics = 2 * (pre + post) * (4.0 if layer.norm.kind == "rms" else 8.0) / tp
    blocks = {
        "attention": block_saved(registry.ATTENTION, ATTENTION_SAVED, a.kind)(layer, outputs),
        "feed_forward": block_saved(registry.FEED_FORWARD, FEED_FORWARD_SAVED, layer.feed_forward.kind)(layer, outputs),
    }
    needed = frozenset(flops) - (set() if post else {"feed_forward.down"})  # an addition needs none of its terms
    gated = layer.feed_forward.kind == "gated"  # what its non-linearity gives follows from the projection
    return LayerWork(
        flops=MappingProxyType(flops),
        outputs=MappingProxyType(outputs),
        needed=needed,
        shapes=MappingProxyType(shapes),
        gathers=tuple(tuple(names) for _, names in by_columns),
        reduces=by_rows,
        summed=needed.intersection(by_rows if tp > 1 else ()),
        together=tp_overlap != "off",
        partial=float(element_bytes * width) if tp > 1 and tp_overlap == "off" else 0.0,
        spread=outputs["attention.q"] + outputs["attention.k"] if tp > 1 and a.qk_norm == "full" else 0.0,
        weights=sum(map(prod, shapes.values())),
        input=stream,
        saved=streams * stream + statistics + sum(blocks.values()),
        fused=outputs["feed_forward.gate"] if gated else 0.0,
        blocks=MappingProxyType(blocks),
        deferred=deferred,
        between=0.0 if parallel_residual else stream,
        feed=(1 + (pre and post)) * stream + statistics / 2 + blocks["feed_forward"],
        feed_deferred=feed_deferred,
    )


Saved = Callable[[LayerSpec, Mapping[str, float]], float]
"""(layer, bytes of each operation's result) -> bytes of one token that a block holds for backward, beside its input."""


def softmax_saved(layer: LayerSpec, outputs: Mapping[str, float]) -> float:
    """The projections, before and behind the norms of queries and keys, and attention's own result."""
    query, key, value = (outputs[f"attention.{name}"] for name in "qkv")
    return (query + key) * (1 if layer.attention.qk_norm == "none" else 2) + value + outputs["attention"]


def gated_saved(layer: LayerSpec, outputs: Mapping[str, float]) -> float:
    """Both projections, the non-linearity's result and its product with the second."""
    return 2 * (outputs["feed_forward.gate"] + outputs["feed_forward.up"])


def plain_saved(layer: LayerSpec, outputs: Mapping[str, float]) -> float:
    """The projection and the non-linearity's result."""
    return 2 * outputs["feed_forward.up"]


def block_saved(kinds: registry.KindRegistry, ours: Mapping[str, Saved], kind: str) -> Saved:
    """What a block holds for backward, whether its kind is one of `ours` or registered."""
    if kind not in kinds.registered:
        return ours[kind]
    block = "attention." if kinds is registry.ATTENTION else "feed_forward."

    def usual(layer: LayerSpec, outputs: Mapping[str, float]) -> float:
        return 2 * sum(size for name, size in outputs.items() if name.startswith(block))

    return kinds[kind].facts["saved"] or usual


ATTENTION_SAVED: dict[str, Saved] = {"softmax": softmax_saved}
FEED_FORWARD_SAVED: dict[str, Saved] = {"gated": gated_saved, "plain": plain_saved}


class EagerExtra(NamedTuple):
    """What eager layers over ranks hold and repeat, and compiled ones leave out since nothing reads it.

    saved: bytes of one token: products before their sums, and sums, which selective recompute keeps both; and what
    norms over the heads of several ranks take in several operations. again: products whose results are summed.
    calls: sums of such products, and gathers of inputs whose products are kept.
    """

    saved: float = 0.0
    again: tuple[str, ...] = ()
    calls: int = 0


class RecomputeEffect(NamedTuple):
    """What a recompute policy leaves of a layer.

    saved: bytes of one token that are held for backward. again: operations that the backward pass repeats, and the
    share of each: below 1 where it is not known which. host: bytes of one token that wait in host memory. attends: how
    often it runs attention's block again, whose kernel's result may have been kept: what ranks send there, they send
    again. eager: what eager layers do besides.
    """

    saved: float
    again: Mapping[str, float]
    host: float = 0.0
    attends: float = 0.0
    eager: EagerExtra = EagerExtra()


def left_by_recompute(
    layers: Sequence[LayerWork], config: ActivationConfig | None, compiled: bool = False
) -> list[RecomputeEffect]:
    """What a recompute policy leaves of each layer of a model."""
    known: dict[tuple[int, object], RecomputeEffect] = {}
    left, varied = [], config is not None and by_layer(config.save)
    for index, layer in enumerate(layers):
        # Equal layers share one `LayerWork`; patterns on modules may name single layers, and so may what is saved.
        rule: object = None
        if config is not None:
            entries = saved_in(config.save, index) if varied else ()
            rule = index if config.modules else entries
        key = id(layer), rule
        if key not in known:
            known[key] = recompute_effect(layer, index, config, compiled)
        left.append(known[key])
    return left


def recompute_effect(layer: LayerWork, index: int, config: ActivationConfig | None, compiled: bool) -> RecomputeEffect:
    """What a recompute policy (see `parallel/recompute.py`) leaves of layer `index`. Eager layers hold what they
    are told to keep, compiled ones what of it backward reads."""
    if config is None:
        return RecomputeEffect(layer.saved, {}, eager=EagerExtra(layer.spread))
    tiled = list(filter(is_feed_forward, layer.flops)) if config.tile else []  # what tiles repeat, the last product too
    whole, host, attends = layer.saved - layer.feed * bool(tiled), 0.0, True
    entries = saved_in(config.save, index) if config.mode == "selective" and not config.modules else ()
    spared = any(entry.name == ALL for entry in entries)
    if config.mode in ("none", "auto") or spared:  # auto: before it is decided
        return RecomputeEffect(whole, dict.fromkeys(tiled, 1.0), eager=EagerExtra(layer.spread))
    if config.mode == "selective" and config.modules:
        matched = [name for name in layer.flops if matches_module(index, name, config.modules)]
        again = [name for name in matched if name not in layer.reduces]  # recompute ends before a block's last product
        # A block's input is a norm's output, which is kept. What a single projection returns is its consumer's to keep.
        saved = whole - sum(
            size for block, size in layer.blocks.items() if matches_module(index, block, config.modules)
        )
        attends = matches_module(index, "attention", config.modules)
        summed = tuple(name for name in layer.reduces if name in matched) if layer.partial else ()
        eager = EagerExtra(layer.spread * (not attends), summed, len(summed))
    else:
        kept = [name for name in layer.flops if is_saved(layer, name, entries) or entries and name in layer.summed]
        inputs = layer.input + layer.between * bool(tiled)
        held = [name for name in kept if name in layer.needed or not compiled]
        saved = inputs + sum(layer.outputs[name] for name in held if name not in tiled)
        again = [name for name in layer.flops if name not in kept]
        eager = eager_extra(layer, entries, kept, [name for name in layer.reduces if name not in tiled])
        if config.offload:  # a byte is left, of which what W needs can be a multiple
            saved, host = max(1.0, saved - inputs), inputs
    share = 1.0
    if config.mode == "budget":  # which operations the compiler keeps is not known: between all and none
        saved, share = saved + config.budget * (layer.saved - saved), 1 - config.budget
    repeated = {name: share for name in again if name in layer.needed}
    return RecomputeEffect(saved, repeated | dict.fromkeys(tiled, 1.0), host, share * attends, eager)


def eager_extra(layer: LayerWork, entries: Sequence[SaveEntry], kept: Sequence[str], rows: Sequence[str]) -> EagerExtra:
    """What an eager layer holds and repeats beside, of which `kept` is planned to be kept. rows: products whose results
    are summed."""
    if not layer.partial:
        return EagerExtra()
    chosen = [name for name in rows if is_saved(layer, name, entries)]
    again = tuple(name for name in rows if name not in chosen and (name in kept or name not in layer.needed))
    if not entries:
        return EagerExtra(0.0, again, len(again))
    saved = layer.partial * len(chosen) + sum(layer.outputs[name] for name in rows if name not in kept)
    whole = [names for names in layer.gathers if all(is_saved(layer, name, entries) for name in names)]
    return EagerExtra(saved, again, len(whole))


def is_feed_forward(name: str) -> bool:
    """Whether an operation belongs to the feed-forward block."""
    return name.startswith("feed_forward.")


def is_saved(layer: LayerWork, name: str, entries: Sequence[SaveEntry]) -> bool:
    """Whether entries of `activation.save` keep an operation."""
    if name == "attention":
        return any("attention" in entry.name.rpartition(".")[2] and entry.every == 1 for entry in entries)
    products = [product for product in layer.flops if product != "attention"]
    operation = next((names for names in layer.gathers if layer.together and name in names), (name,))
    return any(
        # Of every so many products the last is kept, of those by name each.
        (set(operation[-1:] if entry.name in MATMULS else operation)).intersection(entry.products(products))
        for entry in entries
    )


def matches_module(index: int, name: str, patterns: list[str]) -> bool:
    """Whether `activation.modules` names a block or projection of layer `index`, or a module around it."""
    parts = f"layers.{index}.{name}".split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(3, len(parts) + 1) for pattern in patterns)
