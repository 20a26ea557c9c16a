"""What the watchdog left of a run that stalled, read again afterwards."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from trainer.observe.sinks import METRICS_FILE
from trainer.observe.watchdog import describe_ranks, read_report
from trainer.util.reading import Malformed, make_printable


def last_stall(folder: Path, size: int) -> list[str]:
    """Where the ranks of a run stood when it stalled, those that held up the others first; empty where the run has gone
    on since, or never stalled. size: processes of the run."""
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
