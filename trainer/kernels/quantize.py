"""Triton kernels that quantise blocks of a gradient, with the bits of the torch code in `parallel/compress/codec.py`.

One pass over the gradient gathers blocks from where they lie, adds what earlier steps left out, quantises, packs, and
keeps what is left out now; one pass over the received bytes decodes, sums and writes to where blocks lie. A program
takes `TILE` blocks in two halves, which int4 packs into one byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"enable_fp_fusion": False}
"""Launch options: no contraction to fused multiply-adds, which would change the last bit."""


@triton.jit
def _magnitude(low, high):
    """Largest magnitude of each block, NaN where it holds one (which tl.max would drop)."""
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    broken = tl.maximum(tl.max((low != low).to(tl.int32), 1), tl.max((high != high).to(tl.int32), 1))
    return tl.where(broken > 0, float("nan"), largest)


@triton.jit
def _scale(magnitude, LARGEST: tl.constexpr):
    """Scale of each block, and the factor that divides by it."""
    reciprocal: tl.constexpr = 1 / LARGEST
    scale = tl.where(magnitude < 1e-30, 0.0, magnitude * reciprocal)
    return scale, tl.where(scale > 0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 0.0)


@triton.jit
def _round_code(x, LARGEST: tl.constexpr):
    """Values in units of their block's scale -> the nearest codes."""
    return tl.minimum(tl.maximum(tl.floor(x + 0.5), -LARGEST), LARGEST)


