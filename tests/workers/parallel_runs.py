"""Whole runs under plans of data, tensor and pipeline parallelism: what several processes do in one launch.

`four` and `two` go on with what one process has left in a folder (see tests/training/test_parallel_runs.py); `dies` is
one rank of a run in which a rank vanishes in the middle of a step."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.launch import fork, leave

import trainer
import trainer.training.auto
import trainer.training.trainer
from trainer.commands import train
from trainer.config import Config
from trainer.distributed.mesh import join_world
from trainer.distributed.p2p import FailureStore
from trainer.model.transformer import Transformer
from trainer.observe.sinks import SAMPLES
from trainer.planning.features import resolve_plan
from trainer.planning.schedules.search import ScheduleChoice
from trainer.planning.schedules.templates import build_schedule

train_step = trainer.training.trainer.train_step

COMMON = {
    "model": "tiny",
    "model.width": 32,
    "model.depth": 4,
    "model.feed_forward.width": 48,
    "model.vocab_size": 257,
    "model.init.embedding_std": 0.3,
    "data": "text",
    "data.tokenizer": "bytes",
    "data.eval_fraction": 0.3,
    "data.workers": 1,
    "batch.sequence_length": 32,
    "batch.global_size": 8,
    "batch.micro_size": 2,
    "lr": "constant",
    "lr.warmup": 2,
    "lr.peak": 3e-3,
    "eval.every": 2,
    "eval.sequences": 5,
    "eval.generate": "{every: 4, tokens: 5, prompts: [the, '', a longer beginning of a text]}",
    "checkpoint.keep_last": 0,
    "run.device": "cpu",
    "logging.console": "none",
}
"""Embeddings are large enough for gradients of norms not to hang on the last bits of small numbers."""

PLANS = {  # of one run of four steps; 1F1B and ZeRO-1 are among `CHAINS`
    "dp2_tp2": {"parallel.tp": 2, "parallel.zero.stage": 3},
    "cp2_tp2": {"parallel.cp": 2, "parallel.tp": 2, "parallel.tp_overlap": "copy_engine"},
    "tp2_pp2_interleaved": {
        "parallel.tp": 2,
        "parallel.pp": 2,
        "parallel.pipeline.schedule": "interleaved",
        "parallel.zero.stage": 3,
    },
    "pp2_dp2_zb_v": {
        "parallel.pp": 2,
        "parallel.pipeline.schedule": "zb_v",
        "parallel.zero.stage": 2,
        "batch.micro_size": 1,
    },
}

CHAINS = {  # of plans, two steps each, on 4 processes and then on 2; one process begins and ends
    "untied": {
        4: [
            {"parallel.pp": 2, "parallel.cp": 2, "parallel.pipeline.schedule": "zb_h1", "parallel.zero.stage": 2},
            {"parallel.tp": 2, "parallel.pp": 2, "parallel.pipeline.schedule": "interleaved", "parallel.zero.stage": 1},
            {"parallel.cp": 4, "parallel.zero.stage": 3},
        ],
        2: [{"parallel.cp": 2, "parallel.context.method": "allgather", "parallel.zero.stage": 1}],
    },
    "tied": {
        4: [
            {
                "parallel.tp": 2,
                "parallel.pp": 2,
                "parallel.pipeline.schedule": "zb_v",
                "parallel.zero.stage": 2,
                "parallel.ep": 2,
            },  # ends on one rank
            {"parallel.pp": 4, "parallel.pipeline.schedule": "1f1b"},  # and on two
            {
                "parallel.tp": 4,
                "parallel.ep": 4,
                "parallel.ep_dispatch": "shared_memory",
                "parallel.ep_capacity": 1.0,  # steps have no room for all rows, and are run again
            },
        ],
        2: [{"parallel.pp": 2, "parallel.pipeline.schedule": "dualpipe_v", "parallel.zero.stage": 1}],
    },
}

BY_NAME = [
    *(f"{kind}/{name}" for kind in ("loss", "targets", "eval_loss") for name in ("text", "more")),
    "eval_loss/apart",
]
"""Metrics of the sources and of the set."""

TRAINED = {
    "untied": {},
    "tied": {
        "model.tied": True,
        "model.feed_forward.experts.count": 4,
        "model.feed_forward.experts.bias_rate": 0.01,
        "model.feed_forward.experts.balance": 0.1,
        "model.feed_forward.experts.balance_over": "previous",
        "model.feed_forward.experts.z_loss": 0.01,
        "optimizer.name": "muon",
        "optimizer.muon.compute": "fp32",
        "optimizer.ema.decay": 0.8,
        "eval.ema": True,
    },
}
"""What is trained in each chain, and how."""

FIRST, LEG = 2, 2
"""Steps that one process takes before a chain, and steps of each leg."""

STOPPED = {"untied": 2, "tied": 2}
"""The legs that would go on, but are ended by a signal to one rank: of tp2 x pp2, and of pp4."""


class Watched:
    """Wraps the optimizer step: notes which samples all ranks together saw, the weights at the start if they are
    wanted, and can send one rank a signal."""

    def __init__(self, stop_after: int | None = None, keep_weights: bool = False):
        self.stop_after, self.keep_weights = stop_after, keep_weights
        self.ids: list[list[str]] = []
        self.weights: dict[str, torch.Tensor] = {}

    def __call__(self, state, batches, stop):
        if self.keep_weights and not self.ids:
            everyone = gather({name: whole(parameter) for name, parameter in state.parameters.items()})
            self.weights = {name: value for some in everyone for name, value in some.items()}
        self.ids.append(
            sorted(
                {sample for some in gather([sample for batch in batches for sample in batch.ids]) for sample in some}
            )
        )
        scalars = train_step(state, batches, stop)
        if self.stop_after == state.step and state.world.rank == state.world.size - 1:
            signal.raise_signal(signal.SIGTERM)  # one rank only: all must stop after the same step
        return scalars


def whole(parameter: torch.Tensor) -> torch.Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.clone()


def gather(value: Any) -> list[Any]:
    """The value of every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


