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

PASSED_OVER = "passing over the damaged checkpoint "


def steps_to_keep(steps: Sequence[int], saved: int, keep_last: int, keep_every: int) -> set[int]:
    """Steps whose checkpoints stay: the `keep_last` newest (0: all), multiples of `keep_every` (0: none), and the one
    just written, `saved`.

    At least one older than `saved` stays too, if there is one: a finite step followed it, so it is known to be good,
    which is not known of `saved` yet. steps: newest first."""
    newest = steps[:keep_last] if keep_last else steps
    milestones = {step for step in steps if keep_every and step % keep_every == 0}
    older = [step for step in steps if step < saved][:1]
    return {saved, *newest, *older} | milestones


def prune(folder: Path, saved: int, config: CheckpointConfig) -> None:
    """Deletes the checkpoints in `folder` that `config` does not keep, after that of step `saved` was written."""
    if not config.keep_last:
        return
    checkpoints = list_checkpoints(folder)
    for step in checkpoints.keys() - steps_to_keep([*checkpoints], saved, config.keep_last, config.keep_every):
        leaving = checkpoints[step].with_suffix(".tmp")
        remove_entry(leaving)
        checkpoints[step].rename(leaving)
        shutil.rmtree(leaving)


def remove_entry(path: Path) -> None:
    """Removes a folder with all that is in it, or a file, if it is there. Raises `OSError` if it cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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


def remove_leftovers(folder: Path) -> list[str]:
    """Clears `folder` of what a crash left: what was being written, deleted or replaced. Returns a message for each
    leftover that cannot be removed; a start passes it over."""
    messages = []
    replaced = [path for path in folder.glob("step-*.replaced") if path.with_suffix("").exists()]
    for leftover in [*folder.glob("step-*.tmp"), *replaced]:
        try:
            remove_entry(leftover)
        except OSError as error:
            messages.append(f"{leftover}, which an earlier start left, cannot be removed: {error.strerror}")
    return messages


def sync_folder(folder: Path) -> None:
    """Syncs `folder`, so that files created or renamed in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_newest(folder: Path, verify_files: bool, last: int | None = None) -> tuple[Path | None, list[str]]:
    """The checkpoint in `folder` with the most steps of those that are whole, and a warning for each damaged one that
    was passed over. last: checkpoints of later steps are not looked at; None: there is no such limit."""
    warnings = []
    for step, path in list_checkpoints(folder).items():
        if last is not None and step > last:
            continue
        try:
            verify(path, verify_files)
            return path, warnings
        except DamagedCheckpoint as damage:
            warnings.append(f"{PASSED_OVER}{path}: {damage}")
    return None, warnings


def find_resume(
    setting: str, folder: Path, verify_files: bool, proven: int | None = None
) -> tuple[Path | None, list[str]]:
    """What `checkpoint.resume` means for a run whose checkpoints lie in `folder`, with warnings to print.

    `auto` gives the newest whole checkpoint, or None if there is none at all; `none` gives None. Anything else is the
    path of a checkpoint or of a run's folder. ConfigError is raised if that holds no whole checkpoint, or if `folder`
    has checkpoints for `auto` and all of them are damaged.

    proven: for `auto`, after steps that were not finite: a checkpoint of a later step is taken only if there is no
    other."""
    if setting == "none":
        return None, []
    if setting == "auto":
        newest, warnings = find_newest(folder, verify_files, proven)
        if newest is None and proven is not None:
            newest, warnings = find_newest(folder, verify_files)
        if newest is None and warnings:
            damaged = "; ".join(text.removeprefix(PASSED_OVER) for text in warnings[:3])
            raise ConfigError(
                f"checkpoint.resume=auto: no checkpoint in {folder} is whole ({damaged}); restore one, "
                "set checkpoint.resume to the path of another, or set checkpoint.resume=none to begin anew, which sets "
                "what is in run.dir aside"
            )
        return newest, warnings
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
