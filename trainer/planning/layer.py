"""A transformer layer as data: the operations that it runs, in order, with what each costs.

`layer_program` is the only description of what a layer does. FLOPs, memory, seconds, recompute, and the shapes that a
probe measures are sums over its operations. A new kind of block is one function in `INNER_OPS` or `BLOCK_OPS` here,
beside its parameters in `planning/parameters.py`.

All quantities are of one token on one of the tensor-parallel ranks that share the layer, with sequence parallelism: the
ranks share the tokens of the residual stream, all-gather the input of the projections and reduce-scatter the output of
a block (Korthikanti et al., arXiv 2205.05198)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Literal

from trainer.config import registry
from trainer.config.model import AttentionSpec, CodeLayerSpec, LayerSpec, ModelSpec
from trainer.planning.parameters import (
    DOWN,
    ROLES,
    ParameterInfo,
    by_value,
    declare_parameters,
    head_matrix,
    head_rows,
    layer_specs,
    layer_table,
    layer_tables,
    outer_tables,
)

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass over those of its forward pass: flash attention computes the scores again, which
makes five matrix products where the forward pass has two."""

UNFUSED = 3.5
"""How many times the bytes that a layer of unknown operations holds its eager kernels read and write in the forward
pass. It fits Llama-3 8B by transformers' code, whose norms and rotary positions take more kernels than ours."""

LOSS_TRAFFIC = 110.0
"""Bytes of a logit that the eager kernels of the loss read and write, in fp32 but for the logits: those of the
log-normaliser and of the target's score, and those of the gradient."""

Kind = Literal[
    "residual",
    "norm",
    "all_gather",
    "gemm",
    "attention",
    "elementwise",
    "choice",
    "permute",
    "reduce_scatter",
    "lookup",
    "loss",
]


@dataclass(frozen=True)
class Op:
    """One operation, for one token on one rank.

    name: the name of the module that runs it, within the layer: `attention.q`; `attention` is the attention kernel.
    shape: of a GEMM's matrix, [outputs, inputs]. flops: of the forward pass.
    result: bytes of the result where recompute is told to keep it.
    saved: bytes held for backward where nothing is recomputed. fused: those of `saved` that a compiled layer computes
    again in any case, as a part of another kernel. eager: bytes that an eager layer over several ranks holds besides: a
    norm over the heads of several ranks, and the terms of a sum.
    deferred: bytes held for a deferred weight gradient, from the gradient of the input to that of the weight.
    read: whether backward reads the result.
    sends: bytes of the whole tensor of a collective among the tensor-parallel ranks; 0 where there is only one.
    gemms: the GEMMs that read what a collective gathers, or write what it sums; it can overlap with these.
    rows, matrices: how many rows of the GEMM's input a token is, and how many matrices of the shape there are: one for
    each expert. wide: whether the GEMM multiplies in fp32 whatever the compute type.
    moved: bytes that a permutation of rows reads and writes. The gradient of the permutation that a block begins with
    moves as many as the one that it ends with, and the other way round.
    traffic, back_traffic: bytes that the kernels of an eager layer read and write in the forward and in the backward
    pass. GEMMs, attention and permutations are not in it.
    """

    name: str
    kind: Kind
    shape: tuple[float, ...] = ()
    flops: float = 0.0
    result: float = 0.0
    saved: float = 0.0
    fused: float = 0.0
    eager: float = 0.0
    deferred: float = 0.0
    read: bool = True
    sends: float = 0.0
    gemms: tuple[str, ...] = ()
    rows: float = 1.0
    matrices: int = 1
    wide: bool = False
    moved: float = 0.0
    traffic: float = 0.0
    back_traffic: float = 0.0


