"""Expert parallelism: tokens travel to the ranks that hold their experts, and the experts' outputs travel back.

The ranks of a group hold the experts of a layer in equal runs. Every rank has tokens of its own, whatever it shares
with the others: their batch (data parallelism), a sequence (context parallelism), or the matrices of dense layers
(tensor parallelism). No token is dropped. Gradients are sums over tokens, so the owner of an expert has its whole
gradient, and no factor corrects it.

`AllToAll` sends a row for each choice of a token. `AllGather` sends each token once to all ranks, and sums what the
ranks return; `SharedMemory` does the same by kernels between the GPUs of a node. All data-dependent sizes are results
of operators of our own, which recompute saves: backward neither routes again nor waits for sizes again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.distributed.collectives import GROUPS, GatherTokens, ReduceScatterSum, TensorGroup, register_operator
from trainer.distributed.overlap import pass_turn, run_on_side_stream
from trainer.distributed.rows import gather_rows, pull_tokens, push_sums, spread_rows

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


class SpreadTokens(torch.autograd.Function):
    """`spread_rows`. Autograd's own gradient would add in the rows' type, on GPUs in no fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return spread_rows(x, order, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return gather_rows(gradient, *ctx.saved_tensors), None, None


class GatherRows(torch.autograd.Function):
    """`gather_rows`. order: as for `spread_rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return gather_rows(rows, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return spread_rows(gradient, *ctx.saved_tensors), None, None


class SpreadWeights(torch.autograd.Function):
    """The weights of choices [tokens, top_k] -> those of the rows: [rows]. order, places: as for `spread_rows`. Rows
    that no choice has get the weight of another rank's row, whose gradient is not counted."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return weights.flatten()[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        (places,) = ctx.saved_tensors
        return F.pad(gradient, (0, 1))[places], None, None  # -1 is the zero behind the others


class Dispatched(NamedTuple):
    """The outputs of experts, [tokens, width], and how many choices there was no room for on this rank, [1]."""

    output: Tensor
    missing: Tensor


class Dispatch:
    """How tokens reach experts. Here every rank holds all experts, and nothing is sent."""

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, count: int, compute: Compute) -> Dispatched:
        """x: [tokens, width]. chosen, weights: of each token's experts, [tokens, top_k]. count: experts of the layer.
        compute: with the experts of this rank."""
        order, places, ends = sort_choices(chosen, count)
        rows = compute(SpreadTokens.apply(x, order, places), weights.flatten()[order], ends)
        return Dispatched(GatherRows.apply(rows, order, places), ends.new_zeros(1))