@cache
def common(root: Path) -> Config:
    return trainer.compose(
        [f"{name}={value}" for name, value in COMMON.items()]
        + [f"data.sources.text.path={root / 'corpus'}", f"data.cache={root / 'cache'}", f"run.dir={root / 'run'}"]
        + [f"data.sources.more={{kind: text, path: {root / 'more'}, streaming: true}}"]
        + [f"eval.sets.apart={{kind: text, path: {root / 'apart'}}}"],
        world_size=1,
    )


def settings(folder: Path, **changes: Any) -> Config:
    """The common settings, composed once a process, with changes by dotted name."""
    config = copy.deepcopy(common(folder.parent))
    for name, value in {"run.dir": str(folder), **changes}.items():
        path, _, field = name.rpartition(".")
        target = attrgetter(path)(config)
        assert hasattr(target, field), name
        setattr(target, field, value)
    return config


def run(folder: Path, steps: int, watched: Watched | None = None, **changes: Any) -> dict[str, Any]:
    """A run to `steps`, resuming what the folder has: its exit code on this process, the samples, and the lines of
    metrics."""
    watched = watched or Watched()
    trainer.training.trainer.train_step = watched
    try:
        result = trainer.run(settings(folder, **{"run.steps": steps, **changes}))
    finally:
        trainer.training.trainer.train_step = train_step
    lines = [line for line in result.metrics if "loss" in line]
    return {
        "code": result.code,
        "ids": watched.ids,
        "steps": [line["step"] for line in lines],
        "losses": [line["loss"] for line in lines],
        "norms": [line["grad_norm"] for line in lines],
        "bubbles": [line["bubble"] for line in lines],
        "overflow": [line.pop("experts/overflow") for line in lines],
        "experts": [{name: line[name] for name in line if name.startswith("experts/")} for line in lines],
        "samples": [json.loads(line) for line in (result.folder / SAMPLES).read_text().splitlines()],
        "eval": {line["step"]: line["eval_loss"] for line in result.metrics if "eval_loss" in line},
        "by_name": [{name: line[name] for name in BY_NAME if name in line} for line in result.metrics],
    }


