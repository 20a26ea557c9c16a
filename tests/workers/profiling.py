"""Runs of two ranks that are profiled (see tests/training/test_profiling.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from support.launch import fork, leave

import trainer
from trainer.distributed.mesh import join_world
from trainer.planning.features import resolve_plan

COMMON = [
    "+config=debug",
    "model.width=32",
    "model.depth=2",
    "model.feed_forward.width=48",
    "data=text",
    "data.eval_fraction=0.3",
    "data.workers=1",
    "batch.sequence_length=32",
    "batch.micro_size=1",
    "logging=quiet",
    "run.device=cpu",
]

RUNS = {
    "sharded": [
        *("parallel=zero3", "activation=full", "run.steps=5", "logging.profile=4", "logging.trace=[3]"),
        *("checkpoint.every=1", "eval.every=1", "eval.sequences=2"),
    ],
    "pipeline": ["parallel.pp=2", "batch.global_size=4", "run.steps=3", "logging.profile=3"],
    "copied": ["parallel.tp=2", "parallel.tp_overlap=copy_engine", "run.steps=3", "logging.profile=3"],
    "copied_shards": ["parallel=zero3", "parallel.zero.collectives=copy_engine", "run.steps=3", "logging.profile=3"],
}


def main(root: Path) -> None:
    join_world(resolve_plan(trainer.Config().parallel, 2), torch.device("cpu"))
    files = [f"data.sources.text.path={root / 'corpus'}", f"data.cache={root / 'cache'}"]
    for name, changes in RUNS.items():
        trainer.run(trainer.compose([*COMMON, *files, *changes, f"run.dir={root / name}"]))


if __name__ == "__main__":
    fork()
    main(Path(sys.argv[1]))
    leave()
