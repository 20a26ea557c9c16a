"""Copies of a run's checkpoints in an object store (`checkpoint.upload`).

`URL/step-00000100/` holds the files of one checkpoint. Its manifest is uploaded last and removed first: a folder
without a manifest is no checkpoint. A start that goes on from an earlier step moves later checkpoints to
`URL/earlier/TIME/`, as it does in the run folder."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.checkpointing.loading import SaveFailed, run_on_ranks
from trainer.checkpointing.manifest import (
    FILE_NAME,
    MANIFEST,
    DamagedCheckpoint,
    list_checkpoints,
    read_manifest,
    step_folder,
    verify_checkpoint,
    verify_checksums,
)
from trainer.checkpointing.retention import clear_name, find_whole, publish_checkpoint, steps_to_keep, sync_folder
from trainer.config import CheckpointConfig, ConfigError
from trainer.distributed.mesh import World
from trainer.util.objects import ObjectStore, StoredObject, StoreDown, hide_secrets, transfer_all
from trainer.util.reading import explain_errors

SETTING = "checkpoint.upload"
UPLOAD_TIMEOUT = timedelta(hours=12)
"""Of the ranks that wait for the slowest upload. A dead rank does not take this long: its connections break at once."""

END_WAIT = 1800.0
"""Seconds that the end of a run waits for the upload of its last checkpoint."""

Files = dict[str, StoredObject]


class StoredCheckpoints:
    """The checkpoints under a URL. setting: has the URL, for messages."""

    def __init__(self, url: str, setting: str = SETTING):
        self.url, self.setting = url.rstrip("/"), setting
        self.store = ObjectStore(setting, self.url)
        if self.store.pattern is not None:
            raise ConfigError(f"{self.store.named} is a pattern; name one folder")
        self.store.prefix = "step-"  # of `earlier/` nothing is listed

    def list_folders(self) -> dict[int, Files]:
        """What lies in the folders of steps, complete or not, the latest step first."""
        found: dict[int, Files] = {}
        for one in self.store.list():
            inner = one.name.removeprefix(self.store.root + "/")
            if (match := re.fullmatch(r"step-(\d{8,})/([^/]+)", inner)) and FILE_NAME.fullmatch(match[2]):
                found.setdefault(int(match[1]), {})[match[2]] = one
        return dict(sorted(found.items(), reverse=True))

    def list_complete(self) -> dict[int, Files]:
        """The objects of each checkpoint, the latest step first."""
        return {step: files for step, files in self.list_folders().items() if MANIFEST in files}

    def object_name(self, step: int, name: str) -> str:
        return f"{self.store.root}/{step_folder(Path(), step)}/{name}"

    def fetch_manifest(self, files: Files, folder: Path) -> dict[str, Any]:
        """Downloads the manifest of a checkpoint into `folder`, and returns what it says."""
        folder.mkdir(parents=True, exist_ok=True)
        self.store.fetch(files[MANIFEST], folder / MANIFEST)
        return read_manifest(folder)

    def remove(self, files: Files) -> None:
        """Removes a checkpoint, of which the manifest goes first."""
        if MANIFEST in files:
            self.store.remove([files[MANIFEST].name])
        self.store.remove(one.name for name, one in files.items() if name != MANIFEST)

    def set_aside(self, after: int) -> str | None:
        """Moves what there is of steps after `after` to `earlier/`. Returns the URL of that, or None. Nothing is
        removed before all of it has been copied."""
        later = [files for step, files in self.list_folders().items() if step > after]
        if not later:
            return None
        root, place = self.store.root, f"earlier/{time.strftime('%Y%m%d-%H%M%S')}"

        def copy(one: StoredObject) -> None:
            self.store.copy(one.name, f"{root}/{place}/{one.name.removeprefix(root + '/')}")

        transfer_all(copy, [one for files in later for one in files.values()])
        for files in later:
            self.remove(files)
        return f"{self.url}/{place}"


class FetchNeeded(Exception):
    """A start has to fetch a checkpoint before it can decide. All ranks then call `fetch_together`.

    place: setting and URL of where it lies. files: its objects. target: the folder that it becomes."""

    def __init__(self, place: tuple[str, str], files: Files, target: Path):
        super().__init__(place, files, target)
        self.place, self.files, self.target = place, files, target

    def fetch_together(self, world: World) -> str | None:
        """Downloads the checkpoint, each rank its share, compares checksums, and gives it its name. Returns what is
        wrong with it, or None. Raises `ConfigError` on all ranks where the store or the disk fails."""
        setting, url = self.place
        stored, target, written = StoredCheckpoints(url, setting), self.target, self.target.with_suffix(".tmp")

        def fetch_manifest() -> dict[str, Any]:
            clear_name(written)
            wanted = stored.fetch_manifest(self.files, written)["files"]
            if lacking := sorted(wanted.keys() - self.files.keys()):
                raise DamagedCheckpoint(f"{written / lacking[0]} is missing")
            return wanted

        def fetch_share() -> None:
            mine = {name: wanted[name] for name in sorted(wanted)[world.rank :: world.size]}
            transfer_all(lambda name: stored.store.fetch(self.files[name], written / name), mine)
            verify_checksums(written, mine)

        def publish() -> None:
            verify_checkpoint(written, checksums=False)
            sync_folder(written)
            publish_checkpoint(written, target)

        try:
            with explain_errors(target.parent):
                wanted = world.agree(fetch_manifest)
                world.together(fetch_share)
                world.agree(publish)
        except DamagedCheckpoint as damage:
            return str(damage).replace(str(written), f"{stored.url}/{target.name}")
        return None


class StoreAtStart:
    """What the stores of a configuration add to the checkpoints of a run's `folder`, when rank 0 looks for one to start
    from. notes: messages for the log. fetched: what `FetchNeeded` has brought and compared with its checksums.

    Raises `ConfigError` where `checkpoint.upload` cannot be read and written, unless the store is only down and
    `folder` has checkpoints, which are rarely older than those of the store."""

    def __init__(self, config: CheckpointConfig, folder: Path):
        self.folder, self.notes = folder, list[str]()
        self.fetched, self.damaged = set[Path](), dict[Path, str]()
        self.own = StoredCheckpoints(config.upload) if config.upload else None
        self.found: dict[int, Files] = {}
        self.foreign: dict[str, tuple[StoredCheckpoints, dict[int, Files]]] = {}
        try:
            if self.own:
                self.found = self.own.list_complete()
                self.own.store.put_bytes(b"", f"{self.own.store.root}/.writable")  # raises where nothing can be written
        except StoreDown as error:
            if not list_checkpoints(folder):
                raise ConfigError(f"{error}, or set {SETTING}=null to start without it") from None
            self.notes = [f"{error}; the checkpoints in {folder} are taken"]

    def merge(self, checkpoints: dict[int, Path]) -> dict[int, Path]:
        """`checkpoints` of the folder and those of the store, by step, the latest first. What only the store has gets
        the path that it will have."""
        both = {step: step_folder(self.folder, step) for step in self.found} | checkpoints
        return dict(sorted(both.items(), reverse=True))

    def read_manifest(self, path: Path) -> dict[str, Any]:
        """The manifest of a checkpoint of `merge`."""
        if path.exists() or self.own is None:
            return read_manifest(path)
        return self.own.fetch_manifest(self.found[step_of(path)], path.with_suffix(".manifest.tmp"))

    def fetch(self, path: Path) -> None:
        """Has a checkpoint of `merge` that is missing or damaged on the disk fetched, by raising `FetchNeeded`, if the
        store has it. Raises `DamagedCheckpoint` where it is damaged there, too."""
        files = self.found.get(step_of(path))
        if files is not None and self.own is not None and not path.suffix:
            self._need(self.own, files, path)

    def _need(self, stored: StoredCheckpoints, files: Files, target: Path) -> None:
        if target in self.damaged:
            raise DamagedCheckpoint(self.damaged[target])
        raise FetchNeeded((stored.setting, stored.url), files, target)

    def note(self, need: FetchNeeded, damage: str | None) -> None:
        """Notes the result of a fetch."""
        if damage is not None:
            self.damaged[need.target] = damage
        else:
            self.fetched.add(need.target)
            self.notes.append(f"fetched {need.place[1]}/{need.target.name}")

    def find_url(self, url: str) -> tuple[Path, list[str]]:
        """The checkpoint that `checkpoint.resume` names by a URL: of one, or of the folder that holds them, of which
        the newest whole one is taken. With a warning for each damaged one before it.

        That of another run gets a name in `folder` that the next start removes."""
        url = url.rstrip("/")
        place, _, name = url.rpartition("/")
        single = re.fullmatch(r"step-(\d{8,})", name)
        place = place if single else url
        own = self.own is not None and place == self.own.url
        if not own and place not in self.foreign:
            stored = StoredCheckpoints(place, "checkpoint.resume")
            self.foreign[place] = stored, stored.list_complete()
        found = self.found if own else self.foreign[place][1]
        damages: dict[str, str] = {}
        for step in [int(single[1])] if single else found:
            path, there = step_folder(self.folder, step), f"{place}/{step_folder(Path(), step)}"
            target = path if own else path.with_suffix(".fetched.tmp") / path.name
            try:
                if step not in found:
                    raise DamagedCheckpoint("there is no complete checkpoint")
                if own:
                    whole, wrong = find_whole([path], self)
                    if whole is None:
                        raise DamagedCheckpoint(wrong[path])
                elif target not in self.fetched:
                    self._need(self.foreign[place][0], found[step], target)
                return target, [f"passing over the damaged checkpoint {one}: {text}" for one, text in damages.items()]
            except DamagedCheckpoint as damage:
                damages[there] = str(damage)
        others = [there for step in found if (there := f"{place}/{step_folder(Path(), step)}") not in damages]
        wrong = "; ".join(f"{one}: {text}" for one, text in damages.items())
        raise ConfigError(
            f"checkpoint.resume={url} holds no whole checkpoint{f' ({wrong})' if wrong else ''}; set checkpoint.resume "
            f"to {others[0] if others else 'the path or URL of another'}, or to none"
        )


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.stem.removeprefix("step-"))


class CheckpointUploader:
    """Copies the complete checkpoints of `folder` to `config.upload` in the background, and removes there what `config`
    does not keep.

    Every rank constructs it, after the process group exists, and makes the same calls in the same order. Each rank
    uploads the files that it wrote; rank 0 adds the manifest when all are there. What fails is told, and tried again
    after the next checkpoint. If several checkpoints become complete during an upload, those that are still kept on
    disk follow, the newest first. spared: steps that must stay on disk for the moment, on rank 0; `lock` guards it.
    failure: why the newest checkpoint is not in the store, or None, on rank 0."""

    def __init__(self, folder: Path, config: CheckpointConfig):
        self.folder, self.config = folder, config
        self.stored = StoredCheckpoints(config.upload or "")
        self.lock, self.spared = threading.Lock(), set[int]()
        self.failure: str | None = None
        self.messages: deque[str] = deque()
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        self._group = None
        if distributed:
            self._group = dist.new_group(backend="gloo", timeout=UPLOAD_TIMEOUT, group_desc="upload")
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._keep_older, self._closed = False, False
        self._aside: int | None = None
        self._refused: set[int] = set()
        self._thread: threading.Thread | None = None

    def begin_run(self, step: int) -> None:
        """Before the first checkpoint of a start that goes on from `step`, or from none of this run's (-1): sets later
        ones in the store aside. If this fails, it is tried again before the first upload."""
        self._aside = step
        if self._rank == 0:
            try:
                self._set_aside()
            except ConfigError as error:
                self.messages.append(f"{error}; what an earlier run left there is set aside with the first upload")

    def begin(self, keep_older: bool = False) -> None:
        """Uploads what is new in `folder`. keep_older: removes nothing from the store."""
        with self._changed:
            self._asked, self._keep_older = self._asked + 1, keep_older
            self._changed.notify_all()
            if self._thread is None:
                # A daemon: a process that fails must be able to end while a store does not answer.
                self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
                self._thread.start()

    def finish(self, alive: Callable[[], None], seconds: float = END_WAIT) -> None:
        """Uploads what is not there yet, and waits up to so many seconds for it. `alive` is called every second."""
        self.begin(keep_older=self._keep_older)
        until = time.monotonic() + seconds
        with self._changed:
            while self._done < self._asked and time.monotonic() < until:
                alive()
                self._changed.wait(1.0)
            late = self._done < self._asked
        if late and self._rank == 0:
            self._fail(f"{self.stored.store.named}: the last upload was not complete after {seconds:.0f} s")

    def close(self) -> None:
        """Ends the thread, unless it is still waiting for a store."""
        with self._changed:
            idle, self._closed = self._done >= self._asked, True
            self._changed.notify_all()
        if idle and self._thread is not None:
            self._thread.join()
        if idle and self._group is not None:
            dist.destroy_process_group(self._group)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._asked > self._done)
                if self._asked <= self._done:
                    return
            try:
                done = self._upload_new()
            except Exception as error:  # such as a broken connection to another rank, which ends the run elsewhere
                self._fail(f"{self.stored.store.named}: uploads have ended: {hide_secrets(str(error))}")
                done = self._asked
            with self._changed:
                self._done = max(self._done, done)
                self._changed.notify_all()

    def _upload_new(self) -> int:
        """Uploads each checkpoint that `config` keeps and that the store lacks. Returns the number of calls of `begin`
        that are done with it, by rank 0's count: other ranks may be a call ahead or behind."""
        answer = [self._choose()] if self._rank == 0 else [None]
        if self._group is not None:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        asked, steps = answer[0]
        for step, names in steps:
            started = time.perf_counter()
            try:
                run_on_ranks(lambda: self._put_files(step, names), self._group)
                size = sum(run_on_ranks(lambda: self._put_manifest(step) if self._rank == 0 else 0, self._group))
            except SaveFailed as error:
                # A failing store takes time: the others wait for the next save, too. A checkpoint that is gone only
                # served to rebuild the run.
                if self._rank == 0 and step_folder(self.folder, step).exists():
                    self._fail(f"the checkpoint of step {step} could not be uploaded: {hide_secrets(str(error))}")
                break
            if self._rank == 0:
                text = f"{size / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s"
                self.messages.append(f"uploaded {self.stored.url}/{step_folder(Path(), step)}: {text}")
        if self._rank == 0:
            with self.lock:
                self.spared = set()
            if steps and not self._keep_older and self.config.keep_last:
                self._remove_old()
        return asked

    def _choose(self) -> tuple[int, list[tuple[int, list[str]]]]:
        """The number of calls of `begin` so far; and what to upload, the newest first: steps with names of files."""
        with self._changed:
            asked = self._asked
        chosen: list[tuple[int, list[str]]] = []
        self.failure = None
        try:
            self._set_aside()
            folders = self.stored.list_folders()
            with self.lock:  # so that nothing chosen is removed meanwhile
                local = list_checkpoints(self.folder)
                kept = steps_to_keep([*local], max(local, default=0), self.config.keep_last, self.config.keep_every)
                for step, path in local.items():
                    if step in kept and MANIFEST not in folders.get(step, {}) and step not in self._refused:
                        try:
                            chosen.append((step, sorted(verify_checkpoint(path, checksums=False)["files"])))
                        except DamagedCheckpoint as damage:
                            self._refused.add(step)
                            self.messages.append(f"the checkpoint {path} is not uploaded: {damage}")
                self.spared = {step for step, _ in chosen}
            for step, _ in chosen:  # of an upload that was cut off
                self.stored.remove(folders.get(step, {}))
        except (ConfigError, OSError) as error:
            self._fail(str(error))
            return asked, []
        return asked, chosen

    def _put_files(self, step: int, names: list[str]) -> None:
        """Uploads the files of a checkpoint that this rank wrote. Those of an earlier start are shared out."""
        written = (int(found[1]) if (found := re.match(r"rank-(\d{1,9})", name)) else 0 for name in names)
        mine = [name for name, rank in zip(names, written) if rank % self._ranks == self._rank]
        path = step_folder(self.folder, step)
        transfer_all(lambda name: self.stored.store.put(path / name, self.stored.object_name(step, name)), mine)

    def _put_manifest(self, step: int) -> int:
        """Makes the uploaded files a checkpoint. Returns its size in bytes."""
        path, there = step_folder(self.folder, step), self.stored.list_folders().get(step, {})
        files = read_manifest(path)["files"]
        for name, entry in files.items():
            if name not in there or there[name].size != entry["bytes"]:
                raise StoreDown(f"{self.stored.url}/{path.name}/{name} did not arrive whole")
        self.stored.store.put(path / MANIFEST, self.stored.object_name(step, MANIFEST))
        return sum(entry["bytes"] for entry in files.values())

    def _remove_old(self) -> None:
        """Removes the checkpoints that `config` does not keep, and what uploads that were cut off have left."""
        try:
            folders = self.stored.list_folders()
            complete = [step for step, files in folders.items() if MANIFEST in files]
            kept = steps_to_keep(complete, max(complete, default=0), self.config.keep_last, self.config.keep_every)
            for step in folders.keys() - (kept & {*complete}):
                self.stored.remove(folders[step])
        except ConfigError as error:
            self.messages.append(f"old checkpoints could not be removed: {error}")

    def _set_aside(self) -> None:
        if self._aside is not None and (place := self.stored.set_aside(self._aside)):
            self.messages.append(f"what an earlier run left in {self.stored.url} is now in {place}")
        self._aside = None

    def _fail(self, text: str) -> None:
        self.failure = self.failure or text  # that of the newest checkpoint comes first
        if self._rank == 0:
            self.messages.append(f"{text}; training goes on, and it is tried again after the next save")
