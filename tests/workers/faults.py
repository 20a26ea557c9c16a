"""`python -m trainer` with a rank that is slow from step 20 on (SLOW_RANK), one that waits in step 20 for what never
comes, as for a GPU (WAITING_RANK), and one whose gradient breaks when the file BREAK exists.

Two steps after a checkpoint are broken, which guard.max_skipped=2 ends the run for, before the next checkpoint holds
the gap."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import trainer.training.trainer
from trainer.commands.train import main

RANK, SLOW = int(os.environ.get("RANK", 0)), int(os.environ.get("SLOW_RANK", -1))
WAITING = int(os.environ.get("WAITING_RANK", -1))
BREAK, EVERY = Path(os.environ["BREAK"]), 5
train_step = trainer.training.trainer.train_step
broken: list[int] = []
"""After which steps those came that were broken. One that is run again is broken again."""


def faulty_step(state: Any, batches: Any, stop: bool) -> Any:
    layer, handle = state.stages[0].layers["1"], None
    if RANK == WAITING and state.step == 20:
        print("waits for ever", flush=True)
        while True:
            time.sleep(1)
    if RANK == SLOW and state.step >= 20:
        handle = layer.register_forward_pre_hook(lambda *_: time.sleep(0.15))
    # The first two steps after a save, in turn.
    new = BREAK.exists() and state.step not in broken and state.step % EVERY == len(broken) + 1
    if RANK == state.world.size - 1 and (new or state.step in broken):
        handle = layer.attention.o.register_full_backward_hook(
            lambda module, inputs, outputs: (torch.full_like(inputs[0], float("nan")),)
        )
        if new:
            broken.append(state.step)
        if new and len(broken) == 2:
            BREAK.unlink()
    scalars = train_step(state, batches, stop)
    if handle:
        handle.remove()
    return scalars


if __name__ == "__main__":
    trainer.training.trainer.train_step = faulty_step
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
