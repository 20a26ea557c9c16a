"""Expert parallelism: tokens travel to the ranks that hold their experts, and the experts' outputs travel back.

The ranks of a group hold the experts of a layer in equal runs. Every rank has tokens of its own, whatever it shares
with the others: their batch (data parallelism), a sequence (context parallelism), or the matrices of dense layers
(tensor parallelism). No token is dropped. Gradients are sums over tokens, so the owner of an expert has its whole
gradient, and no factor corrects it.

`AllToAll` sends a row for each choice of a token. `AllGather` sends each token once to all ranks, and sums what the
ranks return. All data-dependent sizes are results of operators of our own, which recompute saves: backward neither
routes again nor waits for sizes again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.distributed.collectives import GROUPS, GatherTokens, ReduceScatterSum, TensorGroup

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows sorted by expert [rows, width], the weight of each row [rows], ends of the experts' rows int32 [experts]) ->
the experts' outputs, multiplied by the weights: [rows, width]."""


def cast_result(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The result of an autograd function's forward in another type. A cast to the same type must not be the last
    operation there: the compiler of torch 2.11 takes the gradient of its result for zero."""
    return value if value.dtype is dtype else value.to(dtype)


def inverse_order(order: Tensor) -> Tensor:
    """The inverse of a permutation: the place of each element in `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def sort_choices(chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The choices [tokens, top_k] of `count` experts as one list, sorted by expert and, for one expert, by token; the
    place of each choice in that order, [tokens, top_k]; and the number of rows up to the last of each expert: int32
    [count]."""
    by_expert, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(count, device=order.device), right=True, out_int32=True)
    return order, inverse_order(order).view_as(chosen), ends


# Between tokens and the rows that experts compute with: each function is the gradient of the other.


def spread_tokens(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Tokens [tokens, width] -> a row for each choice, sorted by expert: [rows, width].

    order: the choices [tokens, top_k] as one list, sorted by expert. places: the place of each choice in that order.
    """
    return x[order // places.shape[1]]


def gather_rows(rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Rows sorted by expert -> for each token the sum of its own, added in fp32 or wider: [tokens, width]."""
    return cast_result(rows[places].sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)), rows.dtype)


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


class Dispatch:
    """How tokens reach experts. Here every rank holds all experts, and nothing is sent."""

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, count: int, compute: Compute) -> Tensor:
        """x and result: [tokens, width]. chosen, weights: of each token's experts, [tokens, top_k]. count: experts of
        the layer. compute: with the experts of this rank."""
        order, places, ends = sort_choices(chosen, count)
        rows = compute(SpreadTokens.apply(x, order, places), weights.flatten()[order], ends)
        return GatherRows.apply(rows, order, places)


class SharedDispatch(Dispatch):
    """Experts that are shared by the ranks of `group`."""

    def __init__(self, group: TensorGroup):
        self.group = group


# Operators of our own, which recompute can save.


@torch.library.custom_op("trainer::exchange_counts", mutates_args=())
def exchange_counts(ends: Tensor, group: str) -> Tensor:
    """How many rows this rank sends to each expert of each rank, and how many rows each rank sends to each of its own
    experts: int64 [2, ranks, experts / ranks], in host memory. The host waits for the device.

    ends: as `sort_choices` returns them, for all experts of the layer.
    """
    ranks = GROUPS[group]
    sent = ends.diff(prepend=ends.new_zeros(1)).long()
    received = ranks.wait(ranks.exchange(sent))
    return torch.stack([sent, received]).cpu().view(2, ranks.size, -1)


@exchange_counts.register_fake
def _(ends: Tensor, group: str) -> Tensor:
    ranks = GROUPS[group].size
    return torch.empty((2, ranks, ends.shape[0] // ranks), dtype=torch.int64)


@torch.library.custom_op("trainer::order_arrivals", mutates_args=())
def order_arrivals(counts: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """For rows that arrive sorted by rank and then by expert: their order by expert and then by rank, int64 [rows], and
    the ends of the experts' rows, int32 [experts / ranks]. counts: from `exchange_counts`. like: a tensor on the
    device of the results."""
    received, rows = counts[1].to(like.device), int(counts[1].sum())
    experts = torch.arange(received.shape[1], device=like.device).expand_as(received).flatten()
    order = torch.repeat_interleave(experts, received.flatten(), output_size=rows).argsort(stable=True)
    return order, received.sum(0).cumsum(0, dtype=torch.int32)


@order_arrivals.register_fake
def _(counts: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return like.new_empty(rows, dtype=torch.int64), like.new_empty(counts.shape[2], dtype=torch.int32)


@torch.library.custom_op("trainer::send_rows", mutates_args=())
def send_rows(rows: Tensor, counts: Tensor, order: Tensor, group: str) -> Tensor:
    """Rows sorted by expert -> the rows of all ranks for this rank's experts, sorted by expert: [arriving, ...]."""
    ranks, (sent, received) = GROUPS[group], counts.sum(2).tolist()
    return ranks.wait(ranks.exchange(rows, received, sent))[order]


@send_rows.register_fake
def _(rows: Tensor, counts: Tensor, order: Tensor, group: str) -> Tensor:
    return rows.new_empty(order.shape[0], *rows.shape[1:])


@torch.library.custom_op("trainer::return_rows", mutates_args=())
def return_rows(rows: Tensor, counts: Tensor, order: Tensor, like: Tensor, group: str) -> Tensor:
    """The inverse of `send_rows`. like: a tensor with as many rows as the result."""
    ranks, (sent, received) = GROUPS[group], counts.sum(2).tolist()
    arranged = torch.empty_like(rows)
    arranged[order] = rows
    return ranks.wait(ranks.exchange(arranged, sent, received))


@return_rows.register_fake
def _(rows: Tensor, counts: Tensor, order: Tensor, like: Tensor, group: str) -> Tensor:
    return rows.new_empty(like.shape[0], *rows.shape[1:])


class SendRows(torch.autograd.Function):
    """`send_rows`. like: a tensor with as many rows as are sent."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Tensor, order: Tensor, like: Tensor, group: str) -> Tensor:
        ctx.save_for_backward(counts, order, like)
        ctx.group = group
        return send_rows(rows, counts, order, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return return_rows(gradient.contiguous(), *ctx.saved_tensors, ctx.group), None, None, None, None


class ReturnRows(torch.autograd.Function):
    """`return_rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Tensor, order: Tensor, like: Tensor, group: str) -> Tensor:
        ctx.save_for_backward(counts, order)
        ctx.group = group
        return return_rows(rows, counts, order, like, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return send_rows(gradient.contiguous(), *ctx.saved_tensors, ctx.group), None, None, None, None


class AllToAll(SharedDispatch):
    """Sends a row for each choice, by two all-to-alls in forward and two in backward. The host waits once for sizes."""

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, count: int, compute: Compute) -> Tensor:
        order, places, ends = sort_choices(chosen, count)
        counts = exchange_counts(ends, self.group.key)
        arrivals, own_ends = order_arrivals(counts, order)
        travel = counts, arrivals, order, self.group.key
        rows = SendRows.apply(SpreadTokens.apply(x, order, places), *travel)
        # The weights travel too: what is kept for their gradient is then as narrow as an expert, see `Experts.compute`.
        rows = compute(rows, SendRows.apply(weights.flatten()[order], *travel), own_ends)
        return GatherRows.apply(ReturnRows.apply(rows, *travel), order, places)


