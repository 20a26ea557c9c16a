"""The blocks that a model consists of: linear layer, norm, attention, feed-forward block, decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import ConfigError, registry
from trainer.config.model import LATENT_EPS, AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec
from trainer.distributed.collectives import AllReduceSum, GatherTokens
from trainer.model.attention import causal_attention, pad_heads
from trainer.model.cache import CachedMask, attend_cached
from trainer.model.context_attention import SharedMask, attend_together
from trainer.model.experts import Experts, RoutedExperts, Router, Sequences, WideLinear
from trainer.model.initial import DeclaredModule
from trainer.model.linear import Adapter, DeferredGrads, column_parallel, number_layer, row_parallel
from trainer.model.rotary import rotate_heads, rotate_pairs
from trainer.model.stage import BlockReport, ReportedOutput, join_reports, keep_here, split_report
from trainer.planning.parameters import DOWN, UP, declare_adapter
from trainer.precision.products import GradientSum, Multiply, matmul

# Functions of single tokens computed for some tokens at a time, and again in backward: what lives at once is one
# tile's intermediate results instead of a whole sequence's (Bekman et al., arXiv 2506.13996, section 3.1). The
# gradients of parameters are added up over tiles in fp32, or their rounding would grow with the number of tiles, and
# reach autograd once: what waits for a parameter's gradient (FSDP, DeepSpeed) sees one.


Parameters = Callable[[], list[nn.Parameter]]


class TiledFunction(torch.autograd.Function):
    """See `apply_tiled`. The parameters stand behind the inputs for the graph's sake alone."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], parameters: Parameters, tile: int, x: Tensor, *_: nn.Parameter
    ) -> Tensor:
        ctx.function, ctx.parameters, ctx.tile = function, parameters, tile
        ctx.save_for_backward(x)
        result = torch.empty_like(x)
        for rows in split_rows(len(x), tile):
            result[rows] = function(x[rows])
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        (x,), parameters = ctx.saved_tensors, ctx.parameters()
        to_x = torch.empty_like(x)
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        for rows in split_rows(len(x), ctx.tile):
            part = x[rows].detach().requires_grad_()
            with torch.enable_grad():
                result = ctx.function(part)
            to_x[rows], *terms = torch.autograd.grad(result, [part, *parameters], gradient[rows])
            del result
            for total, term in zip(sums, terms):
                total += term
        return None, None, None, to_x, *(total.to(p.dtype) for total, p in zip(sums, parameters))


def apply_tiled(function: Callable[[Tensor], Tensor], parameters: Parameters, tile: int, x: Tensor) -> Tensor:
    """`function(x)`, whose result is of x's shape and type, computed from `tile` rows of x at a time.

    parameters: those of the function that are trained, asked for again in backward, where ZeRO-3 has gathered them."""
    return TiledFunction.apply(function, parameters, tile, x, *parameters())


def split_rows(rows: int, tile: int) -> Iterator[slice]:
    """The rows of each tile."""
    return (slice(begin, min(begin + tile, rows)) for begin in range(0, rows, tile))


