"""Mixture of experts: the router, the grouped GEMM, and the experts of a layer.

Each rank sends the tokens that it holds between blocks through whole experts. Tokens are sorted by expert, so that one
grouped GEMM computes a projection of all experts, and no token is dropped. The sort is stable, and the outputs of a
token's experts are added in the order in which the router chose them: results do not depend on the order in which
kernels run, and gradients need no atomic additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.model import EXPERT_ALIGNMENT, ExpertsSpec
from trainer.distributed.collectives import GROUPS, register_operator
from trainer.model.dispatch import Dispatch, Dispatched, cast_result
from trainer.model.initial import DeclaredModule
from trainer.model.linear import DeferredGrads, accumulate_gradients, detach_weights, number_layer, weight_views
from trainer.model.stage import BlockReport
from trainer.planning.parameters import DOWN, UP, declare_adapter
from trainer.precision.products import E4M3


@register_operator("choose_experts")
def choose_experts(scores: Tensor, top_k: int, groups: int, top_groups: int, best: int) -> Tensor:
    """The experts of each token, by falling score: int64 [tokens, top_k].

    scores: [tokens, experts]. Only the `top_groups` groups count whose `best` highest scores have the largest sum. This
    is one operator so that recompute can save its result: a token that backward sent to another expert would give
    gradients of another model.
    """
    if groups > 1:
        grouped = scores.unflatten(-1, (groups, -1))
        chosen = grouped.topk(best, -1).values.sum(-1).topk(top_groups, -1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, chosen, False)
        scores = grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)
    chosen = scores.topk(top_k, -1).indices
    return chosen if _replacement is None else _replacement(chosen)


_replacement: Callable[[Tensor], Tensor] | None = None


@contextmanager
def replace_choices(replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The context in which tokens go to the experts that `replace` returns for those that they have chosen, both int64
    [tokens, top_k]. For `trainer parity`, which compares models in 16 bits with the same routing."""
    global _replacement
    before, _replacement = _replacement, replace
    try:
        yield
    finally:
        _replacement = before


@torch.library.register_fake("trainer::choose_experts")
def _(scores: Tensor, top_k: int, groups: int, top_groups: int, best: int) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], top_k), dtype=torch.int64)


@register_operator("choose_largest")
def choose_largest(
    scores: Tensor, count: int, dimension: int = -1, largest: bool = True, ordered: bool = True
) -> Tensor:
    """The numbers that `topk` finds, as an operator whose result recompute can save, see `choose_experts`."""
    return scores.topk(count, dimension, largest, ordered).indices


@torch.library.register_fake("trainer::choose_largest")
def _(scores: Tensor, count: int, dimension: int = -1, largest: bool = True, ordered: bool = True) -> Tensor:
    shape = list(scores.shape)
    shape[dimension] = count
    return scores.new_empty(shape, dtype=torch.int64)


def count_choices(keys: Tensor, size: int) -> Tensor:
    """How often each number below `size` is in `keys`: int64 [size]."""
    # Not `bincount`, which makes the host wait for the device, and has no fixed shape for the compiler. Counts are
    # int32 first: the compiler has no atomic sum of int64, and falls back on a sort and six kernels.
    ones = torch.ones_like(keys, dtype=torch.int32)
    return ones.new_zeros(size).index_add_(0, keys, ones).long()


_SIZES = [2.0**power for power in range(-30, 1)]
MARGIN_POINTS = [*(-size for size in reversed(_SIZES)), 0.0, *_SIZES]
"""Points at which margins of scores are counted: zero, and powers of two from 2^-30 to 1 on both sides. They are close
near zero, where the quantile lies once the experts are balanced: each step starts from the biases of the step before,
so their distance limits the speed of the balance and not its accuracy."""

WHOLE = 2**16
"""What a margin counts. Integers have the same sum in every order."""


