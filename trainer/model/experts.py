"""Mixture of experts: the router, the grouped GEMM, and the experts of a layer.

Each rank sends the tokens that it holds between blocks through whole experts. Tokens are sorted by expert, so that one
grouped GEMM computes a projection of all experts, and no token is dropped. The sort is stable, and the outputs of a
token's experts are added in the order in which the router chose them: results do not depend on the order in which
kernels run, and gradients need no atomic additions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.config.model import ExpertsSpec
from trainer.distributed.collectives import GROUPS
from trainer.model.initial import DeclaredModule
from trainer.model.linear import DeferredGrads, accumulate_gradients, detach_weights, number_layer, weight_views
from trainer.model.stage import BlockReport


@torch.library.custom_op("trainer::choose_experts", mutates_args=())
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
    return scores.topk(top_k, -1).indices


@choose_experts.register_fake
def _(scores: Tensor, top_k: int, groups: int, top_groups: int, best: int) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], top_k), dtype=torch.int64)


def count_choices(keys: Tensor, size: int) -> Tensor:
    """How often each number below `size` is in `keys`: int64 [size]."""
    # Not `bincount`, which makes the host wait for the device, and has no fixed shape for the compiler.
    return keys.new_zeros(size).index_add_(0, keys, torch.ones_like(keys))


class Sequences(NamedTuple):
    """Which sequence each of this rank's tokens belongs to.

    numbers: int64 [tokens], from 0 to `count` - 1. groups: keys of `GROUPS`, one a line: the tensor- and
    context-parallel ranks that hold the other tokens of these sequences.
    """

    numbers: Tensor
    count: int
    groups: str


@torch.library.custom_op("trainer::count_by_sequence", mutates_args=())
def count_by_sequence(chosen: Tensor, numbers: Tensor, count: int, groups: str, experts: int) -> Tensor:
    """How often the tokens of each sequence chose each expert, whichever rank holds them: fp32 [sequences, experts].

    chosen: int64 [tokens, top_k]. numbers, count, groups: see `Sequences`. This is one operator so that recompute can
    save its result instead of communicating again.
    """
    counts = count_choices((numbers[:, None] * experts + chosen).flatten(), count * experts).float()
    for key in groups.splitlines():
        counts = GROUPS[key].wait(GROUPS[key].sum(counts))
    return counts.view(count, experts)


@count_by_sequence.register_fake
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
    """A small projection of tokens in fp32: the router, or the gate of a shared block. weight: [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.declare("weight", (outputs, inputs), ("experts", "embed"), "matrix")

    def forward(self, x: Tensor) -> Tensor:
        return WideProduct.apply(x, self.local("weight"))


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters of a model, those of `WideLinear` to fp32 at least."""
    model.to(dtype)
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


class Router(WideLinear):
    """Chooses the experts of each token and their weights, in fp32, and balances the load of the experts.

    balance: fp32 [experts], added to the scores for the choice alone (Wang et al., arXiv 2408.15664). usage: fp32
    [experts], the load of each expert in the previous step over the mean load, for a loss that balances the global
    batch (Qiu et al., arXiv 2501.11873). Both are buffers that checkpoints hold, begin with zeros, and are None where
    the spec does not use them.
    """

    balance: Tensor | None
    usage: Tensor | None

    def __init__(self, spec: ExpertsSpec, width: int):
        super().__init__(width, spec.count)
        self.spec = spec
        for name in ("balance", "usage"):
            self.register_buffer(name, torch.zeros(spec.count) if name in spec.buffers else None)

    def reset_buffers(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()

    def forward(self, x: Tensor) -> Routing:
        """x: [tokens, width]."""
        spec, logits = self.spec, super().forward(x)
        scores = logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()
        ranked = scores.detach() if self.balance is None else scores.detach() + self.balance
        best = 2 if spec.group_score == "top2" else 1
        chosen = choose_experts(ranked, spec.top_k, spec.groups, spec.top_groups, best)
        weights = scores.gather(-1, chosen)
        if spec.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(chosen, weights if spec.scale == 1 else weights * spec.scale, logits, scores)

    @property
    def reports(self) -> dict[str, int]:
        """The statistics that `report` has, with the number of values of each."""
        spec = self.spec
        sizes = {"load": spec.count, "balance": spec.balance > 0, "z_loss": spec.z_loss > 0, "bias": spec.bias_rate > 0}
        return {name: int(size) for name, size in sizes.items() if size}

    def report(self, routing: Routing, sequences: Sequences | None) -> BlockReport:
        """The losses that balance the experts, and statistics: `load`, how many tokens each expert has; `balance` and
        `z_loss`, the two losses; `bias`, the range of `balance` times the sum of `load`, since ranks and micro-batches
        add up what they report.

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
        return BlockReport(sum(loss for _, loss in losses) if losses else None, statistics)

    @torch.no_grad()
    def rebalance(self, load: Tensor, skipped: Tensor) -> None:
        """Takes over what a step shows. load: fp64 [experts], the tokens of each expert in the whole step; the counts
        are exact. skipped: scalar, 1 where the step's update was skipped; then nothing changes."""
        mean, applied = load.mean(), skipped == 0
        if self.balance is not None:
            self.balance.add_((mean - load).sign() * applied, alpha=self.spec.bias_rate)
        if self.usage is not None:
            self.usage.copy_(torch.where(applied, load / mean, self.usage))


@cache
def multiplies_groups(device: torch.device) -> bool:
    """Whether torch has a grouped kernel for bf16 on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def expert_rows(ends: Tensor) -> list[tuple[int, slice]]:
    """The number and the rows of each expert that has any. The host waits for the device."""
    bounds = [0, *ends.tolist()]
    return [(number, slice(*pair)) for number, pair in enumerate(zip(bounds, bounds[1:])) if pair[0] < pair[1]]


def multiply_grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x_e W_e of each expert's rows of x [rows, inputs]. weight: [experts, inputs, outputs]."""
    if len(x) and x.dtype is torch.bfloat16 and multiplies_groups(x.device):
        return torch._grouped_mm(x, weight, offs=ends)
    result = x.new_empty(len(x), weight.shape[-1])
    for number, rows in expert_rows(ends):
        torch.mm(x[rows], weight[number], out=result[rows])
    return result


def grouped_weight_gradient(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """g_e^T x_e of each expert's rows: [experts, outputs, inputs]; zero for an expert without rows."""
    if len(x) and x.dtype is torch.bfloat16 and multiplies_groups(x.device):
        return torch._grouped_mm(gradient.t(), x, offs=ends)
    result = x.new_zeros(len(ends), gradient.shape[-1], x.shape[-1])
    for number, rows in expert_rows(ends):
        torch.mm(gradient[rows].t(), x[rows], out=result[number])
    return result


# Operators of our own. The fake kernel of torch's takes bf16 alone, and rows behind the last offset would be undefined:
# every row here belongs to an expert.


@torch.library.custom_op("trainer::grouped_matmul", mutates_args=())
def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x_e W_e^T of each expert's rows. x: [rows, inputs], sorted by expert; weight: [experts, outputs, inputs]; ends:
    int32 [experts], the number of rows up to the last of each expert. Result: [rows, outputs]."""
    return multiply_grouped(x, weight.transpose(1, 2), ends)


@grouped_matmul.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("trainer::grouped_backward", mutates_args=())
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


@grouped_backward.register_fake
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
        to_x, *to_weight = grouped_backward(gradient.contiguous(), weight, x, ends, numbers)
        return to_x, *(to_weight or [None]), None, *[None] * len(numbers)


class GroupedLinear(DeclaredModule):
    """One projection of all experts. weight: [experts, outputs, inputs]. axes: those of (outputs, inputs)."""

    def __init__(self, spec: ExpertsSpec, inputs: int, outputs: int, axes: tuple[str, str], residual: bool = False):
        super().__init__()
        self.deferred: DeferredGrads | None = None
        self.number: Tensor | None = None
        active = spec.top_k / spec.count
        self.declare("weight", (spec.count, outputs, inputs), ("experts", *axes), "matrix", residual, active=active)

    def defer(self, deferred: DeferredGrads) -> None:
        """From now on this layer may defer weight gradients, to `deferred`."""
        self.deferred, self.number = deferred, number_layer(self)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x: [rows, inputs], sorted by expert. ends: see `grouped_matmul`."""
        numbers = [] if self.number is None else [self.number]
        (weight,) = detach_weights([self.local("weight")], numbers)
        return GroupedProduct.apply(x, weight, ends, *numbers)


# Between tokens and the rows that experts compute with: each function is the gradient of the other.


def spread_tokens(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Tokens [tokens, width] -> a row for each choice, sorted by expert: [tokens top_k, width].

    order: the choices [tokens, top_k] as one list, sorted by expert. places: the place of each choice in that order.
    """
    return x[order // places.shape[1]]


def gather_rows(rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Rows sorted by expert -> for each token the sum of its own, added in fp32 or wider: [tokens, width]."""
    return rows[places].sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)


class SpreadTokens(torch.autograd.Function):
    """`spread_tokens`. Autograd's own gradient would add in the rows' type, on GPUs in no fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return spread_tokens(x, order, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return gather_rows(gradient, *ctx.saved_tensors), None, None


class GatherRows(torch.autograd.Function):
    """`gather_rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return gather_rows(rows, order, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return spread_tokens(gradient, *ctx.saved_tensors), None, None


class Experts(nn.Module):
    """The experts of a layer: down(act(gate(x)) * up(x)) each."""

    def __init__(self, spec: ExpertsSpec, width: int, inner: int, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.count, self.activation = spec.count, activation
        self.gate = GroupedLinear(spec, width, inner, ("inner", "embed"))
        self.up = GroupedLinear(spec, width, inner, ("inner", "embed"))
        self.down = GroupedLinear(spec, inner, width, ("embed", "inner"), residual=True)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x and result: [tokens, width]. chosen, weights: [tokens, top_k], as the router returns them."""
        by_expert, order = chosen.flatten().sort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        places = places.view_as(chosen)
        ends = torch.searchsorted(by_expert, torch.arange(self.count, device=order.device), right=True, out_int32=True)
        rows = SpreadTokens.apply(x, order, places)
        hidden = self.activation(self.gate(rows, ends)) * self.up(rows, ends)
        # The output is linear in what `down` reads. Weighted there, rows of `inner` elements are kept for the gradient
        # of the weights, which are narrower than those of the residual stream in models of many experts.
        hidden = (hidden * weights.flatten()[order, None]).to(x.dtype)
        return GatherRows.apply(self.down(hidden, ends), order, places)
