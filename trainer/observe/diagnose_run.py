"""The diagnosis of a run, from what lies in its folder."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

from trainer.diagnosis import oom_report, time_breakdown
from trainer.diagnosis.evidence import ThrottledRank, collect_evidence, machine_of
from trainer.diagnosis.verdict import Diagnosis, diagnose_evidence
from trainer.observe import metrics
from trainer.observe.nvml import throttle_reasons
from trainer.observe.slowdown import throttle_reasons_in, throttled_rank_in
from trainer.util.reading import Malformed, read_json
from trainer.util.run_folder import LOG, METRICS_FILE, STARTS, STATUS

NOW = 20
"""Logged steps, the newest, that tell why clocks are held down now."""

LATEST = 100_000
"""Lines of metrics, the newest, that are looked at: some 300 MiB of memory."""

WRITTEN = (METRICS_FILE, LOG, STATUS, STARTS, time_breakdown.ACCOUNTS, "checkpoints", "traces", "flight")
"""What a run that goes on changes, each now and then."""


def diagnose_run(folder: Path, hardware: str = "", config_dir: str | None = None) -> Diagnosis:
    """The diagnosis of a run's folder; hardware and config_dir as for `collect_evidence`. Raises `ConfigError` where it
    has neither metrics nor accounts, or damaged ones."""
    accounts, status = time_breakdown.read_breakdowns(folder), {}
    stalled: list[str] = []
    with contextlib.suppress(OSError, Malformed):
        status = read_json(folder / STATUS, {"status": str, "step": int, "steps": int}, "")
    if (folder / "flight").is_dir():
        from trainer.observe.stalls import last_stall  # needs torch

        stalled = last_stall(folder, machine_of(folder, accounts).processes)
    started = accounts or stalled or status
    records = [] if started and not _logged(folder) else [*deque(metrics.iterate_metrics(folder), LATEST)]
    newest = [record for record in records if record.get("step_seconds") is not None][-NOW:]
    throttle, lacked, silent = (
        throttle_reasons(throttle_reasons_in(newest)),
        oom_report.read_oom_report(folder),
        seconds_since_write(folder, status),
    )
    known = folder, records, accounts, status, stalled, throttle
    return diagnose_evidence(collect_evidence(*known, hardware, config_dir, lacked, silent, throttled_rank(newest)))


def throttled_rank(newest: Sequence[Mapping[str, Any]]) -> ThrottledRank | None:
    """The rank whose clocks are held down in logged steps, where they say whose."""
    rank, reasons = throttled_rank_in(newest)
    ranks = [int(count) for line in newest if (count := line.get("hardware/throttle_ranks"))]
    return None if rank is None else ThrottledRank(rank, throttle_reasons(reasons), median_low(ranks) if ranks else 1)


def seconds_since_write(folder: Path, status: Mapping[str, Any]) -> float | None:
    """Seconds since a run that says that it goes on has written anything; None of one that does not say so."""
    if status.get("status") != "running":
        return None
    written = [(folder / name).stat().st_mtime for name in WRITTEN if (folder / name).exists()]
    return max(0.0, time.time() - max(written, default=0.0))


def _logged(folder: Path) -> bool:
    path = folder / METRICS_FILE
    return path.is_file() and path.stat().st_size > 0
