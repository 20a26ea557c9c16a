"""Which checkpoints stay, and which one a run resumes from.

Everything here runs on rank 0 alone. A checkpoint is renamed to `.tmp` before it is deleted, so that a crash never
leaves half a checkpoint that looks whole. What cannot be removed is reported and passed over."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

from trainer.checkpointing.manifest import DamagedCheckpoint, list_checkpoints, verify_checkpoint
from trainer.config import CheckpointConfig, ConfigError
from trainer.util.objects import is_url


def steps_to_keep(steps: Sequence[int], saved: int, keep_last: int, keep_every: int) -> set[int]:
    """Steps whose checkpoints stay: the `keep_last` newest (0: all), multiples of `keep_every` (0: none), and the one
    just written, `saved`.

    At least one older than `saved` stays too, if there is one: a finite step followed it, so it is known to be good,
    which is not known of `saved` yet. steps: newest first."""
    newest = steps[:keep_last] if keep_last else steps
    milestones = {step for step in steps if keep_every and step % keep_every == 0}
    older = [step for step in steps if step < saved][:1]
    return {saved, *newest, *older} | milestones


def prune_checkpoints(folder: Path, saved: int, config: CheckpointConfig, spared: Set[int] = frozenset()) -> list[str]:
    """Deletes the checkpoints in `folder` that `config` does not keep, after that of step `saved` was written, except
    those of the steps `spared`. Returns a message for each that cannot be deleted."""
    if not config.keep_last:
        return []
    checkpoints, messages = list_checkpoints(folder), []
    kept = steps_to_keep([*checkpoints], saved, config.keep_last, config.keep_every)
    for step in checkpoints.keys() - kept - spared:
        try:
            remove_checkpoint(checkpoints[step])
        except OSError as error:
            messages.append(f"the old checkpoint {checkpoints[step]} cannot be removed: {error}")
    return messages


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint, which loses its name first. Raises `OSError` if it cannot be removed."""
    leaving = path.with_suffix(".tmp")
    clear_name(leaving)
    path.rename(leaving)
    remove_entry(leaving)


def remove_entry(path: Path) -> None:
    """Removes a folder with all that is in it, or a file, if it is there. Raises `OSError` if it cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_name(path: Path) -> None:
    """Makes sure that nothing has the name `path`: removes what has it, or renames it to another name of a leftover if
    it cannot be removed. Raises `OSError` if neither is possible."""
    try:
        remove_entry(path)
    except OSError:
        names = (path.with_name(f"{path.stem}.{number}.tmp") for number in itertools.count(1))
        path.rename(next(name for name in names if not os.path.lexists(name)))


def publish_checkpoint(written: Path, path: Path) -> None:
    """Gives the complete folder `written` its final name `path`.

    An older checkpoint of that name is renamed to `.replaced`, which still counts as a checkpoint, and deleted after
    the new one has the name. A crash between the two renames loses neither."""
    aside = path.with_suffix(".replaced")
    if path.exists():
        clear_name(aside)
        path.rename(aside)
    written.rename(path)
    sync_folder(path.parent)
    with contextlib.suppress(OSError):  # the next start tries again
        remove_entry(aside)


def remove_leftovers(folder: Path) -> list[str]:
    """Clears `folder` of what a crash left: what was being written, deleted or replaced. Returns a message for each
    leftover that cannot be removed; a start passes it over.

    To be called before later checkpoints are set aside: a `.replaced` beside its checkpoint is a leftover, but would
    count as a checkpoint without it. It loses this name even if it cannot be removed."""
    messages = []
    for leftover in [*folder.glob("step-*.replaced"), *folder.glob("step-*.tmp")]:
        try:
            if leftover.suffix == ".tmp":
                remove_entry(leftover)
            elif os.path.lexists(leftover.with_suffix("")):
                remove_checkpoint(leftover)
        except OSError as error:
            messages.append(
                f"passing over {leftover}, which an earlier start left and which cannot be removed: {error}"
            )
    return messages


def sync_folder(folder: Path) -> None:
    """Syncs `folder`, so that files created or renamed in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class OtherPlace(Protocol):
    """Where there are checkpoints that the folder of a run may lack; `remote.StoreAtStart`. fetched: from there, and
    compared with their checksums."""

    fetched: set[Path]

    def merge(self, checkpoints: dict[int, Path]) -> dict[int, Path]: ...
    def read_manifest(self, path: Path) -> dict[str, Any]: ...
    def fetch(self, path: Path) -> None: ...
    def find_url(self, url: str) -> tuple[Path, list[str]]: ...


