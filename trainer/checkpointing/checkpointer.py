"""Saves and loads the tensors of a run: sharded over the ranks, written in the background, readable under any plan.

A save goes: decide which rank writes what, copy that to host memory, let training go on; then, in a thread, write with
torch.distributed.checkpoint into `step-N.tmp` while hashing, read back and compare, write the manifest, rename. Failure
on any rank is a message to the user, never an exception in the training loop, and leaves the older checkpoints alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from trainer.checkpointing.manifest import (
    OWN_KEYS,
    read_manifest,
    step_folder,
    verify,
    verify_checksums,
    write_manifest,
)
from trainer.checkpointing.retention import prune, publish, sync_folder, tidy
from trainer.config import CheckpointConfig, ConfigError
from trainer.distributed.tensors import Fragment, boxes
from trainer.distributed.world import gather

# One process without a process group is a normal run here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

# Ranks may finish writing far apart on a slow shared file system; a dead rank is noticed at once all the same.
WRITE_TIMEOUT = timedelta(hours=2)


class SaveFailed(Exception):
    """A save that failed on at least one rank; the message says on which, and why."""


class Checkpointer:
    """Writes the checkpoints of one run into `folder` and removes those that `config` does not keep.

    Every rank constructs it, after the process group exists, and makes the same calls in the same order. Background
    work uses a gloo group of its own, so that it never meets the collectives of training. Attributes: `stall_seconds`,
    how long the last `save` held up training; `saved_step`, the last step whose checkpoint is complete, or None.
    """

    def __init__(self, folder: Path, config: CheckpointConfig):
        self.folder, self.config = Path(folder), config
        self.stall_seconds, self.saved_step = 0.0, None
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        self._group = None
        if distributed:
            self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT, group_desc="checkpoint")
        self._rank = dist.get_rank() if distributed else 0
        self._thread: threading.Thread | None = None
        self._messages: deque[str] = deque()
        self._layout: dict[Hashable, int] = {}
        self._mine: set[Hashable] = set()
        self._buffers: dict[str, Tensor] = {}
        if self._rank == 0:
            tidy(self.folder)

    @property
    def saving(self) -> bool:
        """Whether a save is running in the background."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self, step: int, tensors: dict[str, Tensor | Fragment], manifest: dict[str, Any], wait: bool = False
    ) -> None:
        """Saves `tensors` by their global names, with rank 0's `manifest` (JSON data), as the checkpoint of `step`.

        The tensors may change as soon as this returns. A rank may pass tensors that others do not have; what several
        ranks hold (replicas) is taken to be equal and written once. With `wait`, or unless `checkpoint.asynchronous`,
        it returns when the checkpoint is complete and needs no host memory for copies. Waits for a save that is still
        running. Failure is reported by `poll`; `saved_step` tells whether it worked.
        """
        started = time.perf_counter()
        self.wait()
        clash = manifest.keys() & set(OWN_KEYS) - {"step"}
        if clash:
            raise ValueError(f"the manifest's keys {sorted(clash)} belong to the checkpoint itself")
        manifest = json.loads(json.dumps({**manifest, "step": step}))  # a copy, and what JSON makes of it
        pieces = self._own_pieces(tensors)
        if wait or not self.config.asynchronous:
            self._run(step, pieces, manifest, None)
        else:
            failure = None
            try:
                pieces = self._copy_to_host(pieces)
            except RuntimeError as error:  # host memory is full; the other ranks must learn of it
                failure = error
            self._thread = threading.Thread(
                target=self._run, args=(step, pieces, manifest, failure), name="checkpoint", daemon=True
            )
            self._thread.start()
        self.stall_seconds = time.perf_counter() - started

    def poll(self) -> list[str]:
        """What became of saves since the last call, to be printed; always empty but on rank 0. Costs nothing."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def wait(self) -> None:
        """Returns when no save is running."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def forget(self, path: Path) -> None:
        """Removes the newest checkpoint, which was only a means. All ranks call it, after they have read it."""
        self.saved_step = None
        if self._rank == 0:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Waits for the last save and releases the process group and the host memory."""
        self.wait()
        self._buffers.clear()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _own_pieces(self, tensors: dict[str, Tensor | Fragment]) -> dict[str, Piece]:
        """The pieces that this rank has to write: dealt out again only when the layout has changed on some rank."""
        pieces = {
            name: piece
            for name, tensor in tensors.items()
            if getattr(tensor, "counted", True) and (piece := Piece.of(tensor)) is not None
        }
        layout = {(name, *piece.boxes): piece.local.nbytes for name, piece in pieces.items()}
        changed = torch.tensor(int(layout != self._layout))
        if self._group is not None:
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._group)
        if changed:
            self._layout, self._mine = layout, self._deal(layout)
        return {name: piece for name, piece in pieces.items() if (name, *piece.boxes) in self._mine}

    def _deal(self, layout: dict[Hashable, int]) -> set[Hashable]:
        if self._group is None:
            return set(layout)
        layouts = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(layout, layouts, dst=0, group=self._group)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, deal(layouts) if layouts else None, src=0, group=self._group)
        return mine[0]

    def _copy_to_host(self, pieces: dict[str, Piece]) -> dict[str, Piece]:
        """Copies of `pieces` in host memory that is kept for the next save (pinned where the original is on a GPU)."""
        buffers, devices = {}, set()
        for name, piece in pieces.items():
            local, buffer = piece.local, self._buffers.pop(name, None)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            buffers[name] = buffer.copy_(local, non_blocking=True)
            if local.is_cuda:
                devices.add(local.device)
        self._buffers = buffers
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return {name: piece.copied(buffers[name]) for name, piece in pieces.items()}

    def _run(self, step: int, pieces: dict[str, Piece], manifest: dict[str, Any], failure: Exception | None) -> None:
        """One save from the pieces to the finished folder; all that goes wrong ends up in a message."""
        started, path = time.perf_counter(), step_folder(self.folder, step)
        try:
            size = self._write(path, pieces, manifest, failure)
        except (Exception, CheckpointException) as error:
            if self._rank == 0:
                shutil.rmtree(path.with_suffix(".tmp"), ignore_errors=True)
                self._messages.append(
                    f"the checkpoint of step {step} could not be saved: {_reason(error)}; "
                    "training goes on, older checkpoints are untouched"
                )
            return
        self.saved_step = step
        if self._rank == 0:
            seconds = time.perf_counter() - started
            self._messages.append(f"saved {path}: {size / 1e9:.2f} GB in {seconds:.1f} s")
            try:
                prune(self.folder, step, self.config)
            except OSError as error:
                self._messages.append(f"an old checkpoint could not be removed: {error}")

    def _write(self, path: Path, pieces: dict[str, Piece], manifest: dict[str, Any], failure: Exception | None) -> int:
        """Writes beside `path`, verifies, and gives the folder its name; returns its bytes, on rank 0."""
        written = path.with_suffix(".tmp")

        def prepare() -> None:
            if failure is not None:
                raise failure
            if self._rank == 0:
                shutil.rmtree(written, ignore_errors=True)
                written.mkdir(parents=True)

        def verify_own_files() -> dict[str, dict[str, Any]]:
            files = writer.written_files()
            verify_checksums(written, files)
            return files

        def commit() -> int:
            if self._rank != 0:
                return 0
            tensors = {
                name: {"shape": list(entry.size), "dtype": str(entry.properties.dtype).removeprefix("torch.")}
                for name, entry in sorted(metadata.state_dict_metadata.items())
            }
            write_manifest(written, {**manifest, "torch": torch.__version__, "files": files, "tensors": tensors})
            verify(written, checksums=False)  # that this rank sees what the others wrote
            sync_folder(written)
            publish(written, path)
            return sum(file["bytes"] for file in files.values())

        self._together(prepare)
        writer = HashingWriter(written)
        metadata = dcp.save(
            dict(pieces),
            storage_writer=writer,
            planner=PiecePlanner(),
            process_group=self._group,
            no_dist=self._group is None,
        )
        files = {name: file for part in self._together(verify_own_files) for name, file in part.items()}
        return self._together(commit)[0]

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        """Runs `action` on every rank and returns what each returned; if it fails on any, raises SaveFailed on all."""
        try:
            outcome = (action(), None)
        except Exception as error:
            outcome = (None, _reason(error))
        outcomes = [outcome]
        if self._group is not None:
            outcomes = gather(outcome, self._group)
        problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(outcomes) if problem is not None]
        if problems:
            raise SaveFailed("; ".join(problems[:3]))
        return [result for result, _ in outcomes]


class Piece:
    """This rank's part of a tensor of `shape`: its values (`local`), and the same by where in the whole they begin
    (`boxes`)."""

    def __init__(self, tensor: Tensor | Fragment, local: Tensor):
        self.tensor, self.local, self.shape = tensor, local, tensor.shape
        whole = tensor.of(local) if isinstance(tensor, Fragment) else tensor
        self.boxes = {offset: values if isinstance(tensor, Fragment) else local for offset, values in boxes(whole)}

    @classmethod
    def of(cls, tensor: Tensor | Fragment) -> Piece | None:
        """The piece of `tensor` that lies on this rank, not copied; None where nothing of it does."""
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            return None
        local = (tensor.to_local() if isinstance(tensor, (DTensor, Fragment)) else tensor).detach()
        return cls(tensor, local) if local.numel() or not tensor.shape.numel() else None

    def copied(self, local: Tensor) -> Piece:
        """The same part with its values in another place."""
        return Piece(self.tensor, local)

    # What torch's planners ask of tensor-like objects.
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, values.shape) for offset, values in self.boxes.items()]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


class PiecePlanner(dcp.DefaultSavePlanner):
    """torch's plan of a save, for a dictionary of pieces."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].boxes[index.offset]


