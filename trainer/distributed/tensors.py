"""What a rank holds of a tensor when its part is a run of elements, flat in memory, and not a rectangle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass
class Fragment:
    """Elements `start` and following, in row-major order, of a rank's rectangular part of a tensor, as DeepSpeed shares
    a parameter out: without regard to rows.

    values: [elements], flat; part: shape of the rectangle; offset: where that begins in the whole; shape: of the whole.
    counted: whether this rank's copy is the one that is counted and saved where others hold the same rectangle, which
    they may have cut elsewhere. grad: of the same elements, or None."""

    values: Tensor
    start: int
    part: torch.Size
    offset: torch.Size
    shape: torch.Size
    counted: bool = True
    grad: Fragment | None = None

    def of(self, values: Tensor) -> Fragment:
        """Other values for the same elements."""
        return Fragment(values, self.start, self.part, self.offset, self.shape, self.counted)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def to_local(self) -> Tensor:
        return self.values

    def take(self, whole: Tensor) -> Tensor:
        """These elements of the whole tensor: [elements]."""
        part = whole[tuple(slice(first, first + size) for first, size in zip(self.offset, self.part))]
        return part.flatten()[self.start : self.start + self.values.numel()]


def local_regions(tensor: Tensor | Fragment) -> list[tuple[torch.Size, Tensor]]:
    """What this rank holds of a tensor as rectangles: where each begins in the whole, and its values, not copied."""
    if isinstance(tensor, Fragment):
        return [
            (torch.Size(first + offset for first, offset in zip(begin, tensor.offset)), values)
            for begin, values in _rectangles(tensor.values, tensor.start, tensor.part)
        ]
    if isinstance(tensor, DTensor):
        return [(local_extent(tensor)[1], tensor.to_local().detach())]
    return [(torch.Size([0] * tensor.dim()), tensor.detach())]


def _rectangles(values: Tensor, start: int, shape: torch.Size) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The run of `values` from element `start` of an array of `shape` on, cut where rows begin and end."""
    if len(shape) < 2:
        if values.numel():
            yield (start,) * len(shape), values.view(values.shape if shape else ())
        return
    row, done = shape[1:].numel(), 0
    while done < values.numel():
        index, skipped = divmod(start + done, row)
        left = values.numel() - done
        if skipped or left < row:  # the end of a row, or the beginning of one
            size = min(row - skipped, left)
            for begin, part in _rectangles(values[done : done + size], skipped, shape[1:]):
                yield (index, *begin), part[None]
        else:
            size = left // row * row
            yield (index,) + (0,) * (len(shape) - 1), values[done : done + size].view(-1, *shape[1:])
        done += size


def local_extent(tensor: DTensor, places: Mapping[str, int] | None = None) -> tuple[torch.Size, torch.Size]:
    """Shape of what a rank holds of a tensor, and where in the whole it begins. places: of the rank in the mesh, by
    dimension; None: this one's.

    A dimension that tensor parallelism and then sharding have cut is marked as strided by FSDP. torch's own function
    counts such parts as if they were cut the other way round, which differs where sizes do not divide."""
    size, first, mesh = list(tensor.shape), [0] * tensor.dim(), tensor.device_mesh
    for dimension in sorted(
        range(mesh.ndim), key=lambda dimension: isinstance(tensor.placements[dimension], _StridedShard)
    ):
        cut = getattr(tensor.placements[dimension], "dim", None)
        if cut is not None:
            part = -(-size[cut] // mesh.size(dimension))
            place = places[mesh.mesh_dim_names[dimension]] if places else mesh.get_local_rank(dimension)
            start = min(size[cut], part * place)
            size[cut], first[cut] = min(part, size[cut] - start), first[cut] + start
    return torch.Size(size), torch.Size(first)


def local_values(tensor: Tensor | Fragment) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, (DTensor, Fragment)) else tensor


def with_values(tensor: Tensor | Fragment, values: Tensor) -> Tensor | Fragment:
    """Other values for what this rank holds of a tensor."""
    if isinstance(tensor, Fragment):
        return tensor.of(values)
    if not isinstance(tensor, DTensor):
        return values
    return DTensor.from_local(
        values, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


# Digests of the bits of tensors: cheap, exact, and the same for equal bits wherever they lie in memory. A tensor is
# read as words of 64 bits. Rows of words are summed in 64-bit integer arithmetic, which wraps around: the result does
# not depend on the order of the additions, so no device needs a deterministic mode. The sums of the rows are then
# added up with odd factors. A single flipped bit changes the sum of its row by a power of two, and an odd factor
# keeps that from becoming zero modulo 2**64: the digest always differs. For other differences the digests are equal
# with a probability of about 2**-64. Each byte is read once. The sums of the rows are 1/4096 of that.


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
    rows = torch.cat([part.to(device) for part in sums])
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
