"""What it costs a run to profile every n-th step (`logging.profile`), from the times at which its lines were written.

    torchrun --standalone --nproc-per-node 2 -m trainer +config=llama_60m run.steps=200 logging.profile=20 run.dir=RUN
    python bench/profiling.py RUN

A profile is felt in the step, in the one before (on a GPU), and before the next, when the trace is written; the process
that reads it may slow down some more. So whole cycles of n steps are compared with n steps of the median pace."""

from __future__ import annotations

import itertools
import sys
from statistics import median

from trainer.diagnosis import account
from trainer.observe import metrics


def main(run: str) -> None:
    lines = {line["step"]: line["time"] for line in metrics.read(run) if "loss" in line}
    took = {after: lines[after] - lines[step] for step, after in itertools.pairwise(lines)}
    profiled = sorted({one.step for one in account.read(run)} & set(took))
    cycles = [
        [took[step] for step in range(start - 1, end - 1)]
        for start, end in itertools.pairwise(profiled)
        if all(step in took for step in range(start - 1, end - 1))
    ]
    usual = median(itertools.chain(*cycles))
    extra = median(sum(cycle) - usual * len(cycle) for cycle in cycles)
    steps = extra / usual
    print(f"{len(profiled)} profiles; a step takes {usual:.4g} s, a profile {extra:.4g} s more: {steps:.3g} steps")
    print(f"so logging.profile={round(100 * steps)} costs 1% of the time")


if __name__ == "__main__":
    main(sys.argv[1])
