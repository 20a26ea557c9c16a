"""Ranks under the watchdog: one evaluates for longer than a step may take, which is no stall, nor is that it then takes
a step while the others go on waiting; then one waits for data for ever, and one holds Python's lock."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.config import GuardConfig
from trainer.distributed.symmetric_memory import buffers_of
from trainer.observe import flight
from trainer.observe.watchdog import DATA, EVALUATING, STEP, Watchdog

folder = Path(sys.argv[1])
flight.enable_recorder(folder / "flight")
dist.init_process_group("gloo")
rank = dist.get_rank()
guard = GuardConfig(stall_factor=10, stall_seconds=2 if rank == 3 else 3, stall_allowance=30)
watchdog = Watchdog(folder, "start", rank, dist.get_world_size(), guard, steps=9)
near = dist.new_group([0, 1])
if rank < 2:
    boxes = buffers_of("gather", near, torch.float32)
    boxes.begin(4, 2, torch.device("cpu"))
    boxes.signal(1 - rank)
    boxes.wait(1 - rank)
    boxes.begin(4, 2, torch.device("cpu"))  # and rank 1 sends nothing in this epoch
    if rank == 0:
        boxes.signal(1)


def hang() -> None:
    if rank == 2:
        time.sleep(1000)
    if rank == 3:
        time.sleep(1)  # to be heard of once more
        ctypes.PyDLL(None).sleep(1000)


for step in range(1, 9):
    watchdog.enter(DATA, step)
    if step == 8:
        hang()
    watchdog.enter(STEP, step)
    if step == 6 and rank == 1:
        time.sleep(1)
    dist.all_reduce(torch.ones(3))
    if step == 5 and rank == 1:
        watchdog.enter(EVALUATING, step)
        time.sleep(5)
    elif step == 5:
        watchdog.enter(EVALUATING, step)
print("no stall", flush=True)
