"""What a page is about: runs, and the sweeps and searches whose trials they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.config import ConfigError
from trainer.pages.folder import RunFolder
from trainer.pages.sweeps import SweepFolder
from trainer.planning.estimate.hardware import load_hardware
from trainer.util.run_folder import RUN_FILES, STARTS, holds_trials, label_runs, of_sweeps
from trainer.util.tables import format_number

HARDWARE = (
    "a file of configs/hardware or its path, such as one that trainer probe wrote, whose peaks the kernels are "
    "held against; '': that of the device"
)
"""What the option of commands means."""


class PageRuns:
    """Runs as they stand in folders, each one of a run, a sweep or a search (`trainer.tune`), whose trials count as
    runs. `read` looks again, also for trials that have begun since.

    hardware: see `RunFolder`. Raises `ConfigError` for one that cannot be read."""

    def __init__(self, folders: Sequence[Path], hardware: str = ""):
        if hardware:
            load_hardware(hardware)
        self.folders, self.hardware = folders, hardware
        self.runs: list[RunFolder] = []
        self.sweeps: list[SweepFolder] = []

    def read(self) -> bool:
        """Reads what is new, and says whether anything is."""
        before = self.runs, self.sweeps
        runs, sweeps = ({one.folder: one for one in known} for known in before)
        found = [folder for folder in of_sweeps(self.folders, RUN_FILES) if not holds_trials(folder)]
        self.runs = [runs.get(folder) or RunFolder("", folder, self.hardware) for folder in found]
        self.sweeps = [sweeps.get(folder) or SweepFolder(folder) for folder in self.folders if holds_trials(folder)]
        for run, label in zip(self.runs, label_runs(found) if found else ()):
            run.label = label
        changed = [one.read() for one in (*self.runs, *self.sweeps)]
        return any(changed) or before != (self.runs, self.sweeps)

    @property
    def single(self) -> RunFolder | None:
        """The run of a page that is about one alone."""
        return self.runs[0] if len(self.runs) == 1 and not self.sweeps else None

    @property
    def title(self) -> str:
        if self.single:
            return self.single.label
        if len(self.folders) == len(self.sweeps) == 1:
            return f"{self.folders[0].resolve().name}: {format_number(len(self.runs), 'trial')}"
        return f"{len(self.runs)} runs compared"


def open_folders(folders: Sequence[Path], hardware: str = "") -> PageRuns:
    """What stands in these folders, read. Raises `ConfigError` for a folder of which there is nothing to show."""
    shown = PageRuns(folders, hardware)
    shown.read()
    if wrong := [run for run in shown.runs if not run.exists]:
        raise ConfigError(
            [
                f"{run.folder}: no run has written there (no {STARTS}); give a run folder like runs/NAME, or that of a "
                "sweep or a search"
                for run in wrong
            ]
        )
    return shown
