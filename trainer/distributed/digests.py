"""Digests of the bits of tensors: cheap, exact, and the same for equal bits wherever they lie in memory.

A tensor is read as words of 64 bits. Rows of words are summed in 64-bit integer arithmetic, which wraps around: the
result does not depend on the order of the additions, so no device needs a deterministic mode. The sums of the rows are
then added up with odd factors. A single flipped bit changes the sum of its row by a power of two, and an odd factor
keeps that from becoming zero modulo 2**64: the digest always differs. For other differences the digests are equal with
a probability of about 2**-64.

Each byte is read once. The sums of the rows are 1/4096 of that."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

ROW = 4096
"""Words of a row."""

FACTOR = -0x61C8864680B583EB
"""2**64 divided by the golden ratio, odd, as a signed integer: factors of neighbouring rows have few bits in common."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, the integers with the same bits."""


def tensor_words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The elements of a tensor as integers, flat: those that fill words of 64 bits, and the few at the end."""
    flat = tensor.detach().contiguous().view(-1)
    flat = flat.view(INTEGERS[flat.element_size()])
    per_word = 8 // flat.element_size()
    whole = flat.numel() // per_word * per_word
    return flat[:whole], flat[whole:]


def row_sums(tensor: Tensor) -> Tensor:
    """The sum of each row of words, the last of which may be shorter, and the elements that fill no word:
    int64 [rows]."""
    elements, rest = tensor_words(tensor)
    if elements.storage_offset() * elements.element_size() % 8:
        elements = elements.clone()
    words = elements.view(torch.int64)
    full = words.numel() // ROW * ROW
    parts = [words[:full].view(-1, ROW).sum(1)] if full else []
    if full < words.numel():
        parts.append(words[full:].sum().view(1))
    if rest.numel() or not parts:
        parts.append(rest.long())
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def digest_rows(sums: Iterable[Tensor], device: torch.device) -> Tensor:
    """The digest of the row sums of one tensor, or of several in this order: int64 scalar on `device`."""
    rows = torch.cat([part.to(device, non_blocking=True) for part in sums])
    factors = torch.arange(1, len(rows) + 1, device=device).mul_(FACTOR).bitwise_or_(1)
    return (rows * factors).sum()


def elements_of_rows(tensor: Tensor, rows: Iterable[int]) -> dict[int, Tensor]:
    """The elements behind the sums with these numbers, on the CPU, by the place of the first in the flat tensor."""
    flat = tensor.detach().contiguous().view(-1)
    words, _ = tensor_words(tensor)
    length = ROW * 8 // flat.element_size()
    sums = -(-len(words) // length)
    places = {row: row * length if row < sums else len(words) + row - sums for row in rows}
    return {
        first: flat[first : min(first + length, len(words)) if row < sums else first + 1].cpu()
        for row, first in places.items()
    }
