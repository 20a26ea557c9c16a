"""The diagnosis of a run, from what lies in its folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from trainer.diagnosis import account
from trainer.diagnosis.evidence import gather, machine_of
from trainer.diagnosis.verdict import Diagnosis, diagnose
from trainer.observe import metrics
from trainer.observe.nvml import words
from trainer.util.reading import Malformed, read_json
from trainer.util.run_folder import METRICS_FILE, STATUS


def examine(folder: Path, hardware: str = "", config_dir: str | None = None) -> Diagnosis:
    """The diagnosis of a run's folder; hardware and config_dir as for `gather`. Raises `ConfigError` where it has
    neither metrics nor accounts, or damaged ones."""
    accounts, status = account.read(folder), {}
    stalled: list[str] = []
    with contextlib.suppress(OSError, Malformed):
        status = read_json(folder / STATUS, {"status": str, "step": int, "steps": int}, "")
    if (folder / "flight").is_dir():
        from trainer.observe.stalls import last_stall  # needs torch

        stalled = last_stall(folder, machine_of(folder, accounts).processes)
    started = accounts or stalled or status
    records = [] if started and not _logged(folder) else metrics.read(folder)
    throttle = next((record["hardware/throttle"] for record in records[::-1] if record.get("hardware/throttle")), 0)
    return diagnose(gather(folder, records, accounts, status, stalled, words(int(throttle)), hardware, config_dir))


def _logged(folder: Path) -> bool:
    path = folder / METRICS_FILE
    return path.is_file() and path.stat().st_size > 0
