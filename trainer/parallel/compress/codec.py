"""Blockwise quantisation of gradients, in one format that torch operators write on CPUs and Triton kernels on GPUs.

A payload is bytes [rows, row_bytes]. A row is `[scales | codes]`: an fp32 scale for each block, filled up to a multiple
of 16 bytes, then the blocks' codes. A block is `block` neighbouring elements of one parameter (its last block is filled
up with zeros), so that parameters never share a scale. Symmetric quantisation to the block's largest magnitude m:
`scale = m / largest code`, `code = floor(x / scale + 1/2)`; int4 packs element j with element j + block/2. `bf16` has
no scales.

Non-finite gradients stay visible: a block with one decodes to non-finite values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainer.kernels import quantize

T = TypeVar("T", int, Tensor)

LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The largest code."""

BITS = {"bf16": 16, "int8": 8, "int4": 4, "fp8": 8}

TINY = 1e-30
"""Blocks whose largest magnitude is smaller become zero: their scale could not be inverted."""


@dataclass(frozen=True)
class BlockCodec:
    """How blocks become codes.

    kind: bf16, int8, int4 or fp8 (e4m3). block: elements that share a scale. hadamard: the size of the orthonormal
    Hadamard matrices by which blocks are rotated before, which spreads outliers; 0 for no rotation. stochastic: codes
    are rounded up or down at random, such that their mean is the value."""

    kind: str
    block: int
    hadamard: int = 0
    stochastic: bool = False

    @property
    def scaled(self) -> bool:
        return self.kind in LARGEST

    def scale_bytes(self, blocks: int) -> int:
        """Bytes of a row's scales, after which its codes begin."""
        return -(-blocks // 4) * 16 if self.scaled else 0

    def row_bytes(self, blocks: int) -> int:
        """Size of a row of so many blocks."""
        return self.scale_bytes(blocks) + blocks * self.block * BITS[self.kind] // 8

    def split(self, payload: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Views of a payload [..., row_bytes]: scales [..., blocks] in fp32 and codes [..., bytes]."""
        begin = self.scale_bytes(blocks)
        return payload[..., :begin].view(torch.float32)[..., :blocks], payload[..., begin:]


class BlockLayout:
    """Where the blocks of a payload lie in a flat tensor.

    segments: (offset, length) in the tensor, in order. Each is filled up to a multiple of `grain` (a multiple of
    `block`) and cut into blocks. rows: of the payload. Every row gets `count` blocks, in order; the last ones may be
    empty."""

    def __init__(
        self, segments: Sequence[tuple[int, int]], block: int, rows: int, device: torch.device, grain: int = 0
    ):
        self.block, self.rows, self.device, self.grain = block, rows, device, grain or block
        self.places, place = [], 0
        """(first element among the blocks, offset, length) of each segment."""
        for offset, length in segments:
            self.places.append((place, offset, length))
            place += -(-length // self.grain) * self.grain
        self.count = -(-place // (rows * self.grain)) * (self.grain // block)

    @classmethod
    def dense(cls, rows: int, length: int, block: int, device: torch.device) -> BlockLayout:
        """Blocks of a tensor that holds `rows` rows of `length` elements, a multiple of `block`."""
        return cls([(0, rows * length)], block, rows, device)

    @property
    def length(self) -> int:
        """Elements in a row."""
        return self.count * self.block

    def gather(self, flat: Tensor) -> Tensor:
        """The blocks [rows, count, block] of a flat tensor, in its type."""
        blocks = flat.new_zeros(self.rows, self.count, self.block)
        for place, offset, length in self.places:
            blocks.view(-1)[place : place + length] = flat[offset : offset + length]
        return blocks

    def scatter(self, blocks: Tensor, flat: Tensor) -> None:
        """Writes blocks [rows, count, block] to their places in a flat tensor."""
        for place, offset, length in self.places:
            flat[offset : offset + length] = blocks.view(-1)[place : place + length]

    @cached_property
    def table(self) -> tuple[Tensor, Tensor]:
        """For kernels: offset (int64) and length (int32) of every block [rows x count]."""
        starts = torch.zeros(self.rows * self.count, dtype=torch.int64)
        lengths = torch.zeros(self.rows * self.count, dtype=torch.int32)
        for place, offset, length in self.places:
            first, number = place // self.block, -(-length // self.block)
            inside = torch.arange(number) * self.block
            starts[first : first + number] = offset + inside
            lengths[first : first + number] = (length - inside).clamp(max=self.block)
        return starts.to(self.device), lengths.to(self.device)


class ErrorFeedback:
    """Error feedback: the quantisation errors of earlier steps, added to the next gradient (Seide et al., Interspeech
    2014).

    `classic` keeps the whole error in fp32: what t steps have sent is the sum of their gradients minus the error kept.
    `average8` keeps a moving average of errors in int8 with a scale for each block, in a quarter of the memory (LoCo,
    arXiv 2407.04480). Errors are kept in units of the gradient without the loss scale, rotated as the codec rotates.

    kept: the errors that the next step adds. left: the errors of the step in progress. `end_step` makes them the kept
    ones, unless the step's update was skipped."""

    DECAY = 0.8
    RESET = 1024
    """average8: the average is reset every so many steps."""

    def __init__(self, kind: str, blocks: BlockLayout):
        self.kind = kind
        shape = blocks.rows, blocks.count, blocks.block
        self.kept = self._zeros(shape, blocks.device)
        self.left = self._zeros(shape, blocks.device)

    def _zeros(self, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        if self.kind == "classic":
            return (torch.zeros(shape, device=device),)
        return torch.zeros(shape, dtype=torch.int8, device=device), torch.zeros(shape[:-1], device=device)

    def read(self) -> Tensor:
        """The errors kept, in fp32: [rows, count, block]."""
        values = self.kept[0].float()
        return values if self.kind == "classic" else values * self.kept[1].unsqueeze(-1)

    def write(self, left: Tensor) -> None:
        """Takes the errors of the step in progress: [rows, count, block]."""
        if self.kind == "classic":
            self.left[0].copy_(left)
            return
        average = self.DECAY * self.read() + (1 - self.DECAY) * left
        scale, inverse = scale_of(average, 127.0)
        self.left[0].copy_((average * inverse.unsqueeze(-1) + 0.5).floor_().clamp_(-127, 127))
        self.left[1].copy_(scale)

    def end_step(self, found_inf: Tensor, step: int) -> None:
        """After step number `step`: keeps its errors, unless its update was skipped (`found_inf`, a scalar, is 1)."""
        anew = self.kind == "average8" and step % self.RESET == 0
        for kept, left in zip(self.kept, self.left):
            kept.copy_(torch.where(found_inf > 0, kept, torch.zeros_like(left) if anew else left))


def pack_blocks(
    codec: BlockCodec,
    flat: Tensor,
    blocks: BlockLayout,
    errors: ErrorFeedback | None = None,
    unit: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Encodes the blocks of a flat tensor of any float type: the payload [rows, row_bytes].

    errors: those of earlier steps are added first; those of this step are written to it. unit: the loss scale, a scalar
    tensor. seed: for stochastic rounding."""
    if flat.is_cuda:
        return triton_pack(codec, flat, blocks, errors, unit, seed)
    values = hadamard_rotate(blocks.gather(flat).float(), codec.hadamard)
    if errors is None:
        return encode_blocks(codec, values, seed)[0]
    payload, left = encode_blocks(codec, values + errors.read() * unit, seed)
    errors.write(left / unit)
    return payload


def unpack_blocks(codec: BlockCodec, payload: Tensor, blocks: BlockLayout, flat: Tensor) -> None:
    """Decodes a payload [senders, rows, row_bytes], sums it over senders, and writes the sum to its places in
    `flat`."""
    if flat.is_cuda:
        triton_unpack(codec, payload, blocks, flat)
    else:
        blocks.scatter(hadamard_rotate(decode_payload(codec, payload, blocks.count), codec.hadamard), flat)


def triton_pack(
    codec: BlockCodec,
    flat: Tensor,
    blocks: BlockLayout,
    errors: ErrorFeedback | None = None,
    unit: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """`pack_blocks` in one pass over the gradient, with the same bits."""
    from trainer.kernels import quantize  # needs Triton

    payload = torch.empty(blocks.rows, codec.row_bytes(blocks.count), dtype=torch.uint8, device=flat.device)
    feedback = (
        {"feedback": errors.kind, "decay": errors.DECAY, "kept": errors.kept, "left": errors.left, "unit": unit}
        if errors
        else {}
    )
    quantize.pack_blocks(_form(codec, blocks), flat, blocks.table, payload, mix_seed(seed), **feedback)
    return payload


def triton_unpack(codec: BlockCodec, payload: Tensor, blocks: BlockLayout, flat: Tensor) -> None:
    """`unpack_blocks` in one pass over the received bytes, with the same bits."""
    from trainer.kernels import quantize

    quantize.unpack_blocks(_form(codec, blocks), payload, blocks.table, flat)


def _form(codec: BlockCodec, blocks: BlockLayout) -> quantize.BlockFormat:
    """The codec as the kernels see it."""
    from trainer.kernels import quantize

    return quantize.BlockFormat(
        codec.kind,
        codec.block,
        LARGEST.get(codec.kind, 1.0),
        codec.hadamard,
        hadamard_factor(codec.hadamard),
        codec.stochastic,
        codec.scale_bytes(blocks.count),
    )


def encode_blocks(codec: BlockCodec, blocks: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Quantises blocks [rows, count, block], which are rotated already if the codec rotates.

    Returns the payload [rows, row_bytes] and the quantisation error, in fp32 and rotated: [rows, count, block].
    """
    rows, count, block = blocks.shape
    payload = torch.zeros(rows, codec.row_bytes(count), dtype=torch.uint8, device=blocks.device)
    scales, codes = codec.split(payload, count)
    if not codec.scaled:
        quantised = blocks.bfloat16()
        codes.copy_(quantised.view(rows, -1).view(torch.uint8))
        return payload, blocks - quantised
    largest = LARGEST[codec.kind]
    scale, inverse = scale_of(blocks, largest)
    scales.copy_(scale)
    scaled = blocks * inverse.unsqueeze(-1)
    if codec.kind == "fp8":
        quantised = scaled.clamp(-largest, largest).to(torch.float8_e4m3fn)
        codes.copy_(quantised.view(rows, -1).view(torch.uint8))
    else:
        up = uniform_noise(scaled.shape, seed, blocks.device) if codec.stochastic else 0.5
        quantised = (scaled + up).floor_().clamp_(-largest, largest)
        if codec.kind == "int8":
            codes.copy_(quantised.to(torch.int8).view(rows, -1).view(torch.uint8))
        else:
            low, high = (quantised + 8).to(torch.uint8).split(block // 2, -1)
            codes.copy_((low | high << 4).view(rows, -1))
    return payload, blocks - quantised.float() * scale.unsqueeze(-1)


def decode_payload(codec: BlockCodec, payload: Tensor, count: int) -> Tensor:
    """Decodes a payload and sums it over senders, in their order, in fp32; still rotated.

    payload [senders, rows, row_bytes] -> [rows, count, block]."""
    total = torch.zeros(payload.shape[1], count, codec.block, device=payload.device)
    for row in payload:
        scales, codes = codec.split(row, count)
        codes = codes.contiguous()
        if codec.kind == "bf16":
            total += codes.view(torch.bfloat16).view(total.shape)
            continue
        if codec.kind == "int4":
            packed = codes.view(*total.shape[:2], -1)
            values = torch.cat([packed & 15, packed >> 4], -1).float() - 8
        else:
            values = codes.view(torch.int8 if codec.kind == "int8" else torch.float8_e4m3fn).view(total.shape).float()
        total += values * scales.unsqueeze(-1)
    return total


def scale_of(blocks: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """The scale of each block and its inverse; NaN and 0 where a block is not finite."""
    magnitude = blocks.abs().amax(-1)
    scale = torch.where(magnitude < TINY, 0.0, magnitude * (1 / largest))
    return scale, torch.where(scale > 0, 1 / scale, 0.0)


def hadamard_factor(size: int) -> float:
    """The factor that makes the Hadamard matrix of this size orthonormal."""
    return 1 / math.sqrt(size) if size else 1.0


def hadamard_rotate(blocks: Tensor, size: int) -> Tensor:
    """Multiplies runs of `size` elements by the orthonormal Hadamard matrix, which is its own inverse."""
    if not size:
        return blocks
    values, half = blocks, 1
    while half < size:
        low, high = values.view(-1, 2, half).unbind(1)
        values = torch.stack([low + high, low - high], 1)
        half *= 2
    return (values * hadamard_factor(size)).view(blocks.shape)


def uniform_noise(shape: Sequence[int], seed: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1) as a function of seed and position alone: a 32-bit finaliser (Wellons, lowbias32) of the
    position."""
    word = torch.arange(math.prod(shape), device=device) & 0xFFFFFFFF
    return (_finalised(word ^ mix_seed(seed)) >> 8).float().mul_(2.0**-24).view(shape)


def mix_seed(seed: int) -> int:
    """A hash of the seed, in 31 bits.

    Positions are combined with it bit by bit. With the plain seed, seeds that differ in few bits would draw the same
    numbers in another order."""
    return _finalised(seed & 0xFFFFFFFF) & 0x7FFFFFFF


def _finalised(word: T) -> T:
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = ((word ^ word >> shift) * multiplier) & 0xFFFFFFFF
    return word ^ word >> 16