class SharedDispatch(Dispatch):
    """Experts that are shared by the ranks of `group`.

    capacity: how many rows a rank has room for, as a multiple of the mean over ranks; 0 for as many as arrive. exact:
    whether there is room for all that arrive whatever the capacity, as in evaluation and in a step that is run again.
    """

    exact = False

    def __init__(self, group: TensorGroup, capacity: float = 0.0):
        self.group, self.capacity = group, capacity

    def room(self, chosen: Tensor) -> int:
        """Rows that this rank has room for, a multiple of 16 of them, or 0 for as many as arrive."""
        if self.exact or not self.capacity or not torch.is_grad_enabled():
            return 0
        choices = chosen.shape[0] * chosen.shape[1]
        return min(-(-math.ceil(self.capacity * choices) // 16) * 16, self.group.size * choices)


# Operators of our own, which recompute can save.


@register_operator("exchange_counts")
def exchange_counts(ends: Tensor, group: str) -> Tensor:
    """How many rows this rank sends to each expert of each rank, and how many rows each rank sends to each of its own
    experts: int64 [2, ranks, experts / ranks], in host memory. The host waits for the device.

    ends: as `sort_choices` returns them, for all experts of the layer.
    """
    ranks = GROUPS[group]
    sent = ends.diff(prepend=ends.new_zeros(1)).long()
    started, counts = ranks.exchange(sent), []
    # On a stream of its own, the copy does not wait for what another pass launches before this one goes on.
    arrived = run_on_side_stream(
        "counts",
        ends.device,
        lambda: counts.append(torch.stack([sent, ranks.wait(started)]).to("cpu", non_blocking=True)),
    )
    pass_turn()
    if arrived is not None:
        arrived.synchronize()
    return counts[0].view(2, ranks.size, -1)


@torch.library.register_fake("trainer::exchange_counts")
def _(ends: Tensor, group: str) -> Tensor:
    ranks = GROUPS[group].size
    return torch.empty((2, ranks, ends.shape[0] // ranks), dtype=torch.int64)


@register_operator("order_arrivals")
def order_arrivals(counts: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """For rows that arrive sorted by rank and then by expert: their order by expert and then by rank, int64 [rows], and
    the ends of the experts' rows, int32 [experts / ranks]. counts: from `exchange_counts`. like: a tensor on the
    device of the results."""
    received, rows = counts[1].to(like.device, non_blocking=True), int(counts[1].sum())
    experts = torch.arange(received.shape[1], device=like.device).expand_as(received).flatten()
    order = torch.repeat_interleave(experts, received.flatten(), output_size=rows).argsort(stable=True)
    return order, received.sum(0).cumsum(0, dtype=torch.int32)


@torch.library.register_fake("trainer::order_arrivals")
def _(counts: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return like.new_empty(rows, dtype=torch.int64), like.new_empty(counts.shape[2], dtype=torch.int32)


@register_operator("send_rows")
def send_rows(rows: Tensor, counts: Tensor, order: Tensor, group: str) -> Tensor:
    """Rows sorted by expert -> the rows of all ranks for this rank's experts, sorted by expert: [arriving, ...]."""
    ranks, (sent, received) = GROUPS[group], counts.sum(2).tolist()
    started = ranks.exchange(rows, received, sent)
    pass_turn()
    return ranks.wait(started)[order]


@torch.library.register_fake("trainer::send_rows")
def _(rows: Tensor, counts: Tensor, order: Tensor, group: str) -> Tensor:
    return rows.new_empty(order.shape[0], *rows.shape[1:])


@register_operator("return_rows")
def return_rows(rows: Tensor, counts: Tensor, order: Tensor, like: Tensor, group: str) -> Tensor:
    """The inverse of `send_rows`. like: a tensor with as many rows as the result."""
    ranks, (sent, received) = GROUPS[group], counts.sum(2).tolist()
    arranged = torch.empty_like(rows)
    arranged[order] = rows
    started = ranks.exchange(arranged, sent, received)
    pass_turn()
    return ranks.wait(started)


@torch.library.register_fake("trainer::return_rows")
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

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, count: int, compute: Compute) -> Dispatched:
        order, places, ends = sort_choices(chosen, count)
        counts = exchange_counts(ends, self.group.key)
        arrivals, own_ends = order_arrivals(counts, order)
        travel = counts, arrivals, order, self.group.key
        rows = SendRows.apply(SpreadTokens.apply(x, order, places), *travel)
        # The weights travel too: what is kept for their gradient is then as narrow as an expert, see `Experts.compute`.
        rows = compute(rows, SendRows.apply(weights.flatten()[order], *travel), own_ends)
        return Dispatched(GatherRows.apply(ReturnRows.apply(rows, *travel), order, places), own_ends.new_zeros(1))


@register_operator("select_choices")
def select_choices(chosen: Tensor, first: int, count: int, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The choices [tokens, top_k] of the experts from `first` on, `count` of them. room: how many rows there are, or 0
    for as many as there are such choices; then the host waits for their number.

    Returns what `sort_choices` returns, with the place -1 for choices that have no row; and the number of choices of
    these experts for which there is no room, [1].
    """
    choices = chosen.flatten() - first
    own = (choices >= 0) & (choices < count)
    by_expert, order = torch.where(own, choices, count).sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(count, device=order.device), right=True, out_int32=True)
    rows = room or int(ends[-1])
    places = inverse_order(order)
    places = torch.where(own & (places < rows), places, -1).view_as(chosen)
    return order[:rows].clone(), places, ends.clamp(max=rows), (ends[-1:] - rows).clamp(min=0)


@torch.library.register_fake("trainer::select_choices")
def _(chosen: Tensor, first: int, count: int, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = room or torch.library.get_ctx().new_dynamic_size()
    ends = chosen.new_empty(count, dtype=torch.int32)
    return chosen.new_empty(rows), chosen.new_empty(chosen.shape), ends, ends.new_empty(1)


class AllGather(SharedDispatch):
    """Sends each token once to all ranks, and sums what their experts return: an all-gather and a reduce-scatter. That
    is less than a row for each choice where tokens have more experts than there are ranks. The host waits once, and
    with a `capacity` never."""

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, count: int, compute: Compute) -> Dispatched:
        group, own = self.group, count // self.group.size
        everyone, all_weights = group.wait(group.gather(chosen)), GatherTokens.apply(group, weights)
        room = self.room(chosen)
        order, places, ends, missing = select_choices(everyone, own * group.rank, own, room)
        rows = self.fetch_rows(x, order, places, chosen, own)
        rows = compute(rows, SpreadWeights.apply(all_weights, order, places), ends)
        return Dispatched(self.return_rows(rows, order, places, chosen, own), missing)

    def fetch_rows(self, x: Tensor, order: Tensor, places: Tensor, chosen: Tensor, own: int) -> Tensor:
        """This rank's rows of all ranks' tokens: [rows, width]. chosen: the experts of this rank's tokens; own: how
        many experts a rank has."""
        return SpreadTokens.apply(GatherTokens.apply(self.group, x), order, places)

    def return_rows(self, rows: Tensor, order: Tensor, places: Tensor, chosen: Tensor, own: int) -> Tensor:
        """The sums of all ranks' rows of each of this rank's tokens: [tokens, width]."""
        return ReduceScatterSum.apply(self.group, GatherRows.apply(rows, order, places))


class PullTokens(torch.autograd.Function):
    """`pull_tokens`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, chosen: Tensor, own: int, group: str) -> Tensor:
        ctx.save_for_backward(places, chosen)
        ctx.place = own, group
        return pull_tokens(x, order, places, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return push_sums(gradient.contiguous(), *ctx.saved_tensors, *ctx.place), None, None, None, None, None


class PushSums(torch.autograd.Function):
    """`push_sums`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, chosen: Tensor, own: int, group: str) -> Tensor:
        ctx.save_for_backward(order, places)
        ctx.group = group
        return push_sums(rows, places, chosen, own, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return pull_tokens(gradient.contiguous(), *ctx.saved_tensors, ctx.group), None, None, None, None, None


class SharedMemory(AllGather):
    """`AllGather` between the GPUs of a node without buffers of gathered tokens: kernels copy tokens from the memory of
    their rank to the rows of their choices, and write sums of rows into it."""

    def fetch_rows(self, x: Tensor, order: Tensor, places: Tensor, chosen: Tensor, own: int) -> Tensor:
        return PullTokens.apply(x, order, places, chosen, own, self.group.key)

    def return_rows(self, rows: Tensor, order: Tensor, places: Tensor, chosen: Tensor, own: int) -> Tensor:
        return PushSums.apply(rows, order, places, chosen, own, self.group.key)