@torch.library.custom_op("trainer::select_choices", mutates_args=())
def select_choices(chosen: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The choices [tokens, top_k] of the experts from `first` on, `count` of them. Returns what `sort_choices` returns,
    with the place -1 for choices of other experts. The host waits for the number of rows."""
    choices = chosen.flatten() - first
    own = (choices >= 0) & (choices < count)
    by_expert, order = torch.where(own, choices, count).sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(count, device=order.device), right=True, out_int32=True)
    places = torch.where(own, inverse_order(order), -1).view_as(chosen)
    return order[: int(ends[-1])].clone(), places, ends


@select_choices.register_fake
def _(chosen: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    ends = chosen.new_empty(count, dtype=torch.int32)
    return chosen.new_empty(rows), chosen.new_empty(chosen.shape), ends


def gather_own(rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """`gather_rows` where the place of a choice that has no row is -1."""
    return gather_rows(F.pad(rows, (0, 0, 0, 1)), order, places)  # -1 is the row of zeros behind the others


class SpreadOwn(SpreadTokens):
    """`SpreadTokens` for some of the choices."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return gather_own(gradient, *ctx.saved_tensors), None, None


class GatherOwn(GatherRows):
    """`GatherRows` for some of the choices."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return gather_own(rows, order, places)


class AllGather(SharedDispatch):
    """Sends each token once to all ranks, and sums what their experts return: an all-gather and a reduce-scatter. That
    is less than a row for each choice where tokens have more experts than there are ranks. The host waits once."""

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, count: int, compute: Compute) -> Tensor:
        group, own = self.group, count // self.group.size
        tokens, all_weights = GatherTokens.apply(group, x), GatherTokens.apply(group, weights)
        order, places, ends = select_choices(group.wait(group.gather(chosen)), own * group.rank, own)
        rows = compute(SpreadOwn.apply(tokens, order, places), all_weights.flatten()[order], ends)
        return ReduceScatterSum.apply(group, GatherOwn.apply(rows, order, places))