@dataclass(frozen=True)
class Program:
    """The operations of a unit of the model, or of a part of it, and sums over them.

    overlapped: whether the GEMMs that share an input are one operation with the collective that gathers it
    (`parallel.tp_overlap`).
    """

    ops: tuple[Op, ...]
    overlapped: bool = False

    def select(self, *kinds: Kind) -> Iterator[Op]:
        return (op for op in self.ops if op.kind in kinds)

    def total(self, field: str, *kinds: Kind) -> float:
        """The sum of a field over all operations, or over those of some kinds."""
        return sum(getattr(op, field) for op in (self.select(*kinds) if kinds else self.ops))

    def block(self, name: str) -> Program:
        """The operations inside of a module of the layer: of `attention`, `feed_forward`, or a projection."""
        return replace(self, ops=tuple(op for op in self.ops if f"{op.name}.".startswith(f"{name}.")))

    @cached_property
    def gemms(self) -> Mapping[str, Op]:
        return MappingProxyType({op.name: op for op in self.select("gemm")})

    @cached_property
    def experts(self) -> frozenset[str]:
        """The names of the experts' GEMMs."""
        return frozenset(name for name, gemm in self.gemms.items() if gemm.matrices > 1)

    @cached_property
    def computed(self) -> Mapping[str, Op]:
        """What recompute can keep: the GEMMs in the order in which they run, then the attention kernel."""
        return MappingProxyType({**self.gemms, **{op.name: op for op in self.select("attention")}})

    @cached_property
    def gathers(self) -> tuple[Op, ...]:
        return tuple(self.select("all_gather"))

    @cached_property
    def scatters(self) -> tuple[Op, ...]:
        return tuple(self.select("reduce_scatter"))

    @cached_property
    def second_half(self) -> Program:
        """The feed-forward block and its norms, which a tile of tokens passes through."""
        return replace(self, ops=tuple(op for op in self.ops if op.name.startswith("feed_forward")))

    @cached_property
    def flops(self) -> float:
        return self.total("flops")

    @cached_property
    def saved(self) -> float:
        return self.total("saved")

    @cached_property
    def deferred(self) -> float:
        return self.total("deferred")

    @property
    def input(self) -> Op:
        """The residual stream."""
        return self.ops[0]

    @property
    def middle(self) -> Op:
        """The residual stream between attention and the feed-forward block; empty where both read the input."""
        return next(op for op in self.ops if op.name == "middle")


@by_value
def model_programs(
    spec: ModelSpec,
    length: int,
    tp: int,
    element_bytes: int,
    tp_overlap: str = "off",
    causal: bool = True,
    room: float = 0.0,
) -> tuple[Program, ...]:
    """The program of each layer; layers that are equal share one. The arguments are those of `layer_program`."""
    common = spec.width, spec.parallel_residual, length, tp, element_bytes, tp_overlap, causal, room
    return tuple(layer_program(layer, *common) for layer in layer_specs(spec))


