"""Checkpoints in host memory, from which a job resumes after a fault without reading a disk.

Every rank writes its part of the state into a file of its node's memory file system (tmpfs), which outlives the
process. Where there are several nodes, it also sends that file to a rank of the next node, which keeps a copy, so that
the state survives the loss of one node. The scheme is that of Wang et al., "GEMINI: Fast Failure Recovery in
Distributed Training with In-Memory Checkpoints" (SOSP 2023), with one copy and nodes in a ring.

An in-memory checkpoint is a folder like that of a checkpoint on disk. Each node has the whole manifest, but only the
files of its own ranks and those that it keeps for the node before it. Two ranks are on one node if they share the
memory file system.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpointing.checkpointer import Checkpointer, RankFiles, describe_files
from trainer.checkpointing.chunks import TensorPart, write_parts
from trainer.checkpointing.loading import CheckpointContents, run_together
from trainer.checkpointing.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    list_checkpoints,
    read_manifest,
    step_folder,
    verify_checksums,
    write_manifest,
)
from trainer.checkpointing.retention import publish_checkpoint
from trainer.config import CheckpointConfig, ConfigError
from trainer.distributed.mesh import World
from trainer.distributed.tensors import Fragment

MESSAGE_BYTES = 2**28
"""Files travel in messages of at most so many bytes."""
WRITERS = 4
"""Threads, each with a file of its own, that write the part of a rank: computing SHA-256 takes longer than copying."""


@dataclass(frozen=True)
class MemoryNodes:
    """The ranks of a job, grouped by the memory file system that they share.

    nodes: the ranks of each node, ordered by their first rank. folder: where this node keeps the in-memory checkpoints
    of the run. rank: this one. available: whether the memory file system exists on every node."""

    nodes: list[list[int]]
    folder: Path
    rank: int
    available: bool

    @classmethod
    def find(cls, config: CheckpointConfig, run_dir: Path, world: World) -> MemoryNodes:
        """Asks every rank for its node. All ranks call it together. Raises `ConfigError` on all of them if
        `checkpoint.peer_every` is set and a node has no folder `checkpoint.peer_folder`, or one of somebody else."""
        root = Path(config.peer_folder).expanduser()
        name = hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest()[:16]
        folder = root / f"trainer-{os.geteuid()}-{name}"

        def identify_node() -> tuple[str, int, int]:
            status = os.stat(root)
            if config.peer_every:
                make_private_folder(folder)
            return socket.gethostname(), status.st_dev, status.st_ino

        try:
            answer: tuple[Any, str] = identify_node(), ""
        except OSError as error:
            answer = socket.gethostname(), f"{error.strerror}: {error.filename}"
        answers = world.gather(answer)
        problems = [f"rank {rank} on {socket.gethostname()}: {text}" for rank, (_, text) in enumerate(answers) if text]
        if problems and config.peer_every:
            raise ConfigError(
                f"checkpoint.peer_folder={config.peer_folder} cannot be used ({'; '.join(problems[:3])}); name the "
                "folder of a memory file system (tmpfs) that every node has, or set checkpoint.peer_every=0"
            )
        nodes: dict[Any, list[int]] = {}
        for rank, (node, _) in enumerate(answers):
            nodes.setdefault(node, []).append(rank)
        return cls([*nodes.values()], folder, world.rank, not problems)

    @property
    def own(self) -> list[int]:
        """The ranks of this rank's node."""
        return next(ranks for ranks in self.nodes if self.rank in ranks)

    @property
    def leads(self) -> bool:
        """Whether this rank makes, renames and removes the folders of its node."""
        return self.rank == self.own[0]

    def remove_checkpoints(self, kept: Path | None = None) -> None:
        """Removes everything that this node keeps for the run, except the checkpoint `kept`."""
        if self.leads and self.folder.is_dir():
            for path in self.folder.iterdir():
                if path != kept:
                    shutil.rmtree(path, ignore_errors=True)
            if kept is None:
                shutil.rmtree(self.folder, ignore_errors=True)


