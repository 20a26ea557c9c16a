"""Fills tensors from a checkpoint, whatever plan saved it; each rank reads the bytes that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpointing.chunks import Chunk, ChunkPiece, StoredTensor, tensor_bytes
from trainer.checkpointing.files import WAY_OUT, DamagedCheckpoint, format_foreign, open_inside
from trainer.checkpointing.manifest import MANIFEST, read_manifest
from trainer.checkpointing.parts import TensorPart
from trainer.config import ConfigError
from trainer.distributed.tensors import Fragment
from trainer.distributed.world import gather_objects

T = TypeVar("T")


class PlannedRead(NamedTuple):
    """Elements of the tensor `name` to read. out: of them, as a view of the tensor that is filled."""

    name: str
    piece: ChunkPiece
    out: Tensor


class CheckpointContents:
    """The tensors in the checkpoint folder `path`: what there is, and their values. Runs no code that is in it.

    DamagedCheckpoint, here and in all methods, where the folder makes no sense; before memory is asked for."""

    def __init__(self, path: Path):
        self.path, self.manifest = path, read_manifest(path)
        self.files, self._entries = self.manifest["files"], self.manifest["tensors"]
        self.names = self._entries.keys()
        self._found: dict[str, StoredTensor] = {}

    def find(self, name: str) -> StoredTensor | None:
        """What is known of the tensor `name`, if there is one."""
        if name in self._entries and name not in self._found:
            tensor = self._guard(self._place(name), StoredTensor.parse, self._entries[name])
            if unknown := [chunk.file for chunk in tensor.chunks if chunk.file not in self.files]:
                raise DamagedCheckpoint(
                    f"{self.path / MANIFEST} does not vouch for {format_foreign(unknown[0])}, where "
                    f"{format_foreign(name)} lies"
                )
            self._found[name] = tensor
        return self._found.get(name)

    def check_whole(self, tensors: dict[str, StoredTensor]) -> None:
        """Whether all of `tensors` can be there at once, as each has bytes of its own in the files."""
        for name, tensor in tensors.items():
            self._guard(self._place(name), tensor.pieces, (0,) * len(tensor.shape), tensor.shape)
        self._check_files((name, chunk) for name, tensor in tensors.items() for chunk in tensor.chunks)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU."""
        stored = {name: tensor for name in names if (tensor := self.find(name)) is not None}
        self.check_whole(stored)
        tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in stored.items()}
        self.fill(self.plan(tensors))
        return tensors

    def files_of(self, tensors: dict[str, Tensor | Fragment]) -> set[str]:
        """The files that hold this rank's parts of `tensors`; tensors that are not there are left out."""
        known = {name: tensor for name, tensor in tensors.items() if self.find(name) is not None}
        return {read.piece.chunk.file for read in self._locate(known)}

    def plan(self, tensors: dict[str, Tensor | Fragment]) -> list[PlannedRead]:
        """What is to be read to fill this rank's parts of `tensors`, which are there with their shape and dtype."""
        reads = self._locate(tensors)
        self._check_files({(read.name, read.piece.chunk) for read in reads})
        return reads

    def _locate(self, tensors: dict[str, Tensor | Fragment]) -> list[PlannedRead]:
        reads = []
        for name, tensor in tensors.items():
            stored, part = self.find(name), TensorPart.of(tensor)
            for offset, values in part.boxes.items() if part else ():
                pieces = self._guard(self._place(name), stored.pieces, tuple(offset), tuple(values.shape))
                reads += [PlannedRead(name, piece, values[piece.within(offset)]) for piece in pieces]
        return reads

    def fill(self, reads: list[PlannedRead]) -> None:
        """Reads file by file, in the order of bytes."""
        reads = sorted(reads, key=lambda read: (read.piece.chunk.file, read.piece.chunk.start))
        for name, of_file in groupby(reads, key=lambda read: read.piece.chunk.file):
            with open_inside(self.path, name) as file:
                for read in of_file:
                    self._guard(name, read_rows, file, read)

    def _check_files(self, chunks: Iterable[tuple[str, Chunk]]) -> None:
        """Whether the files are as long as the chunks of some tensors, each of which has bytes of its own."""
        needed: dict[str, int] = {}
        for _, chunk in chunks:
            needed[chunk.file] = needed.get(chunk.file, 0) + chunk.length
            if chunk.start + chunk.length > self.files[chunk.file]["bytes"]:
                raise DamagedCheckpoint(f"{self.path / chunk.file} is too short for what should be in it")
        for name, length in needed.items():
            with open_inside(self.path, name) as file:
                size = file.seek(0, 2)
            if size != self.files[name]["bytes"] or length > size:
                raise DamagedCheckpoint(f"{self.path / name} has {size} bytes, which cannot be what should be in it")

    def _place(self, name: str) -> str:
        return f"{MANIFEST}: {format_foreign(name)}"

    def _guard(self, where: str, action: Callable[..., T], *arguments: Any) -> T:
        try:
            return action(*arguments)
        except (ValueError, OSError) as error:
            raise DamagedCheckpoint(f"{self.path / where}: {error}") from None


