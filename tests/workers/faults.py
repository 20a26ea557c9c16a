"""`python -m trainer`, with a rank that is slow (SLOW_RANK) and one whose gradient breaks when the file BREAK appears.

Two steps after a checkpoint are broken, which guard.max_skipped=2 ends the run for, before the next checkpoint holds the gap.
"""
from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import trainer.train
from trainer.cli import main

RANK, SLOW = int(os.environ.get("RANK", 0)), int(os.environ.get("SLOW_RANK", -1))
BREAK, EVERY = Path(os.environ["BREAK"]), 5
train_step = trainer.train.train_step
state_of_faults = {"slow": RANK == SLOW, "broken": 0}


def faulty_step(state: Any, batches: Any, stop: bool) -> Any:
    layer = state.stages[0].layers["1"]
    if state_of_faults["slow"]:
        layer.register_forward_pre_hook(lambda *_: time.sleep(0.03))
        state_of_faults["slow"] = False
    handle = None
    if RANK == state.world.size - 1 and BREAK.exists() and state.step % EVERY in (1, 2) and state_of_faults["broken"] == state.step % EVERY - 1:
        handle = layer.attention.o.register_full_backward_hook(lambda module, inputs, outputs: (torch.full_like(inputs[0], float("nan")),))
        state_of_faults["broken"] += 1
    scalars = train_step(state, batches, stop)
    if handle:
        handle.remove()
    if state_of_faults["broken"] == 2:
        BREAK.unlink(missing_ok=True)
    return scalars


if __name__ == "__main__":
    trainer.train.train_step = faulty_step
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
