"""The names of what lies in the folder of a run, and which runs are meant where folders are named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

METRICS_FILE, REPLACED, STATUS, LOG = "metrics.jsonl", "metrics-replaced.jsonl", "status.json", "console.log"
STARTS, SETTINGS, EARLIER = "starts.jsonl", "config.yaml", "earlier"
DIAGNOSIS, REPORT, SHORTAGE = "diagnosis.json", "report.html", "out_of_memory.json"


def labels(folders: Sequence[Path]) -> list[str]:
    """A short name for each run: the fewest trailing parts of the paths that make all names different."""
    parts = [(folder.parent if folder.is_file() else folder).resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts))):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def of_sweeps(folders: Sequence[Path]) -> list[Path]:
    """The folders, with the trials that have trained in place of a sweep's."""
    sweeps = [folder for folder in folders if (folder / "results.jsonl").exists()]
    trials = {folder: [path.parent for path in sorted(folder.glob(f"*/{METRICS_FILE}"))] for folder in sweeps}
    return [run for folder in folders for run in trials.get(folder) or [folder]]
