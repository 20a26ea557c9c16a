"""Context parallelism, the masks: which tokens of each sequence a rank holds, which keys its queries look at, and what
they see of them. What travels is in `shared_attention.py`; who does what, in `planning/context.py`.

Masks are made of places in the whole sequence, so it does not matter where it is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.distributed.collectives import TensorGroup
from trainer.model.attention import build_mask, first_seen, is_plain, mask_of
from trainer.planning.context import ContextPlan


class HaloPart(NamedTuple):
    """Queries of a rank and the keys before it that they look at, from one to the next, and their mask."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Any


class HaloExchange(NamedTuple):
    """How a rank fetches the keys before its runs.

    sent: places, among its own tokens, of those that others need, by destination. to, of: how many go to each outer
    rank and come from each. fetched, own: where those tokens go, in the order in which runs look at them.
    """

    sent: Tensor
    to: list[int]
    of: list[int]
    fetched: Tensor
    own: Tensor


@dataclass(frozen=True)
class SharedMask:
    """What attention of one kind of layer needs beside queries, keys and values: masks, and how keys travel.

    order: the place in the sequence of each gathered key; inverse: the place among the gathered of each key. again:
    whether backward gathers keys again by itself, which happens anyway where the layer is recomputed.
    """

    group: ContextGroup
    parts: tuple[HaloPart, ...]
    order: Tensor
    inverse: Tensor
    halo: HaloExchange | None = None
    again: bool = True


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the sequences of a micro-batch, of which this is number `rank`. heads, keys: those that
    exchange heads, and those that gather keys; None where it would be alone."""

    plan: ContextPlan
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
            parts = [HaloPart(whole, whole, build_mask(documents, length, window, soft_cap, device))]
        elif before := self.plan.fetched(window, length):
            parts, halo = self._halo_parts(first, before, size, runs), self._halo(before, size, length, device)
        elif is_plain(documents, length, window, soft_cap) and self.plan.order != "blocks":
            parts = [self._early_part(first, number, run, size) for number, run in enumerate(runs)]
        else:
            mine = order.view(self.plan.outer, -1)[self.keys.rank]
            parts = [HaloPart((0, len(mine)), whole, mask_of(first[:, mine], mine, length))]
        return SharedMask(self, tuple(parts), order, torch.argsort(order), halo)

    @staticmethod
    def _early_part(first: Tensor, number: int, run: int, size: int) -> HaloPart:
        """A run of queries that see all keys before them: a GPU's kernel needs no mask for it."""
        stop = (run + 1) * size
        places = torch.arange(stop - size, stop, device=first.device)
        mask = None if first.is_cuda else mask_of(first[:, places], places, stop)
        return HaloPart((number * size, (number + 1) * size), (0, stop), mask)

    @staticmethod
    def _halo_parts(first: Tensor, before: int, size: int, runs: list[int]) -> list[HaloPart]:
        parts, stop = [], 0
        for number, run in enumerate(runs):
            start, fetched = run * size, before * (run > 0)
            places = torch.arange(fetched, fetched + size, device=first.device)
            seen = (first[:, start : start + size] - (start - fetched)).clamp(min=0)
            keys = stop, stop + fetched + size
            parts.append(HaloPart((number * size, (number + 1) * size), keys, mask_of(seen, places, fetched + size)))
            stop = keys[1]
        return parts

    def _halo(self, before: int, size: int, length: int, device: torch.device) -> HaloExchange:
        """The last `before` keys of each run go to the holder of the next one."""
        runs, last, ranks = self.runs(length), self.plan.outer * self.plan.rows(length) - 1, range(self.plan.outer)
        sent = sorted((self.holder(run + 1), place) for place, run in enumerate(runs) if run < last)
        came = sorted((self.holder(run - 1), place) for place, run in enumerate(runs) if run > 0)
        behind, inside = torch.arange(before, device=device), torch.arange(size, device=device)
        fetches = [run > 0 for run in runs]
        starts = [place * size + before * sum(fetches[:place]) for place in range(len(runs))]
        return HaloExchange(
            torch.cat([behind[:0], *((place + 1) * size - before + behind for _, place in sent)]),
            [before * sum(to == rank for to, _ in sent) for rank in ranks],
            [before * sum(of == rank for of, _ in came) for rank in ranks],
            torch.cat([behind[:0], *(starts[place] + behind for _, place in came)]),
            torch.cat([start + before * fetch + inside for start, fetch in zip(starts, fetches)]),
        )


def without_regather(mask: Any) -> Any:
    """The mask for a layer that is recomputed, where keys are gathered again with all the rest."""
    return replace(mask, again=False) if isinstance(mask, SharedMask) else mask
