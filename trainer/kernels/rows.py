"""Rows of experts: each token is copied to the rows of its choices, and the rows of a token are added up again.

Both kernels read or write every row once, a program for each token. Tokens may lie in the memory of other GPUs of the
node, rank after rank: the first half of a dispatch then needs no buffer of gathered tokens, and the second half writes
sums of rows to the rank of the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""Types of rows that the kernels take."""
PER_WARP = 512
"""Elements of a row for each warp: 16 bytes of bf16 for each thread, twice."""


@triton.jit
def peer_address(table, rank, DTYPE: tl.constexpr):
    """Where a rank's memory begins. Without the hint Triton 3.6 moves two bytes at a time."""
    address = tl.load(table.to(tl.pointer_type(tl.uint64)) + rank)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def first_column(address, rank, row, WIDTH: tl.constexpr, PEERS: tl.constexpr, DTYPE: tl.constexpr):
    """Where a row begins. address: of the rows, or with PEERS of a table of the addresses of all ranks' rows."""
    if PEERS:
        start = peer_address(address, rank, DTYPE)
    else:
        start = address.to(tl.pointer_type(DTYPE))
    return start + row.to(tl.int64) * WIDTH


@triton.jit
def spread_kernel(
    x,
    places,
    rows,
    tokens,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    SLOTS: tl.constexpr,
    PEERS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    slots, columns = tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    inside = columns < WIDTH
    # A token without a row here is not read: it may be in the memory of another GPU.
    if tl.max(tl.load(places + token * CHOICES + slots, slots < CHOICES, -1)) >= 0:
        start = first_column(x, token // tokens, token % tokens, WIDTH, PEERS, DTYPE)
        value = tl.load(start + columns, inside)
        for choice in tl.static_range(CHOICES):
            place = tl.load(places + token * CHOICES + choice)
            if place >= 0:
                tl.store(rows + place * WIDTH + columns, value, inside)


@triton.jit
def gather_kernel(
    rows,
    places,
    result,
    tokens,
    slot,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    SLOTS: tl.constexpr,
    PEERS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    slots, columns = tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places + token * CHOICES + choice)
        total += tl.load(rows + place * WIDTH + columns, inside & (place >= 0), 0.0).to(tl.float32)
    found = tl.max(tl.load(places + token * CHOICES + slots, slots < CHOICES, -1)) >= 0
    if found or not PEERS:
        start = first_column(result, token // tokens, slot * tokens + token % tokens, WIDTH, PEERS, DTYPE)
        tl.store(start + columns, total.to(DTYPE), inside)


@triton.jit
def add_kernel(
    parts,
    chosen,
    result,
    tokens,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    slots, columns = tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    inside = columns < WIDTH
    owners = tl.load(chosen + token * CHOICES + slots, slots < CHOICES, -EACH) // EACH
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        sent = tl.max((owners == rank).to(tl.int32)) > 0
        start = parts + (rank * tokens + token).to(tl.int64) * WIDTH
        total += tl.load(start + columns, inside & sent, 0.0).to(tl.float32)
    tl.store(result + token.to(tl.int64) * WIDTH + columns, total.to(result.dtype.element_ty), inside)


def shape_options(width: int, choices: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    warps = min(max(block // PER_WARP, 1), 16)
    return {
        "WIDTH": width,
        "CHOICES": choices,
        "SLOTS": triton.next_power_of_2(choices),
        "BLOCK": block,
        "num_warps": warps,
    }


def copy_to_rows(x: int, peers: bool, places: Tensor, tokens: int, rows: Tensor) -> None:
    """Writes each token to its rows.

    x: address of the tokens [tokens, width], or with `peers` of a table of the addresses of each rank's. places: of
    each token's choices in `rows`, -1 for none, int64 [ranks x tokens, choices]. rows: [rows, width].
    """
    options = shape_options(rows.shape[1], places.shape[1])
    if len(places):
        spread_kernel[(len(places),)](x, places, rows, tokens, PEERS=peers, DTYPE=DTYPES[rows.dtype], **options)


def add_up_rows(rows: Tensor, places: Tensor, tokens: int, result: int, peers: bool, slot: int = 0) -> None:
    """Adds up the rows of each token, in fp32.

    places: as for `copy_to_rows`. result: address of the sums [tokens, width], or with `peers` of a table of the
    addresses of all ranks' [ranks, tokens, width], in which this rank fills part `slot`, for tokens that have a row.
    """
    options = shape_options(rows.shape[1], places.shape[1])
    if len(places):
        gather_kernel[(len(places),)](
            rows, places, result, tokens, slot, PEERS=peers, DTYPE=DTYPES[rows.dtype], **options
        )


def add_parts(parts: Tensor, chosen: Tensor, each: int) -> Tensor:
    """The sum of what the ranks have sent for each token: [tokens, width]. parts: [ranks, tokens, width]. chosen:
    experts of each token, int64 [tokens, choices]; rank r has the experts from r x each on."""
    result = parts.new_empty(parts.shape[1:])
    options = shape_options(parts.shape[2], chosen.shape[1])
    if len(result):
        add_kernel[(len(result),)](parts, chosen, result, len(result), RANKS=len(parts), EACH=each, **options)
    return result