@register_operator("count_margins")
def count_margins(ranked: Tensor, top_k: int) -> Tensor:
    """How many tokens have which margin for an expert: int64 [experts x points], in units of `WHOLE`.

    ranked: the scores by which experts are chosen, [tokens, experts]. The margin of a token for an expert is the
    token's score of rank `top_k` + 1 minus the expert's score. It is the change of the expert's bias from which on the
    expert has the token, and is negative for an expert that has it. A margin counts in parts at the two points around
    it, so that counts hardly change with its rounding: with bins, two plans could put it in different ones.
    """
    points, last = margin_points(ranked.device), len(MARGIN_POINTS) - 1
    margins = (ranked.topk(top_k + 1, -1).values[:, -1:] - ranked).float().clamp(points[0], points[-1])
    lower = torch.bucketize(margins, points[1:-1], right=True, out_int32=True)
    parts = ((margins - points[lower]) / (points[lower + 1] - points[lower]) * WHOLE).round().long()
    places = lower + torch.arange(0, ranked.shape[1] * (last + 1), last + 1, device=ranked.device, dtype=torch.int32)
    counts = parts.new_zeros(ranked.shape[1] * (last + 1))
    counts.index_add_(0, places.flatten(), (WHOLE - parts).flatten())
    return counts.index_add_(0, places.flatten() + 1, parts.flatten())


@torch.library.register_fake("trainer::count_margins")
def _(ranked: Tensor, top_k: int) -> Tensor:
    return ranked.new_empty(ranked.shape[1] * len(MARGIN_POINTS), dtype=torch.int64)


@cache
def margin_points(device: torch.device) -> Tensor:
    """`MARGIN_POINTS` on a device, copied once: a copy from the host's memory would make the host wait."""
    return torch.tensor(MARGIN_POINTS, device=device)


def margin_quantiles(counts: Tensor, share: float) -> Tensor:
    """The margin of each expert that is above those of a share of the tokens: fp64 [experts].

    counts: fp64 [experts, points], exact. What is counted at a point lies half below it. Between points, margins count
    as evenly spread."""
    points, last = margin_points(counts.device).double(), len(MARGIN_POINTS) - 1
    below, wanted = counts.cumsum(-1) - counts / 2, share * counts.sum(-1, keepdim=True)
    above = (below < wanted).sum(-1, keepdim=True)
    lower, upper = ((above + step).clamp(0, last) for step in (-1, 0))
    start, end = below.gather(-1, lower), below.gather(-1, upper)
    part = torch.where(end > start, (wanted - start) / torch.where(end > start, end - start, 1), 0)
    return torch.lerp(points[lower], points[upper], part).squeeze(-1)


class Sequences(NamedTuple):
    """Which sequence each of this rank's tokens belongs to.

    numbers: int64 [tokens], from 0 to `count` - 1. groups: keys of `GROUPS`, one a line: the tensor- and
    context-parallel ranks that hold the other tokens of these sequences.
    """

    numbers: Tensor
    count: int
    groups: str


@register_operator("count_by_sequence")
def count_by_sequence(chosen: Tensor, numbers: Tensor, count: int, groups: str, experts: int) -> Tensor:
    """How often the tokens of each sequence chose each expert, whichever rank holds them: fp32 [sequences, experts].

    chosen: int64 [tokens, top_k]. numbers, count, groups: see `Sequences`. This is one operator so that recompute can
    save its result instead of communicating again.
    """
    counts = count_choices((numbers[:, None] * experts + chosen).flatten(), count * experts).float()
    for key in groups.splitlines():
        counts = GROUPS[key].wait(GROUPS[key].sum(counts))
    return counts.view(count, experts)


@torch.library.register_fake("trainer::count_by_sequence")
def _(chosen: Tensor, numbers: Tensor, count: int, groups: str, experts: int) -> Tensor:
    return chosen.new_empty(count, experts, dtype=torch.float32)


