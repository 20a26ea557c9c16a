"""Whole runs in one launch: undisturbed, stopped and resumed under other plans, with overflows and with broken
numbers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.checkpoints import read_tensors
from support.launch import fork, leave

import trainer
import trainer.training.trainer
from trainer.config import ConfigError
from trainer.distributed.mesh import join_world
from trainer.planning.features import resolve_plan
from trainer.training.metrics_tracker import NonFiniteError

train_step = trainer.training.trainer.train_step

STEPS = 8

PLANS: dict[str, dict[str, object]] = {
    "zero3": {"parallel": "zero3"},
    "zero0": {"parallel": "ddp"},
    "zero1_hsdp": {"parallel": "zero1", "parallel.shard": 2},
    "zero2_accumulate": {"parallel": "zero2"},
    "zero3_micro2": {"parallel": "zero3", "batch.micro_size": 2},
}
RESUMED = {
    4: ("zero3", "zero1_hsdp", "zero2_accumulate"),
    2: ("zero0", "zero1_hsdp", "zero3_micro2"),
    1: ("zero3_micro2",),
}
"""By processes, the plans under which a run of four that was stopped goes on; tests/workers/parallel_runs.py has those
with other axes. On one process all stages are the same."""
MIXED = (0, 2, 3)
"""Stages of ZeRO in bf16. Parameters are whole in stage 1 as in 0, and optimizer states are sharded as in 2."""


class Watched:
    """Wraps the optimizer step: notes sample ids and a random draw, and can stop the run or break a gradient."""

    def __init__(self, stop_after: int | None = None, break_at: range = range(0), value: float = float("nan")):
        self.stop_after, self.break_at, self.value = stop_after, break_at, value
        self.ids: list[list[str]] = []
        self.draws: list[float] = []
        self.updates: list[int] = []

    def __call__(self, state, batches, stop):
        mine: list = [None] * state.world.size
        dist.all_gather_object(mine, [sample for batch in batches for sample in batch.ids])
        self.ids.append(sorted(sample for some in mine for sample in some))
        self.draws.append(torch.rand(()).item())
        broken = state.step + 1 in self.break_at and state.world.rank == state.world.size - 1
        handle = None
        if broken:  # one rank's gradient of one parameter, before any reduction
            handle = (
                state.stages[0]
                .layers["1"]
                .attention.o.register_full_backward_hook(lambda *_: (torch.full_like(_[1][0], self.value),))
            )
        scalars = train_step(state, batches, stop)
        if handle:
            handle.remove()
        self.updates.append(int(state.optimizer.updates))
        if self.stop_after == state.step and state.world.rank == min(1, state.world.size - 1):
            signal.raise_signal(signal.SIGTERM)  # one rank only: all must stop at the same step
        return scalars


def settings(folder: Path, **overrides: object):
    values = {
        "model": "tiny",
        "data.tokenizer": "bytes",
        "data.cache": folder.parent / "cache",
        "data.sources.stdlib.limit": 40,
        "batch.sequence_length": 32,
        "batch.global_size": 8,
        "batch.micro_size": 1,
        "model.width": 32,
        "model.depth": 2,
        "run.steps": STEPS,
        "lr.warmup": 3,
        "lr.peak": 3e-3,
        "run.dir": folder,
        "run.device": "cpu",
        "logging.console": "none",
        **overrides,
    }
    overrides = [f"{name}={value}" for name, value in values.items()]
    composed: list = [trainer.compose(overrides) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(composed)  # a third of a second of each rank's processor time otherwise
    return composed[0]


def run(folder: Path, watched: Watched | None = None, skew: float = 1, **overrides: object) -> dict:
    """skew: what the others have for rank 0's lr.peak, as a factor."""
    watched = watched or Watched()
    trainer.training.trainer.train_step = watched
    answer: dict = {"error": None, "code": None}
    try:
        config = settings(folder, **overrides)
        config.lr.peak *= skew if dist.get_rank() else 1
        answer["code"] = trainer.run(config).code
    except (ConfigError, NonFiniteError) as error:
        answer["error"] = str(error)
    lines = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        if (folder / "metrics.jsonl").exists()
        else []
    )
    steps = [line for line in lines if "loss" in line]
    return answer | {
        "ids": watched.ids,
        "draws": watched.draws,
        "updates": watched.updates,
        "steps": [line["step"] for line in steps],
        "losses": [line["loss"] for line in steps],
        "norms": [line["grad_norm"] for line in steps],
        "skipped": [line["skipped"] for line in steps],
        "scales": [line["loss_scale"] for line in steps],
        "lr": [line["lr"] for line in steps],
        "eval": [line["eval_loss"] for line in lines if "eval_loss" in line],
    }