def make_private_folder(folder: Path) -> None:
    """Makes a folder that only this user can enter. Raises `PermissionError` if somebody else has made it, since
    memory file systems are open to all users of a machine."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(0, "somebody else has made it", str(folder))


def pair_ranks(nodes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Which rank keeps a copy of whose file: {rank: the rank of the next node}; empty if there is one node."""
    if len(nodes) < 2:
        return {}
    return {
        rank: following[place % len(following)]
        for ranks, following in zip(nodes, [*nodes[1:], nodes[0]])
        for place, rank in enumerate(ranks)
    }


def split_evenly(sizes: dict[str, int], most: int) -> list[list[str]]:
    """Up to `most` groups of names with about the same sum of sizes, none of them empty."""
    groups: list[list[str]] = [[] for _ in range(most)]
    sums = [0] * most
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        smallest = min(range(most), key=sums.__getitem__)
        groups[smallest].append(name)
        sums[smallest] += sizes[name]
    return [group for group in groups if group]


class FileTransfer(NamedTuple):
    """A file that rank `source` sends to rank `target`; `size` in bytes."""

    source: int
    target: int
    name: str
    size: int


def allocate_files(transfers: Iterable[FileTransfer], rank: int, folder: Path) -> None:
    """Reserves memory for the files that this rank will receive into `folder`. Raises `OSError` if there is not
    enough: writing to a file that is mapped into memory would end the process instead."""
    for transfer in transfers:
        if transfer.target == rank:
            with open(folder / f"{transfer.name}.part", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, transfer.size)


