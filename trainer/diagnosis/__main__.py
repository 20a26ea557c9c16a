"""Writes the accounts of a step, from the traces that its ranks leave: `python -m trainer.diagnosis RUN STEP RANK...`.

A run starts it when it has profiled a step, and goes on: reading traces takes seconds of a processor, which training
should not feel. It waits for the traces of all the ranks; of a rank that leaves none within `PATIENCE`, there is no
account."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from trainer.diagnosis.accounts import break_down_step
from trainer.diagnosis.ranks import trace_of
from trainer.diagnosis.time_breakdown import breakdown_metrics
from trainer.diagnosis.traces import read_trace
from trainer.util.lines import LineFile
from trainer.util.run_folder import ACCOUNTS

PATIENCE = 120.0
"""Seconds that traces are waited for."""


def main(run: Path, step: int, ranks: list[int]) -> None:
    """Adds the accounts of a step to those of a run, and prints their metrics."""
    paths, end = [trace_of(run, step, rank) for rank in ranks], time.monotonic() + PATIENCE
    while not all(path.exists() for path in paths) and time.monotonic() < end:
        time.sleep(0.05)
    found = break_down_step([read_trace(path) for path in paths if path.exists()])
    with LineFile(run / ACCOUNTS) as file:
        file.append("".join(f"{account.dumps()}\n" for account in found))
    print(json.dumps(breakdown_metrics(found)))


if __name__ == "__main__":
    os.nice(19)
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(rank) for rank in sys.argv[3:]])
