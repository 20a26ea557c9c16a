"""Attention of sequences that ranks share: how queries and keys are brought together.

Everything but attention works on a rank's own tokens. Two ways, which go together (see `planning/context.py`):

gather  every rank gathers the keys and values of all tokens and computes its own queries, or fetches only the keys
        before its runs where a window is short enough (halo). Keys come in groups of heads, the next group while
        attention runs on this one. Backward gathers them again instead of keeping them.
heads   an all-to-all makes parts of sequences into parts of heads, and back.

No partial outputs are merged, so both are as exact as one process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.distributed.collectives import TensorGroup
from trainer.model.attention import causal_attention
from trainer.model.context import HaloExchange, HaloPart, SharedMask
from trainer.planning.context import divide_heads


class AllToAll(torch.autograd.Function):
    """All to all along the first dimension, in equal parts."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return group.wait(group.exchange(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return None, ctx.group.wait(ctx.group.exchange(gradient))


class HaloFetch(torch.autograd.Function):
    """This rank's tokens [tokens, ...] -> its runs, each with the keys before it. See `HaloExchange`.

    Not by `cat`: where a rank fetches nothing, the compiler would leave out what is empty, and the exchange with it
    where the layer is recomputed, for which the others wait."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, halo: HaloExchange, x: Tensor) -> Tensor:
        ctx.group, ctx.halo = group, halo
        whole = x.new_empty(len(halo.fetched) + len(halo.own), *x.shape[1:])
        whole[halo.fetched] = group.wait(group.exchange(x[halo.sent], halo.of, halo.to))
        whole[halo.own] = x
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        halo = ctx.halo
        returned = ctx.group.wait(ctx.group.exchange(gradient[halo.fetched], halo.to, halo.of))
        return None, None, gradient[halo.own].index_add(0, halo.sent, returned)


class KVGradReduce(torch.autograd.Function):
    """This rank's part [tokens / c, ...] of a group of heads -> one copy for each rank, [c, tokens / c, ...], without
    memory.

    The gradients of the copies come from all ranks, by an exchange that `KVAllGather` has started. They are added up
    here, in fp32 and rounded once: a reduce-scatter in bf16 would round after each rank, and its error grow with their
    number."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return x.expand(group.size, *x.shape)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple:
        return None, ctx.group.wait(gradients).sum(0)  # torch adds up types of 16 bits in fp32


class KVAllGather(torch.autograd.Function):
    """Keys and values of a group of heads, in the sequence's order, on every rank: [tokens, ...]. copies: of this
    rank's part, of `KVGradReduce`; started: its gather."""

    @staticmethod
    def forward(
        ctx: Any,
        group: TensorGroup,
        again: KVRegather | None,
        number: int,
        order: Tensor,
        inverse: Tensor,
        copies: Tensor,
        started: Tensor,
    ) -> Tensor:
        ctx.group, ctx.again, ctx.number = group, again, number
        ctx.save_for_backward(order)
        return group.wait(started)[inverse]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        (order,) = ctx.saved_tensors
        if ctx.again is not None:
            ctx.again.drop(ctx.number)
        by_rank = gradient[order].unflatten(0, (ctx.group.size, -1))
        return None, None, None, None, None, ctx.group.exchange(by_rank), None


class KVRegather:
    """Gathers the keys and values of groups of heads again in the backward pass, from the last to the first, one group
    ahead. parts: of this rank, by group of heads, each [tokens / c, ...]."""

    def __init__(self, shared: SharedMask, parts: Sequence[Tensor]):
        self.group, self.inverse = shared.group.keys, shared.inverse
        self.parts = [part.detach() for part in parts]
        self.started: dict[int, Tensor] = {}
        self.here: dict[int, Tensor] = {}

    def start(self, number: int) -> None:
        if number >= 0 and number not in self.started:
            self.started[number] = self.group.gather(self.parts[number])

    def whole(self, number: int) -> Tensor:
        """[tokens, ...] of a group of heads, in the sequence's order."""
        if number not in self.here:
            self.start(number)
            self.start(number - 1)
            self.here[number] = self.group.wait(self.started.pop(number))[self.inverse]
        return self.here[number]

    def drop(self, number: int) -> None:
        """Attention has used them."""
        self.here.pop(number, None)

    def instead_of(self, whole: Tensor, number: int) -> torch.autograd.graph.saved_tensors_hooks:
        """Context in which views of `whole` are not kept for backward."""
        memory = whole.untyped_storage().data_ptr()

        def pack(x: Tensor) -> Any:
            if x.untyped_storage().data_ptr() != memory:
                return x.detach()
            return x.shape, x.stride(), x.storage_offset()

        def unpack(kept: Any) -> Tensor:
            return kept if isinstance(kept, Tensor) else self.whole(number).as_strided(*kept)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def attend_together(
    query: Tensor, key: Tensor, value: Tensor, shared: SharedMask, scale: float, soft_cap: float
) -> Tensor:
    """`causal_attention` for this rank's queries among the keys of whole sequences. All are [batch, heads, tokens of
    this rank, head_dim]."""
    heads = shared.group.heads
    if heads is not None:
        query, key, value = to_heads(heads, query, key, value)
    attended = attend_gathered(query, key, value, shared, scale, soft_cap)
    return attended if heads is None else to_tokens(heads, attended)


