"""Context parallelism in attention: ranks hold parts of each sequence, and bring queries and keys together.

Everything but attention works on a rank's own tokens. Two ways, which go together (see `planning/context.py`):

gather  every rank gathers the keys and values of all tokens and computes its own queries, or fetches only the keys
        before its runs where a window is short enough (halo). Keys come in groups of heads, the next group while
        attention runs on this one. Backward gathers them again instead of keeping them.
heads   an all-to-all makes parts of sequences into parts of heads, and back.

No partial outputs are merged, so both are as exact as one process. Masks are made of places in the whole sequence, so
it does not matter where it is cut."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.distributed.collectives import TensorGroup
from trainer.model.attention import attend, build_mask, first_seen, is_plain, mask_of
from trainer.planning.context import Context


class Part(NamedTuple):
    """Queries of a rank and the keys before it that they look at, from one to the next, and their mask."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Any


class Halo(NamedTuple):
    """How a rank fetches the keys before its runs.

    sent: places, among its own tokens, of those that others need, by destination. to, of: how many go to each outer
    rank and come from each. laid: places of [fetched, own] tokens in the order in which runs look at them.
    """

    sent: Tensor
    to: list[int]
    of: list[int]
    laid: Tensor


@dataclass(frozen=True)
class SharedMask:
    """What attention of one kind of layer needs beside queries, keys and values: masks, and how keys travel.

    order: the place in the sequence of each gathered key; inverse: the place among the gathered of each key. again:
    whether backward gathers keys again by itself, which happens anyway where the layer is recomputed.
    """

    group: ContextGroup
    parts: tuple[Part, ...]
    order: Tensor
    inverse: Tensor
    halo: Halo | None = None
    again: bool = True


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the sequences of a micro-batch, of which this is number `rank`. heads, keys: those that
    exchange heads, and those that gather keys; None where it would be alone."""

    plan: Context
    rank: int
    heads: TensorGroup | None
    keys: TensorGroup | None

    def order(self, length: int, device: torch.device) -> Tensor:
        """Places in the sequence of the tokens of rank 0, 1, ... one after the other: [length]. They rise within an
        outer rank."""
        runs = torch.arange(length, device=device).view(-1, self.plan.outer, self.plan.run(length)).clone()
        runs[1::2] = runs[1::2].flip(1)
        return runs.transpose(0, 1).flatten()

    def own(self, length: int, device: torch.device) -> Tensor:
        """Places in the sequence of this rank's tokens: [length / cp]."""
        return self.order(length, device).view(self.plan.inner * self.plan.outer, -1)[self.rank]

    def runs(self, length: int) -> list[int]:
        """The numbers of the sequence's runs that this outer rank holds."""
        count = self.plan.outer * self.plan.rows(length)
        return [run for run in range(count) if self.holder(run) == self.rank // self.plan.inner]

    def holder(self, run: int) -> int:
        """The outer rank that holds a run."""
        row, place = divmod(run, self.plan.outer)
        return self.plan.outer - 1 - place if row % 2 else place

    def build_mask(
        self, documents: Tensor | None, length: int, window: int, soft_cap: float, device: torch.device
    ) -> SharedMask:
        """`attention.build_mask` for what is shared. documents: of whole sequences."""
        size, runs, halo = self.plan.run(length), self.runs(length), None
        order = self.order(length, device)
        first, whole = first_seen(documents, length, window, device), (0, length)
        if self.keys is None:
            parts = [Part(whole, whole, build_mask(documents, length, window, soft_cap, device))]
        elif before := self.plan.fetched(window, length):
            parts, halo = self._halo_parts(first, before, size, runs), self._halo(before, size, length, device)
        elif is_plain(documents, length, window, soft_cap) and self.plan.order != "blocks":
            parts = [self._early_part(first, number, run, size) for number, run in enumerate(runs)]
        else:
            mine = order.view(self.plan.outer, -1)[self.keys.rank]
            parts = [Part((0, len(mine)), whole, mask_of(first[:, mine], mine, length))]
        return SharedMask(self, tuple(parts), order, torch.argsort(order), halo)

    @staticmethod
    def _early_part(first: Tensor, number: int, run: int, size: int) -> Part:
        """A run of queries that see all keys before them: a GPU's kernel needs no mask for it."""
        stop = (run + 1) * size
        places = torch.arange(stop - size, stop, device=first.device)
        mask = None if first.is_cuda else mask_of(first[:, places], places, stop)
        return Part((number * size, (number + 1) * size), (0, stop), mask)

    @staticmethod
    def _halo_parts(first: Tensor, before: int, size: int, runs: list[int]) -> list[Part]:
        parts, stop = [], 0
        for number, run in enumerate(runs):
            start, fetched = run * size, before * (run > 0)
            places = torch.arange(fetched, fetched + size, device=first.device)
            seen = (first[:, start : start + size] - (start - fetched)).clamp(min=0)
            keys = stop, stop + fetched + size
            parts.append(Part((number * size, (number + 1) * size), keys, mask_of(seen, places, fetched + size)))
            stop = keys[1]
        return parts

    def _halo(self, before: int, size: int, length: int, device: torch.device) -> Halo:
        """The last `before` keys of each run go to the holder of the next one."""
        runs, last, ranks = self.runs(length), self.plan.outer * self.plan.rows(length) - 1, range(self.plan.outer)
        sent = sorted((self.holder(run + 1), place) for place, run in enumerate(runs) if run < last)
        came = sorted((self.holder(run - 1), place) for place, run in enumerate(runs) if run > 0)
        own, behind = before * len(came), torch.arange(before, device=device)
        fetched = {place: number * before + behind for number, (_, place) in enumerate(came)}
        laid = []
        for place in range(len(runs)):
            laid += [fetched[place]] if place in fetched else []
            laid.append(torch.arange(own + place * size, own + (place + 1) * size, device=device))
        return Halo(
            torch.cat([behind[:0], *((place + 1) * size - before + behind for _, place in sent)]),
            [before * sum(to == rank for to, _ in sent) for rank in ranks],
            [before * sum(of == rank for of, _ in came) for rank in ranks],
            torch.cat(laid),
        )


class Exchange(torch.autograd.Function):
    """All to all along the first dimension, in equal parts."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return group.wait(group.exchange(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return None, ctx.group.wait(ctx.group.exchange(gradient))


class Fetch(torch.autograd.Function):
    """This rank's tokens [tokens, ...] -> its runs, each with the keys before it. See `Halo`."""

    @staticmethod
    def forward(
        ctx: Any, group: TensorGroup, to: list[int], of: list[int], sent: Tensor, laid: Tensor, x: Tensor
    ) -> Tensor:
        ctx.group, ctx.to, ctx.of = group, to, of
        ctx.save_for_backward(sent, laid)
        return torch.cat([group.wait(group.exchange(x[sent], of, to)), x])[laid]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        sent, laid = ctx.saved_tensors
        apart = torch.empty_like(gradient)
        apart[laid] = gradient
        fetched, own = apart[: sum(ctx.of)], apart[sum(ctx.of) :]
        returned = ctx.group.wait(ctx.group.exchange(fetched, ctx.to, ctx.of))
        return None, None, None, None, None, own.index_add(0, sent, returned)


class Gather(torch.autograd.Function):
    """[tokens / c, ...] of each rank -> [tokens, ...] in the sequence's order, on every rank; at once."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, order: Tensor, inverse: Tensor, x: Tensor) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(order)
        return group.wait(group.gather(x))[inverse]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        (order,) = ctx.saved_tensors
        return None, None, None, ctx.group.wait(ctx.group.scatter_sum(gradient[order]))


class Journey:
    """The keys and values of one layer by group of heads, each [tokens / c, ...], and of those under way or here the
    whole ones, [tokens, ...] in the sequence's order. again: whether they are gathered more than once."""

    def __init__(self, shared: SharedMask, parts: Sequence[Tensor], again: bool):
        self.group, self.order, self.inverse, self.again = shared.group.keys, shared.order, shared.inverse, again
        self.parts = dict(enumerate(part.detach() for part in parts))
        self.started: dict[int, Tensor] = {}
        self.here: dict[int, Tensor] = {}

    def start(self, number: int) -> None:
        if number in self.parts and number not in self.started:
            self.started[number] = self.group.gather(self.parts[number])

    def whole(self, number: int, then: int) -> Tensor:
        """Those of a group of heads; those of the group `then`, if there is one, start."""
        if number not in self.here:
            self.start(number)
            arrived = self.group.wait(self.started[number])
            self.start(then)
            self.here[number] = arrived[self.inverse]
            del self.started[number]
            if not self.again:
                del self.parts[number]
        return self.here[number]


class Depart(torch.autograd.Function):
    """Where the gradients of a group of heads arrive. They have started in `Arrive`; this is the last to run."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return None, ctx.group.wait(gradient)


class Arrive(torch.autograd.Function):
    """The whole keys and values of a group of heads, of its part that `Depart` returned."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, number: int, x: Tensor) -> Tensor:
        ctx.journey, ctx.number = journey, number
        whole = journey.whole(number, number + 1)
        del journey.here[number]
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        journey = ctx.journey
        journey.here.pop(ctx.number, None)  # attention has used it
        return None, None, journey.group.scatter_sum(gradient[journey.order])


def attend_together(
    query: Tensor, key: Tensor, value: Tensor, shared: SharedMask, scale: float, soft_cap: float
) -> Tensor:
    """`attend` for this rank's queries among the keys of whole sequences. All are [batch, heads, tokens of this rank,
    head_dim]."""
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
        sent, to, of, laid = shared.halo
        return run(query, Fetch.apply(group, to, of, sent, laid, travelling(key, value)))
    if torch.compiler.is_compiling():
        return run(query, Gather.apply(group, shared.order, shared.inverse, travelling(key, value)))
    count = max(n for n in range(1, shared.group.plan.groups + 1) if key.shape[1] % n == 0)
    # All before attention, so that backward comes to them after it.
    parts = [
        Depart.apply(group, travelling(*part)) for part in zip(key.chunk(count, 1), value.chunk(count, 1), strict=True)
    ]
    again = shared.again and parts[0].requires_grad
    journey, attended = Journey(shared, parts, again), []
    for number, (part, queries) in enumerate(zip(parts, query.chunk(count, 1), strict=True)):
        whole = Arrive.apply(journey, number, part)
        with gathered_again(journey, number, whole) if again else contextlib.nullcontext():
            attended.append(run(queries, whole))
    return attended[0] if count == 1 else torch.cat(attended, 1)


def travelling(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one tensor to send: [tokens, batch, 2 x kv_heads, head_dim]."""
    return torch.cat([key, value], 1).permute(2, 0, 1, 3).contiguous()


def gathered_again(journey: Journey, number: int, whole: Tensor) -> torch.autograd.graph.saved_tensors_hooks:
    """Context in which views of `whole` are not kept for backward, but gathered again there, from the last group of
    heads to the first."""
    memory = whole.untyped_storage().data_ptr()

    def pack(x: Tensor) -> Any:
        if x.untyped_storage().data_ptr() != memory:
            return x.detach()
        return x.shape, x.stride(), x.storage_offset()

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else journey.whole(number, number - 1).as_strided(*kept)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def attend_parts(
    query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scale: float, soft_cap: float
) -> Tensor:
    """Attention of runs of queries, each with the keys that it looks at."""
    attended = [
        attend(
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
    parts = Exchange.apply(group, torch.cat(by_rank, 2).transpose(0, 1))  # [c, batch, heads, tokens / c, head_dim]
    return list(parts.permute(1, 2, 0, 3, 4).flatten(2, 3).split(sizes, 1))


def to_tokens(group: TensorGroup, x: Tensor) -> Tensor:
    """[batch, heads / c, tokens, head_dim] -> [batch, heads, tokens / c, head_dim]."""
    parts = Exchange.apply(group, x.unflatten(2, (group.size, -1)).movedim(2, 0))
    return parts.transpose(0, 1).flatten(1, 2)


def once(mask: Any) -> Any:
    """The mask for a layer that is recomputed, where keys are gathered again with all the rest."""
    return replace(mask, again=False) if isinstance(mask, SharedMask) else mask
