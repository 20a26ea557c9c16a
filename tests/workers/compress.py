"""Quantised gradients on four processes: plans beside one process, steps that one rank breaks, and whole runs that
resume.

Nodes are emulated: LOCAL_WORLD_SIZE is all that the project knows of them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.checkpoints import read_tensors
from support.launch import fork, leave
from support.matrix import PLAIN, SEQUENCES, Case
from support.reference import random_batch, rows, settings
from workers.parallel_runs import Watched
from workers.parallel_runs import settings as run_settings
from workers.plans import LENGTH, Worlds, config_of, spec_of

import trainer
import trainer.training.run
import trainer.training.trainer
from trainer.config import Config, GenerateConfig
from trainer.config.model import ModelSpec
from trainer.data.batches import MicroBatch
from trainer.distributed.mesh import World
from trainer.distributed.tensors import local_values
from trainer.observe.sinks import Logger
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.parity.compare import coarsest_tolerance, compare_runs, judge_plan, train_reference
from trainer.parity.watch import StateRecorder
from trainer.planning.features import resolve_plan
from trainer.planning.parameters import declare_parameters
from trainer.planning.plan import BatchPlan, Plan
from trainer.planning.states import feedback_bytes
from trainer.precision.products import DTYPES
from trainer.training.session import numeric_mode
from trainer.training.state import TrainState
from trainer.training.step import train_step

RANKS, STEPS = 4, 3
CPU = torch.device("cpu")


def case(node: int = RANKS, **changes: Any) -> Case:
    """A case on nodes of so many processes. Settings of parallel.grad_comm have two underscores for a dot; messages of
    any size are quantised."""
    gradients = {name: changes.pop(name) for name in list(changes) if name.startswith(("inner__", "outer__"))}
    return PLAIN | {"dp": RANKS, "node": node, "gradients": {"min_size": 0} | gradients} | changes


CLASSIC = {"codec": "int8", "error_feedback": "classic"}
INT8, INT4 = {"codec": "int8"}, {"codec": "int4", "error_feedback": "classic"}


def inner(**hop: Any) -> dict[str, Any]:
    return {f"inner__{name}": value for name, value in hop.items()}


def outer(**hop: Any) -> dict[str, Any]:
    return {f"outer__{name}": value for name, value in hop.items()}


TP, PP = {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2, "micro_batches": 4}
PLANS: dict[str, Case] = {
    # Plain data parallelism: an all-reduce in one hop, or two there and two back.
    "dp4": case(**outer(**INT8)),
    "dp4_nodes": case(2, **inner(**INT8), **outer(**INT4)),
    "dp4_nodes_inner": case(2, **inner(**CLASSIC)),
    "dp4_fp16": case(2, precision="fp16", **inner(codec="int4"), **outer(**INT8), micro_batches=3),
    # Sharded state: a reduce-scatter.
    "zero2_3": case(stage=2, **inner(**INT8), micro_batches=3),
    "zero2_1": case(stage=2, **inner(**INT8), micro_batches=1),
    "zero3_3": case(stage=3, **inner(**INT4), micro_batches=3),
    "zero3_nodes": case(2, stage=3, **inner(**INT8), **outer(**INT4), micro_batches=3),
    "zero3_nodes_outer": case(2, stage=3, **outer(**INT8)),
    "zero3_bf16": case(stage=3, precision="bf16", reduce="bf16", **inner(**CLASSIC)),
    "zero3_tied": case(stage=3, tied=True, family="gpt2", offload=True, **inner(**INT8)),
    # Replicas of sharded state: a reduce-scatter, then an all-reduce.
    "hsdp1": case(stage=1, shard=2, **inner(**INT8), **outer(**INT8)),
    "hsdp2_3": case(2, stage=2, shard=2, **outer(**INT8), micro_batches=3),
    "hsdp3_3": case(2, stage=3, shard=2, **inner(**INT8), **outer(**INT4), micro_batches=3),
    "hsdp3_1": case(1, stage=3, shard=2, **outer(**CLASSIC), micro_batches=1),
    "whole3_3": case(2, stage=3, shard=1, **outer(**CLASSIC), micro_batches=3),
    # Beside other parallelisms; a stage's shards are those of zero3 whatever orders the micro-batches.
    "tp2_nodes": case(2, **TP, **outer(**INT8), micro_batches=3),
    "pp2_1f1b_dp": case(**PP, schedule="1f1b", tied=True, **outer(**INT8)),
    "pp2_zb_v_3": case(**PP, schedule="zb_v", stage=3, tied=True, precision="bf16", **inner(**INT4)),
    # ZeRO-1 with parameters chosen by name; messages that are too small: all, or the layers but not embedding and head.
    "by_name": case(
        stage=1, rules={"layers.0.*": {"quantise": False}, "*norm.weight": {"quantise": True}}, **inner(**INT8)
    ),
    "small": case(stage=0, gradients={"min_size": 1 << 20, **outer(**INT4)}),
    "small_layers": case(stage=1, vocab=600, gradients={"min_size": 30_000, **inner(codec="int4")}),
}


def build(chosen: Case, worlds: Worlds) -> TrainState:
    """A training state under the plan of a case."""
    os.environ["LOCAL_WORLD_SIZE"] = str(chosen["node"])
    config, spec = config_of(chosen, Path()), spec_of(chosen, CPU)
    config.precision.loss_scale = chosen.get("loss_scale", config.precision.loss_scale)
    spec.vocab_size, config.precision.types.rules = chosen.get("vocab", spec.vocab_size), chosen.get("rules", {})
    plan = resolve_plan(config.parallel, RANKS, spec, RANKS)
    batch = BatchPlan(LENGTH, SEQUENCES, SEQUENCES // plan.dp // chosen["micro_batches"], chosen["micro_batches"])
    return TrainState.build(config, spec, plan, resolve_pipeline(config, spec, plan, batch), worlds.of(plan, CPU))


def run_plan(chosen: Case, worlds: Worlds, references: dict[str, Any]) -> dict[str, Any]:
    """One plan for a few steps, beside one process."""
    started, state, sent = time.perf_counter(), build(chosen, worlds), []
    config, spec, plan, world = state.config, state.spec, state.plan, state.world
    with numeric_mode(config):
        watch = StateRecorder(state)
        for batches in data(chosen, spec, world, plan):
            watch.train(batches)
            sent.append(state.compression.sent)
        seen = watch.trajectory()
    planned = feedback_bytes(config, spec, plan, state.pipeline, chosen["node"])
    ranks = gather(
        {
            "sent": sent,
            "feedback": [state.compression.feedback_bytes, planned[world.rank // (RANKS // plan.pp)]],
            "parameters": {name: list(parameter.shape) for name, parameter in state.optimizer.parameters.items()},
        }
    )
    state.close()
    if world.rank:
        return {}
    key = json.dumps([spec.to_dict()])
    if key not in references:
        references[key] = train_reference(settings(), spec, data(chosen, spec, None, plan), CPU), {}
    expected, plain = references[key]
    kind = coarsest_tolerance(config.precision, config.parallel.grad_comm)
    if kind in DTYPES and kind != "fp32" and kind not in plain:
        plain[kind] = compare_runs(
            train_reference(settings(), spec, data(chosen, spec, None, plan), CPU, compute=DTYPES[kind]), expected
        )
    result = judge_plan("", [], kind, seen, expected, plain.get(kind))
    norms = {name: value.norm().item() for name, value in expected.gradients[0].items()}
    floor = 1e-2 * math.hypot(*norms.values())
    off = {
        name: (seen.gradients[0][name] - value).norm().item() / max(norms[name], floor)
        for name, value in expected.gradients[0].items()
    }
    return {
        "kind": kind,
        "reasons": result.reasons,
        "off": off,
        "ranks": ranks,
        "overflows": seen.overflows,
        "seconds": time.perf_counter() - started,
    }


def data(chosen: Case, spec: ModelSpec, world: World | None, plan: Plan) -> Iterator[list[MicroBatch]]:
    """The steps of this rank, or of one process."""
    ranks, micro_batches, rank = (plan.dp, chosen["micro_batches"], world.data.get_local_rank()) if world else (1, 1, 0)
    micro = SEQUENCES // ranks // micro_batches
    for step in range(STEPS):
        batch = random_batch(step, SEQUENCES, LENGTH, spec.vocab_size, False)
        yield [
            rows(batch, start, start + micro)
            for start in range(rank * micro * micro_batches, (rank + 1) * micro * micro_batches, micro)
        ]


def gather(value: Any) -> list[Any]:
    """The value of every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


