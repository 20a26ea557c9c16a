"""Triton kernels of attention for one new query a row among kept keys: Flash-Decoding (Dao et al., 2023), whose parts
run at the same time, and which ranks of a node share as well.

The first kernel attends to the slots of each part by itself. The second brings the parts together by the log-sum-exp
of their scores; where ranks share the slots it sends its sums to all others, waits for theirs, and adds them up in the
order of ranks, so that all have the same bits. How they signal is in `exchange.py`.

Why nothing waits in a circle: a program sends before it waits, and programs take their places in the order in which
they come to run. On every rank those that run begin with the first that has not ended; of these the lowest of all
ranks waits only for such as have run, or run."""

from __future__ import annotations

from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.kernels.exchange import SymmetricRegion, peer_address, signal_peer, wait_for_flag

KV_BLOCK = 64
"""Slots that a program looks at at a time, at most."""

TILE = 2**15
"""Bytes of keys, and as many of values, that it looks at at a time, at most: some are loaded ahead, and 227 KiB of
shared memory hold them all."""

PROGRAMS = 264
"""Of the first kernel, at least, where there are slots for so many: two for each multiprocessor of a Hopper GPU."""


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _attend_kv_parts(
    query,
    key,
    value,
    positions,
    attended,
    logsum,
    scale,
    soft_cap,
    row_stride,
    head_stride,
    window,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOTS: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One part of the slots that the query of a row sees, for the GROUP heads of a key-value head."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    last = tl.load(positions + row)
    end = ((last - RANK + SIZE) // SIZE).to(tl.int32)  # slots of this rank up to the query's place
    begin = end * 0
    if window > 0:
        begin = (tl.maximum(last - window + 1 - RANK + SIZE - 1, 0) // SIZE).to(tl.int32)
    each = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), SLOTS), PARTS) * SLOTS
    first = begin + part * each
    behind = tl.minimum(end, first + each)
    queries, width = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    of_query = (row * heads + head * GROUP + queries)[:, None] * DIM + width[None, :]
    own = (queries[:, None] < GROUP) & (width[None, :] < DIM)
    q = tl.load(query + of_query, mask=own, other=0.0)
    base = row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, WIDTH], tl.float32)
    for at in range(first, behind, SLOTS):
        slots = at + tl.arange(0, SLOTS)
        place = base + slots[:, None].to(tl.int64) * DIM + width[None, :]
        seen = (slots[:, None] < behind) & (width[None, :] < DIM)
        keys = tl.load(key + place, mask=seen, other=0.0)
        values = tl.load(value + place, mask=seen, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if CAPPED:
            scores = soft_cap * _tanh(scores / soft_cap)
        scores = tl.where((slots < behind)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        rest = tl.exp(top - higher)
        total = total * rest + tl.sum(weights, 1)
        result = result * rest[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = higher
    result = result / tl.where(total == 0, 1.0, total)[:, None]
    place = (row * heads + head * GROUP + queries) * PARTS + part
    tl.store(logsum + place, tl.where(total == 0, float("-inf"), top + tl.log(total)), mask=queries < GROUP)
    tl.store(attended + place[:, None] * DIM + width[None, :], result, mask=own)


@triton.jit(do_not_specialize=["epoch"])
def _combine(
    attended,
    logsum,
    out,
    boxes,
    flags,
    tickets,
    error,
    epoch,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One of COUNT rows and heads: its parts on this rank, then those of all ranks."""
    place = tl.program_id(0)
    if SIZE > 1:
        place = (tl.atomic_add(tickets, 1) % COUNT).to(tl.int32)
    parts, width = tl.arange(0, AT_ONCE), tl.arange(0, WIDTH)
    inside = width < DIM
    logs = tl.load(logsum + place * PARTS + parts, mask=parts < PARTS, other=float("-inf"))
    top = tl.max(logs, 0)
    weights = tl.exp(logs - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    of_parts = attended + (place * PARTS + parts)[:, None] * DIM + width[None, :]
    values = tl.load(of_parts, mask=(parts[:, None] < PARTS) & inside[None, :], other=0.0)
    result = tl.sum(values * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    if SIZE > 1:
        mine = tl.where(total == 0, float("-inf"), top + tl.log(total))
        half = (epoch % 2).to(tl.int64) * HALF
        for ahead in tl.static_range(1, SIZE):
            box = peer_address(boxes, (RANK + ahead) % SIZE, tl.float32) + half
            tl.store(box + (RANK * COUNT + place) * DIM + width, result, mask=inside)
            tl.store(box + SIZE * COUNT * DIM + RANK * COUNT + place, mine)
            signal_peer(flags, (RANK + ahead) % SIZE, RANK * COUNT + place, epoch)
        own = peer_address(boxes, RANK, tl.float32) + half
        highest = tl.full([], float("-inf"), tl.float32)
        total = tl.full([], 0.0, tl.float32)
        everyone = tl.zeros([WIDTH], tl.float32)
        for source in tl.static_range(0, SIZE):
            if source == RANK:
                log, of_source = mine, result
            else:
                wait_for_flag(flags, RANK, source, place, COUNT, epoch, error, LIMIT)
                log = tl.load(own + SIZE * COUNT * DIM + source * COUNT + place)
                of_source = tl.load(own + (source * COUNT + place) * DIM + width, mask=inside, other=0.0)
            higher = tl.maximum(highest, log)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            rest, weight = tl.exp(highest - safe), tl.exp(log - safe)
            total = total * rest + weight
            everyone = everyone * rest + of_source * weight
            highest = higher
        result = everyone / tl.where(total == 0, 1.0, total)
    tl.store(out + place * DIM + width, result.to(out.dtype.element_ty), mask=inside)


def attend_kv_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
    rank: int = 0,
    size: int = 1,
) -> tuple[Tensor, Tensor]:
    """Attention of one query a row to each part of the slots that it sees.

    query: [rows, heads, 1, head_dim], bf16, fp16 or fp32; key, value: [rows, kv_heads, slots, head_dim] of the same
    type, contiguous; positions: int64 [rows], place of each query in its sequence, of which slot s of rank r of `size`
    has place s * size + r; window: the newest places that are seen, 0 for all. Returns attended [rows, heads, parts,
    head_dim] and the log of the sum of exponentiated scores [rows, heads, parts], fp32; zeros and -inf of parts without
    a slot."""
    rows, heads, _, dim = query.shape
    kv_heads, slots = key.shape[1:3]
    width = max(16, triton.next_power_of_2(dim))
    at_once = max(16, min(KV_BLOCK, TILE // (width * key.element_size())))
    parts = max(1, min(ceil(PROGRAMS / (rows * kv_heads)), ceil(slots / at_once)))
    attended = query.new_empty((rows, heads, parts, dim), dtype=torch.float32)
    logsum = query.new_empty((rows, heads, parts), dtype=torch.float32)
    _attend_kv_parts[(rows, kv_heads, parts)](
        query.contiguous(),
        key,
        value,
        positions,
        attended,
        logsum,
        scale,
        soft_cap,
        key.stride(0),
        key.stride(1),
        window,
        GROUP=heads // kv_heads,
        DIM=dim,
        PARTS=parts,
        RANK=rank,
        SIZE=size,
        CAPPED=soft_cap > 0,
        SLOTS=at_once,
        QUERIES=max(16, triton.next_power_of_2(heads // kv_heads)),
        WIDTH=width,
        num_warps=4 if key.element_size() == 2 else 8,  # sums of fp32 spilled registers with 4
    )
    return attended, logsum


def combine_parts(
    attended: Tensor,
    logsum: Tensor,
    dtype: torch.dtype,
    region: SymmetricRegion | None = None,
    epoch: int = 0,
    limit: int = 0,
) -> Tensor:
    """The parts together: [rows, heads, 1, head_dim]. region: of the ranks that share the slots, all of which call it,
    with boxes of `buffer_elements` fp32 and as many flags as `flags`; limit: looks of a wait before it ends with an
    error."""
    rows, heads, parts, dim = attended.shape
    out = attended.new_empty((rows, heads, 1, dim), dtype=dtype)
    alone, at_once, width = out.new_empty(0), triton.next_power_of_2(parts), max(16, triton.next_power_of_2(dim))
    _combine[(rows * heads,)](
        attended,
        logsum,
        out,
        region.boxes if region else 0,
        region.flags if region else 0,
        region.tickets if region else alone,
        region.error if region else alone,
        epoch,
        COUNT=rows * heads,
        DIM=dim,
        PARTS=parts,
        HALF=region.half if region else 0,
        RANK=region.rank if region else 0,
        SIZE=region.size if region else 1,
        LIMIT=limit,
        AT_ONCE=at_once,
        WIDTH=width,
        num_warps=min(16, max(1, at_once * width // 2048)),
    )
    return out


def buffer_elements(rows: int, heads: int, dim: int, size: int) -> int:
    """Of half a box: what all ranks send."""
    return size * rows * heads * (dim + 1)


def flag_count(rows: int, heads: int, size: int) -> int:
    return size * rows * heads