# The blocks of a model.


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The gate of GPT-OSS, whose inputs are clamped (arXiv 2508.10925)."""
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)


def gate_hidden(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """What the down projection of a gated block reads."""
    return clamped_swiglu(gate, up) if activation == "clamped_swiglu" else ACTIVATIONS[activation](gate) * up


class AdaptableLinear(DeclaredModule):
    """A linear layer with a `weight` [outputs, inputs], which may defer its weight gradient, and with an adapter
    (`adapt`) adds scale (x A^T) B^T to its output. gradient_sum: to which the product adds the weight gradient, None
    where autograd does. It is for layers that have been told to `defer`. held: where a step casts the weight once, its
    operands (`cast_weight`) while it is gathered."""

    deferred: DeferredGrads | None = None
    number: Tensor | None = None
    gradient_sum: GradientSum | None = None
    adapter_scale: float | None = None
    held: Sequence[Tensor] = ()

    def adapt(self, rank: int, scale: float) -> None:
        """Puts an adapter beside the matrix. scale: factor on its output."""
        self.adapter_scale = scale
        for name, info in declare_adapter(self.declared["weight"], rank).items():
            self.add_parameter(name, info)

    def defer(self, deferred: DeferredGrads) -> None:
        """From now on this layer may defer weight gradients, to `deferred`. Those of an adapter are too small for it,
        and a frozen matrix has none."""
        if self.adapter_scale is None and self.weight.requires_grad:
            self.deferred, self.number = deferred, number_layer(self)

    def local_adapter(self) -> Adapter | None:
        if self.adapter_scale is None:
            return None
        return Adapter(self.local(DOWN), self.local(UP), self.adapter_scale)


class Linear(AdaptableLinear):
    """y = x W^T + b with W: [outputs, inputs]. axes: the logical axes of (outputs, inputs). units: the number of equal
    parts (heads) into which the outputs may be cut; 0 means rows.

    Tensor parallelism splits the outputs (column-parallel) or the inputs (row-parallel, `by_rows`). With an adapter
    (`adapt`), y = x W^T + b + scale (x A^T) B^T. `row_scale`: where W is in fp8, the factors of the rows that this rank
    computes with, fp32 [rows, 1].
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axes: tuple[str, str],
        bias: bool = False,
        residual: bool = False,
        units: int = 0,
    ):
        super().__init__()
        self.by_rows = False
        self.multiply: Multiply = matmul
        self.row_scale: Tensor | None = None
        self.declare("weight", (outputs, inputs), axes, "matrix", residual, units)
        self.bias = None
        if bias:
            # `nn.Module` refuses to register a parameter under the name of a plain attribute.
            del self.bias
            self.declare("bias", (outputs,), axes[:1], "bias", units=units)

    def local_bias(self) -> Tensor | None:
        return None if self.bias is None else self.local("bias")

    def forward(self, x: Tensor) -> Tensor:
        if self.by_rows:
            adapter = None if self.adapter_scale is None else self.local_adapter()
            return row_parallel(
                x,
                self.local("weight"),
                self.local_bias(),
                self.group,
                self.number,
                self.multiply,
                adapter,
                self.row_scale,
            )
        return project_input(x, self)[0]


def project_input(x: Tensor, *linears: Linear) -> Sequence[Tensor]:
    """The products of one input [tokens / t, inputs] with several linear layers that are split alike: [tokens, outputs
    / t] each. The input is gathered once, unless the layers multiply differently (fp8 for some of them)."""
    # A loop: generators would cost the host as much as the calls below.
    numbers: list[Tensor] = []
    adapters: list[Adapter | None] = []
    row_scales: list[Tensor | None] = []
    held: list[Tensor] = []
    for linear in linears:
        # Operands in different types cannot share a gather of converted tokens.
        if linear.multiply is not linears[0].multiply:
            return [project_input(x, one)[0] for one in linears]
        if linear.number is not None:
            numbers.append(linear.number)
        if linear.adapter_scale is not None:
            adapters = [one.local_adapter() for one in linears]
        if linear.row_scale is not None:
            row_scales = [one.row_scale for one in linears]
        held += linear.held
    return column_parallel(
        x,
        [linear.local("weight") for linear in linears],
        [linear.local_bias() for linear in linears],
        linears[0].group,
        # Where one of them has an adapter or a frozen matrix, all compute their weight gradients at once.
        numbers if len(numbers) == len(linears) else [],
        linears[0].multiply,
        adapters,
        row_scales,
        held,
    )