BROKEN: dict[str, Case] = {
    "dp4": case(2, **inner(**CLASSIC), **outer(**INT4)),
    "zero3": case(stage=3, micro_batches=3, **inner(**INT4)),
    "hsdp_fp16": case(2, stage=2, shard=2, precision="fp16", **inner(**INT4), **outer(**CLASSIC)),
    "pp2_bf16": case(**PP, schedule="1f1b", stage=1, precision="bf16", **inner(**CLASSIC)),
}


def break_steps(chosen: Case, worlds: Worlds) -> list[dict[str, Any]]:
    """Steps in each of which one rank's gradients are not finite, with a good one before and after each."""
    state = build(chosen | {"loss_scale": 1024.0}, worlds)
    world = state.world
    batches, results = next(data(chosen, state.spec, world, state.plan)), []
    for victim, value in ((0, "inf"), (3, "nan"), (2, "-inf")):
        good = train_step(state, batches, False)
        errors = {name: tensor.clone() for name, tensor in state.compression.tensors().items()}
        weights = [local_values(parameter).detach().clone() for parameter in state.parameters.values()]
        scale, handles = state.scaler.value.item(), []
        if world.rank == victim:  # before any reduction, and on the way back into the layers below
            layers = [layer for model in state.stages.values() for layer in model.layers.values()]
            hook = lambda module, entering, leaving: (torch.full_like(entering[0], float(value)),)  # noqa: E731
            handles = [layers[-1].attention.o.register_full_backward_hook(hook)]
        bad = train_step(state, batches, False)
        for handle in handles:
            handle.remove()
        results += gather(
            {
                "good": good["found_inf"].item(),
                "bad": bad["found_inf"].item(),
                "backoff": state.scaler.value.item() / scale,
                "kept": max(tensor.float().abs().max().item() for tensor in errors.values()),
                "weights": all(
                    torch.equal(old, local_values(parameter))
                    for old, parameter in zip(weights, state.parameters.values())
                ),
                "errors": errors.keys() == state.compression.tensors().keys()
                and all(torch.equal(tensor, errors[name]) for name, tensor in state.compression.tensors().items()),
            }
        )
    results += gather({"next": train_step(state, batches, False)["found_inf"].item()})
    state.close()
    return results


