"""Blockwise quantisation of gradients. Torch operators write one format on CPUs, and Triton kernels the same on GPUs.

A payload is bytes [rows, row_bytes]. A row is `[scales | codes]`: an fp32 scale for each block, padded to a multiple of
16 bytes, and then the codes of the blocks. A block is `block` neighbouring elements of one parameter, whose last block
is padded with zeros, so parameters never share a scale. Quantisation is symmetric to the largest magnitude m of a
block: `scale = m / largest code`, `code = floor(x / scale + 1/2)`. int4 packs element j with element j + block/2.

Gradients that are not finite stay visible: a block that contains one decodes to values that are not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainer.kernels import quantize

LARGEST = {"int8": 127.0, "int4": 7.0}
"""The largest code of each kind."""

BITS = {"int8": 8, "int4": 4}

TINY = 1e-30
"""Blocks whose largest magnitude is smaller become zero, because the inverse of their scale would overflow."""


@dataclass(frozen=True)
class BlockCodec:
    """How blocks become codes.

    kind: int8 or int4. block: number of elements that share a scale.
    """

    kind: str
    block: int

    def scale_bytes(self, blocks: int) -> int:
        """Bytes of a row's scales, behind which its codes begin."""
        return -(-blocks // 4) * 16

    def row_bytes(self, blocks: int) -> int:
        """Bytes of a row of so many blocks."""
        return self.scale_bytes(blocks) + blocks * self.block * BITS[self.kind] // 8

    def split(self, payload: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Views of a payload [..., row_bytes]: scales [..., blocks] in fp32 and codes [..., bytes]."""
        begin = self.scale_bytes(blocks)
        return payload[..., :begin].view(torch.float32)[..., :blocks], payload[..., begin:]


class BlockLayout:
    """Maps the blocks of a payload to elements of a flat tensor.

    segments: (offset, length) in the tensor, in order. Each is padded to a multiple of `grain` (a multiple of `block`)
    and cut into blocks. rows: of the payload. Every row has `count` blocks, in order; the last blocks may be empty.
    """

    def __init__(
        self, segments: Sequence[tuple[int, int]], block: int, rows: int, device: torch.device, grain: int = 0
    ):
        self.block, self.rows, self.device, self.grain = block, rows, device, grain or block
        self.places, place = [], 0
        """(first element among the blocks, offset in the tensor, length) of each segment."""
        for offset, length in segments:
            self.places.append((place, offset, length))
            place += -(-length // self.grain) * self.grain
        self.count = -(-place // (rows * self.grain)) * (self.grain // block)

    @classmethod
    def dense(cls, rows: int, length: int, block: int, device: torch.device) -> BlockLayout:
        """The layout of a tensor that holds `rows` rows of `length` elements, a multiple of `block`, without gaps."""
        return cls([(0, rows * length)], block, rows, device)

    @property
    def length(self) -> int:
        """Number of elements in a row, padding included."""
        return self.count * self.block

    def gather(self, flat: Tensor) -> Tensor:
        """Copies the elements of a flat tensor into blocks [rows, count, block], in the tensor's type."""
        blocks = flat.new_zeros(self.rows, self.count, self.block)
        for place, offset, length in self.places:
            blocks.view(-1)[place : place + length] = flat[offset : offset + length]
        return blocks

    def scatter(self, blocks: Tensor, flat: Tensor) -> None:
        """Writes blocks [rows, count, block] to their places in a flat tensor. Padding is dropped."""
        for place, offset, length in self.places:
            flat[offset : offset + length] = blocks.view(-1)[place : place + length]

    @cached_property
    def table(self) -> tuple[Tensor, Tensor]:
        """For the kernels: offset (int64) and length (int32) of every block, [rows x count] each."""
        starts = torch.zeros(self.rows * self.count, dtype=torch.int64)
        lengths = torch.zeros(self.rows * self.count, dtype=torch.int32)
        for place, offset, length in self.places:
            first, number = place // self.block, -(-length // self.block)
            inside = torch.arange(number) * self.block
            starts[first : first + number] = offset + inside
            lengths[first : first + number] = (length - inside).clamp(max=self.block)
        return starts.to(self.device), lengths.to(self.device)


class ErrorFeedback:
    """Error feedback: the quantisation errors of earlier steps are added to the next gradient (Seide et al., 1-bit SGD,
    Interspeech 2014). What t steps have sent is the sum of their gradients minus the error that is kept. Errors are in
    units of the gradient without the loss scale.

    kept: the errors that the next step adds, fp32 [rows, count, block]. pending: the errors of the step in progress.
    `end_step` makes them the kept ones, unless the step's update was skipped.
    """

    def __init__(self, blocks: BlockLayout):
        # Two sets: whether the step's update is applied is known only after the errors have been computed.
        self.kept, self.pending = torch.zeros(2, blocks.rows, blocks.count, blocks.block, device=blocks.device)

    def end_step(self, found_inf: Tensor) -> None:
        """Keeps the errors of a step, unless its update was skipped (`found_inf`, a scalar tensor, is 1). Selects on
        the device, so the host waits for nothing."""
        # A skipped step is run again or dropped. Its errors belong to gradients that were never applied.
        self.kept.copy_(torch.where(found_inf > 0, self.kept, self.pending))


def pack_blocks(
    codec: BlockCodec,
    flat: Tensor,
    blocks: BlockLayout,
    errors: ErrorFeedback | None = None,
    unit: Tensor | None = None,
) -> Tensor:
    """Encodes the blocks of a flat tensor of any float type. Returns the payload [rows, row_bytes].

    errors: those of earlier steps are added first, and those of this step are written to it. unit: the loss scale, a
    scalar tensor.
    """
    if flat.is_cuda:
        return triton_pack(codec, flat, blocks, errors, unit)
    values = blocks.gather(flat).float()
    if errors is None:
        return encode_blocks(codec, values)[0]
    # The gradient contains this step's loss scale and the errors do not, because the scale may change between steps.
    payload, error = encode_blocks(codec, values + errors.kept * unit)
    errors.pending.copy_(error / unit)
    return payload


def unpack_blocks(codec: BlockCodec, payload: Tensor, blocks: BlockLayout, flat: Tensor) -> None:
    """Decodes a payload [senders, rows, row_bytes], sums it over senders in fp32, and writes the sum to its places in
    `flat`."""
    if flat.is_cuda:
        triton_unpack(codec, payload, blocks, flat)
    else:
        blocks.scatter(decode_payload(codec, payload, blocks.count), flat)


def triton_pack(
    codec: BlockCodec,
    flat: Tensor,
    blocks: BlockLayout,
    errors: ErrorFeedback | None = None,
    unit: Tensor | None = None,
) -> Tensor:
    """`pack_blocks` on a GPU, in one pass over the gradient and with the same bits."""
    from trainer.kernels import quantize  # needs Triton

    payload = torch.empty(blocks.rows, codec.row_bytes(blocks.count), dtype=torch.uint8, device=flat.device)
    feedback = {"kept": errors.kept, "left": errors.pending, "unit": unit} if errors else {}
    quantize.pack_blocks(_form(codec, blocks), flat, blocks.table, payload, **feedback)
    return payload


def triton_unpack(codec: BlockCodec, payload: Tensor, blocks: BlockLayout, flat: Tensor) -> None:
    """`unpack_blocks` on a GPU, in one pass over the received bytes and with the same bits."""
    from trainer.kernels import quantize

    quantize.unpack_blocks(_form(codec, blocks), payload, blocks.table, flat)


def _form(codec: BlockCodec, blocks: BlockLayout) -> quantize.BlockFormat:
    """The codec in the form that the kernels take."""
    from trainer.kernels import quantize

    return quantize.BlockFormat(codec.kind, codec.block, LARGEST[codec.kind], codec.scale_bytes(blocks.count))


def encode_blocks(codec: BlockCodec, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises blocks [rows, count, block]. Returns the payload [rows, row_bytes], and the quantisation error in fp32:
    [rows, count, block]."""
    rows, count, block = blocks.shape
    payload = torch.zeros(rows, codec.row_bytes(count), dtype=torch.uint8, device=blocks.device)
    scales, codes = codec.split(payload, count)
    largest = LARGEST[codec.kind]
    scale, inverse = scale_of(blocks, largest)
    scales.copy_(scale)
    quantised = (blocks * inverse.unsqueeze(-1) + 0.5).floor_().clamp_(-largest, largest)
    if codec.kind == "int8":
        codes.copy_(quantised.to(torch.int8).view(rows, -1).view(torch.uint8))
    else:
        # Codes -7 to 7 become 1 to 15, so that two of them fit into a byte without a sign.
        low, high = (quantised + 8).to(torch.uint8).split(block // 2, -1)
        codes.copy_((low | high << 4).view(rows, -1))
    return payload, blocks - quantised * scale.unsqueeze(-1)


def decode_payload(codec: BlockCodec, payload: Tensor, count: int) -> Tensor:
    """Decodes a payload and sums it over senders, in fp32 and in the order of senders, which makes the sum
    deterministic.

    payload: [senders, rows, row_bytes] -> [rows, count, block].
    """
    total = torch.zeros(payload.shape[1], count, codec.block, device=payload.device)
    for row in payload:
        scales, codes = codec.split(row, count)
        codes = codes.contiguous()
        if codec.kind == "int4":
            packed = codes.view(*total.shape[:2], -1)
            values = torch.cat([packed & 15, packed >> 4], -1).float() - 8
        else:
            values = codes.view(torch.int8).view(total.shape).float()
        total += values * scales.unsqueeze(-1)
    return total


def scale_of(blocks: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """The scale of each block [...] and its inverse, from blocks [..., block]. A block that is not finite gets a scale
    that is not finite and an inverse of zero."""
    magnitude = blocks.abs().amax(-1)
    scale = torch.where(magnitude < TINY, 0.0, magnitude * (1 / largest))
    return scale, torch.where(scale > 0, 1 / scale, 0.0)
