"""Saves and loads the tensors of a run: sharded over the ranks, written in the background, readable under any plan.

A save has two halves. In the training thread each rank learns what it has to write and copies that to host memory; then
training goes on. In a background thread it writes with torch.distributed.checkpoint into `step-N.tmp` while hashing,
reads back and compares, writes the manifest, and renames the folder. A failure on any rank becomes a message to the
user, never an exception in the training loop, and leaves older checkpoints untouched."""

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

# A run of one process has no process group, which is nothing to warn of.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

# On a slow shared file system ranks may finish writing far apart. A dead rank does not take this long: its connections
# break at once.
WRITE_TIMEOUT = timedelta(hours=2)


class SaveFailed(Exception):
    """A save that failed on at least one rank; the message says on which, and why."""


class Checkpointer:
    """Writes the checkpoints of one run into `folder` and removes those that `config` does not keep.

    Every rank constructs it, after the process group exists, and makes the same calls in the same order. Background
    work uses a gloo group of its own, so that its collectives never mix with those of training. Attributes:
    `stall_seconds`, how long the last `save` held up training; `saved_step`, the last step whose checkpoint is
    complete, or None."""

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

        The tensors may change as soon as this returns. A rank may pass tensors that others do not have. What several
        ranks hold (replicas) is taken to be equal and written once. With `wait`, or without `checkpoint.asynchronous`,
        the call returns when the checkpoint is complete, and no copies are made in host memory. A save that is still
        running is waited for first. A failure is reported by `poll`; `saved_step` says which step was saved last.
        """
        started = time.perf_counter()
        self.wait()
        clash = manifest.keys() & set(OWN_KEYS) - {"step"}
        if clash:
            raise ValueError(f"the manifest's keys {sorted(clash)} belong to the checkpoint itself")
        manifest = json.loads(json.dumps({**manifest, "step": step}))  # a copy, and what JSON makes of it
        parts = self._own_parts(tensors)
        if wait or not self.config.asynchronous:
            self._run(step, parts, manifest, None)
        else:
            failure = None
            try:
                parts = self._copy_to_host(parts)
            except RuntimeError as error:  # host memory is full; the other ranks must learn of it
                failure = error
            self._thread = threading.Thread(
                target=self._run, args=(step, parts, manifest, failure), name="checkpoint", daemon=True
            )
            self._thread.start()
        self.stall_seconds = time.perf_counter() - started

    def poll(self) -> list[str]:
        """Messages for the user about saves that ended since the last call; empty on all ranks but 0. Never waits."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def wait(self) -> None:
        """Returns when no save is running."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def forget(self, path: Path) -> None:
        """Removes the newest checkpoint, which only served to rebuild the run. All ranks call it, after they have read
        it."""
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

    def _own_parts(self, tensors: dict[str, Tensor | Fragment]) -> dict[str, TensorPart]:
        """The parts that this rank has to write: assigned again only when the layout has changed on some rank."""
        parts = {
            name: part
            for name, tensor in tensors.items()
            if getattr(tensor, "counted", True) and (part := TensorPart.of(tensor)) is not None
        }
        layout = {(name, *part.boxes): part.local.nbytes for name, part in parts.items()}
        changed = torch.tensor(int(layout != self._layout))
        if self._group is not None:
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._group)
        if changed:
            self._layout, self._mine = layout, self._assign_writers(layout)
        return {name: part for name, part in parts.items() if (name, *part.boxes) in self._mine}

    def _assign_writers(self, layout: dict[Hashable, int]) -> set[Hashable]:
        if self._group is None:
            return set(layout)
        layouts = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(layout, layouts, dst=0, group=self._group)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, assign_writers(layouts) if layouts else None, src=0, group=self._group)
        return mine[0]

    def _copy_to_host(self, parts: dict[str, TensorPart]) -> dict[str, TensorPart]:
        """Copies of `parts` in host memory (pinned where the original is on a GPU), which is kept for the next save."""
        buffers, devices = {}, set()
        for name, part in parts.items():
            local, buffer = part.local, self._buffers.pop(name, None)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            buffers[name] = buffer.copy_(local, non_blocking=True)
            if local.is_cuda:
                devices.add(local.device)
        self._buffers = buffers
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return {name: part.copied(buffers[name]) for name, part in parts.items()}

    def _run(
        self, step: int, parts: dict[str, TensorPart], manifest: dict[str, Any], failure: Exception | None
    ) -> None:
        """One save, from the parts to the finished folder; every error becomes a message."""
        started, path = time.perf_counter(), step_folder(self.folder, step)
        try:
            size = self._write(path, parts, manifest, failure)
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

    def _write(
        self, path: Path, parts: dict[str, TensorPart], manifest: dict[str, Any], failure: Exception | None
    ) -> int:
        """Writes beside `path`, verifies, and renames the folder to `path`. Returns its size in bytes, on rank 0."""
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
            verify(written, checksums=False)  # whether this rank sees what the others wrote
            sync_folder(written)
            publish(written, path)
            return sum(file["bytes"] for file in files.values())

        self._together(prepare)
        writer = HashingWriter(written)
        metadata = dcp.save(
            dict(parts),
            storage_writer=writer,
            planner=PartSavePlanner(),
            process_group=self._group,
            no_dist=self._group is None,
        )
        files = {name: file for written_by in self._together(verify_own_files) for name, file in written_by.items()}
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


class TensorPart:
    """This rank's part of a tensor of `shape`.

    local: its values. boxes: the same values as rectangles of the whole tensor, by the offset at which each begins.
    """

    def __init__(self, tensor: Tensor | Fragment, local: Tensor):
        self.tensor, self.local, self.shape = tensor, local, tensor.shape
        whole = tensor.of(local) if isinstance(tensor, Fragment) else tensor
        self.boxes = {offset: values if isinstance(tensor, Fragment) else local for offset, values in boxes(whole)}

    @classmethod
    def of(cls, tensor: Tensor | Fragment) -> TensorPart | None:
        """The part of `tensor` that this rank holds, not copied; None where it holds nothing of it."""
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            return None
        local = (tensor.to_local() if isinstance(tensor, (DTensor, Fragment)) else tensor).detach()
        return cls(tensor, local) if local.numel() or not tensor.shape.numel() else None

    def copied(self, local: Tensor) -> TensorPart:
        """The same part, with its values in the tensor `local`."""
        return TensorPart(self.tensor, local)

    # torch's planners call these two methods of tensor-like objects.
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


class PartSavePlanner(dcp.DefaultSavePlanner):
    """torch's save planner for a state dict of `TensorPart`s."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].boxes[index.offset]