class Norm(DeclaredModule):
    """RMSNorm (Zhang and Sennrich, arXiv 1910.07467) or LayerNorm over the last dimension. Result: shape and type of
    the input."""

    def __init__(self, width: int, spec: NormSpec, axis: str = "embed", units: int = 0):
        super().__init__()
        self.kind, self.eps, self.offset, self.width = spec.kind, spec.eps, spec.offset, width
        self.declare("weight", (width,), (axis,), "norm", units=units)
        if spec.kind == "layer":
            self.declare("bias", (width,), (axis,), "norm", units=units)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.local("weight")
        # In fp32, because bf16 would round away a small weight that is added to the offset, a sum over ranks needs the
        # precision, and torch accumulates the weight gradient of a LayerNorm on CPUs in bf16 over all tokens.
        if self.offset or self.group is not None or (self.kind == "layer" and not x.is_cuda):
            wide = torch.promote_types(x.dtype, torch.float32)
            weight = weight.to(wide) + self.offset if self.offset else weight.to(wide)
            return self.normalise(x.to(wide), weight).to(x.dtype)
        return self.normalise(x, weight)

    def normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        bias = self.local("bias").to(weight.dtype) if self.kind == "layer" else None
        if self.group is not None:
            return self.normalise_split(x, weight, bias)
        if self.kind == "layer":
            return F.layer_norm(x, (self.width,), weight, bias, self.eps)
        return F.rms_norm(x, (self.width,), weight, self.eps)

    def normalise_split(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`normalise` where each rank holds an equal part of the normalised dimension. Parts that several ranks hold
        (shared key-value heads) count with equal weight, which leaves mean and variance unchanged."""
        elements = x.shape[-1] * self.group.size
        if self.kind == "layer":
            x = x - AllReduceSum.apply(self.group, x.sum(-1, keepdim=True)) / elements
        variance = AllReduceSum.apply(self.group, x.square().sum(-1, keepdim=True)) / elements
        x = x * torch.rsqrt(variance + self.eps) * weight
        return x if bias is None else x + bias


class Block(nn.Module):
    """A part of a layer: attention or feed-forward. In training it may return `ReportedOutput`; `reports` then says how
    many values each of its statistics has."""

    by_sequence = False
    """For feed-forward: whether it is called with the `Sequences` of its tokens besides."""

    caches = False
    """For attention: whether it accepts a `CachedMask` and depends on earlier tokens through their keys and values
    alone. Otherwise generation computes the whole context for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: dict[str, int] = {}


ATTENTION_BACKENDS: dict[type, Callable[..., Tensor]] = {SharedMask: attend_together, CachedMask: attend_cached}
"""Type of a mask that says where the keys are -> function that computes attention. `causal_attention` handles all
others."""


class Sinks(DeclaredModule):
    """A logit for each head, see `AttentionSpec.sinks`. weight: [heads].

    Its role is that of biases, because like them it is added and starts at zero: weight decay would pull every head
    towards the same share of attention for its sink."""

    def __init__(self, heads: int):
        super().__init__()
        self.declare("weight", (heads,), ("heads",), "bias", units=heads)


class Attention(Block):
    """Causal self-attention with grouped key-value heads (GQA, Ainslie et al., arXiv 2305.13245)."""

    caches = True

    def __init__(self, spec: AttentionSpec, norm: NormSpec, width: int):
        super().__init__()
        self.head_dim, self.scale, self.soft_cap, self.rotary = (
            spec.head_dim,
            spec.scale,
            spec.soft_cap,
            spec.positions == "rope",
        )
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q = Linear(width, queries, ("heads", "embed"), spec.bias, units=spec.heads)
        self.k = Linear(width, keys, ("kv_heads", "embed"), spec.bias, units=spec.kv_heads)
        self.v = Linear(width, keys, ("kv_heads", "embed"), spec.bias, units=spec.kv_heads)
        self.o = Linear(queries, width, ("embed", "heads"), spec.output_bias, residual=True)
        self.sinks = Sinks(spec.heads) if spec.sinks else None
        self.qk_norm = spec.qk_norm
        if spec.qk_norm != "none":
            per_head = spec.qk_norm == "head"
            self.q_norm = (
                Norm(spec.head_dim, norm, "head_dim") if per_head else Norm(queries, norm, "heads", spec.heads)
            )
            self.k_norm = (
                Norm(spec.head_dim, norm, "head_dim") if per_head else Norm(keys, norm, "kv_heads", spec.kv_heads)
            )

    def forward(self, x: Tensor, shape: tuple[int, int], rotation: tuple[Tensor, Tensor] | None, mask: Any) -> Tensor:
        """x: [tokens, width], this rank's tokens of a micro-batch. shape: (batch, length) of that micro-batch, where
        length counts what this rank holds of each sequence between the input and output projections. rotation: cos and
        sin of the positions (RoPE), or None. mask: see `attention.build_mask`, `context_attention.SharedMask` and
        `cache.CachedMask`. Returns [tokens, width]."""
        # The projections gather the tokens of all tensor-parallel ranks, and give this rank's heads: attention itself
        # needs no communication.
        query, key, value = project_input(x, self.q, self.k, self.v)
        if self.qk_norm == "full":
            # `full` normalises over all heads together, which tensor-parallel ranks share.
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (
            y.view(*shape, -1, self.head_dim) for y in (query, key, value)
        )  # [batch, length, heads, head_dim]
        if self.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotary:
            query, key = rotate_heads(query, *rotation), rotate_heads(key, *rotation)
        # Kernels take [batch, heads, length, head_dim].
        query, key, value = (y.transpose(1, 2) for y in (query, key, value))
        attend = ATTENTION_BACKENDS.get(type(mask), causal_attention)
        sinks = None if self.sinks is None else self.sinks.local("weight")
        attended = attend(query, key, value, mask, self.scale, self.soft_cap, sinks)
        return self.o(attended.transpose(1, 2).reshape(shape[0] * shape[1], -1))


class LatentAttention(Block):
    """Causal self-attention whose keys and values are projections of a small latent vector (`LatentSpec`).

    Tensor-parallel ranks cut the projections to heads, and hold those to latent vectors whole. Each rank computes the
    latent vectors of its own tokens, and what is gathered are these and not the wider residual stream.
    """

    caches = True

    def __init__(self, spec: AttentionSpec, norm: NormSpec, width: int):
        super().__init__()
        self.latent, self.head_dim, self.scale, self.soft_cap = spec.latent, spec.head_dim, spec.scale, spec.soft_cap
        self.rotary, latent, heads = spec.positions == "rope", spec.latent, spec.heads
        # In the order in which they run, by which `activation.save` counts.
        if latent.q_rank:
            self.q_a = Linear(width, latent.q_rank, ("latent", "embed"), spec.bias)
            self.q_b = Linear(latent.q_rank, heads * spec.head_dim, ("heads", "latent"), units=heads)
        else:
            self.q = Linear(width, heads * spec.head_dim, ("heads", "embed"), units=heads)
        self.kv_a = Linear(width, latent.kv_rank + latent.rope_dim, ("latent", "embed"), spec.bias)
        expanded = heads * (latent.nope_dim + latent.value_dim)
        self.kv_b = Linear(latent.kv_rank, expanded, ("heads", "latent"), units=heads)
        self.o = Linear(heads * latent.value_dim, width, ("embed", "heads"), spec.output_bias, residual=True)
        norm = replace(norm, eps=LATENT_EPS)
        if latent.q_rank:
            self.q_norm = Norm(latent.q_rank, norm, "latent")
        self.kv_norm = Norm(latent.kv_rank, norm, "latent")

    def forward(self, x: Tensor, shape: tuple[int, int], rotation: tuple[Tensor, Tensor] | None, mask: Any) -> Tensor:
        """See `Attention.forward`."""
        latent = self.latent
        query = self.q_b(self.q_norm(self.q_a(x))) if latent.q_rank else self.q(x)
        query = query.view(*shape, -1, self.head_dim)
        latents, shared = self.kv_a(x).split([latent.kv_rank, latent.rope_dim], -1)
        expanded = self.kv_b(self.kv_norm(latents)).view(*shape, -1, latent.nope_dim + latent.value_dim)
        if self.kv_b.group is not None:
            shared = GatherTokens.apply(self.kv_b.group, shared)
        shared = shared.view(*shape, 1, latent.rope_dim)
        content, position = query.split([latent.nope_dim, latent.rope_dim], -1)
        key, value = expanded.split([latent.nope_dim, latent.value_dim], -1)
        if self.rotary:
            position, shared = rotate_pairs(position, *rotation), rotate_pairs(shared, *rotation)
        query = torch.cat([content, position], -1)
        key = torch.cat([key, shared.expand(*key.shape[:-1], -1)], -1)
        if attend := ATTENTION_BACKENDS.get(type(mask)):
            # Ranks exchange keys and values as one tensor, and a cache has one size for both.
            value = pad_heads(value, self.head_dim)
        query, key, value = (y.transpose(1, 2) for y in (query, key, value.contiguous()))
        attended = (attend or causal_attention)(query, key, value, mask, self.scale, self.soft_cap)
        attended = attended[..., : latent.value_dim].transpose(1, 2)
        return self.o(attended.reshape(shape[0] * shape[1], -1))


class FeedForward(Block):
    """Gated (SwiGLU and its variants, Shazeer, arXiv 2002.05202) or plain two-layer feed-forward block. x: [tokens,
    width]."""

    def __init__(self, spec: FeedForwardSpec, width: int):
        super().__init__()
        self.activation, self.gated = spec.activation, spec.kind == "gated"
        if self.gated:
            self.gate = Linear(width, spec.width, ("mlp", "embed"), spec.bias)
        self.up = Linear(width, spec.width, ("mlp", "embed"), spec.bias)
        self.down = Linear(spec.width, width, ("embed", "mlp"), spec.bias, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(ACTIVATIONS[self.activation](self.up(x)))
        return self.down(gate_hidden(self.activation, *project_input(x, self.gate, self.up)))


class Mixture(Block):
    """Experts instead of one feed-forward block, and a block that every token passes through besides, if there is one
    (Shazeer et al., arXiv 1701.06538; shared experts: Dai et al., arXiv 2401.06066).

    Under tensor parallelism each rank routes its own tokens through whole experts; the shared block is cut as any
    other.
    """

    def __init__(self, spec: FeedForwardSpec, width: int):
        super().__init__()
        self.router = Router(spec.experts, width)
        self.experts = Experts(spec.experts, width, spec.width, partial(gate_hidden, spec.activation), spec.bias)
        self.shared = self.shared_gate = None
        if spec.experts.shared_width:
            self.shared = FeedForward(replace(spec, width=spec.experts.shared_width), width)
        if spec.experts.shared_gate:
            self.shared_gate = WideLinear(width, 1)
        self.reports = self.router.reports | {"overflow": 1}
        self.by_sequence = spec.experts.balance > 0 and spec.experts.balance_over == "sequence"

    def forward(self, x: Tensor, sequences: Sequences | None = None) -> Any:
        """x and result: [tokens, width], this rank's tokens. sequences: theirs, where `by_sequence`."""
        routing = self.router(x)
        result, missing = self.experts(x, routing.chosen, routing.weights)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = (self.shared_gate(x).sigmoid() * shared).to(x.dtype)
            result = result + shared
        if not self.training:
            return result
        loss, statistics = self.router.report(routing, sequences)
        return ReportedOutput(result, BlockReport(loss, statistics | {"overflow": missing}))


ATTENTION: dict[str, Callable[[AttentionSpec, NormSpec, int], Block]] = {
    "softmax": Attention,
    "latent": LatentAttention,
}
FEED_FORWARD: dict[str, Callable[[FeedForwardSpec, int], Block]] = {"gated": FeedForward, "plain": FeedForward}
"""Kind of a block in the spec -> its class."""


def build_feed_forward(spec: FeedForwardSpec, width: int) -> Block:
    """The block of a kind that is built in."""
    return Mixture(spec, width) if spec.experts.count else FEED_FORWARD[spec.kind](spec, width)


def registered_block(spec: AttentionSpec | FeedForwardSpec, kinds: registry.KindRegistry, width: int) -> Block | None:
    """The block of a registered kind, or None where the kind is built in."""
    if (entry := kinds.registered.get(spec.kind)) is None:
        return None
    block = entry.made(entry.chosen(spec.settings), spec, width)
    if not isinstance(block, Block):
        raise ConfigError(f"the {kinds.kind} '{entry.name}' ({entry.home}) is no trainer.model.layers.Block")
    return block


class Layer(nn.Module):
    """One decoder layer, a `StageLayer`. `recompute` decides what backward finds saved of the layer's body. `run` and
    `run_tile` may be compiled versions of its parts. None of them wraps the module, so parameter names stay global."""

    def __init__(self, spec: LayerSpec, width: int, parallel_residual: bool):
        super().__init__()
        self.parallel_residual = parallel_residual
        self.attention = registered_block(spec.attention, registry.ATTENTION, width) or ATTENTION[spec.attention.kind](
            spec.attention, spec.norm, width
        )
        self.feed_forward = registered_block(spec.feed_forward, registry.FEED_FORWARD, width) or build_feed_forward(
            spec.feed_forward, width
        )
        pre, post = spec.norm.placement in ("pre", "both"), spec.norm.placement in ("post", "both")
        self.attention_norm = Norm(width, spec.norm) if pre else nn.Identity()
        self.feed_forward_norm = Norm(width, spec.norm) if pre else nn.Identity()
        self.attention_post_norm = Norm(width, spec.norm) if post else nn.Identity()
        self.feed_forward_post_norm = Norm(width, spec.norm) if post else nn.Identity()
        self.tile = 0
        # Set by the plan: see `apply_recompute`, `compile_layers`, `HostStore` and `ExpertUnit`.
        self.expert_unit: ExpertUnit | None = None
        self.recompute: Callable | None = None
        self.run: Callable = self.run_body
        self.run_tile: Callable = self.feed
        self.keep: Callable[..., AbstractContextManager] = keep_here

    @property
    def caches(self) -> bool:
        """Whether attention can keep keys."""
        return self.attention.caches

    @property
    def recomputes_attention(self) -> bool:
        """Whether backward runs attention again."""
        return self.recompute is not None

    def forward(self, x: Tensor, *context: Any) -> Any:
        """x and result: [tokens, width], this rank's tokens. context: what attention takes besides (shape, rotation,
        mask), and then what the feed-forward block takes besides."""
        # Around `run`, outside of recompute and compiled code: its hooks have to see the layer's input, which
        # checkpointing saves.
        with self.keep(x):
            output = (self.expert_unit or self.run)(x, *context)
        if not self.tile:
            return output
        # With tiles, `run` computed attention only. The feed-forward half treats tokens alone, so it runs a tile at a
        # time and needs no memory for all of its intermediate results.
        between, attention_report = output
        # With parallel residuals (GPT-NeoX) both halves read the layer's input.
        source = x if self.parallel_residual else between
        with self.keep(source, 1):
            result = apply_tiled(self.run_tile, self.feed_parameters, self.tile, source)
        result = between + result if self.parallel_residual else result
        return join_reports(result, {"attention": attention_report}) if self.training else result

    def run_body(self, x: Tensor, *context: Any) -> Any:
        body = self.attend if self.tile else self.body
        return body(x, *context) if self.recompute is None else self.recompute(body, x, *context)

    def body(self, x: Tensor, *context: Any) -> Any:
        """The whole layer as `run` computes it without tiles. x and result: [tokens, width]. context: see `forward`."""
        between, attention_report = self.attend(x, *context)
        ff_output, feed_forward_report = split_report(
            self.feed_forward(self.feed_forward_norm(x if self.parallel_residual else between), *context[3:])
        )
        result = between + self.feed_forward_post_norm(ff_output)
        if not self.training:
            return result
        return join_reports(result, {"attention": attention_report, "feed_forward": feed_forward_report})

    def attend(self, x: Tensor, *context: Any) -> tuple[Tensor, BlockReport | None]:
        """The first half of the layer: the residual stream after attention, and attention's report."""
        attended, report = split_report(self.attention(self.attention_norm(x), *context[:3]))
        return x + self.attention_post_norm(attended), report

    def feed(self, x: Tensor) -> Tensor:
        """The second half, for some of the tokens. With parallel residuals, where both halves read the same input, the
        result does not include the residual stream."""
        ff_output = self.feed_forward_post_norm(self.feed_forward(self.feed_forward_norm(x)))
        return ff_output if self.parallel_residual else x + ff_output

    def feed_parameters(self) -> list[nn.Parameter]:
        """The trained parameters of the second half."""
        modules = (self.feed_forward_norm, self.feed_forward, self.feed_forward_post_norm)
        return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]


class ExpertUnit(nn.Module):
    """What an engine shards of a layer's experts, where their ranks are others than those of the layer. It runs the
    layer's body, so the engine's hooks act where those of the layer do: outside of what is recomputed or compiled."""

    def __init__(self, layer: Any, experts: RoutedExperts):
        super().__init__()
        self.experts, self.layers = experts, (layer,)  # a tuple, which does not make the layer a child

    def forward(self, x: Tensor, *context: Any) -> Any:
        return self.layers[0].run(x, *context)