def scenarios(root: Path, world_size: int):
    """Name -> result. With fewer processes only the resumes of what four left behind."""
    common = {"run.deterministic": True, "eval.every": STEPS // 2, "eval.sequences": 5, "checkpoint.every": STEPS // 2}
    if world_size == 4:
        yield "whole", run(root / "whole", **common, parallel="zero3")
        yield "again", run(root / "again", **common, parallel="zero3")
        yield "stopped", run(root / "stopped", Watched(stop_after=STEPS // 2), **common, parallel="zero3")
        dist.barrier()
    for name in RESUMED[world_size]:
        plan = PLANS[name] | ({"batch.accumulation": 8 // world_size} if name == "zero2_accumulate" else {})
        if dist.get_rank() == 0:
            shutil.copytree(root / "stopped", root / f"{name}_{world_size}")
        dist.barrier()
        yield f"resumed_{name}_{world_size}", run(root / f"{name}_{world_size}", **common, **plan)
    if world_size == 4:
        yield "done", run(root / "zero3_4", **common, parallel="zero3")
        mixed = {
            **common,
            "precision": "bf16",
            "run.steps": 4,
            "checkpoint.every": 2,
            "eval.every": 2,
            "checkpoint.keep_last": 0,
        }
        for stage in MIXED:  # a save that follows an evaluation, when whole copies in bf16 are around
            folder = root / f"bf16_zero{stage}"
            yield f"bf16_zero{stage}", run(folder, **mixed, **{"parallel.zero.stage": stage})
            saved = read_tensors(folder / "checkpoints" / "step-00000004")
            assert {str(value.dtype) for value in saved.values()} == {"torch.float32"}, {
                n: v.dtype for n, v in saved.items()
            }
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder / "checkpoints" / "step-00000004")
            dist.barrier()
            yield f"bf16_again{stage}", run(folder, **mixed, **{"parallel.zero.stage": stage})
        short = {"run.steps": 8, "parallel": "zero2"}
        as_whole = {"run.deterministic": True, "parallel": "zero3"}
        yield "broken", run(root / "broken", Watched(break_at=range(4, 6)), **as_whole)
        yield "hopeless", run(root / "hopeless", Watched(break_at=range(4, 99)), **short, **{"guard.max_skipped": 3})
        yield (
            "overflow",
            run(
                root / "overflow",
                Watched(break_at=range(3, 5), value=float("inf")),
                **short,
                precision="fp16",
                **{"precision.loss_scale": 1024},
            ),
        )
        yield "different", run(root / "different", skew=10, **short, **{"lr.peak": 1e-3})
        yield (
            "other_model",
            run(root / "whole", **common, parallel="zero3", **{"model.feed_forward.width": 64, "run.steps": STEPS + 2}),
        )
        yield (
            "other_data",
            run(
                root / "whole", **common, parallel="zero3", **{"data.sources.stdlib.limit": 30, "run.steps": STEPS + 2}
            ),
        )
        yield (
            "other_data_restart",
            run(
                root / "whole",
                **common,
                parallel="zero3",
                **{"data.sources.stdlib.limit": 30, "run.steps": STEPS + 2, "checkpoint.data": "restart"},
            ),
        )


def main(root: str) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    join_world(resolve_plan(trainer.Config().parallel, world_size), torch.device("cpu"))
    results = dict(scenarios(Path(root), world_size))
    if dist.get_rank() == 0:
        (Path(root) / f"results_{world_size}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    fork()
    main(sys.argv[1])
    leave()