def read_rows(file: BinaryIO, read: PlannedRead) -> None:
    """Reads the rows of a chunk that hold a piece of it; into the tensor itself, if it asks for whole rows."""
    chunk, out = read.piece.chunk, read.out
    first, *inner = read.piece.within(chunk.offsets) or (slice(0, 1),)
    sizes = chunk.sizes[1:]
    whole = out.is_contiguous() and out.device.type == "cpu" and out.shape[1:] == sizes
    rows = out if whole else torch.empty((first.stop - first.start, *sizes), dtype=out.dtype)
    file.seek(chunk.start + first.start * prod(sizes) * out.dtype.itemsize)
    if file.readinto(tensor_bytes(rows)) != rows.nbytes:
        raise ValueError("the file ends before its values do")
    if not whole:
        out.copy_(rows[(slice(None), *inner)] if out.dim() else rows[0])


def load_tensors(path: Path, tensors: dict[str, Tensor | Fragment]) -> None:
    """Fills `tensors` in place from the checkpoint folder `path`, whatever plan saved it. All ranks call it together.

    Ranks may name different tensors; other tensors of the checkpoint are ignored. Raises ConfigError on every rank if
    the checkpoint lacks a tensor of any rank, has it in another shape or dtype, or is damaged.
    """

    def plan() -> tuple[CheckpointContents, list[PlannedRead]]:
        contents = CheckpointContents(path)
        if problems := _mismatches(contents, tensors):
            raise ConfigError(problems)
        return contents, contents.plan(tensors)

    contents, reads = run_together(plan)
    run_together(lambda: contents.fill(reads))


def read_tensors(path: Path, names: list[str] | None = None) -> dict[str, Tensor]:
    """Whole tensors of the checkpoint folder `path` on the CPU: all, or those in `names`. Needs no other process."""
    contents = CheckpointContents(path)
    if missing := [name for name in names or () if name not in contents.names]:
        raise ConfigError(f"{path} has no tensor {_first(missing)}")
    return contents.read(contents.names if names is None else names)


def run_together(action: Callable[[], T]) -> T:
    """Runs `action` on every rank and returns its result on this one. A ConfigError or OSError of any rank is raised as
    a ConfigError on all."""
    problems: list[str] = []
    try:
        result = action()
    except OSError as error:
        problems = [f"{error.filename or 'a file'}: {error.strerror}; {WAY_OUT}"]
    except DamagedCheckpoint as damage:
        problems = [f"{damage}; {WAY_OUT}"]
    except ConfigError as error:
        problems = error.problems
    if dist.is_initialized():
        problems = list(dict.fromkeys(problem for rank in gather_objects(problems) for problem in rank))
    if problems:
        raise ConfigError(problems)
    return result


def _mismatches(contents: CheckpointContents, wanted: dict[str, Tensor | Fragment]) -> list[str]:
    held = {name: stored for name in wanted if (stored := contents.find(name)) is not None}
    missing = [name for name in wanted if name not in held]
    differing = [
        f"{name} ({held[name].dtype} {list(held[name].shape)} there, {tensor.dtype} {list(tensor.shape)} here)"
        for name, tensor in wanted.items()
        if name in held and (held[name].shape, held[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    kinds = (missing, "are not in the checkpoint"), (differing, "differ from the checkpoint's")
    return [
        f"checkpoint.resume={contents.path}: {len(names)} of {len(wanted)} tensors {what}: {_first(names)}; resume "
        "with the settings it was saved with, or set checkpoint.resume=none"
        for names, what in kinds
        if names
    ]


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