class PieceLoader(dcp.DefaultLoadPlanner):
    """torch's plan of a load, for a dictionary of pieces."""

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].boxes[index.offset]


def deal(layouts: list[dict[Hashable, int]]) -> list[set[Hashable]]:
    """Deals pieces to the ranks that hold them: each to one, so that the bytes to write are even.

    `layouts[rank]` maps the pieces that the rank holds to their bytes; equal keys are replicas. Pieces with a single
    holder go first, then the largest to the least loaded holder.
    """
    holders: dict[Hashable, list[int]] = {}
    for rank, layout in enumerate(layouts):
        for piece in layout:
            holders.setdefault(piece, []).append(rank)
    load = [0] * len(layouts)
    dealt: list[set[Hashable]] = [set() for _ in layouts]
    for piece, ranks in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -layouts[item[1][0]][item[0]])):
        rank = min(ranks, key=lambda rank: load[rank])
        load[rank] += layouts[rank][piece]
        dealt[rank].add(piece)
    return dealt


class HashingWriter(dcp.FileSystemWriter):
    """torch's writer of sharded files, one a rank, on a file system that hashes them."""

    def __init__(self, path: Path):
        # Copies ahead would go through the current stream of a device that this thread does not own.
        super().__init__(path, per_thread_copy_ahead=0, sync_files=False, overwrite=False)
        self.fs = HashingFileSystem()

    def written_files(self) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of what was to be in each file. Raises the first error that a file had."""
        if self.fs.error is not None:
            raise self.fs.error
        return self.fs.files


class HashingFileSystem(FileSystem):
    """Local files, hashed while they are written, synced to the disk; the first error is kept in `error`, not raised.

    Thrown through torch, "no space left on device" would come out as a broken assertion of its C++ archive writer, and
    its way of telling the other ranks fails on Python 3.13 before torch 2.13, which leaves them waiting.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[HashingStream, None, None]:
        stream = HashingStream(path)
        yield stream
        stream.finish()
        self.error = self.error or stream.error
        self.files[Path(path).name] = {"bytes": stream.size, "sha256": stream.sha256.hexdigest()}

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        try:
            super().rename(path, new_path)
        except OSError as error:
            self.error = self.error or error
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class HashingStream:
    """A new binary file; hashes what is meant to be in it, and keeps its first error."""

    def __init__(self, path: str | os.PathLike):
        self.sha256, self.size = hashlib.sha256(), 0
        self.file, self.error = None, None
        try:
            self.file = open(path, "wb")
        except OSError as error:
            self.error = error

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        self.size += data.nbytes
        if self.error is None:
            self.sha256.update(data)
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        return data.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Left to `finish`: torch calls this after each tensor."""

    close = flush

    def finish(self) -> None:
        """Brings what was written to the disk, and closes the file."""
        try:
            with self.file or nullcontext():
                if self.error is None:
                    self.file.flush()
                    os.fsync(self.file.fileno())
        except OSError as error:
            self.error = self.error or error


def load(path: Path, tensors: dict[str, Tensor | Fragment]) -> None:
    """Fills `tensors` in place from the checkpoint folder `path`, whatever plan saved it. All ranks call it together.

    Ranks may name different tensors; what the checkpoint holds beyond them is ignored. Raises ConfigError on every rank
    if a tensor is missing there or has another shape or dtype.
    """
    problems = _mismatches(path, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    if dist.is_initialized():
        everyone = gather(problems)
        problems = list(dict.fromkeys(problem for one in everyone for problem in one))
    if problems:
        raise ConfigError(problems)
    _read(path, dict(tensors))


def read_tensors(path: Path, names: list[str] | None = None) -> dict[str, Tensor]:
    """Whole tensors of the checkpoint folder `path` on the CPU, all or those in `names`; one process is enough."""
    held = read_manifest(path)["tensors"]
    missing = [name for name in names or () if name not in held]
    if missing:
        raise ConfigError(f"{path} has no tensor {_first(missing)}")
    tensors = {
        name: torch.empty(held[name]["shape"], dtype=getattr(torch, held[name]["dtype"]))
        for name in (held if names is None else names)
    }
    _read(path, tensors)
    return tensors


def _read(path: Path, tensors: dict[str, Tensor | Fragment]) -> None:
    """Every rank reads what it needs by itself: no collectives, so ranks may ask for different tensors."""
    planner = PieceLoader(flatten_state_dict=False)
    pieces = {name: piece for name, tensor in tensors.items() if (piece := Piece.of(tensor)) is not None}
    dcp.load(pieces, storage_reader=dcp.FileSystemReader(path), planner=planner, no_dist=True)


def _mismatches(path: Path, wanted: dict[str, tuple[torch.Size, torch.dtype]]) -> list[str]:
    held = {
        name: (torch.Size(entry["shape"]), getattr(torch, entry["dtype"]))
        for name, entry in read_manifest(path)["tensors"].items()
    }
    missing = [name for name in wanted if name not in held]
    differing = [
        f"{name} ({held[name][1]} {list(held[name][0])} there, {dtype} {list(shape)} here)"
        for name, (shape, dtype) in wanted.items()
        if name in held and held[name] != (shape, dtype)
    ]
    kinds = (missing, "are not in the checkpoint"), (differing, "differ from the checkpoint's")
    return [
        f"checkpoint.resume={path}: {len(names)} of {len(wanted)} tensors {what}: {_first(names)}; resume with the "
        "settings it was saved with, or set checkpoint.resume=none"
        for names, what in kinds
        if names
    ]


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _reason(error: BaseException) -> str:
    """One line: what each rank says, without the tracebacks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in list(error.failures.items())[:3])
    return str(error) or type(error).__name__
