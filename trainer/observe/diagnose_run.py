"""The diagnosis of a run, from what lies in its folder."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low, mode
from typing import Any

from trainer.diagnosis import oom_report, time_breakdown
from trainer.diagnosis.evidence import RunEvidence, ThrottledRank, collect_evidence, machine_of
from trainer.diagnosis.verdict import Diagnosis, diagnose_evidence
from trainer.observe import metrics
from trainer.observe.hardware import REASONS, throttle_reasons
from trainer.util.lines import LOG, METRICS_FILE, STARTS, STATUS, read_status
from trainer.util.reading import Malformed, make_printable

NOW = 20
"""Logged steps, the newest, that tell why clocks are held down now."""

LATEST = 100_000
"""Lines of metrics, the newest, that are looked at: some 300 MiB of memory."""

WRITTEN = (METRICS_FILE, LOG, STATUS, STARTS, time_breakdown.ACCOUNTS, "checkpoints", "traces", "flight")
"""What a run that goes on changes, each now and then."""


def diagnose_run(folder: Path, hardware: str = "", config_dir: str | None = None) -> Diagnosis:
    """The diagnosis of a run's folder; hardware and config_dir as for `collect_evidence`. Raises `ConfigError` where it
    has neither metrics nor accounts, or damaged ones."""
    accounts, status = time_breakdown.read_breakdowns(folder), read_status(folder, step=int, steps=int)
    stalled: list[str] = []
    if (folder / "flight").is_dir():
        stalled = last_stall(folder, machine_of(folder, accounts).processes)
    started = accounts or stalled or status
    records = [] if started and not _logged(folder) else [*deque(metrics.iterate_metrics(folder), LATEST)]
    newest = [record for record in records if record.get("step_seconds") is not None][-NOW:]
    known = RunEvidence(
        folder,
        records,
        status=status,
        stalled=stalled,
        throttle=throttle_reasons(throttle_reasons_in(newest)),
        held=throttled_rank(newest),
        shortage=oom_report.read_oom_report(folder),
        silent=seconds_since_write(folder, status),
    )
    return diagnose_evidence(collect_evidence(known, accounts, hardware, config_dir))


def throttle_reasons_in(lines: Sequence[Mapping[str, Any]], key: str = "hardware/throttle") -> int:
    """The reasons for lower clocks that half of the lines have; on any rank, unless `key` says otherwise."""
    bits = [int(line.get(key) or 0) for line in lines]
    often = [bit for bit in REASONS if bits and 2 * sum(bool(some & bit) for some in bits) >= len(bits)]
    return functools.reduce(operator.or_, often, 0)


def throttled_rank(lines: Sequence[Mapping[str, Any]]) -> ThrottledRank | None:
    """The rank whose clocks are held down in half of the lines or more; None where no rank is."""
    ranks = [int(rank) for line in lines if (rank := line.get("hardware/throttle_rank")) is not None]
    if not ranks or 2 * ranks.count(rank := mode(ranks)) < len(lines):
        return None
    own = [line for line in lines if line.get("hardware/throttle_rank") == rank]
    if not (reasons := throttle_reasons_in(own, "hardware/throttle_of_rank")):
        return None
    counts = [int(count) for line in lines if (count := line.get("hardware/throttle_ranks"))]
    return ThrottledRank(rank, throttle_reasons(reasons), median_low(counts or [1]))


def last_stall(folder: Path, size: int) -> list[str]:
    """Where the ranks of a run stood when it stalled, those that held up the others first; empty where the run has gone
    on since, or never stalled. size: processes of the run."""
    from trainer.observe.watchdog import describe_ranks, read_report  # needs torch

    starts = sorted(path for path in (folder / "flight").glob("*") if path.is_dir())
    reports = [path for path in starts[-1].glob("rank-*.json")] if starts else []
    with contextlib.suppress(OSError):
        if reports and (folder / METRICS_FILE).stat().st_mtime > max(path.stat().st_mtime for path in reports):
            return []
    records = {}
    for path in reports:
        if (named := re.fullmatch(r"rank-(\d{1,6})\.json", path.name)) and int(named[1]) < size:
            with contextlib.suppress(OSError, Malformed):
                records[int(named[1])] = read_report(path)
    return [make_printable(text) for text in describe_ranks(records, {}, size)] if records else []


def seconds_since_write(folder: Path, status: Mapping[str, Any]) -> float | None:
    """Seconds since a run that says that it goes on has written anything; None of one that does not say so."""
    if status.get("status") != "running":
        return None
    written = [(folder / name).stat().st_mtime for name in WRITTEN if (folder / name).exists()]
    return max(0.0, time.time() - max(written, default=0.0))


def _logged(folder: Path) -> bool:
    path = folder / METRICS_FILE
    return path.is_file() and path.stat().st_size > 0
