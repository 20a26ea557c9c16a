"""Attention over sequences that several ranks share (context parallelism): how queries and keys are brought together.

Everything but attention works on a rank's own tokens. There are two methods, which can be combined (see
`parallel/context/plan.py`).

gather: every rank all-gathers the keys and values of all tokens and computes its own queries (Llama 3, arXiv
2407.21783, section 3.3.2). Keys come in groups of heads, the next group while attention computes this one. Backward
gathers them again instead of keeping them.

heads: an all-to-all turns parts of sequences into parts of heads, and back (DeepSpeed-Ulysses, arXiv 2309.14509).

Neither merges partial outputs, so both are as exact as one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.distributed.collectives import TensorGroup
from trainer.model.attention import build_mask, causal_attention, first_seen, is_plain, mask_of
from trainer.parallel.context.plan import ContextPlan, divide_heads

# The masks of context parallelism: which tokens of each sequence a rank holds, which keys its queries need, and what
# they see of them. Masks are computed from places in the whole sequence, so they do not depend on how it is split.


class QueryRun(NamedTuple):
    """A run of this rank's queries and the keys that it needs, as (first, end) of the tensors at hand, and their
    mask."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Any


@dataclass(frozen=True)
class SharedMask:
    """What attention in one kind of layer needs besides queries, keys and values: masks, and how keys travel.

    order: for each gathered key its place in the sequence. inverse: for each key of the sequence its place among the
    gathered ones. again: whether backward has to gather keys again by itself; a recomputed layer does so anyway.
    """

    group: ContextGroup
    parts: tuple[QueryRun, ...]
    order: Tensor
    inverse: Tensor
    again: bool = True


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the sequences of a micro-batch, seen from number `rank`. heads, keys: the ranks that
    exchange heads and those that gather keys, None where it is the only one."""

    plan: ContextPlan
    rank: int
    heads: TensorGroup | None
    keys: TensorGroup | None

    def order(self, length: int, device: torch.device) -> Tensor:
        """Places in the sequence of the tokens of rank 0, rank 1 and so on, concatenated: [length]. They increase
        within an outer rank."""
        runs = torch.arange(length, device=device).view(-1, self.plan.outer, self.plan.run(length)).clone()
        # Zigzag: later queries see more keys, so every second row of runs is dealt out backwards, which gives all ranks
        # equal work.
        runs[1::2] = runs[1::2].flip(1)
        return runs.transpose(0, 1).flatten()

    def own(self, length: int, device: torch.device) -> Tensor:
        """Places in the sequence of this rank's tokens: [length / cp]."""
        return self.order(length, device).view(self.plan.inner * self.plan.outer, -1)[self.rank]

    def runs(self, length: int) -> list[int]:
        """The numbers of the runs that this outer rank holds."""
        count = self.plan.outer * self.plan.rows(length)
        return [run for run in range(count) if self.holder(run) == self.rank // self.plan.inner]

    def holder(self, run: int) -> int:
        """The outer rank that holds a run."""
        row, place = divmod(run, self.plan.outer)
        return self.plan.outer - 1 - place if row % 2 else place

    def build_mask(
        self, documents: Tensor | None, length: int, window: int, changed: bool, device: torch.device
    ) -> SharedMask:
        """Like `attention.build_mask`, for shared sequences. documents: of whole sequences."""
        size, runs = self.plan.run(length), self.runs(length)
        order = self.order(length, device)
        first, whole = first_seen(documents, length, window, device), (0, length)
        # After the exchange of heads a rank has whole sequences, so the ordinary mask applies.
        if self.keys is None:
            parts = [QueryRun(whole, whole, build_mask(documents, length, window, changed, device))]
        # Each run sees all keys before it, so attention takes a prefix of the keys and runs without a mask. Small
        # blocks would make too many kernels.
        elif is_plain(documents, length, window, changed) and self.plan.order != "blocks":
            parts = [self._early_part(first, number, run, size) for number, run in enumerate(runs)]
        else:
            mine = order.view(self.plan.outer, -1)[self.keys.rank]
            parts = [QueryRun((0, len(mine)), whole, mask_of(first[:, mine], mine, length))]
        return SharedMask(self, tuple(parts), order, torch.argsort(order))

    @staticmethod
    def _early_part(first: Tensor, number: int, run: int, size: int) -> QueryRun:
        """A run of queries that sees all keys before it. A GPU's kernel needs no mask for that."""
        stop = (run + 1) * size
        places = torch.arange(stop - size, stop, device=first.device)
        mask = None if first.is_cuda else mask_of(first[:, places], places, stop)
        return QueryRun((number * size, (number + 1) * size), (0, stop), mask)


def without_regather(mask: Any) -> Any:
    """The mask for a recomputed layer, whose recomputation gathers the keys again together with everything else."""
    return replace(mask, again=False) if isinstance(mask, SharedMask) else mask


class AllToAll(torch.autograd.Function):
    """An all-to-all along the first dimension, in equal parts. It is its own inverse, so backward is the same
    exchange."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return group.wait(group.exchange(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return None, ctx.group.wait(ctx.group.exchange(gradient))


class KVGradReduce(torch.autograd.Function):
    """This rank's part [tokens / c, ...] of a group of heads -> one copy for each rank, [c, tokens / c, ...], as a
    view.

    The gradients of the copies come from all ranks, by an exchange that `KVAllGather.backward` has started. Here they
    are summed in fp32 and rounded once. A reduce-scatter in bf16 would round after each rank, with an error that grows
    with their number.
    """

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return x.expand(group.size, *x.shape)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple:
        return None, ctx.group.wait(gradients).sum(0)  # torch accumulates 16-bit types in fp32


class KVAllGather(torch.autograd.Function):
    """Keys and values of a group of heads, in the sequence's order, on every rank: [tokens, ...].

    copies: of this rank's part, from `KVGradReduce`; only for the graph. started: the gather of that part. again:
    gathers the keys again in backward, None if they are saved. number: of the group of heads.
    """

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
            # The backward pass of this group's attention has just used the keys.
            ctx.again.drop(ctx.number)
        # Only starts the exchange, and returns its unfinished result as the gradient of `copies`. `KVGradReduce` waits
        # for it, after autograd has run attention of the group before this one.
        by_rank = gradient[order].unflatten(0, (ctx.group.size, -1))
        return None, None, None, None, None, ctx.group.exchange(by_rank), None


class KVRegather:
    """Gathers the keys and values of groups of heads again in the backward pass, from the last group to the first, one
    group ahead. parts: this rank's, by group of heads, [tokens / c, ...] each."""

    def __init__(self, shared: SharedMask, parts: Sequence[Tensor]):
        self.group, self.inverse = shared.group.keys, shared.inverse
        self.parts = [part.detach() for part in parts]
        self.started: dict[int, Tensor] = {}
        self.gathered: dict[int, Tensor] = {}

    def start(self, number: int) -> None:
        if number >= 0 and number not in self.started:
            self.started[number] = self.group.gather(self.parts[number])

    def whole(self, number: int) -> Tensor:
        """Keys and values of group `number`, in the sequence's order: [tokens, ...]."""
        if number not in self.gathered:
            self.start(number)
            # The next group travels while attention's backward pass computes this one.
            self.start(number - 1)
            self.gathered[number] = self.group.wait(self.started.pop(number))[self.inverse]
        return self.gathered[number]

    def drop(self, number: int) -> None:
        """Frees the gathered keys of a group that attention has used."""
        self.gathered.pop(number, None)

    def instead_of(self, whole: Tensor, number: int) -> torch.autograd.graph.saved_tensors_hooks:
        """Context in which autograd does not save views of `whole` but a note of their shape and position, from which
        `unpack` rebuilds them out of the keys that are gathered again."""
        memory = whole.untyped_storage().data_ptr()

        def pack(x: Tensor) -> Any:
            if x.untyped_storage().data_ptr() != memory:
                # Detached, because a saved result of the function itself would form a reference cycle with its graph.
                return x.detach()
            return x.shape, x.stride(), x.storage_offset()

        def unpack(saved: Any) -> Tensor:
            return saved if isinstance(saved, Tensor) else self.whole(number).as_strided(*saved)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def attend_together(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared: SharedMask,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """`causal_attention` for this rank's queries among the keys of whole sequences. All tensors are [batch, heads,
    tokens of this rank, head_dim]."""
    heads = shared.group.heads
    if heads is not None:
        query, key, value = to_heads(heads, query, key, value)
        sinks = None if sinks is None else sinks.chunk(heads.size)[heads.rank]
    attended = attend_gathered(query, key, value, shared, scale, soft_cap, sinks)
    return attended if heads is None else to_tokens(heads, attended)


def attend_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared: SharedMask,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend_together` after heads have been exchanged: only keys have to be gathered."""
    group = shared.group.keys

    def run(query: Tensor, both: Tensor, sinks: Tensor | None) -> Tensor:
        """both: keys, then values, [tokens, batch, 2 x kv_heads, head_dim]."""
        return attend_parts(query, *both.permute(1, 2, 0, 3).chunk(2, 1), shared.parts, scale, soft_cap, sinks)

    if group is None:
        return attend_parts(query, key, value, shared.parts, scale, soft_cap, sinks)
    count = divide_heads(key.shape[1])
    keys, values, queries = key.chunk(count, 1), value.chunk(count, 1), query.chunk(count, 1)
    of_queries = [None] * count if sinks is None else sinks.chunk(count)
    parts = [pack_kv(keys[number], values[number]) for number in range(count)]
    again = None
    if shared.again and parts[0].requires_grad and not torch.compiler.is_compiling():
        again = KVRegather(shared, parts)

    def send(number: int) -> tuple[Tensor, Tensor]:
        """The copies of a group of heads, and their gather, which it starts.

        Autograd runs functions in the reverse order of their creation. `KVGradReduce` of a group is created just before
        attention of the group before it, so backward comes to it just after that attention: gradients travel while it
        computes, and those of at most two groups exist at a time.
        """
        return KVGradReduce.apply(group, parts[number]), group.gather(parts[number].detach())

    ahead, attended = send(0), []
    for number in range(count):
        copies, started = ahead
        if number + 1 < count:
            ahead = send(number + 1)
        whole = KVAllGather.apply(group, again, number, shared.order, shared.inverse, copies, started)
        with contextlib.nullcontext() if again is None else again.instead_of(whole, number):
            attended.append(run(queries[number], whole, of_queries[number]))
    return attended[0] if count == 1 else torch.cat(attended, 1)


def pack_kv(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one tensor to send: [tokens, batch, 2 x kv_heads, head_dim]. Tokens come first, because
    collectives split the first dimension."""
    return torch.cat([key, value], 1).permute(2, 0, 1, 3).contiguous()


def attend_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Sequence[QueryRun],
    scale: float,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of runs of queries, each with the keys that it needs."""
    attended = [
        causal_attention(
            query[:, :, slice(*part.queries)],
            key[:, :, slice(*part.keys)],
            value[:, :, slice(*part.keys)],
            part.mask,
            scale,
            soft_cap,
            sinks,
        )
        for part in parts
    ]
    return attended[0] if len(parts) == 1 else torch.cat(attended, 2)


def to_heads(group: TensorGroup, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """[batch, heads, tokens / c, head_dim] -> [batch, heads / c, tokens, head_dim] for query, key and value. Where
    there are fewer key-value heads than ranks, several ranks get a copy of one head."""
    # An all-to-all gives each rank an equal part of the heads, so there have to be as many as ranks.
    copies = group.size // key.shape[1]
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    by_rank = [x.unflatten(1, (group.size, -1)) for x in (query, key, value)]
    sizes = [x.shape[2] for x in by_rank]
    # All three tensors travel in one exchange.
    parts = AllToAll.apply(group, torch.cat(by_rank, 2).transpose(0, 1))  # [c, batch, heads, tokens / c, head_dim]
    return list(parts.permute(1, 2, 0, 3, 4).flatten(2, 3).split(sizes, 1))


def to_tokens(group: TensorGroup, x: Tensor) -> Tensor:
    """The inverse for the result: [batch, heads / c, tokens, head_dim] -> [batch, heads, tokens / c, head_dim]."""
    parts = AllToAll.apply(group, x.unflatten(2, (group.size, -1)).movedim(2, 0))
    return parts.transpose(0, 1).flatten(1, 2)
