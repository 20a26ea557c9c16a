"""Block masks of FlexAttention from where each query's run of keys begins, without looking at pairs of tokens.

Of a block of queries, the keys that some query sees are one run of blocks, and those that every query sees whole are a
run inside of it; both follow from the first and the last query. torch's `create_block_mask` evaluates every pair: 10^12
for a million tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.planning.cost.masks import block_size


def block_mask(first: Tensor, places: Tensor, keys: int) -> Any:
    """The BlockMask of queries at `places` [queries], which rise, among `keys` keys: a query sees those from `first`
    [batch or 1, queries], which never falls along a row, to its own place."""
    from torch.nn.attention.flex_attention import BlockMask

    size, queries = block_size(len(first), len(places), keys), len(places)
    by_query, by_key = query_tables(first, places, size, keys), key_tables(first, places, size, keys)
    place, start = places.int(), first.int()
    if len(start) == 1:  # of every sequence of the batch
        start = start[0]

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= place[query]) & (key >= start[query])
    else:

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= place[query]) & (key >= start[batch, query])

    return BlockMask((queries, keys), *by_query, *by_key, BLOCK_SIZE=(size, size), mask_mod=mask_mod)


def seen_blocks(first: Tensor, places: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each block of `size` queries the first and last block of keys that it sees, and the first and last that each
    of its queries sees whole (the last before the first: none). All int32 [batch or 1, blocks of queries]; all rise."""
    heads = torch.arange(0, len(places), size, device=places.device)
    tails = (heads + size - 1).clamp(max=len(places) - 1)
    low, high = first[:, heads] // size, (places[tails] // size).expand(len(first), -1)
    whole_low, whole_high = -(-first[:, tails] // size), ((places[heads] + 1) // size - 1).expand(len(first), -1)
    return low.int(), high.int(), whole_low.int(), whole_high.int()


def query_tables(first: Tensor, places: Tensor, size: int, keys: int) -> tuple[Tensor, ...]:
    """Numbers and indices of the blocks of keys that each block of queries sees in part, and of those it sees whole."""
    return block_tables(*seen_blocks(first, places, size), -(-keys // size))


def key_tables(first: Tensor, places: Tensor, size: int, keys: int) -> tuple[Tensor, ...]:
    """The same from the other side: the blocks of queries that see each block of keys."""
    low, high, whole_low, whole_high = (bound.contiguous() for bound in seen_blocks(first, places, size))
    blocks = torch.arange(-(-keys // size), device=places.device, dtype=torch.int32).expand(len(first), -1).contiguous()

    def between(bottom: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """The first and last block of queries whose run of keys, from `bottom` to `top`, holds each block of keys."""
        after = torch.searchsorted(bottom, blocks, right=True, out_int32=True)
        return torch.searchsorted(top, blocks, out_int32=True), after - 1

    return block_tables(*between(low, high), *between(whole_low, whole_high), low.shape[1])


def block_tables(low: Tensor, high: Tensor, whole_low: Tensor, whole_high: Tensor, width: int) -> tuple[Tensor, ...]:
    """Of runs of blocks with a run inside: how many are outside of the inner one and which, how many inside and which.
    Numbers are int32 [batch or 1, 1, rows], indices [..., width], of which so many count. There is never more for each
    pair of blocks than the two tables and a bool."""
    whole = (whole_high - whole_low + 1).clamp(min=0)
    seen = (high - low + 1).clamp(min=0)
    before = torch.where(whole > 0, whole_low - low, seen)[..., None]  # of those in part, how many stand first
    column = torch.arange(width, device=low.device, dtype=torch.int32)
    part = torch.where(column < before, low[..., None], whole_high[..., None] + 1 - before).add_(column)
    inside = whole_low[..., None] + column
    found = seen - whole, part.clamp_(0, width - 1), whole, inside.clamp_(0, width - 1)
    return tuple(table[:, None] for table in found)