def run(folder: Path, steps: int, node: int = RANKS, stop_after: int | None = None, **changes: Any) -> dict[str, Any]:
    """A run to `steps`, resuming what the folder has: exit code, what it told, and the lines of metrics of its
    steps."""
    os.environ["LOCAL_WORLD_SIZE"] = str(node)
    told: list[str] = []
    tell, Logger.event = Logger.event, lambda logger, text: told.append(text)
    trainer.training.trainer.train_step = Watched(stop_after=stop_after)
    began = time.perf_counter()
    try:
        result = trainer.run(
            run_settings(
                folder,
                **{
                    "run.steps": steps,
                    "lr.warmup": 0,
                    "eval.every": 1000,
                    "eval.generate": GenerateConfig(),
                    "run.deterministic": True,
                    "parallel.grad_comm.min_size": 0,
                    **changes,
                },
            )
        )
    finally:
        Logger.event, trainer.training.trainer.train_step = tell, train_step
    lines = [line for line in result.metrics if "loss" in line]
    return {"code": result.code, "told": told, "lines": lines, "seconds": time.perf_counter() - began}


def hops(**settings: Any) -> dict[str, Any]:
    return {f"parallel.grad_comm.{name.replace('__', '.')}": value for name, value in settings.items()}


RESUMED: dict[str, dict[str, Any]] = {
    "hsdp_classic": {
        "node": 2,
        "parallel.zero.stage": 3,
        "parallel.shard": 2,
        **hops(**inner(codec="int8"), **outer(**INT4)),
    },
    "nodes_fp16": {
        "node": 2,
        "parallel.zero.stage": 2,
        "precision.compute": "fp16",
        "precision.loss_scale": 2.0**10,
        **hops(**inner(**INT4), **outer(**CLASSIC)),
    },
    "pp2_classic": {"parallel.pp": 2, "parallel.zero.stage": 1, "batch.micro_size": 1, **hops(**inner(**INT4))},
}


def whole_runs(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Undisturbed, and stopped after three of six steps and resumed; resumed under another plan."""
    for name, changes in RESUMED.items():
        whole = run(root / f"{name}_whole", 6, **changes)
        stopped = run(root / name, 6, stop_after=2, **changes)
        if name == "hsdp_classic":
            if dist.get_rank() == 0:
                shutil.copytree(root / name, root / "other_plan")
            dist.barrier()
        resumed = run(root / name, 6, **changes)
        bits = dist.get_rank() == 0 and same(root / f"{name}_whole", root / name)
        yield name, {"whole": whole, "stopped": stopped, "resumed": resumed, "same": bits}
    other = {"parallel.zero.stage": 0, **hops(**outer(**CLASSIC))}
    yield "other_plan", run(root / "other_plan", 6, **other)
    yield "no_codec", run(root / "other_plan", 7)
    yield "codec_again", run(root / "other_plan", 8, **other)
    yield (
        "plain",
        run(root / "plain", 1)
        | {
            "parameters": {
                name: info.shape
                for name, info in declare_parameters(
                    trainer.training.run.starting_point(run_settings(root / "plain"))[0]
                ).items()
            }
        },
    )


def same(one: Path, other: Path) -> bool:
    """Whether two runs have left the same bits, errors included."""
    mine, theirs = (read_tensors(folder / "checkpoints/step-00000006") for folder in (one, other))
    return (
        mine.keys() == theirs.keys()
        and any(name.startswith("compression.") for name in mine)
        and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    )


def main(root: Path) -> None:
    worlds = Worlds()
    worlds.of(resolve_plan(Config().parallel, RANKS), CPU)
    results: dict[str, Any] = {"plans": {}, "broken": {}, "runs": {}}
    references: dict[str, Any] = {}
    for name, chosen in PLANS.items():
        try:
            results["plans"][name] = run_plan(chosen, worlds, references)
        except Exception as error:
            error.add_note(f"in the plan {name}")
            raise
    for name, chosen in BROKEN.items():
        results["broken"][name] = break_steps(chosen, worlds)
    results["runs"] = dict(whole_runs(root))
    if dist.get_rank() == 0:
        (root / "results.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    fork()
    main(Path(sys.argv[1]))
    leave()
