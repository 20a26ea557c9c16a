"""Two ranks measure this machine and train on it: what they measured, and how long the steps then take."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from support.launch import fork, leave

import trainer
import trainer.cluster.probe  # before processes are forked
from trainer.commands.probe import main
from trainer.distributed.mesh import join_world
from trainer.observe import metrics
from trainer.planning.features import resolve_plan

RECIPE = [
    "+config=debug",
    "run.device=cpu",
    "model.depth=2",
    "data.sources.stdlib.limit=40",
    "batch.sequence_length=128",
    "parallel=zero2",
]


def train(root: Path) -> list[float]:
    """Seconds of the steps of a run, without the first ones."""
    folders = [f"run.dir={root / 'run'}", f"data.cache={root / 'cache'}"]
    config = trainer.compose([*RECIPE, *folders, "run.steps=12", "logging.console=none", "checkpoint=never"])
    assert trainer.run(config).code == 0
    return [line["step_seconds"] for line in metrics.read_metrics(root / "run")][2:]


if __name__ == "__main__":
    root = Path(sys.argv[1])
    fork()
    parallel = trainer.compose(RECIPE).parallel
    join_world(resolve_plan(parallel, 2), torch.device("cpu"))
    code = main([*RECIPE, "seconds=1", f"out={root / 'here.yaml'}"])
    steps = train(root)
    if dist.get_rank() == 0:
        (root / "results.json").write_text(json.dumps({"code": code, "step": median(steps), "steps": steps}))
    dist.barrier()
    leave()