class WideProduct(torch.autograd.Function):
    """x W^T computed in fp32, or in the operands' type if that is wider. x: [tokens, inputs]; weight: [outputs,
    inputs]. Backward keeps the operands in their own types."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) @ weight.to(wide).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        to_x, to_weight = gradient @ weight.to(gradient.dtype), gradient.t() @ x.to(gradient.dtype)
        return to_x.to(x.dtype), to_weight.to(weight.dtype)


class WideLinear(DeclaredModule):
    """A small projection of tokens in fp32: the router, or the gate of a shared block. weight: [outputs, inputs]; bias:
    [outputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.declare("weight", (outputs, inputs), ("experts", "embed"), "matrix")
        self.biased = bias
        if bias:
            self.declare("bias", (outputs,), ("experts",), "bias")

    def forward(self, x: Tensor) -> Tensor:
        y = WideProduct.apply(x, self.local("weight"))
        return y + self.local("bias") if self.biased else y


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters of a model, those of `WideLinear` to fp32 at least. Frozen matrices in fp8 stay as they
    are."""
    codes = [
        (module, name, parameter.data)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dtype is E4M3
    ]
    model.to(dtype)
    for module, name, values in codes:
        setattr(module, name, nn.Parameter(values, requires_grad=False))
    for module in model.modules():
        if isinstance(module, WideLinear):
            module.to(torch.promote_types(dtype, torch.float32))


class Routing(NamedTuple):
    """What a router says of tokens: the numbers of their experts and the weights of the experts' outputs, [tokens,
    top_k]; and what they follow from, [tokens, experts]."""

    chosen: Tensor
    weights: Tensor
    logits: Tensor
    scores: Tensor


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}
"""`ExpertsSpec.score` -> the scores of logits [tokens, experts]."""


class Router(WideLinear):
    """Chooses the experts of each token and their weights, in fp32, and balances the load of the experts.

    balance: fp32 [experts], added to the scores for the choice alone (Wang et al., arXiv 2408.15664; quantiles: Kimi K3
    technical report, equations 13 and 14, after Su, kexue.fm/archives/11619). usage: fp32
    [experts], the load of each expert in the previous step over the mean load, for a loss that balances the global
    batch (Qiu et al., arXiv 2501.11873). Both are buffers that checkpoints hold, begin with zeros, and are None where
    the spec does not use them.
    """

    balance: Tensor | None
    usage: Tensor | None

    def __init__(self, spec: ExpertsSpec, width: int):
        super().__init__(width, spec.count, spec.router_bias)
        self.spec = spec
        for name in ("balance", "usage"):
            self.register_buffer(name, torch.zeros(spec.count) if name in spec.buffers else None)

    def reset_buffers(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()

    def forward(self, x: Tensor) -> Routing:
        """x: [tokens, width]."""
        spec, logits = self.spec, super().forward(x)
        scores = SCORES[spec.score](logits)
        ranked, best = self.rank(scores), 2 if spec.group_score == "top2" else 1
        chosen = choose_experts(ranked, spec.top_k, spec.groups, spec.top_groups, best)
        weights = scores.gather(-1, chosen)
        if spec.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(chosen, weights if spec.scale == 1 else weights * spec.scale, logits, scores)

    def rank(self, scores: Tensor) -> Tensor:
        """What experts are chosen by: the scores with the biases, without a gradient."""
        return scores.detach() if self.balance is None else scores.detach() + self.balance

    @property
    def reports(self) -> dict[str, int]:
        """The statistics that `report` has, with the number of values of each."""
        spec = self.spec
        sizes = {"load": spec.count, "balance": spec.balance > 0, "z_loss": spec.z_loss > 0, "bias": spec.bias_rate > 0}
        sizes["margins"] = spec.count * len(MARGIN_POINTS) * (spec.bias_rule == "quantile")
        return {name: int(size) for name, size in sizes.items() if size}

    def report(self, routing: Routing, sequences: Sequences | None) -> BlockReport:
        """The losses that balance the experts, and statistics: `load`, how many tokens each expert has; `balance` and
        `z_loss`, the two losses; `bias`, the range of `balance` times the sum of `load`, since ranks and micro-batches
        add up what they report; `margins`, see `count_margins`.

        For a given usage, the balance loss is linear in the scores of each token. Each rank therefore adds the terms
        of its own tokens, and only the usage is a sum over ranks.
        """
        spec, (chosen, _, logits, scores) = self.spec, routing
        statistics, losses = {"load": count_choices(chosen.flatten(), spec.count)}, []
        if spec.balance:
            shares = scores if spec.score == "softmax" else scores / scores.sum(-1, keepdim=True)
            if sequences is None:
                usage = self.usage
            else:
                counts = count_by_sequence(chosen, *sequences, spec.count)
                usage = (counts / counts.mean(-1, keepdim=True))[sequences.numbers]
            losses.append(("balance", spec.balance * (shares * usage).sum()))
        if spec.z_loss:
            losses.append(("z_loss", spec.z_loss * logits.logsumexp(-1).square().sum()))
        statistics |= {name: loss.detach()[None] for name, loss in losses}
        if self.balance is not None:
            low, high = self.balance.aminmax()
            statistics["bias"] = (high - low).double()[None] * chosen.numel()
        if spec.bias_rule == "quantile":  # last: recompute ends with what backward needs, and does not count again
            statistics["margins"] = count_margins(self.rank(scores), spec.top_k)
        return BlockReport(sum(loss for _, loss in losses) if losses else None, statistics)

    @torch.no_grad()
    def rebalance(self, load: Tensor, skipped: Tensor, margins: Tensor | None = None) -> None:
        """Takes over what a step shows.

        load: fp64 [experts], the tokens of each expert in the whole step; margins: fp64 [experts x points], see
        `count_margins`. The counts are exact. skipped: scalar, 1 where the step's update was skipped; then nothing
        changes.
        """
        mean, applied = load.mean(), skipped == 0
        if self.balance is not None:
            change = (mean - load).sign()
            if margins is not None:
                change = margin_quantiles(margins.view(self.spec.count, -1), self.spec.top_k / self.spec.count)
                change -= change.mean()  # of all biases alike, which changes no choice
            self.balance.add_(change * applied, alpha=self.spec.bias_rate)
        if self.usage is not None:
            self.usage.copy_(torch.where(applied, load / mean, self.usage))


@cache
def multiplies_groups(device: torch.device) -> bool:
    """Whether torch has a grouped kernel for bf16 on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def can_group(x: Tensor, outputs: int) -> bool:
    """Whether the grouped kernel multiplies rows x [rows, inputs] to rows of so many outputs. Sizes of transformers'
    code may be none that it reads."""
    aligned = not (x.shape[1] % EXPERT_ALIGNMENT or outputs % EXPERT_ALIGNMENT)
    return aligned and len(x) > 0 and x.dtype is torch.bfloat16 and multiplies_groups(x.device)


