"""Which checkpoints stay, and which one a run resumes from.

Everything here runs on rank 0 alone. A checkpoint is renamed to `.tmp` before it is deleted, so that a crash never
leaves half a checkpoint that looks whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from trainer.checkpointing.files import DamagedCheckpoint
from trainer.checkpointing.manifest import list_checkpoints, verify
from trainer.config import CheckpointConfig, ConfigError


def steps_to_keep(steps: Sequence[int], saved: int, keep_last: int, keep_every: int) -> set[int]:
    """Steps whose checkpoints stay: the `keep_last` newest (0: all) and multiples of `keep_every` (0: none).

    steps: newest first, by the time of saving. saved: the one just written; it stays even where clocks make it look
    old, since it is known to be valid."""
    newest = steps[:keep_last] if keep_last else steps
    milestones = {step for step in steps if keep_every and step % keep_every == 0}
    return {saved, *newest} | milestones


def prune(folder: Path, saved: int, config: CheckpointConfig) -> None:
    """Deletes the checkpoints in `folder` that `config` does not keep, after that of step `saved` was written."""
    if not config.keep_last:
        return
    checkpoints = list_checkpoints(folder)
    for step in checkpoints.keys() - steps_to_keep([*checkpoints], saved, config.keep_last, config.keep_every):
        leaving = checkpoints[step].with_suffix(".tmp")
        shutil.rmtree(leaving, ignore_errors=True)
        checkpoints[step].rename(leaving)
        shutil.rmtree(leaving)


def publish(written: Path, path: Path) -> None:
    """Gives the complete folder `written` its final name `path`.

    An older checkpoint of that name is renamed to `.replaced`, which still counts as a checkpoint, and deleted after
    the new one has the name. A crash between the two renames loses neither."""
    aside = path.with_suffix(".replaced")
    if path.exists():
        path.rename(aside)
    written.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Clears `folder` of what a crash left: folders that were being written, deleted or replaced."""
    replaced = [path for path in folder.glob("step-*.replaced") if path.with_suffix("").exists()]
    for leftover in [*folder.glob("step-*.tmp"), *replaced]:
        shutil.rmtree(leftover)


def sync_folder(folder: Path) -> None:
    """Syncs `folder`, so that files created or renamed in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_newest(folder: Path, verify_files: bool) -> tuple[Path | None, list[str]]:
    """The checkpoint in `folder` that was saved last of those that are whole, and a warning for each damaged one that
    was passed over."""
    warnings = []
    for path in list_checkpoints(folder).values():
        try:
            verify(path, verify_files)
            return path, warnings
        except DamagedCheckpoint as damage:
            warnings.append(f"passing over the damaged checkpoint {path}: {damage}")
    return None, warnings


def find_resume(setting: str, folder: Path, verify_files: bool) -> tuple[Path | None, list[str]]:
    """What `checkpoint.resume` means for a run whose checkpoints lie in `folder`, with warnings to print.

    `auto` gives the newest whole checkpoint, or None; `none` gives None. Anything else is the path of a checkpoint or
    of a run's folder; ConfigError is raised where it holds no whole checkpoint."""
    if setting == "none":
        return None, []
    if setting == "auto":
        return find_newest(folder, verify_files)
    path = Path(setting).expanduser()
    if (path / "checkpoints").is_dir():  # a run's folder stands for its newest whole checkpoint
        newest, warnings = find_newest(path / "checkpoints", verify_files)
        if newest is not None:
            return newest, warnings
    try:
        if not path.is_dir():
            raise DamagedCheckpoint("there is no such folder")
        verify(path, verify_files)
    except DamagedCheckpoint as damage:
        choices = (find_newest(parent, verify_files)[0] for parent in dict.fromkeys((path.parent, folder)))
        newest = next(filter(None, choices), None)
        way_out = (
            f"the newest whole checkpoint is {newest}: set checkpoint.resume={newest}"
            if newest
            else "no other whole checkpoint was found: set checkpoint.resume=none to begin anew, which sets what is "
            "in run.dir aside"
        )
        raise ConfigError(f"checkpoint.resume={setting}: {damage}; {way_out}") from None
    return path, []
