"""Runs under many plans whose replicas are compared after every step, undisturbed and with a flipped bit."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.launch import fork, leave

import trainer
import trainer.training.run
import trainer.training.trainer
from trainer.checkpointing.checkpointer import Checkpointer
from trainer.config import ConfigError
from trainer.distributed.mesh import join_world
from trainer.distributed.tensors import local_values
from trainer.observe.deferred import DeferredScalars, Ready
from trainer.planning.features import resolve_plan
from trainer.training.metrics_tracker import NonFiniteError
from trainer.training.replicas import ReplicaMismatch

train_step = trainer.training.trainer.train_step

STEPS = 6
FLIPPED, BROKEN = 2, 4
"""The steps behind which a bit flips, and that are not finite."""
DEVICE = os.environ.get("REPLICAS_DEVICE", "cpu")
"""By hand: WORLD_SIZE=4 REPLICAS_DEVICE=cuda PYTHONPATH=.:tests python tests/workers/replicas.py FOLDER."""

COMMON = {
    "model": "tiny",
    "model.width": 32,
    "model.depth": 2,
    "model.feed_forward.width": 48,
    "model.attention.qk_norm": "head",
    "data.tokenizer": "bytes",
    "data.sources.stdlib.limit": 40,
    "batch.sequence_length": 32,
    "batch.global_size": 8,
    "batch.micro_size": 1,
    "lr.warmup": 3,
    "lr.peak": 3e-3,
    "run.steps": STEPS,
    "run.device": DEVICE,
    "logging.console": "none",
    "logging.report": False,
    "guard.compare_every": 1,
    "checkpoint.every": STEPS // 2,
}

FEW = {"batch.global_size": 4}
"""Of plans with one or two data-parallel ranks: two or four micro-batches on each, as four ranks have two of eight."""
TIED = {"parallel.pp": 2, "model.depth": 4, "model.tied": True} | FEW
PLANS: dict[str, dict[str, Any]] = {
    "zero0": {"parallel": "ddp"},
    "zero3": {"parallel": "zero3"},
    "hsdp1": {"parallel": "zero1", "parallel.shard": 2},
    "hsdp3_ema": {"parallel": "zero3", "parallel.shard": 2, "precision": "bf16", "optimizer.ema.decay": 0.9},
    "tp2": {"parallel.tp": 2, "precision": "bf16"} | FEW,
    "tp4_muon": {"parallel.tp": 4, "model.attention.kv_heads": 4, "optimizer": "muon"} | FEW,
    "tp2_zero3": {"parallel.tp": 2, "parallel.zero.stage": 3} | FEW,
    "cp2": {"parallel.cp": 2, "parallel.zero.stage": 0} | FEW,
    "cp2_heads": {
        "parallel.cp": 2,
        "parallel.context.method": "ulysses",
        "parallel.zero.stage": 3,
        "parallel.shard": 2,
        "model.attention.kv_heads": 4,
    }
    | FEW,
    "pp2_tied": TIED | {"parallel.pipeline.schedule": "1f1b", "parallel.zero.stage": 0},
    "pp2_tied_v": TIED | {"parallel.pipeline.schedule": "zb_v", "parallel.zero.stage": 1},
    "pp2_tp2_tied": TIED | {"parallel.tp": 2, "parallel.pipeline.schedule": "zb_h1"},
    "muon_zero0": {"parallel": "ddp", "optimizer": "muon", "optimizer.ema.decay": 0.9},
    "muon_hsdp": {"parallel": "zero2", "parallel.shard": 2, "optimizer": "muon"},
    "fp16": {"parallel": "ddp", "precision": "fp16", "precision.loss_scale": 2**18},
    "feedback": {"parallel": "hsdp_int8", "parallel.shard": 2, "parallel.grad_comm.min_size": 0},
    "feedback_zero0": {
        "parallel": "ddp",
        "parallel.grad_comm.outer.codec": "int4",
        "parallel.grad_comm.outer.error_feedback": "classic",
        "parallel.grad_comm.min_size": 0,
    },
    "deepspeed1": {"parallel": "deepspeed_zero1", "parallel.tp": 2} | FEW,
    "deepspeed3": {"parallel.zero.engine": "deepspeed", "parallel.zero.stage": 3},
    "offload": {"parallel": "zero3_offload", "parallel.shard": 2},
}
"""ZeRO-1 and ZeRO-2 with half of the ranks to shard over, in hsdp1 and muon_hsdp: over all ranks they would leave less
to compare."""

FLIPS: dict[str, tuple[str, str, int, int]] = {
    "zero0 model": ("zero0", r"model\.layers\.1\..*q\.weight", 2, 30),
    "hsdp1 exponent": ("hsdp1", r"model\.layers\.0\..*down\.weight", 3, 30),
    "hsdp1 model": ("hsdp1", r"model\.layers\.0\..*down\.weight", 3, 0),
    "hsdp3_ema average": ("hsdp3_ema", r"ema\.layers\.1\..*norm", 1, 12),
    "tp2 norm": ("tp2", r"model\.layers\.1\.attention_norm", 1, 22),
    "cp2 model": ("cp2", r"model\.layers\.1\..*v\.weight", 3, 31),
    "pp2_tied embedding": ("pp2_tied", r"model\.embedding", 3, 15),
    "pp2_tied_v copy": ("pp2_tied_v", r"model\.embedding", 0, 9),
    "pp2_tp2_tied moment": ("pp2_tp2_tied", r"optimizer\.exp_avg\.embedding", 2, 20),
    "muon_hsdp moment": ("muon_hsdp", r"optimizer\.momentum_buffer\..*k\.weight", 1, 7),
    "deepspeed1 updates": ("deepspeed1", r"optimizer\.updates", 1, 30),
    "zero3 updates": ("zero3", r"optimizer\.updates", 2, 30),
}
"""Plan, pattern of the name, rank, and the bit that is flipped in one element."""

BREAKS: dict[str, tuple[str, dict[str, Any]]] = {
    "once tp2_zero3": ("tp2_zero3", {"rank": 2}),
    "once pp2_tied_v": ("pp2_tied_v", {"rank": 0, "late": True}),
    "once backward": ("hsdp1", {"backward": True, "late": True}),
    "once muon_hsdp": ("muon_hsdp", {"late": True}),
    "once fp16": ("fp16", {"late": True}),
    "once feedback": ("feedback", {"late": True}),
    "once feedback_zero0": ("feedback_zero0", {"late": True}),
    "once deepspeed1": ("deepspeed1", {"late": True}),
    "once hsdp3_ema": ("hsdp3_ema", {"at": STEPS, "late": True}),
    "always zero0": ("zero0", {"times": 99, "late": True}),
    "always fp16": ("fp16", {"times": 99, "late": True}),
    "always fp16 at once": ("fp16", {"times": 99}),
    "elsewhere zero0": ("zero0", {"times": 2, "backward": True}),
    "weight zero0": ("zero0", {"weight": True}),
    "weight zero3": ("zero3", {"weight": True, "late": True}),
}
"""Plan, and how a step is broken; see `Breaking`."""

UNDISTURBED = [plan for plan in PLANS if plan not in {"zero3", "tp2", "cp2", "pp2_tied", "pp2_tp2_tied"}]
"""The other plans run until a bit flips behind the last step but one: replicas were equal in the steps before."""


def flipped_after(name: str) -> int:
    """The step behind which a flip of `FLIPS` is."""
    return FLIPPED if FLIPS[name][0] in UNDISTURBED else STEPS - 1


peek = DeferredScalars.peek


def peek_late(self: DeferredScalars, block: bool = False) -> list[Ready]:
    """As on a GPU, where the newest step is not known yet."""
    return [pending.ready for pending in [*self._pending][: None if block else -1]]


class Breaking:
    """`train_step` that makes one step not finite on one rank, so many times: an activation, a gradient, or for good a
    weight of which the rank holds a part. late: the numbers of a step are known one step later."""

    def __init__(
        self,
        rank: int = 1,
        at: int = BROKEN,
        times: int = 1,
        backward: bool = False,
        weight: bool = False,
        late: bool = False,
    ):
        self.rank, self.at, self.times, self.backward, self.weight, self.late = rank, at, times, backward, weight, late
        self.taken: list[int] = []

    def __call__(self, state: Any, batches: Any, asked: Any) -> Any:
        DeferredScalars.peek = peek_late if self.late else peek
        self.taken.append(state.step + 1)
        handle = None
        if state.world.rank == self.rank and state.step + 1 == self.at and self.times:
            self.times -= 1
            stage = next(iter(state.stages.values()))
            layer = list(stage.layers.values())[self.times % 2]
            if self.weight:
                local_values(state.parameters["layers.1.attention.q.weight"]).detach().view(-1)[5] = torch.nan
                self.times = 0
            elif self.backward:
                handle = layer.attention.o.register_full_backward_hook(
                    lambda module, inputs, outputs: (torch.full_like(inputs[0], torch.nan),)
                )
            else:
                handle = layer.register_forward_hook(lambda module, inputs, output: output * torch.nan)
        scalars = train_step(state, batches, asked)
        if handle:
            handle.remove()
        return scalars


class Flipping:
    """`train_step` that flips a bit of a tensor on one rank behind a step."""

    def __init__(self, pattern: str = "", rank: int = -1, bit: int = 0, after: int = FLIPPED):
        self.pattern, self.rank, self.bit, self.after = pattern, rank, bit, after
        self.flipped = ""

    def __call__(self, state: Any, batches: Any, asked: Any) -> Any:
        scalars = train_step(state, batches, asked)
        if state.step == self.after and state.world.rank == self.rank:
            tensors = state.tensors()
            if self.bit == 9:  # the copy of a tied embedding that the same rank holds
                tensors = {f"model.{n}": p for n, p in state.optimizer.parameters.items() if n.endswith(" (copy)")}
            name = next(name for name in tensors if re.match(self.pattern, name))
            values = local_values(tensors[name]).detach()
            values = values.view(-1) if values.dim() else values[None]
            values.view(torch.int32)[len(values) // 3] ^= 1 << self.bit if self.bit < 31 else -(2**31)
            self.flipped = name
        return scalars


@cache
def compose_once(cached: str, *overrides: str) -> Any:
    return trainer.compose([*(f"{name}={value}" for name, value in COMMON.items()), f"data.cache={cached}", *overrides])


def compose(folder: Path, **overrides: Any) -> Any:
    """The settings of a run. Of those that differ in `guard` and in the folder alone, one is composed."""
    alike = {name: value for name, value in overrides.items() if not name.startswith("guard.")}
    composed: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            given = [f"{name}={value}" for name, value in alike.items()]
            composed = [copy.deepcopy(compose_once(str(folder.parent / "cache"), *given))]
        except ConfigError as error:
            composed = [error]
    dist.broadcast_object_list(composed)
    if isinstance(composed[0], Exception):
        raise composed[0]
    composed[0].run.dir = str(folder)
    for name in overrides.keys() - alike.keys():
        setattr(composed[0].guard, name.removeprefix("guard."), overrides[name])
    return composed[0]


def run(folder: Path, step: Any = train_step, **overrides: Any) -> dict[str, Any]:
    trainer.training.trainer.train_step = step
    answer: dict[str, Any] = {"error": None, "kind": None, "code": None}
    try:
        answer["code"] = trainer.run(compose(folder, **overrides)).code
    except (ConfigError, NonFiniteError, ReplicaMismatch) as error:
        answer |= {"error": str(error), "kind": type(error).__name__}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (answer["error"], getattr(step, "flipped", "")))
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    answer["errors"], flipped = zip(*everyone)
    return answer | {
        "flipped": next(filter(None, flipped), ""),
        "losses": [line["loss"] for line in lines if "loss" in line],
        "skipped": [line["skipped"] for line in lines if "loss" in line],
        "taken": getattr(step, "taken", []),
        "repeated": [line["repeated"] for line in lines if "loss" in line],
        "scales": [line["loss_scale"] for line in lines if "loss" in line],
        "tokens": [line["tokens"] for line in lines if "loss" in line],
        "epochs": [line["epoch"] for line in lines if "loss" in line],
        "log": (folder / "console.log").read_text() if (folder / "console.log").exists() else "",
        "saved": sorted(path.name for path in (folder / "checkpoints").glob("step-*")),
    }


def scenarios(root: Path, only: str) -> Any:
    for name in UNDISTURBED:
        if re.search(only, name):
            yield name, run(root / name, **PLANS[name])
    for name, (plan, *flip) in FLIPS.items():
        if re.search(only, name):
            flipping = Flipping(*flip, after=flipped_after(name))
            yield name, run(root / name.replace(" ", "_"), flipping, **PLANS[plan])
    more: dict[str, tuple[Any, dict[str, Any]]] = {
        "every 3": (Flipping(*FLIPS["zero0 model"][1:]), {"guard.compare_every": 3}),
        "before a save": (Flipping(*FLIPS["zero0 model"][1:]), {"guard.compare_every": 100}),
        "never": (Flipping(r"optimizer\.exp_avg_sq\.embedding", 0, 3), {"guard.compare_every": 0}),
    }
    for name, (step, settings) in more.items():
        if re.search(only, name):
            yield name, run(root / name.replace(" ", "_"), step, **PLANS["zero0"] | settings)
    if re.search(only, "while saving"):
        write = Checkpointer._write
        Checkpointer._write = lambda *arguments: (time.sleep(0.5), write(*arguments))[1]
        flip = Flipping(*FLIPS["zero0 model"][1:], after=STEPS // 2 + 1)
        yield "while saving", run(root / "while_saving", flip, **PLANS["zero0"])
        Checkpointer._write = write
    if re.search(only, "counter"):
        counters = trainer.training.trainer.Trainer.counters
        wrong = dist.get_rank() == 2
        trainer.training.trainer.Trainer.counters = lambda self: (
            counters(self) | {"tokens": self.tokens + (wrong and self.state.step == 2)}
        )
        yield "counter", run(root / "counter", **PLANS["zero0"])
        trainer.training.trainer.Trainer.counters = counters
    if re.search(only, "command"):
        trainer.training.trainer.train_step = Flipping(*FLIPS["zero0 model"][1:])
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            code = trainer.training.run.main(compose(root / "command", **PLANS["zero0"]))
        yield "command", {"code": code, "printed": printed.getvalue()}
    for name, (plan, how) in BREAKS.items():
        if re.search(only, name):
            settings = {"guard.max_skipped": 3, "guard.compare_every": 100} if "weight" in how else {}
            settings |= {"run.deterministic": True} if "elsewhere" in name else {}
            yield name, run(root / name.replace(" ", "_"), Breaking(**how), **PLANS[plan], **settings)
            DeferredScalars.peek = peek


def main(root: str, only: str = "") -> None:
    join_world(
        resolve_plan(trainer.Config().parallel, int(os.environ["WORLD_SIZE"])),
        torch.device(DEVICE, *([int(os.environ["LOCAL_RANK"])] if DEVICE == "cuda" else [])),
    )
    results = dict(scenarios(Path(root), only))
    if dist.get_rank() == 0:
        (Path(root) / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    fork(deepspeed=DEVICE == "cpu")
    main(*sys.argv[1:])
    leave()