def expert_rows(ends: Tensor) -> list[tuple[int, slice]]:
    """The number and the rows of each expert that has any. The host waits for the device."""
    bounds = [0, *ends.tolist()]
    return [(number, slice(*pair)) for number, pair in enumerate(zip(bounds, bounds[1:])) if pair[0] < pair[1]]


def multiply_grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x_e W_e of each expert's rows of x [rows, inputs]. weight: [experts, inputs, outputs]."""
    if can_group(x, weight.shape[-1]):
        return torch._grouped_mm(x, weight, offs=ends)
    result = x.new_empty(len(x), weight.shape[-1])
    for number, rows in expert_rows(ends):
        torch.mm(x[rows], weight[number], out=result[rows])
    return result


def grouped_weight_gradient(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """g_e^T x_e of each expert's rows: [experts, outputs, inputs]; zero for an expert without rows."""
    if can_group(x, gradient.shape[-1]):
        return torch._grouped_mm(gradient.t(), x, offs=ends)
    result = x.new_zeros(len(ends), gradient.shape[-1], x.shape[-1])
    for number, rows in expert_rows(ends):
        torch.mm(gradient[rows].t(), x[rows], out=result[number])
    return result


# Operators of our own. The fake kernel of torch's takes bf16 alone, and rows behind the last offset would be undefined:
# every row here belongs to an expert.


@register_operator("grouped_matmul")
def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x_e W_e^T of each expert's rows. x: [rows, inputs], sorted by expert; weight: [experts, outputs, inputs]; ends:
    int32 [experts], the number of rows up to the last of each expert. Result: [rows, outputs]."""
    return multiply_grouped(x, weight.transpose(1, 2), ends)


@torch.library.register_fake("trainer::grouped_matmul")
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@register_operator("grouped_backward")
def grouped_backward(gradient: Tensor, weight: Tensor, x: Tensor, ends: Tensor, numbers: list[Tensor]) -> list[Tensor]:
    """The gradients of the input and of the weight of `grouped_matmul`.

    numbers: of the layer, from `number_layer`, where the weight gradient may be deferred. It is then accumulated or
    deferred, and the input's gradient is the only result.
    """
    to_x = multiply_grouped(gradient, weight, ends)
    if not numbers:
        return [to_x, grouped_weight_gradient(gradient, x, ends)]
    targets, layer = weight_views(numbers)
    if layer.deferred.active:
        layer.deferred.put(targets, lambda: x, lambda started: [grouped_weight_gradient(gradient, started, ends)])
    else:
        accumulate_gradients(targets, [grouped_weight_gradient(gradient, x, ends)])
    return [to_x]


@torch.library.register_fake("trainer::grouped_backward")
def _(gradient: Tensor, weight: Tensor, x: Tensor, ends: Tensor, numbers: list[Tensor]) -> list[Tensor]:
    to_x = x.new_empty(x.shape)
    return [to_x] if numbers else [to_x, weight.new_empty(weight.shape)]


class GroupedProduct(torch.autograd.Function):
    """`grouped_matmul` with its gradients. numbers: of the layer, or empty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, *numbers: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends, *numbers)
        return grouped_matmul(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        x, weight, ends, *numbers = ctx.saved_tensors
        if not numbers and not ctx.needs_input_grad[1]:  # frozen
            return grouped_matmul(gradient.contiguous(), weight.mT, ends), None, None
        to_x, *to_weight = grouped_backward(gradient.contiguous(), weight, x, ends, numbers)
        return to_x, *(to_weight or [None]), None, *[None] * len(numbers)


# The products of adapters are operators of their own, which `activation.save` does not count.


@register_operator("adapt_groups")
def adapt_groups(x: Tensor, down: Tensor, up: Tensor, ends: Tensor, scale: float) -> list[Tensor]:
    """u_e = scale x_e A_e^T of each expert's rows, and u_e B_e^T. x: [rows, inputs], sorted by expert; down: [experts,
    rank, inputs]; up: [experts, outputs, rank]; ends: see `grouped_matmul`."""
    low = multiply_grouped(x, down.mT, ends).mul_(scale)
    return [low, multiply_grouped(low, up.mT, ends)]


@torch.library.register_fake("trainer::adapt_groups")
def _(x: Tensor, down: Tensor, up: Tensor, ends: Tensor, scale: float) -> list[Tensor]:
    return [x.new_empty(x.shape[0], down.shape[1]), x.new_empty(x.shape[0], up.shape[1])]


@register_operator("adapt_groups_backward")
def adapt_groups_backward(
    gradient: Tensor, x: Tensor, low: Tensor, down: Tensor, up: Tensor, ends: Tensor, scale: float
) -> list[Tensor]:
    """The gradients of x, A and B from that of u_e B_e^T. low: u."""
    to_low = multiply_grouped(gradient, up, ends).mul_(scale)
    return [
        multiply_grouped(to_low, down, ends),
        grouped_weight_gradient(to_low, x, ends),
        grouped_weight_gradient(gradient, low, ends),
    ]


@torch.library.register_fake("trainer::adapt_groups_backward")
def _(gradient: Tensor, x: Tensor, low: Tensor, down: Tensor, up: Tensor, ends: Tensor, scale: float) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in (x, down, up)]