def attend_gathered(
    query: Tensor, key: Tensor, value: Tensor, shared: SharedMask, scale: float, soft_cap: float
) -> Tensor:
    """The same where a rank has all of its heads."""
    group = shared.group.keys

    def run(query: Tensor, both: Tensor) -> Tensor:
        """both: keys, then values, [tokens, batch, 2 x kv_heads, head_dim]."""
        return attend_parts(query, *both.permute(1, 2, 0, 3).chunk(2, 1), shared.parts, scale, soft_cap)

    if group is None:
        return attend_parts(query, key, value, shared.parts, scale, soft_cap)
    if shared.halo is not None:
        return run(query, HaloFetch.apply(group, shared.halo, pack_kv(key, value)))
    count = divide_heads(key.shape[1], shared.group.plan.groups)
    keys, values, queries = key.chunk(count, 1), value.chunk(count, 1), query.chunk(count, 1)
    parts = [pack_kv(keys[number], values[number]) for number in range(count)]
    again = None
    if shared.again and parts[0].requires_grad and not torch.compiler.is_compiling():
        again = KVRegather(shared, parts)

    def send(number: int) -> tuple[Tensor, Tensor]:
        """The copies of a group of heads, and their gather. Backward takes the last first: it comes to these gradients
        after attention of the group before, and two groups' are there at a time."""
        return KVGradReduce.apply(group, parts[number]), group.gather(parts[number].detach())

    ahead, attended = send(0), []
    for number in range(count):
        copies, started = ahead
        if number + 1 < count:
            ahead = send(number + 1)
        whole = KVAllGather.apply(group, again, number, shared.order, shared.inverse, copies, started)
        with contextlib.nullcontext() if again is None else again.instead_of(whole, number):
            attended.append(run(queries[number], whole))
    return attended[0] if count == 1 else torch.cat(attended, 1)


def pack_kv(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one tensor to send: [tokens, batch, 2 x kv_heads, head_dim]."""
    return torch.cat([key, value], 1).permute(2, 0, 1, 3).contiguous()


def attend_parts(
    query: Tensor, key: Tensor, value: Tensor, parts: Sequence[HaloPart], scale: float, soft_cap: float
) -> Tensor:
    """Attention of runs of queries, each with the keys that it looks at."""
    attended = [
        causal_attention(
            query[:, :, slice(*part.queries)],
            key[:, :, slice(*part.keys)],
            value[:, :, slice(*part.keys)],
            part.mask,
            scale,
            soft_cap,
        )
        for part in parts
    ]
    return attended[0] if len(parts) == 1 else torch.cat(attended, 2)


def to_heads(group: TensorGroup, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """[batch, heads, tokens / c, head_dim] -> [batch, heads / c, tokens, head_dim]. Where there are fewer key-value
    heads than ranks, several ranks get a copy of one."""
    copies = group.size // key.shape[1]
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    by_rank = [x.unflatten(1, (group.size, -1)) for x in (query, key, value)]
    sizes = [x.shape[2] for x in by_rank]
    parts = AllToAll.apply(group, torch.cat(by_rank, 2).transpose(0, 1))  # [c, batch, heads, tokens / c, head_dim]
    return list(parts.permute(1, 2, 0, 3, 4).flatten(2, 3).split(sizes, 1))


def to_tokens(group: TensorGroup, x: Tensor) -> Tensor:
    """[batch, heads / c, tokens, head_dim] -> [batch, heads, tokens / c, head_dim]."""
    parts = AllToAll.apply(group, x.unflatten(2, (group.size, -1)).movedim(2, 0))
    return parts.transpose(0, 1).flatten(1, 2)
