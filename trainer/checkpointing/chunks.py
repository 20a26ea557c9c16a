"""Where the values of a checkpoint's tensors lie: in chunks, which are rectangles of a tensor and runs of bytes of a
file.

What is read here may have been written by anybody: whatever does not make sense is a `ValueError`, before memory is
asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from trainer.checkpointing.files import LARGEST, check_count, format_foreign

KINDS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
KINDS += ("int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in KINDS}
"""Types of elements that a checkpoint may hold, by the names that it gives them."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor. offsets: where it begins in the whole; sizes: its shape; file: in which its values lie,
    in bytes `start` to `start + length`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class ChunkPiece:
    """What a chunk holds of another rectangle: the elements from `low` to `high` (not included) of the whole tensor."""

    chunk: Chunk
    low: tuple[int, ...]
    high: tuple[int, ...]

    def within(self, offsets: Sequence[int]) -> tuple[slice, ...]:
        """The same elements in a rectangle that begins at `offsets`."""
        return tuple(slice(low - begin, high - begin) for low, high, begin in zip(self.low, self.high, offsets))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of `shape` in a checkpoint, and the chunks that it was cut into."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @classmethod
    def parse(cls, entry: Any) -> StoredTensor:
        """The inverse of `to_json`."""
        shape, name, chunks = _fields(entry, ("shape", "dtype", "chunks"), "a tensor")
        if not isinstance(name, str) or name not in DTYPES:
            raise ValueError(f"its dtype is {format_foreign(name)}; known are {', '.join(DTYPES)}")
        dtype, shape = DTYPES[name], _sizes(shape)
        if prod(size or 1 for size in shape) * dtype.itemsize > LARGEST:
            raise ValueError(f"its shape {format_foreign(list(shape))} is too large for any memory")
        if not isinstance(chunks, list):
            raise ValueError(f"its chunks are {format_foreign(chunks)}, which is no list")
        return cls(torch.Size(shape), dtype, tuple(_chunk(chunk, shape, dtype) for chunk in chunks))

    def to_json(self) -> dict[str, Any]:
        """Plain data. How many bytes a chunk has follows from its sizes and the dtype."""
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "chunks": [
                {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": chunk.file, "start": chunk.start}
                for chunk in self.chunks
            ],
        }

    def pieces(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[ChunkPiece]:
        """What chunks hold of the rectangle of `sizes` at `offsets`; ValueError unless they hold each element once."""
        found = []
        for chunk in self.chunks:
            low = tuple(map(max, offsets, chunk.offsets))
            high = tuple(
                min(first + size, begin + length)
                for first, size, begin, length in zip(offsets, sizes, chunk.offsets, chunk.sizes)
            )
            if all(first < last for first, last in zip(low, high)):
                found.append(ChunkPiece(chunk, low, high))
        held, wanted = sum(prod(map(int.__sub__, piece.high, piece.low)) for piece in found), prod(sizes)
        if held != wanted or any_overlap([(piece.low, piece.high) for piece in found]):
            raise ValueError(f"its chunks hold {held} of {wanted} elements, or some of them twice")
        return found


def any_overlap(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether any two rectangles (low, high) of one space have an element in common.

    They are passed in the order in which they begin in the dimension with most different beginnings; each is compared
    with those that have not ended."""
    boxes = list(boxes)
    dimensions = range(len(boxes[0][0])) if boxes else range(0)
    if not dimensions:
        return len(boxes) > 1
    axis = max(dimensions, key=lambda dimension: len({low[dimension] for low, _ in boxes}))
    begun: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for low, high in sorted(boxes, key=lambda box: box[0][axis]):
        begun = [other for other in begun if other[1][axis] > low[axis]]
        if any(all(low[i] < last[i] and first[i] < high[i] for i in dimensions) for first, last in begun):
            return True
        begun.append((low, high))
    return False


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _chunk(entry: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Chunk:
    offsets, sizes, file, start = _fields(entry, ("offsets", "sizes", "file", "start"), "a chunk")
    offsets, sizes = _sizes(offsets), _sizes(sizes)
    if not len(offsets) == len(sizes) == len(shape) or any(
        offset + size > most for offset, size, most in zip(offsets, sizes, shape)
    ):
        raise ValueError("one of its chunks lies outside of it")
    if not isinstance(file, str):
        raise ValueError("one of its chunks is in no file")
    return Chunk(offsets, sizes, file, check_count(start), prod(sizes) * dtype.itemsize)


def _fields(entry: Any, names: tuple[str, ...], what: str) -> list[Any]:
    if not isinstance(entry, dict) or any(name not in entry for name in names):
        raise ValueError(f"{what} is a mapping with {', '.join(names)}; found {format_foreign(entry)}")
    return [entry[name] for name in names]


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"sizes are a list of whole numbers, not {format_foreign(value)}")
    return tuple(map(check_count, value))