class GroupedAdapter(torch.autograd.Function):
    """scale (x_e A_e^T) B_e^T of each expert's rows, with a pair of matrices for each expert. See `adapt_groups`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, ends: Tensor, scale: float) -> Tensor:
        low, added = adapt_groups(x, down, up, ends, scale)
        ctx.save_for_backward(x, low, down, up, ends)
        ctx.scale = scale
        return added

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return *adapt_groups_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.scale), None, None


@register_operator("sum_groups")
def sum_groups(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The sum of each expert's rows of x [rows, outputs], each times its weight [rows]: [experts, outputs].

    It is a product with a matrix of equal columns: a GEMM adds up in fp32 in a fixed order, and needs no atomics.
    """
    columns = weights.to(x.dtype)[:, None].expand(-1, EXPERT_ALIGNMENT).contiguous()
    return grouped_weight_gradient(x, columns, ends)[..., 0].contiguous()


@torch.library.register_fake("trainer::sum_groups")
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1])


class GroupedBias(torch.autograd.Function):
    """y + w b_e of each expert's rows of y [rows, outputs]. bias: [experts, outputs]; weights: [rows], or None for
    one."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, weights: Tensor | None, ends: Tensor) -> Tensor:
        ctx.save_for_backward(bias, ends, *([] if weights is None else [weights]))
        added = spread_groups(bias, ends, len(y))
        return cast_result(y + (added if weights is None else added * weights[:, None]), y.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        bias, ends, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        if not weights:
            return gradient, sum_groups(gradient, gradient.new_ones(len(gradient)), ends), None, None
        added = spread_groups(bias, ends, len(gradient))
        to_weights = (gradient * added.to(weights[0].dtype)).sum(1)
        return gradient, sum_groups(gradient, *weights, ends), to_weights, None


def spread_groups(values: Tensor, ends: Tensor, rows: int) -> Tensor:
    """A row of values [experts, ...] for each of the sorted rows of experts: [rows, ...]."""
    # Without the last end, so that rows behind it, which belong to no expert, get the last one's.
    return values[torch.searchsorted(ends[:-1], torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)]


def project_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, weights: Tensor | None, number: Tensor | None
) -> Tensor:
    """x_e W_e^T + w b_e of each expert's rows: [rows, outputs].

    x: [rows, inputs], sorted by expert. weight: [experts, outputs, inputs]; bias: [experts, outputs]. ends: see
    `grouped_matmul`. weights: [rows], factors on the bias, or None for one. number: of the layer, where its weight
    gradient may be deferred."""
    numbers = [] if number is None else [number]
    (weight,) = detach_weights([weight], numbers)
    y = GroupedProduct.apply(x, weight, ends, *numbers)
    return y if bias is None else GroupedBias.apply(y, bias, weights, ends)


class GroupedLinear(DeclaredModule):
    """One projection of all experts. weight: [experts, outputs, inputs]; bias: [experts, outputs]. axes: those of
    (outputs, inputs). With an adapter (`adapt`) each expert has matrices A and B of its own."""

    def __init__(
        self,
        spec: ExpertsSpec,
        inputs: int,
        outputs: int,
        axes: tuple[str, str],
        residual: bool = False,
        bias: bool = False,
    ):
        super().__init__()
        self.biased = bias
        self.deferred: DeferredGrads | None = None
        self.number: Tensor | None = None
        self.adapter_scale: float | None = None
        active = spec.top_k / spec.count
        self.declare("weight", (spec.count, outputs, inputs), ("experts", *axes), "matrix", residual, active=active)
        if bias:
            self.declare("bias", (spec.count, outputs), ("experts", axes[0]), "bias", active=active)

    def defer(self, deferred: DeferredGrads) -> None:
        """From now on this layer may defer weight gradients, to `deferred`."""
        if self.weight.requires_grad:
            self.deferred, self.number = deferred, number_layer(self)

    def adapt(self, rank: int, scale: float) -> None:
        """Puts an adapter beside the matrix of each expert. scale: factor on its output."""
        self.adapter_scale = scale
        for name, info in declare_adapter(self.declared["weight"], rank).items():
            self.add_parameter(name, info)

    def forward(self, x: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
        """x, ends, weights and result: see `project_rows`."""
        bias = self.local("bias") if self.biased else None
        y = project_rows(x, self.local("weight"), bias, ends, weights, self.number)
        if self.adapter_scale is None:
            return y
        return y + GroupedAdapter.apply(x, self.local(DOWN), self.local(UP), ends, self.adapter_scale)


class RoutedExperts(nn.Module):
    """The experts of a layer, as stacks of parameters. dispatch: how tokens reach them; the plan sets it where ranks
    share experts. foreign: whether transformers' code chooses among them."""

    dispatch = Dispatch()
    foreign = False


