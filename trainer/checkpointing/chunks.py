"""Where the values of a checkpoint's tensors lie: in chunks. A chunk is a rectangle of a tensor, stored as a run of
bytes of a file.

What is read here may have been written by anybody. Whatever is inconsistent raises `ValueError` before memory is
allocated.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpointing.manifest import LARGEST, HashingFile, check_count, format_foreign
from trainer.distributed.tensors import Fragment, local_regions

KINDS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
KINDS += ("int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in KINDS}
"""Element types that a checkpoint may hold, by their names in the manifest."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor. offsets: where it begins in the whole tensor. sizes: its shape. file: the file that
    holds its values, in bytes `start` to `start + length`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class ChunkPiece:
    """The part of a chunk that lies in another rectangle: elements `low` to `high` (exclusive) of the whole tensor."""

    chunk: Chunk
    low: tuple[int, ...]
    high: tuple[int, ...]

    def within(self, offsets: Sequence[int]) -> tuple[slice, ...]:
        """The same elements as slices of a rectangle that begins at `offsets`."""
        return tuple(slice(low - begin, high - begin) for low, high, begin in zip(self.low, self.high, offsets))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of `shape` in a checkpoint, and the chunks into which it was split."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @classmethod
    def parse(cls, entry: Any) -> StoredTensor:
        """The inverse of `to_json`. Raises ValueError."""
        shape, name, chunks = _fields(entry, ("shape", "dtype", "chunks"), "a tensor")
        if not isinstance(name, str) or name not in DTYPES:
            raise ValueError(f"its dtype is {format_foreign(name)}; known are {', '.join(DTYPES)}")
        dtype, shape = DTYPES[name], _sizes(shape)
        # Zero counts as one: a shape such as [0, 2^62] must not hide a huge dimension.
        if prod(size or 1 for size in shape) * dtype.itemsize > LARGEST:
            raise ValueError(f"its shape {format_foreign(list(shape))} is too large for any memory")
        if not isinstance(chunks, list):
            raise ValueError(f"its chunks are {format_foreign(chunks)}, which is no list")
        return cls(torch.Size(shape), dtype, tuple(_chunk(chunk, shape, dtype) for chunk in chunks))

    def to_json(self) -> dict[str, Any]:
        """JSON data. The number of bytes of a chunk is left out, as it follows from its sizes and the dtype."""
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "chunks": [
                {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": chunk.file, "start": chunk.start}
                for chunk in self.chunks
            ],
        }

    def pieces(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[ChunkPiece]:
        """The parts of chunks that lie in the rectangle of `sizes` at `offsets`. Raises ValueError unless they hold
        each element exactly once."""
        found = []
        for chunk in self.chunks:
            low = tuple(map(max, offsets, chunk.offsets))
            high = tuple(
                min(first + size, begin + length)
                for first, size, begin, length in zip(offsets, sizes, chunk.offsets, chunk.sizes)
            )
            if all(first < last for first, last in zip(low, high)):
                found.append(ChunkPiece(chunk, low, high))
        count, wanted = sum(prod(map(int.__sub__, piece.high, piece.low)) for piece in found), prod(sizes)
        # The right number of elements without overlaps means that each element is there exactly once.
        if count != wanted or any_overlap([(piece.low, piece.high) for piece in found]):
            raise ValueError(f"its chunks hold {count} of {wanted} elements, or some of them twice")
        return found


def any_overlap(rectangles: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether any two rectangles (low, high) of one space have an element in common.

    A sweep: they are visited in the order in which they begin along the dimension with most distinct beginnings, and
    each is compared with those that have not ended. For chunks of one split that is few, where comparing all pairs
    would be quadratic.
    """
    rectangles = list(rectangles)
    dimensions = range(len(rectangles[0][0])) if rectangles else range(0)
    if not dimensions:
        return len(rectangles) > 1
    # Chunks of one split differ in few dimensions. Sweeping along the most divided one leaves the fewest to compare.
    axis = max(dimensions, key=lambda dimension: len({low[dimension] for low, _ in rectangles}))
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for low, high in sorted(rectangles, key=lambda rectangle: rectangle[0][axis]):
        # Rectangles that have ended before this one begins cannot overlap with it or with any later one.
        active = [other for other in active if other[1][axis] > low[axis]]
        if any(all(low[i] < last[i] and first[i] < high[i] for i in dimensions) for first, last in active):
            return True
        active.append((low, high))
    return False


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _chunk(entry: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Chunk:
    offsets, sizes, file, start = _fields(entry, ("offsets", "sizes", "file", "start"), "a chunk")
    offsets, sizes = _sizes(offsets), _sizes(sizes)
    if not len(offsets) == len(sizes) == len(shape) or any(
        offset + size > most for offset, size, most in zip(offsets, sizes, shape)
    ):
        raise ValueError("one of its chunks lies outside of it")
    if not isinstance(file, str):
        raise ValueError("one of its chunks names no file")
    return Chunk(offsets, sizes, file, check_count(start), prod(sizes) * dtype.itemsize)


def _fields(entry: Any, names: tuple[str, ...], what: str) -> list[Any]:
    if not isinstance(entry, dict) or any(name not in entry for name in names):
        raise ValueError(f"{what} is a mapping with {', '.join(names)}; found {format_foreign(entry)}")
    return [entry[name] for name in names]


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"sizes are a list of whole numbers, not {format_foreign(value)}")
    return tuple(map(check_count, value))


# The parts of tensors that a rank holds, which rank writes which of them, and the file of a rank.


class TensorPart:
    """This rank's part of a tensor of `shape`.

    local: its values. boxes: the same values as rectangles of the whole tensor, by the offset at which each begins.
    """

    def __init__(self, tensor: Tensor | Fragment, local: Tensor):
        self.tensor, self.local, self.shape = tensor, local, tensor.shape
        whole = tensor.of(local) if isinstance(tensor, Fragment) else tensor
        self.boxes = {
            offset: values if isinstance(tensor, Fragment) else local for offset, values in local_regions(whole)
        }

    @classmethod
    def of(cls, tensor: Tensor | Fragment) -> TensorPart | None:
        """The part of `tensor` that this rank holds, without a copy; None where it holds nothing of it."""
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            return None
        local = (tensor.to_local() if isinstance(tensor, (DTensor, Fragment)) else tensor).detach()
        return cls(tensor, local) if local.numel() or not tensor.shape.numel() else None

    def copied(self, local: Tensor) -> TensorPart:
        """The same part with its values in the tensor `local`."""
        return TensorPart(self.tensor, local)


def write_parts(path: Path, parts: dict[str, TensorPart]) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Writes the values of `parts` one after the other into the new file `path`. Returns the file's size and SHA-256 as
    they should be, and where each part lies."""
    stored = {}
    if unknown := [name for name, part in parts.items() if part.local.dtype not in DTYPES.values()]:
        raise TypeError(f"{unknown[0]} is {parts[unknown[0]].local.dtype}; checkpoints hold {', '.join(DTYPES)}")
    with HashingFile(path) as file:
        for name, part in parts.items():
            chunks = []
            for offset, values in part.boxes.items():
                start = file.size
                # Parts in host memory are not copied by `cpu()`. In a synchronous save this moves one part at a time
                # off the GPU.
                file.write(tensor_bytes(values.cpu().contiguous()))
                if values.numel():
                    chunks.append(Chunk(tuple(offset), tuple(values.shape), path.name, start, file.size - start))
            stored[name] = StoredTensor(part.shape, part.local.dtype, tuple(chunks))
    return {"bytes": file.size, "sha256": file.sha256.hexdigest()}, stored


def join_parts(ranks: list[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """All tensors, from what each rank has written of them. Raises ValueError where that is not exactly the whole."""
    found: dict[str, list[StoredTensor]] = {}
    for written in ranks:
        for name, tensor in written.items():
            found.setdefault(name, []).append(tensor)
    joined = {}
    for name, tensors in sorted(found.items()):
        shape, dtype = tensors[0].shape, tensors[0].dtype
        if any((tensor.shape, tensor.dtype) != (shape, dtype) for tensor in tensors):
            raise ValueError(f"{name} is of another shape or dtype on another rank")
        joined[name] = StoredTensor(shape, dtype, tuple(chunk for tensor in tensors for chunk in tensor.chunks))
        try:
            joined[name].pieces((0,) * len(shape), shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return joined


def assign_writers(layouts: list[dict[Hashable, int]]) -> list[set[Hashable]]:
    """Assigns each part to one of the ranks that hold it, such that all ranks write about the same number of bytes.

    `layouts[rank]` maps the parts that the rank holds to their bytes; equal keys are replicas. Parts that only one rank
    holds are assigned first. Then each replicated part, the largest first, goes to its holder with the fewest bytes so
    far.
    """
    holders: dict[Hashable, list[int]] = {}
    for rank, layout in enumerate(layouts):
        for part in layout:
            holders.setdefault(part, []).append(rank)
    load = [0] * len(layouts)
    assigned: list[set[Hashable]] = [set() for _ in layouts]
    # Parts without a choice go first, so that replicated ones can even out what these leave.
    for part, ranks in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -layouts[item[1][0]][item[0]])):
        rank = min(ranks, key=lambda rank: load[rank])
        load[rank] += layouts[rank][part]
        assigned[rank].add(part)
    return assigned
