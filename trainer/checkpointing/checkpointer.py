"""Saves the tensors of a run: sharded over the ranks, written in the background, readable under any plan.

A save has two halves. In the training thread each rank finds out what it has to write and copies that to host memory.
Then training goes on. In a background thread it writes its file into `step-N.tmp` while hashing, reads it back and
compares. Rank 0 writes the manifest and renames the folder. A failure on any rank becomes a message to the user, never
an exception in the training loop, and leaves older checkpoints untouched.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpointing.chunks import StoredTensor, TensorPart, assign_writers, join_parts, write_parts
from trainer.checkpointing.loading import run_on_ranks
from trainer.checkpointing.manifest import OWN_KEYS, step_folder, verify_checkpoint, verify_checksums, write_manifest
from trainer.checkpointing.remote import CheckpointUploader
from trainer.checkpointing.retention import (
    clear_name,
    prune_checkpoints,
    publish_checkpoint,
    remove_checkpoint,
    remove_leftovers,
    sync_folder,
)
from trainer.config import CheckpointConfig
from trainer.distributed.tensors import Fragment

T = TypeVar("T")

# On a slow shared file system ranks may finish writing far apart. A dead rank does not take this long: its connections
# break at once.
WRITE_TIMEOUT = timedelta(hours=2)


RankFiles = tuple[dict[str, Any], dict[str, StoredTensor]]
"""What a rank has written: size and SHA-256 of each file, and where each tensor lies."""


def describe_files(manifest: dict[str, Any], ranks: list[RankFiles]) -> dict[str, Any]:
    """The manifest of a checkpoint with what all ranks have written."""
    files = {name: entry for entries, _ in ranks for name, entry in entries.items()}
    tensors = {name: tensor.to_json() for name, tensor in join_parts([stored for _, stored in ranks]).items()}
    return {**manifest, "torch": torch.__version__, "files": files, "tensors": tensors}


class Checkpointer:
    """Writes the checkpoints of one run into `folder` and removes those that `config` does not keep.

    Every rank constructs it after the process group exists, and makes the same calls in the same order. Background work
    uses a gloo group of its own, so its collectives never mix with those of training. stall_seconds: how long the last
    `save` held up training. longest: seconds that the longest save took, in the background or not, or None. saved_step:
    the last step whose checkpoint is complete, or None. uploader: is told of every complete checkpoint.
    """

    kind = "checkpoint"

    def __init__(self, folder: Path, config: CheckpointConfig, uploader: CheckpointUploader | None = None):
        self.folder, self.config, self.uploader = Path(folder), config, uploader
        self.stall_seconds, self.saved_step, self.longest = 0.0, None, None
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
        self._keep_older = False
        if self._rank == 0:
            self._messages.extend(remove_leftovers(self.folder))

    @property
    def saving(self) -> bool:
        """Whether a save is running in the background."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor | Fragment],
        manifest: dict[str, Any],
        wait: bool = False,
        keep_older: bool = False,
    ) -> None:
        """Saves `tensors` by their global names, with rank 0's `manifest` (JSON data), as the checkpoint of `step`.

        The tensors may change as soon as this returns. A rank may pass tensors that others do not have. What several
        ranks hold (replicas) is assumed to be equal and written once. With `wait`, or without
        `checkpoint.asynchronous`, the call returns when the checkpoint is complete, and makes no copies in host memory.
        A save that is still running is waited for first. `keep_older` keeps checkpoints that `config` would remove. A
        failure is reported by `poll`; `saved_step` says which step was saved last.
        """
        started = time.perf_counter()
        self.wait()
        self._keep_older = keep_older
        clash = manifest.keys() & set(OWN_KEYS) - {"step"}
        if clash:
            raise ValueError(f"the manifest's keys {sorted(clash)} belong to the checkpoint itself")
        manifest = json.loads(json.dumps({**manifest, "step": step}))  # a deep copy, as it will be read back
        parts = self._own_parts(tensors)
        if wait or not self.config.asynchronous:
            self._run(step, parts, manifest, None)
        else:
            failure = None
            try:
                parts = self._copy_to_host(parts)
            except RuntimeError as error:  # host memory is full; the thread tells the other ranks
                failure = error
            # A daemon: a process that fails must be able to end while a write is stuck on a dead file system.
            self._thread = threading.Thread(
                target=self._run, args=(step, parts, manifest, failure), name="checkpoint", daemon=True
            )
            self._thread.start()
        self.stall_seconds = time.perf_counter() - started

    def poll(self) -> list[str]:
        """Messages for the user about saves that ended since the last call, on rank 0; empty on all others. Never
        waits."""
        queues = [self._messages, *([self.uploader.messages] if self.uploader else [])]
        return [messages.popleft() for messages in queues for _ in range(len(messages))]

    def wait(self) -> None:
        """Returns when no save is running."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def forget(self, path: Path) -> None:
        """Removes the newest checkpoint, which only served to rebuild the run. All ranks call it after they have read
        it."""
        self.saved_step = None
        if self._rank == 0:
            try:
                remove_checkpoint(path)
            except OSError as error:
                self._messages.append(f"the checkpoint {path} cannot be removed: {error}")

    def close(self) -> None:
        """Waits for the last save, and releases the process group and the host memory."""
        self.wait()
        if self.uploader is not None:
            self.uploader.close()
        self._buffers.clear()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _own_parts(self, tensors: dict[str, Tensor | Fragment]) -> dict[str, TensorPart]:
        """The parts that this rank has to write. They are assigned again only if the layout changed on some rank."""
        parts = {
            name: part
            for name, tensor in tensors.items()
            # DeepSpeed's fragments say themselves which copy is saved, because replicas may be cut at different
            # elements.
            if getattr(tensor, "counted", True) and (part := TensorPart.of(tensor)) is not None
        }
        layout = {(name, *part.boxes): part.local.nbytes for name, part in parts.items()}
        # Assigning gathers all layouts on rank 0. One small all-reduce avoids that in every save but the first.
        changed = torch.tensor(int(layout != self._layout))
        if self._group is not None:
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._group)
        if changed:
            self._layout, self._mine = layout, self._assign_writers(layout)
        return {name: part for name, part in parts.items() if (name, *part.boxes) in self._mine}

    def _assign_writers(self, layout: dict[Hashable, int]) -> set[Hashable]:
        """Lets rank 0 assign each part to one of the ranks that hold it. Returns this rank's parts."""
        if self._group is None:
            return set(layout)
        layouts = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(layout, layouts, dst=0, group=self._group)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, assign_writers(layouts) if layouts else None, src=0, group=self._group)
        return mine[0]

    def _copy_to_host(self, parts: dict[str, TensorPart]) -> dict[str, TensorPart]:
        """Copies of `parts` in host memory, pinned where the original is on a GPU. The buffers are kept for the next
        save, since allocating pinned memory is slow."""
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
            # The optimizer may change the tensors as soon as `save` returns, so the copies have to be complete.
            torch.cuda.current_stream(device).synchronize()
        return {name: part.copied(buffers[name]) for name, part in parts.items()}

    def _run(
        self, step: int, parts: dict[str, TensorPart], manifest: dict[str, Any], failure: Exception | None
    ) -> None:
        """One save, from the parts to the finished folder. Every error becomes a message."""
        started, path = time.perf_counter(), step_folder(self.folder, step)
        try:
            size = self._write(path, parts, manifest, failure)
        except Exception as error:
            if self._leads:
                shutil.rmtree(path.with_suffix(".tmp"), ignore_errors=True)
            if self._rank == 0:
                self._messages.append(
                    f"the {self.kind} of step {step} could not be saved: {str(error) or type(error).__name__}; "
                    "training goes on, older checkpoints are untouched"
                )
            return
        self.saved_step, seconds = step, time.perf_counter() - started
        self.longest = max(seconds, self.longest or 0.0)
        self._finish(step, size, seconds)

    @property
    def _leads(self) -> bool:
        """Whether this rank creates, renames and removes the folders of checkpoints."""
        return self._rank == 0

    def _make_folder(self, written: Path, failure: Exception | None) -> None:
        """Creates the empty folder `written`. Raises `failure`, that of this rank's copy to host memory, if there was
        one."""
        if failure is not None:
            raise failure
        if self._leads:
            clear_name(written)
            written.mkdir(parents=True)

    def _finish(self, step: int, size: int, seconds: float) -> None:
        """Reports a complete checkpoint, removes old ones, and has it uploaded."""
        uploader = self.uploader
        if self._rank == 0:
            path = step_folder(self.folder, step)
            self._messages.append(f"saved {path}: {size / 1e9:.2f} GB in {seconds:.1f} s")
            if not self._keep_older:
                with uploader.lock if uploader else contextlib.nullcontext():
                    spared = uploader.spared if uploader else set()
                    self._messages.extend(prune_checkpoints(self.folder, step, self.config, spared))
        if uploader is not None:
            uploader.begin(self._keep_older)

    def _write(
        self, path: Path, parts: dict[str, TensorPart], manifest: dict[str, Any], failure: Exception | None
    ) -> int:
        """Writes beside `path`, verifies, and renames the folder to `path`. Returns its size in bytes, on rank 0."""
        written = path.with_suffix(".tmp")

        def write() -> RankFiles:
            if not parts:
                return {}, {}
            file = f"rank-{self._rank:05d}.bin"
            entry, stored = write_parts(written / file, parts)
            # The checksum is of what should be written. Reading back finds what the disk or file system did to it.
            verify_checksums(written, {file: entry})
            return {file: entry}, stored

        def commit() -> int:
            if self._rank != 0:
                return 0
            content = describe_files(manifest, ranks)
            write_manifest(written, content)
            verify_checkpoint(written, checksums=False)  # that rank 0 sees the files of all ranks
            # The rename is what makes a checkpoint exist. It must not reach the disk before the files do.
            sync_folder(written)
            publish_checkpoint(written, path)
            return sum(file["bytes"] for file in content["files"].values())

        # Each of these is a barrier: no rank writes before the folder exists, and rank 0 commits only what all have
        # written.
        self._together(lambda: self._make_folder(written, failure))
        ranks = self._together(write)
        return sum(self._together(commit))

    def _together(self, action: Callable[[], T]) -> list[T]:
        return run_on_ranks(action, self._group)