@by_value
def layer_program(
    layer: LayerSpec,
    width: int,
    parallel_residual: bool,
    length: int,
    tp: int,
    element_bytes: int,
    tp_overlap: str,
    causal: bool,
    room: float,
) -> Program:
    """The program of one layer.

    width: of the residual stream. length: tokens of a sequence. causal: whether a token attends to the keys that it
    sees (averaged over the sequence and within the window), or to all. element_bytes: of the compute type. room:
    `parallel.ep_capacity`."""
    if isinstance(layer, CodeLayerSpec):
        keys = seen_keys(length, layer.attention.window) if causal else float(length)
        return code_program(layer, width, tp, element_bytes, keys)
    placement = layer.norm.placement
    whole, stream = element_bytes * width, element_bytes * width / tp
    statistics = (4.0 if layer.norm.kind == "rms" else 8.0) / tp  # fp32, of each token
    matrices = {
        name.removesuffix(".weight"): info for name, info in layer_table(layer, width).items() if info.role == "matrix"
    }
    keys = seen_keys(length, layer.attention.window) if causal else float(length)
    gated = layer.feed_forward.experts.shared_gate
    summed = ("feed_forward.down",) if gated else ("feed_forward.down", "feed_forward.shared.down")
    sends = float(whole) if tp > 1 else 0.0
    partial = float(whole) if tp > 1 and tp_overlap == "off" else 0.0

    def norm(name: str, wanted: bool) -> Iterator[Op]:
        if wanted:  # its output is kept for the projections behind it; behind a block it keeps its input
            yield norm_op(name, stream + statistics)

    def block(name: str, kinds: registry.KindRegistry, kind: str) -> Iterator[Op]:
        yield from norm(f"{name}_norm", placement in ("pre", "both"))
        if name == "feed_forward" and layer.feed_forward.experts.count:
            yield from mixture_ops(layer, width, tp, element_bytes, room)
            if layer.feed_forward.experts.shared_width:
                yield from projections(f"{name}.shared", kinds, kind)
                yield from shared_gate_ops(layer, width, tp, stream)
        elif kind in BLOCK_OPS:
            yield from BLOCK_OPS[kind](layer, width, tp, element_bytes, keys, statistics, partial)
        else:
            yield from projections(name, kinds, kind)
        yield from norm(f"{name}_post_norm", placement in ("post", "both"))

    def projections(name: str, kinds: registry.KindRegistry, kind: str) -> Iterator[Op]:
        infos = {matrix: info for matrix, info in matrices.items() if matrix.startswith(f"{name}.")}
        ends = [matrix for matrix, info in infos.items() if info.cut == 1]  # the ranks' results are summed
        starts = [matrix for matrix in infos if matrix not in ends]
        own = kind not in kinds.registered
        gemms = {}
        for matrix, info in infos.items():
            rows, columns = shape = info.multiplied(tp)
            result, reads = (stream, element_bytes * columns) if matrix in ends else (element_bytes * rows, 0.0)
            gemms[matrix] = Op(
                matrix,
                "gemm",
                shape,
                gemm_flops(info, tp),
                result,
                saved=result if own and matrix in starts else 0.0,
                deferred=result + reads,
                # An addition needs none of its terms, a norm behind the block needs its input.
                read=matrix not in summed or placement != "pre",
            )
        if starts:
            yield Op(f"{name}.all_gather", "all_gather", deferred=stream, gemms=tuple(starts), sends=sends)
        inner = INNER_OPS[kind] if own else registered_ops(kinds[kind].facts["saved"], name, stream)
        between = inner(name, layer, gemms, tp, keys)
        for matrix in infos:  # in the order in which the block declares them, by which `activation.save` counts
            if matrix in starts:
                yield gemms[matrix]
                continue
            yield from between  # once, before the first
            yield gemms[matrix]
            yield Op(f"{name}.reduce_scatter", "reduce_scatter", eager=partial, gemms=(matrix,), sends=sends)
        yield from between

    ops = (
        residual_op("input", stream, stream),
        *block("attention", registry.ATTENTION, layer.attention.kind),
        residual_op("middle", stream, 0.0 if parallel_residual else stream),
        *block("feed_forward", registry.FEED_FORWARD, layer.feed_forward.kind),
    )
    return Program(ops, overlapped=tp_overlap != "off")


def norm_op(name: str, saved: float, eager: float = 0.0) -> Op:
    """One kernel forward. Backward is one for the input's gradient, which reads two tensors and writes one, and one for
    those of the parameters."""
    return Op(name, "norm", saved=saved, eager=eager, traffic=2 * saved, back_traffic=5 * saved)


def residual_op(name: str, stream: float, saved: float) -> Op:
    """The sum of the stream and a block's output, and in backward of the gradients of both paths."""
    return Op(name, "residual", result=stream, saved=saved, traffic=3 * stream, back_traffic=3 * stream)


def rotary_op(elements: float) -> Op:
    """Rotary positions of so many elements of a token, in fp32. Forward: casts of both halves, four products, two sums,
    a concatenation and a cast back. Backward: the gradients of these, and the sum of those of two slices."""
    return Op("attention.rotary", "elementwise", traffic=48 * elements, back_traffic=58 * elements)


