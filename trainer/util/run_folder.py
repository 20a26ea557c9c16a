"""The names of what lies in the folder of a run, and which runs are meant where folders are named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.util.reading import printable

METRICS_FILE, REPLACED, STATUS, LOG = "metrics.jsonl", "metrics-replaced.jsonl", "status.json", "console.log"
STARTS, SETTINGS, EARLIER = "starts.jsonl", "config.yaml", "earlier"
DIAGNOSIS, REPORT, SHORTAGE = "diagnosis.json", "report.html", "out_of_memory.json"
RUN_FILES = (METRICS_FILE, STATUS, STARTS)
"""Any of these makes a folder that of a run."""
RESULTS, TRIAL = "results.jsonl", "trial.json"
"""Of a sweep: what became of its trials, and of each, what it was started with."""
TRIALS, SEARCH, BEST = "trials.jsonl", "search.json", "config/best.yaml"
"""Of a search (`trainer.tune`): what became of its trials, what is foretold of its plans, the fastest as a recipe."""


def labels(folders: Sequence[Path]) -> list[str]:
    """A short name for each run: the fewest trailing parts of the paths that make all names different."""
    paths = [(folder.parent if folder.is_file() else folder).resolve() for folder in folders]
    parts = [tuple(map(printable, path.parts)) for path in paths]
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
