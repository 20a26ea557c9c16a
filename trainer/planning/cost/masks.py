"""How large block masks of FlexAttention are: `model/attention.py` makes them."""

from __future__ import annotations

BLOCK = 128
"""Tokens of a block: what FlexAttention's kernels are written for."""

TABLES = 2**27
"""Bytes that the tables of a mask may take before its blocks become larger."""

INDEX = 4
"""Bytes of a number in a table."""


def block_size(batch: int, queries: int, keys: int) -> int:
    """Tokens of a block: `BLOCK`, doubled until four tables of a number for each pair of blocks fit into `TABLES`."""
    size = BLOCK
    while 4 * INDEX * batch * -(-queries // size) * -(-keys // size) > TABLES:
        size *= 2
    return size


def mask_bytes(batch: int, queries: int, keys: int) -> float:
    """Bytes of a mask: the tables of both sides, each with how many of its numbers count, and of each query its place
    and its first key."""
    size = block_size(batch, queries, keys)
    rows, columns = -(-queries // size), -(-keys // size)
    return INDEX * (batch * (4 * rows * columns + 2 * rows + 2 * columns) + (1 + batch) * queries)