def code_program(layer: CodeLayerSpec, width: int, tp: int, element_bytes: int, keys: float) -> Program:
    """The program of a layer of transformers' own code, by the table of its parameters. What stands between its GEMMs
    is not known: each GEMM is taken to keep its input, as autograd does, and its result once more. In a block that
    ranks share, GEMMs of the gathered tokens keep one input."""
    blocks, whole = layer.code["blocks"], float(element_bytes * width)
    stream, sends = whole / tp, whole * (tp > 1)
    ops, seen, table = [Op("input", "residual", result=stream, saved=stream)], set[str](), layer_table(layer, width)
    matrices = {name.removesuffix(".weight"): info for name, info in table.items() if info.role == "matrix"}
    normed = any(name.startswith(("post_feedforward", "post_mlp")) for name in table)
    last = [name for name, info in matrices.items() if info.cut == 1 and not normed][-1:]
    for name, info in table.items():
        block, matrix = name.split(".")[0], name.removesuffix(".weight")
        kind = blocks.get(block)
        rows = 1.0 if kind else info.active * info.shape[0] / tp if info.stacked else 1 / tp
        if kind and block not in seen:
            own = tuple(one for one in matrices if one.split(".")[0] == block)
            first = tuple(one for one in own if matrices[one].cut == 0 and matrices[one].shape[-1] == width) or own[:1]
            ops.append(Op(f"{block}.all_gather", "all_gather", deferred=stream, gemms=first, sends=sends))
            if block == layer.code["attention"]:
                flops = attention_flops(layer.attention, keys, tp if kind == "cut" else 1)
                ops.append(Op("attention", "attention", flops=flops, result=stream, saved=stream))
            if kind == "cut":
                ops.append(Op(f"{block}.reduce_scatter", "reduce_scatter", eager=sends, gemms=own[-1:], sends=sends))
        seen.add(block)
        if info.role == "matrix":
            outputs, inputs = shape = info.multiplied(tp)[-2:]
            size, count = element_bytes * rows, info.shape[0] if info.stacked else 1
            flops = 2.0 * rows * outputs * inputs
            saved = size * (outputs + inputs * (kind != "cut" or matrix not in first[1:]))
            gemm = Op(matrix, "gemm", shape, flops, size * outputs, saved=saved, deferred=saved, rows=rows)
            # What is added to the residual stream last is read by no backward pass, unless a norm is behind it.
            ops.append(replace(gemm, read=matrix not in last, matrices=count))
        elif info.role == "norm":
            # Its steps in fp32 are held where they are not fused.
            ops.append(Op(matrix, "norm", saved=2 * stream, eager=stream))
    moved = UNFUSED * (stream + sum(op.saved for op in ops))
    middle = Op("middle", "residual", result=stream, saved=stream, traffic=moved, back_traffic=2 * moved)
    return Program((*ops, middle))


InnerOps = Callable[[str, LayerSpec, Mapping[str, Op], int, float], Iterator[Op]]
"""(name of the block, layer, the block's GEMMs by name, tensor-parallel ranks, keys that a token attends to) -> the
operations of a block between the projections that read its input and those that write its output."""


def softmax_ops(block: str, layer: LayerSpec, gemms: Mapping[str, Op], tp: int, keys: float) -> Iterator[Op]:
    """The norms of queries and keys, which keep their inputs, and the kernel, which keeps its output and, in fp32, the
    log-sum-exp of each head's scores. Sinks scale that output."""
    a = layer.attention
    for name in ("q", "k") if a.qk_norm != "none" else ():
        size = gemms[f"attention.{name}"].result
        yield norm_op(f"attention.{name}_norm", size, size if tp > 1 and a.qk_norm == "full" else 0.0)
    if a.positions == "rope":
        yield rotary_op(a.rope.fraction * (gemms["attention.q"].shape[0] + gemms["attention.k"].shape[0]))
    kept = gemms["attention.q"].result + 4.0 * a.heads / tp
    yield Op("attention", "attention", flops=attention_flops(a, keys, tp), result=kept, saved=kept)
    if a.sinks:  # the scaled output, which follows from the kernel's, and its factor
        yield Op("attention.sinks", "elementwise", saved=kept, fused=kept, traffic=2 * kept, back_traffic=4 * kept)


