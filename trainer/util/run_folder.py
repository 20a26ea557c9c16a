"""The names of what lies in the folder of a run, where links may not lead out of it, and which runs are meant where
folders are named."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.config import ConfigError
from trainer.util.reading import make_printable

METRICS_FILE, REPLACED, STATUS, LOG = "metrics.jsonl", "metrics-replaced.jsonl", "status.json", "console.log"
STARTS, SETTINGS, EARLIER = "starts.jsonl", "config.yaml", "earlier"
PART = ".part"
"""Ends the names of files and folders that are not complete yet."""
DIAGNOSIS, REPORT, SHORTAGE = "diagnosis.json", "report.html", "out_of_memory.json"
SAMPLES, ACCOUNTS, CHECKPOINTS = "samples.jsonl", "accounts.jsonl", "checkpoints"
RECORD = (METRICS_FILE, REPLACED, SAMPLES, STATUS, SETTINGS, STARTS, LOG, ACCOUNTS, "tokenizer", "schedule")
"""What a run leaves beside its checkpoints, without which nobody knows what they are."""
TRACES = (CHECKPOINTS, *RECORD, DIAGNOSIS, REPORT, SHORTAGE, "traces", "tensorboard", "wandb", "wandb-id")
"""All that a run writes itself. What a launcher writes (slurm, torchrun, flight) tells of every start, and stays."""
RUN_FILES = (METRICS_FILE, STATUS, STARTS)
"""Any of these makes a folder that of a run."""
RESULTS, TRIAL = "results.jsonl", "trial.json"
"""Of a sweep: what became of its trials, and of each, what it was started with."""
TRIALS, SEARCH, BEST = "trials.jsonl", "search.json", "config/best.yaml"
"""Of a search (`trainer tune`): what became of its trials, what is foretold of its plans, the fastest as a recipe."""
WRITTEN = (*TRACES, EARLIER, "flight", "slurm", "torchrun", "preflight", "log.txt", TRIAL)
"""All that is written into a run's folder before and while it trains: by the run, its launcher, and its sweep."""
MANY = (CHECKPOINTS, EARLIER, "wandb")
"""Folders whose own folders are made anew, under names of their own, and never written to again."""


def refuse_links(folder: Path) -> None:
    """Raises `ConfigError` where a link in a run's folder would have a start write, move or delete something elsewhere.

    `folder` itself may be a link. So may `checkpoints`, which users put on another disk, where it leads to a folder of
    the user's that is not in the folder of another run. What lies in earlier runs and in checkpoints is not looked
    at. Raises `OSError` where a folder cannot be listed."""
    home, checkpoints = os.path.realpath(folder), os.path.realpath(folder / CHECKPOINTS)
    inside = [home]
    if (folder / CHECKPOINTS).is_symlink() and _may_hold_checkpoints(checkpoints):
        inside.append(checkpoints)
    links = [link for name in WRITTEN for link in _links(folder / name, deep=name not in MANY)]
    problems = [
        f"run.dir={folder} holds {link.relative_to(folder)}, a link to {target} outside of it, where this run would "
        "write: remove the link, or set another run.dir"
        for link, target in zip(links, map(os.path.realpath, links))
        if not any(os.path.commonpath([target, place]) == place for place in inside)
    ]
    if problems:
        raise ConfigError(problems[:5])


def _may_hold_checkpoints(target: str) -> bool:
    """Whether `checkpoints` of a run may be a link to this place."""
    try:
        mine = os.stat(target).st_uid == os.geteuid() or os.geteuid() == 0  # root uses folders of all users
    except OSError:
        return False
    around = [Path(target), *Path(target).parents[:2]]
    return mine and os.path.isdir(target) and not any((place / name).exists() for place in around for name in RUN_FILES)


def _links(path: Path, deep: bool) -> Iterator[Path]:
    """The symbolic links at a path and below. Not deep: of the folders in a folder only those that were being written
    when a start ended."""
    if path.is_symlink():
        yield path
    elif path.is_dir():
        found = list[Path]()
        with contextlib.suppress(FileNotFoundError):  # another node has removed it meanwhile
            found = sorted(path.iterdir())
        for inner in found:
            if inner.is_symlink() or deep or inner.suffix == PART:
                yield from _links(inner, True)


def label_runs(folders: Sequence[Path]) -> list[str]:
    """A short name for each run: the fewest trailing parts of the paths that make all names different."""
    paths = [(folder.parent if folder.is_file() else folder).resolve() for folder in folders]
    parts = [tuple(map(make_printable, path.parts)) for path in paths]
    for length in range(1, max(map(len, parts))):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def holds_trials(folder: Path) -> bool:
    """Whether a folder is that of a sweep or a search, which may have begun just now."""
    return any((folder / name).exists() for name in (RESULTS, TRIALS, SEARCH)) or any(folder.glob(f"*/{TRIAL}"))


def of_sweeps(folders: Sequence[Path], wrote: Sequence[str] = (METRICS_FILE,)) -> list[Path]:
    """The folders, with the trials that have written one of these files in place of those of sweeps and searches."""
    trials = {
        folder: sorted({path.parent for name in wrote for path in folder.glob(f"*/{name}")})
        for folder in folders
        if holds_trials(folder)
    }
    return [run for folder in folders for run in trials.get(folder) or [folder]]
