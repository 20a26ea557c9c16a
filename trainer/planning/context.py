"""Context parallelism, decided: which ranks exchange heads and which gather keys, who holds which tokens, what is sent.

Of cp ranks, runs of `inner` neighbours exchange heads (DeepSpeed-Ulysses, arXiv 2309.14509), after which each has some
heads of all their tokens; the `outer` ranks with one place in their runs gather keys and values (Llama 3, arXiv
2407.21783, 3.3.2). `gather` is inner=1, `heads` is outer=1. Pure: needs neither torch nor processes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from statistics import mean
from typing import NamedTuple

from trainer.config.model import AttentionSpec
from trainer.planning.cost.flops import seen_keys
from trainer.planning.cost.masks import block_size
from trainer.planning.documents import DocumentLengths, computed_keys, draw_documents

DRAWS = 8
"""How often documents are drawn, where an order's balance depends on them."""

ROWS = {"contiguous": 1, "zigzag": 2}
"""Runs of tokens that each rank holds, where the order says it."""


@dataclass(frozen=True)
class ContextPlan:
    """How the ranks of a group share sequences.

    inner x outer: see above. order: of tokens over the outer ranks; block: of order blocks. halo: whether layers with a
    window fetch only the keys before each run, where runs are as long as that and few: blocks are not. groups: of
    key-value heads that are gathered one after the other, at most.
    """

    inner: int
    outer: int
    order: str
    block: int
    halo: bool
    groups: int

    def rows(self, length: int) -> int:
        """Runs of tokens that an outer rank holds of a sequence. Row i of the sequence's runs is dealt out from the
        first rank to the last for even i, and back for odd i."""
        return ROWS[self.order] if self.order in ROWS else length // (self.outer * self.block)

    def run(self, length: int) -> int:
        """Tokens of a run."""
        return length // (self.outer * ROWS[self.order]) if self.order in ROWS else self.block

    def fetched(self, window: int, length: int) -> int:
        """The keys that a layer with this window (0: none) fetches before each run; 0: it gathers all."""
        fits = self.outer > 1 and self.order in ROWS and 1 < window <= self.run(length) + 1
        return window - 1 if self.halo and fits else 0

    def parts(self, attention: AttentionSpec, tp: int, length: int) -> int:
        """Groups of heads for which attention runs one after the other, on one of `tp` tensor-parallel ranks: several
        where their keys are gathered."""
        if self.outer == 1 or self.fetched(attention.window, length):
            return 1
        return divide_heads(max(max(attention.kv_heads // tp, 1) // self.inner, 1), self.groups)

    def describe(self) -> str:
        order = f"{self.order} order" + f" of {self.block}" * (self.order == "blocks")
        if self.outer == 1:
            return f"heads exchanged over {self.inner} ranks"
        exchanged = f"heads exchanged over {self.inner}, " if self.inner > 1 else ""
        return f"{exchanged}keys gathered over {self.outer} ranks, {order}"


def divide_heads(heads: int, most: int) -> int:
    """Into how many equal groups heads are divided: as many as go, and at most `most`."""
    while heads % most:
        most -= 1
    return most


class PassElements(NamedTuple):
    """Elements that a rank receives for one sequence in a layer's forward pass, and in its backward pass."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


class ContextTraffic(NamedTuple):
    """What a rank receives among the inner and among the outer ranks."""

    inner: PassElements
    outer: PassElements

    @property
    def all(self) -> float:
        return self.inner.both + self.outer.both


def context_traffic(
    attention: AttentionSpec, context: ContextPlan, length: int, tp: int, again: float, compiled: bool = False
) -> ContextTraffic:
    """What a layer sends. length: of the whole sequence; tp: tensor-parallel ranks; again: how often the backward pass
    runs attention's block again, and with it all that is sent in the forward pass (`Remaining.attends`).

    Where it does not, an eager layer gathers keys again all the same, and a compiled one has kept them."""
    inner, outer, size = context.inner, context.outer, attention.head_dim
    own, heads, keys = length / (inner * outer), attention.heads / tp, max(attention.kv_heads / tp, 1)
    exchanged = (2 * heads + 2 * max(keys, inner)) * size * own * (inner - 1) / inner
    among_inner = PassElements(exchanged, (1 + again) * exchanged)
    token = 2 * max(keys / inner, 1) * size  # keys and values
    if before := context.fetched(attention.window, length):
        moved = token * before * min(context.rows(length), outer - 1)  # of two ranks one has neighbouring runs
        return ContextTraffic(among_inner, PassElements(moved, (1 + again) * moved))
    gathered = token * own * inner * (outer - 1)
    # Gradients are summed over ranks.
    return ContextTraffic(among_inner, PassElements(gathered, (1 + (again if compiled else 1)) * gathered))


KERNELS = ("attention", "last_queries", "block_mask")


def attention_kernel(attention: AttentionSpec, context: ContextPlan | None, length: int, masked: bool) -> str:
    """What computes a layer's attention on a GPU: `attention` for whole sequences, `last_queries` for queries that are
    not the first of their keys, `block_mask` for any mask. What they reach: `AchievedConfig.of_attention`. masked:
    whether documents are."""
    if masked or 0 < attention.window < length or attention.soft_cap:
        return "block_mask"
    if context is None or context.outer == 1:
        return "attention"
    return "block_mask" if context.order == "blocks" else "last_queries"


@lru_cache(1024)
def load_imbalance(context: ContextPlan | None, length: int, window: int, documents: DocumentLengths | None) -> float:
    """Keys that the queries of the busiest rank see in a layer with this window (0: none), over the mean of all ranks.
    documents: that are masked, of which some are drawn."""
    if context is None or context.outer == 1:
        return 1.0
    drawn = [draw_documents(documents, length, draw) for draw in range(DRAWS)] if documents else [[0]]
    work = [_work(context, length, window or length, starts) for starts in drawn]
    return mean(max(ranks) * context.outer / sum(ranks) for ranks in work)


def _work(context: ContextPlan, length: int, window: int, starts: list[int]) -> list[float]:
    """Keys that the queries of each outer rank see. starts: first places of documents."""

    def own(queries: int) -> float:  # of the first queries of a document
        short = min(queries, window)
        return short * (short + 1) / 2 + (queries - short) * window

    sums = [0.0, *accumulate(own(stop - start) for start, stop in zip(starts, starts[1:]))]

    def seen(place: int) -> float:
        number = bisect_right(starts, place) - 1
        return sums[number] + own(place - starts[number])

    size, outer = context.run(length), context.outer
    ends = [seen(place) for place in range(0, length + 1, size)]
    runs = [end - start for start, end in zip(ends, ends[1:])]
    rows = [runs[start : start + outer] for start in range(0, len(runs), outer)]
    return [sum(parts) for parts in zip(*(row[::-1] if number % 2 else row for number, row in enumerate(rows)))]


def computed_share(
    attention: AttentionSpec,
    context: ContextPlan | None,
    length: int,
    micro_size: int,
    documents: DocumentLengths | None,
    on_cpu: bool = False,
) -> tuple[str, float]:
    """The kernel that computes a layer's attention, and what it computes on the rank with most, over what each would if
    a sequence were one document and all were left out that is not seen. documents: that are masked; on_cpu: where a
    mask leaves out no key."""
    window = attention.window
    by, seen = attention_kernel(attention, context, length, documents is not None), seen_keys(length, window)
    if by != "block_mask":
        return by, load_imbalance(context, length, window, None)
    if on_cpu:
        return by, length / seen
    rows = length // context.outer if context else length
    size = block_size(micro_size if documents else 1, rows, length)
    return by, computed_keys(length, window, documents, size) / seen * load_imbalance(
        context, length, window, documents
    )


def gathered_elements(attention: AttentionSpec, context: ContextPlan, length: int, tp: int) -> float:
    """Elements of the keys and values that one rank has before it at once, of one sequence; 0 where none travel."""
    if context.outer == 1 or context.fetched(attention.window, length):
        return 0.0
    return 2 * max(max(attention.kv_heads / tp, 1) / context.inner, 1) * attention.head_dim * length