class Experts(RoutedExperts):
    """The experts of a layer: down(gate_hidden(gate(x), up(x))) each."""

    def __init__(
        self,
        spec: ExpertsSpec,
        width: int,
        inner: int,
        gate_hidden: Callable[[Tensor, Tensor], Tensor],
        bias: bool = False,
    ):
        super().__init__()
        self.count, self.gate_hidden = spec.count, gate_hidden
        self.gate = GroupedLinear(spec, width, inner, ("inner", "embed"), bias=bias)
        self.up = GroupedLinear(spec, width, inner, ("inner", "embed"), bias=bias)
        self.down = GroupedLinear(spec, inner, width, ("embed", "inner"), residual=True, bias=bias)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Dispatched:
        """x: [tokens, width]. chosen, weights: [tokens, top_k], as the router returns them."""
        return self.dispatch.run(x, chosen, weights, self.count, self.compute)

    def compute(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """The weighted outputs of this rank's experts. rows and result: [rows, width], sorted by expert; weights:
        [rows]; ends: see `grouped_matmul`."""
        hidden = self.gate_hidden(self.gate(rows, ends), self.up(rows, ends))
        # The output is linear in what `down` reads. Weighted there, rows of `inner` elements are kept for the gradient
        # of the weights, which are narrower than those of the residual stream in models of many experts.
        return self.down((hidden * weights[:, None]).to(rows.dtype), ends, weights)