@triton.jit
def _pack(
    flat,
    starts,
    lengths,
    scales,
    codes,
    kept,
    left,
    unit,
    count,
    row_bytes,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    FEEDBACK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Encodes row `program_id(1)`. flat: any float type; starts, lengths: of blocks [rows x count]; scales, codes: fp32
    and byte pointers to the payload's first scale and code, rows `row_bytes` apart; kept, left: errors before and after
    (fp32 [rows x count x BLOCK]); unit: what errors are multiples of, a pointer."""
    tile, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = BLOCK // 2
    block = tile * TILE + tl.arange(0, TILE)
    exists = block < count
    number = row * count + block
    inside = tl.arange(0, HALF)[None, :]
    start = tl.load(starts + number, mask=exists, other=0)[:, None]
    length = tl.load(lengths + number, mask=exists, other=0)[:, None]
    low = tl.load(flat + start + inside, mask=inside < length, other=0.0).to(tl.float32)
    high = tl.load(flat + start + inside + HALF, mask=inside + HALF < length, other=0.0).to(tl.float32)
    place = number[:, None] * BLOCK + inside
    there = exists[:, None]
    if FEEDBACK:
        of = tl.load(unit)
        low += tl.load(kept + place, mask=there, other=0.0) * of
        high += tl.load(kept + place + HALF, mask=there, other=0.0) * of
    scale, inverse = _scale(_magnitude(low, high), LARGEST)
    tl.store(scales + row * (row_bytes // 4) + block, scale, mask=block < (count + 3) // 4 * 4)
    low_code, high_code = _round_code(low * inverse[:, None], LARGEST), _round_code(high * inverse[:, None], LARGEST)
    if KIND == "int8":
        out = codes + row * row_bytes + block[:, None] * BLOCK + inside
        tl.store(out, low_code.to(tl.int8).to(tl.uint8, bitcast=True), mask=there)
        tl.store(out + HALF, high_code.to(tl.int8).to(tl.uint8, bitcast=True), mask=there)
    else:
        both = (low_code + 8).to(tl.int32) | ((high_code + 8).to(tl.int32) << 4)
        tl.store(codes + row * row_bytes + block[:, None] * HALF + inside, both.to(tl.uint8), mask=there)
    if FEEDBACK:
        tl.store(left + place, tl.div_rn(low - low_code * scale[:, None], of), mask=there)
        tl.store(left + place + HALF, tl.div_rn(high - high_code * scale[:, None], of), mask=there)


@triton.jit
def _unpack(
    scales,
    codes,
    flat,
    starts,
    lengths,
    count,
    row_bytes,
    rows,
    SENDERS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sums over senders what they encoded of row `program_id(1)`, in their order, and writes it to where its blocks lie
    in `flat`. Payloads of senders are `rows` rows apart."""
    tile, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = BLOCK // 2
    block = tile * TILE + tl.arange(0, TILE)
    exists = block < count
    there = exists[:, None]
    inside = tl.arange(0, HALF)[None, :]
    low = tl.zeros((TILE, HALF), tl.float32)
    high = tl.zeros((TILE, HALF), tl.float32)
    for sender in tl.static_range(SENDERS):
        begin = (sender * rows + row) * row_bytes  # in 64 bits, as row is
        scale = tl.load(scales + begin // 4 + block, mask=exists, other=0.0)[:, None]
        if KIND == "int4":
            both = tl.load(codes + begin + block[:, None] * HALF + inside, mask=there, other=0).to(tl.int32)
            low += ((both & 15) - 8).to(tl.float32) * scale
            high += ((both >> 4) - 8).to(tl.float32) * scale
        else:
            of = codes + begin + block[:, None] * BLOCK + inside
            low += tl.load(of, mask=there, other=0).to(tl.int8, bitcast=True).to(tl.float32) * scale
            high += tl.load(of + HALF, mask=there, other=0).to(tl.int8, bitcast=True).to(tl.float32) * scale
    number = row * count + block
    start = tl.load(starts + number, mask=exists, other=0)[:, None]
    length = tl.load(lengths + number, mask=exists, other=0)[:, None]
    tl.store(flat + start + inside, low.to(flat.dtype.element_ty), mask=inside < length)
    tl.store(flat + start + inside + HALF, high.to(flat.dtype.element_ty), mask=inside + HALF < length)


@dataclass(frozen=True)
class BlockFormat:
    """How blocks are encoded. kind: int8 or int4; block: elements of one; largest: magnitude of a code; scale_bytes:
    where codes begin in a row of the payload, behind the scales."""

    kind: str
    block: int
    largest: float
    scale_bytes: int


def pack_blocks(
    form: BlockFormat,
    flat: Tensor,
    table: tuple[Tensor, Tensor],
    payload: Tensor,
    kept: Tensor | None = None,
    left: Tensor | None = None,
    unit: Tensor | None = None,
) -> None:
    """Encodes the blocks of `flat` into `payload` [rows, row bytes]. table: where each block starts and how long it is
    [rows x count]. kept, left: errors before and after; unit: what they are multiples of."""
    rows, count = payload.shape[0], table[0].numel() // payload.shape[0]
    grid, tile = _grid(rows, count, form.block)
    _pack[grid](
        flat,
        *table,
        *_parts(form, payload),
        kept,
        left,
        unit,
        count,
        payload.shape[1],
        KIND=form.kind,
        LARGEST=form.largest,
        BLOCK=form.block,
        FEEDBACK=kept is not None,
        TILE=tile,
        **OPTIONS,
    )


def unpack_blocks(form: BlockFormat, payload: Tensor, table: tuple[Tensor, Tensor], flat: Tensor) -> None:
    """Sums over senders what they encoded, payload [senders, rows, row bytes], into the blocks of `flat`."""
    payload = payload.contiguous()
    rows, count = payload.shape[1], table[0].numel() // payload.shape[1]
    grid, tile = _grid(rows, count, form.block)
    _unpack[grid](
        *_parts(form, payload),
        flat,
        *table,
        count,
        payload.shape[2],
        rows,
        SENDERS=payload.shape[0],
        KIND=form.kind,
        BLOCK=form.block,
        TILE=tile,
        **OPTIONS,
    )


def _grid(rows: int, count: int, block: int) -> tuple[tuple[int, int], int]:
    """Programs (tiles of a row, rows), and blocks in a tile."""
    tile = max(4, 4096 // block)
    return (-(-count // tile), rows), tile


def _parts(form: BlockFormat, payload: Tensor) -> tuple[Tensor, Tensor]:
    """Pointers to a payload's first scale and first code."""
    flat = payload.view(-1)
    return flat.view(torch.float32), flat[form.scale_bytes :]