def latent_ops(
    layer: LayerSpec, width: int, tp: int, element_bytes: int, keys: float, statistics: float, partial: float
) -> Iterator[Op]:
    """Latent attention as a whole. Each tensor-parallel rank computes the latent vectors of its own tokens, and gathers
    those of all. Keys and values are copies of what the second projection gives. Not counted are zeros behind the
    values, which kernels other than cuDNN's on Hopper want.

    statistics, partial: bytes of a norm's statistics, and of a term of the output in eager layers."""
    a, latent, table = layer.attention, layer.attention.latent, layer_table(layer, width)
    stream, heads = element_bytes * width / tp, element_bytes * a.heads / tp
    queries, values = heads * a.head_dim, heads * a.value_dim

    def gemm(name: str, saved: float = 0.0, reads: float = 0.0) -> Op:
        info = table[f"attention.{name}.weight"]
        shape, rows = info.multiplied(tp), 1 / tp if info.cut is None else 1.0
        result = stream if info.cut == 1 else element_bytes * rows * shape[0]
        flops = rows * gemm_flops(info, tp)
        return Op(f"attention.{name}", "gemm", shape, flops, result, saved=saved, deferred=result + reads, rows=rows)

    def gather(name: str, size: float, sent: float) -> Op:
        name, sends = f"attention.{name}", float(element_bytes * sent * (tp > 1))
        return Op(f"{name}.all_gather", "all_gather", deferred=size, gemms=(name,), sends=sends)

    def norm(name: str, rank: int) -> Op:
        return norm_op(f"attention.{name}", element_bytes * rank / tp + statistics)

    if latent.q_rank:
        size = element_bytes * latent.q_rank / tp
        yield gemm("q_a", saved=size, reads=stream)
        yield norm("q_norm", latent.q_rank)
        yield gather("q_b", size, latent.q_rank)
        yield gemm("q_b", saved=queries)
    else:
        yield gather("q", stream, width)
        yield gemm("q", saved=queries)
    both = latent.kv_rank + latent.rope_dim
    yield gemm("kv_a", saved=element_bytes * both / tp)
    yield norm("kv_norm", latent.kv_rank)
    yield gather("kv_b", element_bytes * latent.kv_rank / tp, both)
    yield gemm("kv_b", saved=queries + values)
    if a.positions == "rope":
        yield rotary_op(latent.rope_dim * (a.heads / tp + 1))
    joined = 2 * (2 * queries + values)  # queries and keys of two parts each, and values, are copied
    yield Op("attention.join", "elementwise", traffic=joined, back_traffic=joined)
    kept = values + 4.0 * a.heads / tp
    yield Op("attention", "attention", flops=attention_flops(a, keys, tp), result=kept, saved=kept)
    yield gemm("o", reads=values)
    sends = element_bytes * float(width) * (tp > 1)
    yield Op("attention.reduce_scatter", "reduce_scatter", eager=partial, gemms=("attention.o",), sends=sends)


def gated_ops(block: str, layer: LayerSpec, gemms: Mapping[str, Op], tp: int, keys: float) -> Iterator[Op]:
    yield gate_op(block, layer, gemms[f"{block}.gate"].result)


def gate_op(block: str, layer: LayerSpec, hidden: float, weighted: bool = False) -> Op:
    """What the activation function keeps, which follows from the projections, and its product with the second one.
    hidden: bytes of a projection's result. weighted: whether that product is multiplied with the weights of experts."""
    results, traffic, back = GATES.get(layer.feed_forward.activation, (1, 5, 9))
    return Op(
        f"{block}.activation",
        "elementwise",
        saved=(results + weighted + 1) * hidden,
        fused=(results + weighted) * hidden,
        traffic=(traffic + 3 * weighted) * hidden,
        back_traffic=(back + 6 * weighted) * hidden,
    )


