"""Runs of two ranks, each slowed down by one cause of known kind and profiled: what `diagnose` is then asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.causes import CAUSES, LAUNCHED, STEPS, WIDE, folder
from support.disturbance import TERM
from support.launch import fork, leave

import trainer
from trainer.data.batches import BatchLoader
from trainer.diagnosis.accounts import main as write_accounts
from trainer.distributed.mesh import join_world
from trainer.planning.features import resolve_plan
from trainer.training.profiling import StepProfiler


def run(folder: Path, steps: int, **overrides: object) -> None:
    """Trains `steps`, of which all but the first are profiled."""
    values = {
        "model": "tiny",
        "data.tokenizer": "bytes",
        "data.cache": folder.parent / "cache",
        "data.sources.stdlib.limit": 40,
        "data.vocab_size": 257,
        "batch.sequence_length": 64,
        "batch.global_size": 8,
        "batch.micro_size": 4,
        "model.width": 64,
        "model.depth": 1,
        "model.feed_forward.width": 128,
        "model.vocab_size": 257,
        "run.steps": steps,
        "lr.warmup": 1,
        "run.dir": folder,
        "run.device": "cpu",
        "logging.console": "none",
        "logging.trace": json.dumps([*range(2, steps + 1)]),
        "checkpoint.at_end": "false",
        **overrides,
    }
    composed: list = [None]
    if dist.get_rank() == 0:
        composed = [trainer.compose([f"{name}={value}" for name, value in values.items()])]
    dist.broadcast_object_list(composed)
    trainer.run(composed[0])
    dist.barrier()
    if dist.get_rank() == 0:
        for step in range(2, steps + 1):
            write_accounts(folder, step, [0, 1])


GROUPS = ("parallel", "activation", "optimizer")
CASES = {
    # The link between ranks is slow beside what they compute: parameters are gathered for few tokens, and sums go over
    # it too. Gathering alone takes as long as its copies and the host's part; which is more depends on the machine.
    "communication": {
        "parallel": "zero3",
        "batch.sequence_length": 8,
        "batch.micro_size": 1,
        "model.width": 128,
        "model.feed_forward.width": 2048,
        "model.depth": 2,
        "sums": 20,
    },
    "bubble": {**WIDE, "parallel.pp": 2, "parallel.pipeline.split": "[3,1]", "model.depth": 4, "batch.micro_size": 2},
    "data": {"data.prefetch": 0, "loading": 0.5},
    "host": {"sleep": 0.5},
    "straggler": {"products": 150, "rank": 1},
    "memory bandwidth": {"copies": 200},
    # Computation bounds it where there is memory enough. Few of the products are a model's: its other kernels touch
    # fresh memory, and page faults, which count as their time, take several times as long on a busy host. This run is
    # the last, since a process's peak does not fall; it stands out by itself too.
    "memory capacity": {**WIDE, "batch.micro_size": 2, "products": 100, "size": 768, "held": 1200},
}


def main(root: str, *names: str) -> None:
    """names: of `CASES` and `CAUSES`; all of the first without, and those of the second that are `LAUNCHED`;
    `recorded`: all of the second, with as many steps as are recorded."""
    join_world(resolve_plan(trainer.Config().parallel, 2), torch.device("cpu"))
    StepProfiler.read = lambda self, number, ranks: None  # a process for each profiled step would take a second
    mixed = {name: values for name, (_, values) in CAUSES.items()}
    wanted = [*CAUSES] if names == ("recorded",) else names or [*LAUNCHED, *CASES]
    for name, values in (mixed | CASES).items():
        if name not in wanted:
            continue
        BatchLoader.slow = 0.0
        named = {key if "." in key or key in GROUPS else f"{TERM}.{key}": value for key, value in values.items()}
        steps = STEPS if names == ("recorded",) else 5 if name == "straggler" else 3
        run(folder(Path(root), name), steps, **named)


if __name__ == "__main__":
    fork()
    main(*sys.argv[1:])
    leave()