def exchange_files(
    transfers: Iterable[FileTransfer], rank: int, folder: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Sends and receives files of `folder` at the same time; memory for them has been allocated. All ranks call it
    together with the same transfers."""
    works, received = [], []
    for source, target, name, size in transfers:
        if rank == source:
            values = torch.from_file(str(folder / name), size=size, dtype=torch.uint8)
            works += [dist.isend(part, target, group) for part in values.split(MESSAGE_BYTES)]
        if rank == target:
            part_file = folder / f"{name}.part"
            values = torch.from_file(str(part_file), shared=True, size=size, dtype=torch.uint8)
            works += [dist.irecv(part, source, group) for part in values.split(MESSAGE_BYTES)]
            received.append((part_file, folder / name))
    for work in works:
        work.wait()
    for part_file, path in received:
        part_file.rename(path)


class MemoryCheckpointer(Checkpointer):
    """Writes the in-memory checkpoints of a run, in the background, and keeps the newest one that is complete.

    Every rank constructs it and makes the same calls in the same order. identity: of the run (`read_identity`), which a
    start compares with its own. Attributes as those of `Checkpointer`."""

    kind = "in-memory checkpoint"

    def __init__(self, nodes: MemoryNodes, config: CheckpointConfig, identity: str | None):
        if nodes.leads:
            make_private_folder(nodes.folder)
        super().__init__(nodes.folder, config)
        self.nodes, self.identity, self.waited = nodes, identity, False
        self._copies = pair_ranks(nodes.nodes)

    def check_memory(self, tensors: dict[str, Tensor | Fragment], world: World) -> None:
        """Raises `ConfigError` on all ranks if a node has too little memory for two in-memory checkpoints at a time:
        the newest one stays until the next one is complete. All ranks call it together."""
        size = sum(part.local.nbytes for part in self._own_parts(tensors).values())
        everyone = world.gather((size, shutil.disk_usage(self.folder).free if self.nodes.leads else 0))
        problems = []
        for ranks in self.nodes.nodes:
            stored = sum(everyone[rank][0] for rank in ranks)
            stored += sum(everyone[source][0] for source, target in self._copies.items() if target in ranks)
            if 2 * stored > (free := everyone[ranks[0]][1]):
                problems.append(
                    f"checkpoint.peer_every={self.config.peer_every} needs {2 * stored / 2**30:.2f} GiB in "
                    f"{self.config.peer_folder} of the node of rank {ranks[0]}, which has {free / 2**30:.2f} GiB free; "
                    "enlarge it (mount -o remount,size=..., docker --shm-size), set checkpoint.peer_folder to another "
                    "memory file system, or set checkpoint.peer_every=0"
                )
        if problems:
            raise ConfigError(problems[:3])

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor | Fragment],
        manifest: dict[str, Any],
        wait: bool = False,
        keep_older: bool = False,
    ) -> None:
        """As `Checkpointer.save`, but `keep_older` changes nothing: memory holds the newest checkpoint alone. Says once
        if training had to wait for the one before."""
        if self.saving and not self.waited and self._rank == 0:
            self.waited = True
            self._messages.append(
                f"checkpoint.peer_every={self.config.peer_every}: at step {step} the in-memory checkpoint before was "
                "still being written, and training waited for it; raise checkpoint.peer_every"
            )
        super().save(step, tensors, {**manifest, "run": self.identity}, wait)

    def close(self, remove: bool = False) -> None:
        """Waits for the last save; with `remove`, the run needs no in-memory checkpoint any more."""
        super().close()
        if remove:
            self.nodes.remove_checkpoints()

    @property
    def _leads(self) -> bool:
        return self.nodes.leads

    def _finish(self, step: int, size: int, seconds: float) -> None:
        self.nodes.remove_checkpoints(step_folder(self.folder, step))

    def _write(
        self, path: Path, parts: dict[str, TensorPart], manifest: dict[str, Any], failure: Exception | None
    ) -> int:
        written = path.with_suffix(".tmp")

        def write() -> RankFiles:
            groups = split_evenly({name: part.local.nbytes for name, part in parts.items()}, WRITERS)
            paths = [written / f"rank-{self._rank:05d}-{number}.bin" for number in range(len(groups))]
            with ThreadPoolExecutor(WRITERS) as pool:
                results = pool.map(write_parts, paths, [{name: parts[name] for name in group} for group in groups])
                entries, stored = {}, {}
                for path, (entry, tensors) in zip(paths, results):
                    entries[path.name] = entry
                    stored |= tensors
            return entries, stored

        def describe() -> tuple[dict[str, Any], list[FileTransfer]] | None:
            if self._rank != 0:
                return None
            transfers = [
                FileTransfer(rank, self._copies[rank], name, entry["bytes"])
                for rank, (entries, _) in enumerate(ranks)
                for name, entry in entries.items()
                if rank in self._copies
            ]
            return {"saved": time.time(), **describe_files(manifest, ranks)}, transfers

        def prepare_copies() -> None:
            allocate_files(transfers, self._rank, written)
            if self._leads:
                write_manifest(written, content)

        self._together(lambda: self._make_folder(written, failure))
        ranks = self._together(write)
        described = self._together(describe)[:1] or [None]
        if self._group is not None:
            dist.broadcast_object_list(described, src=0, group=self._group)
        content, transfers = described[0]
        self._together(prepare_copies)
        self._together(lambda: exchange_files(transfers, self._rank, written, self._group))
        self._together(lambda: publish_checkpoint(written, path) if self._leads else None)
        return sum(file["bytes"] for file in content["files"].values())


class MemoryCheckpoint(NamedTuple):
    """An in-memory checkpoint as one node has it. manifest: digest of that, which is the same on all nodes of one
    checkpoint; files: names of all its files; present: of those that the node has in full; launchers: of the run that
    wrote it."""

    step: int
    manifest: str
    files: frozenset[str]
    present: frozenset[str]
    launchers: frozenset[str]


def list_memory(folder: Path, identity: str | None) -> list[MemoryCheckpoint]:
    """What a node has of the in-memory checkpoints of the run `identity`; others and damaged ones are left out."""
    found = []
    for step, path in list_checkpoints(folder).items() if identity and folder.is_dir() else ():
        try:
            manifest = read_manifest(path)
            digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
        except (DamagedCheckpoint, OSError):
            continue
        if manifest.get("run") == identity:
            files, present = manifest["files"], find_present(path, manifest["files"])
            launchers = frozenset(filter(lambda name: isinstance(name, str), manifest.get("launchers") or ()))
            found.append(MemoryCheckpoint(step, digest, frozenset(files), present, launchers))
    return found


def find_present(path: Path, files: dict[str, Any]) -> frozenset[str]:
    """Those of the `files` of a manifest that the folder `path` has, with the size that they should have."""
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    return frozenset(name for name, entry in files.items() if sizes.get(name) == entry["bytes"])


def choose_newest(listings: Iterable[MemoryCheckpoint]) -> MemoryCheckpoint | None:
    """The newest in-memory checkpoint whose files the nodes have together; None if there is none. listings: of all
    nodes; `present` of the one that is returned: the files of all nodes."""
    together: dict[tuple[int, str], MemoryCheckpoint] = {}
    for listing in listings:
        key = listing.step, listing.manifest
        known = together.get(key, listing)
        together[key] = listing._replace(present=known.present | listing.present)
    whole = [listing for listing in together.values() if listing.present == listing.files]
    return max(whole, key=lambda listing: (listing.step, listing.manifest), default=None)


def find_in_memory(
    nodes: MemoryNodes, identity: str | None, launchers: Sequence[str], any_launch: bool, world: World
) -> tuple[int, Path] | None:
    """The newest in-memory checkpoint of the run: its step, and its folder on this node, which has the manifest from
    then on, but not all files (`fetch_files`). All ranks call it together.

    identity: of the run. Each rank compares its share of the checksums. Unless `any_launch`,
    only what one of `launchers` has started counts."""
    if not nodes.available:
        return None
    while True:
        everyone = world.gather(list_memory(nodes.folder, identity))
        newest = choose_newest(
            listing
            for listings in everyone
            for listing in listings
            if any_launch or listing.launchers & frozenset(launchers)
        )
        if newest is None:
            return None
        path = step_folder(nodes.folder, newest.step)
        found = [next((listing for listing in listings if listing[:2] == newest[:2]), None) for listings in everyone]
        own = found[nodes.rank]
        mine = sorted(own.present)[nodes.own.index(nodes.rank) :: len(nodes.own)] if own is not None else []
        if not any(world.gather(remove_damaged(path, mine))):
            break
    source = next(rank for rank, listing in enumerate(found) if listing is not None)
    content = [(path / MANIFEST).read_bytes() if nodes.rank == source else b""]
    dist.broadcast_object_list(content, src=source)

    def write_missing_manifest() -> None:
        if nodes.leads and own is None:
            make_private_folder(nodes.folder)
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            (path / MANIFEST).write_bytes(content[0])

    run_together(write_missing_manifest)
    return newest.step, path


def remove_damaged(path: Path, names: Sequence[str]) -> bool:
    """Removes those of the files of the checkpoint `path` that differ from their checksums, since another node may have
    a whole copy. Returns whether there were any."""
    if not names:
        return False
    files = read_manifest(path)["files"]

    def is_damaged(name: str) -> bool:
        try:
            verify_checksums(path, {name: files[name]})
        except DamagedCheckpoint:
            (path / name).unlink()
            return True
        return False

    with ThreadPoolExecutor(WRITERS) as pool:  # hashing releases the GIL
        return any([*pool.map(is_damaged, names)])


def fetch_files(nodes: MemoryNodes, path: Path, tensors: dict[str, Tensor | Fragment], world: World) -> None:
    """Brings the files of the in-memory checkpoint `path` that hold parts of `tensors` to this rank's node, from the
    nodes that have them. All ranks call it together."""
    contents = run_together(lambda: CheckpointContents(path))
    sizes = {name: file["bytes"] for name, file in contents.files.items()}
    needed = run_together(lambda: contents.files_of(tensors))
    everyone = world.gather((needed, find_present(path, contents.files)))
    transfers = []
    for ranks in nodes.nodes:
        for name in sorted(set().union(*(everyone[rank][0] for rank in ranks)) - everyone[ranks[0]][1]):
            source = next((rank for rank, (_, there) in enumerate(everyone) if name in there), None)
            if source is None:
                raise ConfigError(f"{path / name} is on no node any more; start again")
            target = next(rank for rank in ranks if name in everyone[rank][0])
            transfers.append(FileTransfer(source, target, name, sizes[name]))
    run_together(lambda: allocate_files(transfers, nodes.rank, path))
    run_together(lambda: exchange_files(transfers, nodes.rank, path))