GATES = {"clamped_swiglu": (4, 16, 31)}
"""Tensors, as large as a projection's result, that the gate of a block keeps between its projections and their product,
where that is not only the activation function's result: the clamped gate, its sigmoid, the product of both, and up + 1.
And how many such tensors eager kernels read and write, forward and backward."""


def plain_ops(block: str, layer: LayerSpec, gemms: Mapping[str, Op], tp: int, keys: float) -> Iterator[Op]:
    """The activation function's result."""
    size = gemms[f"{block}.up"].result
    yield Op(f"{block}.activation", "elementwise", saved=size, traffic=2 * size, back_traffic=3 * size)


INDEX, WIDE = 8.0, 4.0
"""Bytes of an index, and of a number in fp32, in which experts are chosen."""


def mixture_ops(layer: LayerSpec, width: int, tp: int, element_bytes: int, room: float) -> Iterator[Op]:
    """The router and the experts. Each tensor-parallel rank routes its own tokens, of which each is `top_k` rows.
    Memory is allocated for `room` times as many, which experts do not compute."""
    experts, inner = layer.feed_forward.experts, layer.feed_forward.width
    rows, table = experts.top_k / tp, layer_table(layer, width)

    def gemm(matrix: str, result: float, saved: float = 0.0, deferred: float = 0.0) -> Op:
        info = table[f"{matrix}.weight"]
        outputs, inputs = info.shape[-2:]
        share = rows if info.stacked else 1 / tp
        matrices = info.shape[0] if info.stacked else 1
        flops = 2.0 * share * outputs * inputs
        return Op(
            matrix,
            "gemm",
            (outputs, inputs),
            flops,
            result,
            saved=saved,
            deferred=deferred,
            # As of a dense block: the permutation behind it is linear, a norm behind the block needs its input.
            read=matrix != "feed_forward.experts.down" or layer.norm.placement != "pre",
            rows=share,
            matrices=matrices,
            wide=not info.stacked,
        )

    scores = WIDE * experts.count / tp
    row = element_bytes * rows * max(room, 1.0)
    hidden, stream = row * inner, row * width
    yield gemm("feed_forward.router", scores, saved=scores)
    # The chosen experts, the order of their rows, and its inverse; weights before and after that order.
    sums = WIDE / tp if experts.normalise else 0.0
    weights = WIDE * rows * (2 if experts.normalise else 1) + sums
    # The usage of each token's sequence, by which its scores are multiplied, and logits.
    losses = (experts.balance > 0 and experts.balance_over == "sequence") + (experts.z_loss > 0)
    yield Op("feed_forward.choice", "choice", result=INDEX * rows, saved=3 * INDEX * rows + weights + losses * scores)
    moved = 2 * element_bytes * rows * width
    yield Op("feed_forward.dispatch", "permute", saved=stream, deferred=stream, moved=moved)
    for name in ("gate", "up"):
        yield gemm(f"feed_forward.experts.{name}", hidden, saved=hidden, deferred=hidden)
    yield gate_op("feed_forward.experts", layer, hidden, weighted=True)
    yield gemm("feed_forward.experts.down", stream, deferred=stream + hidden)
    yield Op("feed_forward.combine", "permute", moved=moved / 2 + element_bytes * width / tp)


def shared_gate_ops(layer: LayerSpec, width: int, tp: int, stream: float) -> Iterator[Op]:
    """The gate of the shared block, which keeps its own result and that of the block."""
    if layer.feed_forward.experts.shared_gate:
        size = WIDE / tp
        yield Op("feed_forward.shared_gate", "gemm", (1, width), 2.0 * width / tp, size, rows=1 / tp, wide=True)
        yield Op("feed_forward.gating", "elementwise", saved=stream + size)


INNER_OPS: dict[str, InnerOps] = {"softmax": softmax_ops, "gated": gated_ops, "plain": plain_ops}
BLOCK_OPS = {"latent": latent_ops}
"""Kinds with more than one layer of projections: all operations of the block."""