class PartLoadPlanner(dcp.DefaultLoadPlanner):
    """torch's load planner for a state dict of `TensorPart`s."""

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].boxes[index.offset]


def assign_writers(layouts: list[dict[Hashable, int]]) -> list[set[Hashable]]:
    """Assigns each part to one of the ranks that hold it, so that all ranks write about the same number of bytes.

    `layouts[rank]` maps the parts that the rank holds to their bytes; equal keys are replicas. Parts that one rank
    holds are assigned first; then each replicated one, the largest first, goes to the holder with the fewest bytes.
    """
    holders: dict[Hashable, list[int]] = {}
    for rank, layout in enumerate(layouts):
        for part in layout:
            holders.setdefault(part, []).append(rank)
    load = [0] * len(layouts)
    assigned: list[set[Hashable]] = [set() for _ in layouts]
    for part, ranks in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -layouts[item[1][0]][item[0]])):
        rank = min(ranks, key=lambda rank: load[rank])
        load[rank] += layouts[rank][part]
        assigned[rank].add(part)
    return assigned


class HashingWriter(dcp.FileSystemWriter):
    """torch's writer of sharded files, one a rank, on a file system that hashes them."""

    def __init__(self, path: Path):
        # Copying ahead would use the current stream of a device on which this thread has none.
        super().__init__(path, per_thread_copy_ahead=0, sync_files=False, overwrite=False)
        self.fs = HashingFileSystem()

    def written_files(self) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of what was meant to be in each file. Raises the first error that writing one had."""
        if self.fs.error is not None:
            raise self.fs.error
        return self.fs.files


class HashingFileSystem(FileSystem):
    """Local files, hashed while they are written and synced to the disk. The first error is kept in `error`, not
    raised.

    Raised inside torch, "no space left on device" would appear as a failed assertion of its C++ archive writer. Before
    torch 2.13 on Python 3.13, torch would also fail to send the error to the other ranks, which would go on waiting.
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
    """A new binary file. It hashes what is meant to be written, and keeps its first error."""

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
        """Does nothing, since torch calls it after each tensor; `finish` flushes."""

    close = flush

    def finish(self) -> None:
        """Syncs the file to the disk and closes it."""
        try:
            with self.file or nullcontext():
                if self.error is None:
                    self.file.flush()
                    os.fsync(self.file.fileno())
        except OSError as error:
            self.error = self.error or error


def load_tensors(path: Path, tensors: dict[str, Tensor | Fragment]) -> None:
    """Fills `tensors` in place from the checkpoint folder `path`, whatever plan saved it. All ranks call it together.

    Ranks may name different tensors; other tensors of the checkpoint are ignored. Raises ConfigError on every rank if
    the checkpoint lacks a tensor of any rank, or has it in another shape or dtype.
    """
    problems = _mismatches(path, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    if dist.is_initialized():
        everyone = gather(problems)
        problems = list(dict.fromkeys(problem for one in everyone for problem in one))
    if problems:
        raise ConfigError(problems)
    _read(path, dict(tensors))


def read_tensors(path: Path, names: list[str] | None = None) -> dict[str, Tensor]:
    """Whole tensors of the checkpoint folder `path` on the CPU: all, or those in `names`. Needs no other process."""
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
    """Reads without collectives, so that ranks may ask for different tensors."""
    planner = PartLoadPlanner(flatten_state_dict=False)
    parts = {name: part for name, tensor in tensors.items() if (part := TensorPart.of(tensor)) is not None}
    dcp.load(parts, storage_reader=dcp.FileSystemReader(path), planner=planner, no_dist=True)


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
    """One line: the error of each rank, without tracebacks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in list(error.failures.items())[:3])
    return str(error) or type(error).__name__