def list_everywhere(folder: Path, store: OtherPlace | None) -> dict[int, Path]:
    """`list_checkpoints`, with what only the store has."""
    return store.merge(list_checkpoints(folder)) if store is not None else list_checkpoints(folder)


def find_newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint in `folder` with the most steps of those that are whole, and a warning for each damaged one that
    was passed over."""
    path, damages = find_whole(list_checkpoints(folder).values())
    return path, describe_damages(damages)


def find_whole(paths: Iterable[Path], store: OtherPlace | None = None) -> tuple[Path | None, dict[Path, str]]:
    """The first of some checkpoints that is whole, and what is wrong with those before it. Where one is missing
    or damaged and the store has it, `store.fetch` interrupts the search."""
    damages: dict[Path, str] = {}
    for path in paths:
        try:
            try:
                verify_checkpoint(path, store is None or path not in store.fetched)
            except DamagedCheckpoint:
                if store is not None:
                    store.fetch(path)
                raise
            return path, damages
        except DamagedCheckpoint as damage:
            damages[path] = str(damage)
    return None, damages


def describe_damages(damages: dict[Path, str]) -> list[str]:
    """A warning for each damaged checkpoint that is passed over."""
    return [f"passing over the damaged checkpoint {path}: {damage}" for path, damage in damages.items()]


def choose_whole(
    setting: str, checkpoints: dict[int, Path], proven: int | None = None, store: OtherPlace | None = None
) -> tuple[Path | None, list[str]]:
    """The first of `checkpoints` (by step, the newest first) that is whole, with a warning for each before it; None
    where there are none. Raises `ConfigError` where there are some and all are damaged: a run that began anew would
    hide the loss.

    setting: of checkpoint.resume, for the message. proven: checkpoints of later steps are taken only if there is no
    other; None: there is no such limit."""
    good = [path for step, path in checkpoints.items() if proven is None or step <= proven]
    others = [path for path in checkpoints.values() if path not in good]
    path, damages = find_whole([*good, *others], store)
    if path is None and damages:
        raise ConfigError(
            f"checkpoint.resume={setting}: no checkpoint in {next(iter(damages)).parent} is whole "
            f"({'; '.join(f'{damaged.name}: {damage}' for damaged, damage in damages.items())}); restore one, set "
            "checkpoint.resume to the path of another, or set checkpoint.resume=none to begin anew, which sets what is "
            "in run.dir aside"
        )
    return path, describe_damages(damages)


def find_resume(
    setting: str, folder: Path, proven: int | None = None, store: OtherPlace | None = None
) -> tuple[Path | None, list[str]]:
    """What `checkpoint.resume` means for a run whose checkpoints lie in `folder`, with warnings to print.

    `auto` gives the newest whole checkpoint, or None if there is none at all; `none` gives None. Anything else is the
    path of a checkpoint or of a run's folder. ConfigError is raised if a path holds no whole checkpoint, and for `auto`
    if `folder` has checkpoints and all of them are damaged. proven: for `auto`, as in `choose_whole`. store: may have
    more of them; it is needed for a URL."""
    if setting == "none":
        return None, []
    if setting == "auto":
        return choose_whole(setting, list_everywhere(folder, store), proven, store)
    if store is not None and is_url(setting):
        return store.find_url(setting)
    path = Path(setting).expanduser()
    if (path / "checkpoints").is_dir():  # a run's folder stands for its newest whole checkpoint
        newest, warnings = choose_whole(setting, list_checkpoints(path / "checkpoints"))
        if newest is not None:
            return newest, warnings
    try:
        if not path.is_dir():
            raise DamagedCheckpoint("there is no such folder")
        verify_checkpoint(path, checksums=True)
    except DamagedCheckpoint as damage:
        choices = (find_newest(parent)[0] for parent in dict.fromkeys((path.parent, folder)))
        newest = next(filter(None, choices), None)
        way_out = (
            f"the newest whole checkpoint is {newest}: set checkpoint.resume={newest}"
            if newest
            else "no other whole checkpoint was found: set checkpoint.resume=none to begin anew, which sets what is "
            "in run.dir aside"
        )
        raise ConfigError(f"checkpoint.resume={setting}: {damage}; {way_out}") from None
    return path, []