def registered_ops(
    saved: Callable[[LayerSpec, Mapping[str, float]], float] | None, block: str, stream: float
) -> InnerOps:
    """Those of a registered kind of block as one operation. saved: what its declaration says that it holds for
    backward, from the bytes of each projection's result; None: twice these."""

    def inner(_: str, layer: LayerSpec, gemms: Mapping[str, Op], tp: int, keys: float) -> Iterator[Op]:
        sizes = {name: op.result for name, op in gemms.items()}
        held = saved(layer, {**sizes, "attention": stream}) if saved else 2 * sum(sizes.values())
        moved = UNFUSED * held
        if block == "attention":
            flops = attention_flops(layer.attention, keys, tp)
            yield Op(block, "attention", (), flops, stream, held, traffic=moved, back_traffic=2 * moved)
        else:
            yield Op(f"{block}.activation", "elementwise", saved=held, traffic=moved, back_traffic=2 * moved)

    return inner


def embedding_program(spec: ModelSpec, tp: int, element_bytes: int) -> Program:
    """The look-up of tokens, whose indices are kept. Each rank has a part of the vocabulary."""
    whole = float(element_bytes * spec.width)
    lookup = Op("embedding", "lookup", (spec.vocab_size / tp, spec.width), result=whole / tp, saved=8.0)
    return Program((lookup, Op("embedding.reduce_scatter", "reduce_scatter", sends=whole * (tp > 1))))


def trains_head(spec: ModelSpec) -> bool:
    """Whether the matrix that hidden states are multiplied with for logits has a gradient."""
    before, behind = outer_tables(spec, first=True, last=True)
    return before["embedding.weight"].trained if spec.tied else behind["head.weight"].trained


def find_frozen_gemms(spec: ModelSpec) -> tuple[frozenset[str], ...]:
    """The GEMMs of each layer, by the names of `Program.gemms`, whose matrices have no gradient."""
    return tuple(
        frozenset(name.removesuffix(".weight") for name, info in table.items() if not info.trained)
        for table in layer_tables(spec)
    )


@by_value
def measure_adapters(spec: ModelSpec, tp: int) -> tuple[tuple[float, float, float, float], ...]:
    """Of each layer on one of `tp` tensor-parallel ranks: elements of a token that the products of its adapters read
    and write forward and backward, elements of the frozen matrices in fp8, which each pass decodes, and the elements of
    the adapters themselves.

    Forward reads the input, and reads and writes the output to add to it. Backward reads the gradient of the output
    twice and the input once, and reads and writes the gradient of the input. Dense matrices of a block that share an
    input read it once."""
    found = []
    for table in layer_tables(spec):
        forward = backward = elements = 0.0
        read: set[tuple[str, str]] = set()
        for name, down in table.items():
            if name.endswith(f".{DOWN}"):
                weight = table[f"{name.removesuffix(DOWN)}weight"]
                *experts, outputs, inputs = weight.multiplied(tp)
                rows = down.active * prod(experts)  # that a token has in a stack of experts
                shared = name.rsplit(".", 2)[0], weight.axes[-1]
                once = rows * inputs * (weight.stacked or shared not in read)
                read.add(shared)
                forward += once + 2 * rows * outputs
                backward += 3 * once + 2 * rows * outputs
                elements += rows * down.shape[-2] * (inputs + outputs)
        decoded = sum(prod(info.multiplied(tp)) for info in table.values() if info.float8)
        found.append((forward, backward, decoded, elements))
    return tuple(found)


