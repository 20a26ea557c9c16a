"""What a rank holds of a tensor when its part is a run of elements, flat in memory, and not a rectangle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