def follow_chain(root: Path, name: str, world: int) -> Iterator[tuple[str, dict]]:
    """The legs of a chain on `world` processes."""
    before = 0 if world == 4 else len(CHAINS[name][4])
    for leg, plan in enumerate(CHAINS[name][world], start=before + 1):
        end, stopped = FIRST + leg * LEG, leg == STOPPED[name]
        seen = run(
            root / f"chain_{name}",
            end + 9 * stopped,
            Watched(stop_after=end - 1 if stopped else None),
            **TRAINED[name],
            **plan,
        )
        yield f"{name}_{leg}", seen | {"codes": gather(seen["code"])}


def four(root: Path) -> Iterator[tuple[str, dict]]:
    for name, plan in PLANS.items():
        yield name, run(root / name, 4, **plan)
    for name in CHAINS:
        yield from follow_chain(root, name, 4)
    watched = Watched(keep_weights=True)
    imported = {"model.from_hf": str(root / "exported"), "lr.warmup": 0}
    yield "from_hf", run(root / "from_hf", 1, watched, **PLANS["tp2_pp2_interleaved"], **imported)
    if dist.get_rank() == 0:
        torch.save(watched.weights, root / "weights.pt")


def two(root: Path) -> Iterator[tuple[str, dict]]:
    for name in CHAINS:
        yield from follow_chain(root, name, 2)
    auto = {"parallel.pp": 2, "parallel.pipeline.schedule": "auto", "batch.micro_size": None}
    given = {"batch.accumulation": 4, "parallel.pipeline.split": [3, 1], "parallel.pipeline.chunks": 1}
    choose = trainer.training.auto.AutoSchedule.choose
    for name, changes, decide in (
        ("auto", {}, choose),
        ("auto_given", given, choose),
        ("auto_rebuilt", {}, another_cut),
    ):
        for steps in (5, 7):  # the second goes on where the first ended
            measured: list[int] = []
            trainer.training.auto.AutoSchedule.choose = lambda auto: (measured.append(auto.state.step), decide(auto))[1]
            yield f"{name}_{steps}", run(root / name, steps, **auto, **changes) | {"measured": measured}


def another_cut(
    auto: trainer.training.auto.AutoSchedule, choose: Any = trainer.training.auto.AutoSchedule.choose
) -> ScheduleChoice:
    """A choice for which the layers have to be cut anew, whatever was measured."""
    return dataclasses.replace(
        choose(auto),
        schedule=build_schedule("1f1b", 2, 4),
        chunks=1,
        split=(range(3), range(3, 4)),
        microbatches=4,
        micro_size=2,
    )


def dies(arguments: list[str]) -> int:
    """The command line on this rank; rank 1 vanishes in the third step, in the forward pass of its third
    micro-batch. Rank 2 is slow to look why its transfers broke: rank 0, which holds the store, knows long before."""
    forward, passes, find_first = Transformer.forward, [0], FailureStore.find_first

    def find_late(self: FailureStore, patience: float) -> str | None:
        time.sleep(2)
        return find_first(self, patience)

    def counted(self: Transformer, *inputs: Any, **named: Any) -> Any:
        passes[0] += 1
        if os.environ["RANK"] == "1" and passes[0] == 2 * 4 + 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, *inputs, **named)

    Transformer.forward = counted
    if os.environ["RANK"] == "2":
        FailureStore.find_first = find_late
    return train.main(arguments)


def main(what: str, root: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    join_world(resolve_plan(Config().parallel, world), torch.device("cpu"))
    results = dict({"four": four, "two": two}[what](root))
    if dist.get_rank() == 0:
        (root / f"{what}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    if sys.argv[1] == "dies":
        sys.exit(dies(sys.argv[2:]))
    fork()
    main(sys.argv[1], Path(sys.argv[2]))
    leave()
