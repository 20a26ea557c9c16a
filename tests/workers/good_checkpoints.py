"""Whole runs on two ranks, one of which meets what the other does not: values that are not finite, leftovers, files
that cannot be written. Every rank has to end each run in the same way.

Arguments: the folder to work in, where answers.json tells how each run has ended on each rank.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.launch import fork, leave

import trainer
from trainer.checkpointing import retention
from trainer.checkpointing.manifest import list_checkpoints
from trainer.config import ConfigError
from trainer.distributed.tensors import local_values
from trainer.training import trainer as loop
from trainer.training.metrics_tracker import NonFiniteError

STEPS = 8
step = loop.train_step


def run(folder: Path, *overrides: str) -> list[str]:
    """How a run of `STEPS` steps has ended on each rank."""
    settings = ["+config=debug", f"run.dir={folder}", f"data.cache={folder.parent / 'cache'}", "logging=quiet"]
    settings += [
        "data.tokenizer=bytes",
        "model.width=32",
        "model.depth=2",
        "logging.report=false",
        f"run.steps={STEPS}",
        "run.device=cpu",
        "guard.max_skipped=3",
    ]
    settings += ["checkpoint.every=2", "checkpoint.keep_last=2", "checkpoint.at_end=true", "batch.global_size=4"]
    try:
        answer = f"code {trainer.run(trainer.compose([*settings, *overrides], world_size=2)).code}"
    except (ConfigError, NonFiniteError) as error:
        answer = f"{type(error).__name__}: {error}"
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [answer, *map(str, list_checkpoints(folder / "checkpoints"))])
    dist.barrier()
    return [" ".join(words) for words in everyone]


def spoil_one_rank(state, batches, asked):
    """After step 5, one value of the last rank's shard is infinite; no row of the embedding is trained from it."""
    result = step(state, batches, asked)
    if state.step == 5 and dist.get_rank() == 1:
        name = next(name for name in state.tensors() if name.startswith("optimizer.exp_avg_sq"))
        local_values(state.tensors()[name]).detach().view(-1)[0] = math.inf
    return result


def fail_and_stop(state, batches, asked):
    """Steps from 4 on fail on one rank; SIGTERM comes to one rank after step 4."""
    handle = None
    if state.step >= 3 and dist.get_rank() == 1:
        output = state.stages[0].layers["0"].attention.o
        handle = output.register_full_backward_hook(lambda *_: (torch.full_like(_[1][0], math.nan),))
    result = step(state, batches, asked)
    if handle is not None:
        handle.remove()
    if state.step == 4 and dist.get_rank() == 1:
        signal.raise_signal(signal.SIGTERM)
    return result


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    lead = dist.get_rank() == 0
    answers = {}

    loop.train_step = spoil_one_rank
    answers["spoiled"] = run(folder / "spoiled", "parallel=zero3")
    loop.train_step = step
    answers["spoiled, restarted"] = run(folder / "spoiled", "parallel=zero3")

    loop.train_step = fail_and_stop
    answers["stopped"] = run(folder / "stopped", "parallel=zero3", "checkpoint.every=0")
    loop.train_step = step
    answers["stopped, restarted"] = run(folder / "stopped", "parallel=zero3", "checkpoint.every=0")

    erase = shutil.rmtree

    def refuse(path, *arguments, **options):
        if (Path(path) / "stuck").exists():
            raise PermissionError(13, "Permission denied", str(path))
        return erase(path, *arguments, **options)

    retention.shutil.rmtree = refuse
    if lead:
        stuck = folder / "leftovers" / "checkpoints" / "step-00000004.tmp"
        stuck.mkdir(parents=True)
        (stuck / "stuck").touch()
    answers["leftovers"] = run(folder / "leftovers", "parallel=zero3")
    retention.shutil.rmtree = erase

    if lead:
        for path in list_checkpoints(folder / "leftovers" / "checkpoints").values():
            (path / "manifest.json").write_text("{")
    dist.barrier()
    answers["damaged"] = run(folder / "leftovers", "parallel=zero3")

    if lead:
        (folder / "blocked").mkdir()
        (folder / "blocked" / "schedule").touch()
        (folder / "blocked" / "traces").touch()
    dist.barrier()
    answers["blocked"] = run(folder / "blocked", "parallel.pp=2", "logging.profile=6")
    if lead:
        (folder / "answers.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    fork()
    main(Path(sys.argv[1]))
    leave()