def head_program(spec: ModelSpec, tp: int, element_bytes: int) -> Program:
    """The final norm, which keeps its input and output, the head and the loss, which keeps the logits: they become
    their own gradient."""
    matrix, whole = head_matrix(spec), float(element_bytes * spec.width)
    rows, _ = shape = matrix.multiplied(tp)
    return Program(
        (
            Op("norm", "norm", saved=2 * whole / tp),
            Op("head.all_gather", "all_gather", sends=whole * (tp > 1), gemms=("head",)),
            Op("head", "gemm", shape, gemm_flops(matrix, tp), element_bytes * rows),
            Op("loss", "loss", saved=element_bytes * head_rows(rows), traffic=LOSS_TRAFFIC * head_rows(rows)),
        )
    )


def gemm_flops(matrix: ParameterInfo, ranks: int = 1) -> float:
    """Forward FLOPs of one token in the GEMM with a matrix, on one of `ranks` tensor-parallel ranks."""
    return 2.0 * matrix.active * prod(matrix.multiplied(ranks))


def attention_flops(a: AttentionSpec, keys: float, ranks: int = 1) -> float:
    """Forward FLOPs of one token that attends to `keys` keys, on one of `ranks` tensor-parallel ranks: scores, and
    their product with the values."""
    if entry := registry.ATTENTION.registered.get(a.kind):
        return entry.facts["flops"](entry.chosen(a.settings), a, keys) / ranks
    return 2.0 * (a.heads * (a.head_dim + a.value_dim) / ranks) * keys


def seen_keys(length: int, window: int = 0) -> float:
    """Keys that a token sees under causal attention, on average over the positions of a sequence."""
    window = min(window or length, length)
    # The first `window` positions see 1, 2, ... window keys; the others see `window`.
    return window * (length - (window - 1) / 2) / length


def has_experts(spec: ModelSpec) -> bool:
    """Whether some layer is a mixture of experts."""
    return any(layer.feed_forward.experts.count for layer in layer_specs(spec))


@by_value
def parameter_counts(spec: ModelSpec) -> Mapping[str, int]:
    """Numbers of parameters: `total`; `trained`; `embedding` (token and position tables); `matmul`, those that a token
    is multiplied with. A tied head is counted once in `total`, and in `matmul` as well as in `embedding`."""
    sizes, trained = dict.fromkeys(ROLES, 0), 0
    for info in declare_parameters(spec).values():
        sizes[info.role] += info.size
        trained += info.size * info.trained
    matrices = [info for table in layer_tables(spec) for info in table.values() if info.role == "matrix"]
    matmul = round(sum(info.active * info.size for info in [*matrices, head_matrix(spec)]))
    return MappingProxyType(
        {"total": sum(sizes.values()), "trained": trained, "embedding": sizes["embedding"], "matmul": matmul}
    )


@by_value
def flops_per_token(spec: ModelSpec, length: int, causal: bool) -> float:
    """Floating-point operations of one training step per token of a sequence of `length`: the forward pass and twice as
    much for the backward pass, matrix products only, recompute not counted (PaLM, arXiv 2204.02311, appendix B). A
    frozen matrix has no product for its gradient.

    causal: whether attention counts the keys that a token sees, averaged over the positions and within the window, or
    all `length` keys (as published MFU figures often do).
    """
    layers, head = model_programs(spec, length, 1, 1, causal=causal), head_program(spec, 1, 1)
    total = 3.0 * sum(program.flops for program in (*layers, head))
    if not spec.adapter.rank:
        return total
    for layer, frozen, (*_, elements) in zip(layers, find_frozen_gemms(spec), measure_adapters(spec, 1)):
        total += 6.0 * elements - sum(gemm.flops for name, gemm in layer.gemms.items() if name in frozen)
    return total - head.flops * (not trains_head(spec))


def registered_blocks(spec: ModelSpec) -> list[tuple[registry.KindRegistry, registry.RegisteredKind]]:
    """The kinds of blocks of the user's packages that the layers have."""
    used = {registry.ATTENTION: {layer.attention.kind for layer in layer_specs(spec)}}
    used[registry.FEED_FORWARD] = {layer.feed_forward.kind for layer in layer_specs(spec)}
    return [
        (kinds, entry) for kinds, names in used.items() for entry in kinds.registered.values() if entry.name in names
    ]
