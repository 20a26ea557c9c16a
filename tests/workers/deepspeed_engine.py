"""DeepSpeed beside the torch engine: numbers, overflows under fp16, lost losses, and on four processes runs that change
the engine; on eight what is parallel in all three ways."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.launch import fork, leave
from support.reference import random_batch, rows, settings, tiny_spec
from torch.multiprocessing.reductions import StorageWeakRef
from workers.parallel_runs import gather, run

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.data.batches import MicroBatch
from trainer.distributed.mesh import World, join_world
from trainer.distributed.tensors import local_values
from trainer.model.initial import InitialWeights
from trainer.model.loss import IGNORE
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.parity.compare import StartedAdapters, coarsest_tolerance, compare_runs, judge_plan, train_reference
from trainer.parity.watch import StateRecorder
from trainer.planning.features import resolve_plan
from trainer.planning.parameters import declare_parameters
from trainer.planning.plan import BatchPlan
from trainer.precision import scaler
from trainer.precision.products import DTYPES
from trainer.training.out_of_memory import memory_breakdown
from trainer.training.state import TrainState
from trainer.training.step import train_step

STEPS, SEQUENCES, LENGTH = 3, 8, 16

THEIRS = {"parallel__zero__engine": "deepspeed"}
SMALL = {"reduce_bucket_size": 500, "sub_group_size": 4000, "stage3_param_persistence_threshold": 100}
"""Many buckets and groups, and parameters that are larger than a bucket; few that stay gathered."""

CASES: dict[str, dict[str, Any]] = {  # name -> micro-batches, and settings
    "zero1": {"micro": 2, "stage": 1},
    "zero1_buckets": {
        "micro": 1,
        "stage": 1,
        "deepspeed": {"zero_optimization": {"reduce_bucket_size": 500, "contiguous_gradients": False}},
    },
    "zero1_offload_bf16": {"micro": 2, "stage": 1, "offload": True, "compute": "bf16"},
    "zero3_experts": {"micro": 2, "stage": 3, "experts": 4, "recompute": "full"},
    "zero2_experts": {
        "micro": 2,
        "stage": 2,
        "experts": 4,
        "offload": True,
        "deepspeed": {"zero_optimization": {"reduce_bucket_size": 500}},
    },
    "zero2_offload_bf16": {"micro": 2, "stage": 2, "offload": True, "compute": "bf16"},
    "zero3": {"micro": 2, "stage": 3, "tied": True, "deepspeed": {"zero_optimization": SMALL}, "recompute": "full"},
    "zero2_scattered_bf16": {
        "micro": 2,
        "stage": 2,
        "compute": "bf16",
        "deepspeed": {"zero_optimization": {"reduce_bucket_size": 500, "contiguous_gradients": False}},
    },
    "zero3_keys": {
        "micro": 2,
        "stage": 3,
        "deepspeed": {
            "wall_clock_breakdown": True,
            "zero_optimization": SMALL
            | {
                "contiguous_gradients": False,
                "overlap_comm": False,
                "stage3_prefetch_bucket_size": 0,
                "stage3_model_persistence_threshold": 0,
                "stage3_module_granularity_threshold": 100,
                "stage3_use_all_reduce_for_fetch_params": True,
            },
        },
    },
    "zero3_hpz_offload_bf16": {
        "micro": 2,
        "stage": 3,
        "node": 2,
        "offload": True,
        "compute": "bf16",
        "deepspeed": {"zero_optimization": SMALL | {"zero_hpz_partition_size": 2}},
    },
    "zero1_adapters_fp8_bf16": {"micro": 2, "stage": 1, "compute": "bf16", "adapter": {"weights": "fp8"}},
    "zero2_adapters_offload": {"micro": 2, "stage": 2, "offload": True, "adapter": {"targets": ["*.[qv]", "*.down"]}},
    "zero3_adapters": {
        "micro": 2,
        "stage": 3,
        "adapter": {"trained": ["*norm*"]},
        "deepspeed": {"zero_optimization": SMALL},
        "recompute": "full",
    },
    "zero3_adapters_experts_bf16": {
        "micro": 2,
        "stage": 3,
        "offload": True,
        "compute": "bf16",
        "experts": 4,
        "adapter": {"targets": ["*.attention.*", "*.experts.*"], "rank": 8},
        "deepspeed": {"zero_optimization": SMALL | {"stage3_allgather_sequential": True}},
    },
    "tp2_pp2_adapters": {"micro": 4, "stage": 1, "tp": 2, "pp": 2, "schedule": "interleaved", "adapter": {}},
    "tp2": {"micro": 1, "stage": 1, "tp": 2, "recompute": "selective"},
    "tp4_offload": {"micro": 1, "stage": 1, "tp": 4, "offload": True},
    "pp2_1f1b": {"micro": 2, "stage": 1, "pp": 2, "schedule": "1f1b", "offload": True, "tied": True},
    "pp2_zb_v_bf16": {"micro": 4, "stage": 1, "pp": 2, "schedule": "zb_v", "compute": "bf16", "tied": True},
    "tp2_pp2_zb_h1_offload": {
        "micro": 4,
        "stage": 1,
        "tp": 2,
        "pp": 2,
        "schedule": "zb_h1",
        "offload": True,
        "tied": True,
    },
}
"""On four processes. node: processes of what is to count as one node. Stage 2 in fp32 that is not offloaded, and zb_v
with tp and pp, are among `LEGS`; what is offloaded in fp32 under stage 2 has experts or adapters besides."""

CUBE = {"micro": 2, "stage": 1, "tp": 2, "pp": 2}

CUBES: dict[str, dict[str, Any]] = {  # on eight
    "dp2_tp2_pp2_zb_v_offload_bf16": CUBE
    | {
        "schedule": "zb_v",
        "offload": True,
        "compute": "bf16",
        "tied": True,
        "deepspeed": {"zero_optimization": {"reduce_bucket_size": 500}},
    }
}

OVERFLOWS = [
    {"micro": 2, "stage": 1, "tp": 2, "pp": 2},
    {"micro": 2, "stage": 2, "offload": True},  # by `FlatZero`, as stage 1
    {"micro": 2, "stage": 3},
]


def settings_of(case: dict[str, Any], **changes: Any) -> Config:
    zero = {f"parallel__zero__{name}": case[name] for name in ("stage", "offload", "deepspeed") if name in case}
    parallel = {f"parallel__{name}": case[name] for name in ("tp", "pp") if name in case}
    return settings(
        parallel__pipeline__schedule=case.get("schedule", "1f1b"),
        precision__compute=case.get("compute", "fp32"),
        activation__mode=case.get("recompute", "none"),
        **zero,
        **parallel,
        **changes,
    )


class Worlds(dict[tuple, World]):
    """Meshes by shape; each is made once."""

    def of(self, plan: Any) -> World:
        return self.setdefault((plan.pp, plan.replicate, plan.shard, plan.tp), None) or self._made(plan)

    def _made(self, plan: Any) -> World:
        world = self[plan.pp, plan.replicate, plan.shard, plan.tp] = join_world(plan, torch.device("cpu"))
        return world


WORLDS = Worlds()


def starting(config: Config, spec: ModelSpec) -> StartedAdapters | None:
    """Weights with adapters that change the model; None where it has no adapters."""
    seed = config.run.seed
    return StartedAdapters(InitialWeights(spec, seed, torch.device("cpu")), seed) if spec.adapter.rank else None


def build(config: Config, case: dict[str, Any], depth: int = 4) -> tuple[TrainState, Iterator[list[MicroBatch]]]:
    """The state, and the steps of this data-parallel rank."""
    balanced = {"count": case.get("experts", 0), "bias_rate": 0.01, "balance": 0.2, "z_loss": 0.01}
    blocks = {"width": 40, "experts": balanced} if "experts" in case else {}
    adapter = {"adapter": {"rank": 4, "alpha": 4.0} | case["adapter"]} if "adapter" in case else {}
    spec = tiny_spec(tied=case.get("tied", False), depth=depth, init={"std": 0.05}, feed_forward=blocks, **adapter)
    plan = resolve_plan(config.parallel, dist.get_world_size(), spec, case.get("node"))
    batch = BatchPlan(LENGTH, SEQUENCES, SEQUENCES // plan.dp // case["micro"], case["micro"])
    world = WORLDS.of(plan)
    weights = starting(config, spec)
    state = TrainState.build(config, spec, plan, resolve_pipeline(config, spec, plan, batch), world, weights)
    first, size = world.data.get_local_rank() * SEQUENCES // plan.dp, batch.micro_size

    def steps() -> Iterator[list[MicroBatch]]:
        for step in range(100):
            whole = random_batch(step, SEQUENCES, LENGTH, spec.vocab_size, False)
            yield [rows(whole, start, start + size) for start in range(first, first + SEQUENCES // plan.dp, size)]

    return state, steps()


def parity(name: str, case: dict[str, Any], references: dict[str, Any]) -> dict[str, Any]:
    """A case against one plain process: loss, norm, every gradient and every parameter."""
    config = settings_of(case, **THEIRS)
    config.precision.types.norm.lr_scale, config.precision.types.rules = 0.5, {"layers.1.*": {"weight_decay": 0.3}}
    state, steps = build(config, case, 4 if "pp" in case else 2)
    watch, theirs, copied = StateRecorder(state), [], []
    if "node" in case:  # the node has its own copies of what is dropped after use
        parameter = next(iter(state.stages[0].layers.values())).feed_forward.down.weight
        state.stages[0].head.register_forward_pre_hook(
            lambda *_: copied.append(parameter.ds_secondary_tensor is not None)
        )
    for _ in range(STEPS):
        watch.train(next(steps))
        theirs.append(float(state.optimizer.zero._global_grad_norm))
    elements = sum(fragment.values.numel() for fragment in state.optimizer.parameters.values())
    taken = memory_breakdown(state)
    assert taken["optimizer"] == 8 * elements and taken["parameters"] >= 4 * elements, "moments; masters, and weights"
    if "adapter" in case:
        whole = sum(math.prod(info.shape) for info in declare_parameters(state.spec).values())
        assert elements < whole / 8, "no masters of frozen parameters"
    assert taken["gradients"] is taken["communication buffers"] is None
    seen = watch.trajectory()
    assert any(copied) == ("node" in case)
    state.close()
    kind, model = coarsest_tolerance(config.precision), (json.dumps(state.spec.to_dict()),)
    if dist.get_rank() != 0:
        return {}
    for compute in {"fp32", kind}:
        if (*model, compute) not in references:
            batches = [[random_batch(step, SEQUENCES, LENGTH, state.spec.vocab_size, False)] for step in range(STEPS)]
            base = dataclasses.replace(config, parallel=Config().parallel)
            references[*model, compute] = train_reference(
                base, state.spec, batches, torch.device("cpu"), starting(config, state.spec), DTYPES[compute]
            )
    expected = references[*model, "fp32"]
    plain = None if kind == "fp32" else compare_runs(references[*model, kind], expected, kind)
    return dataclasses.asdict(judge_plan(name, [], kind, seen, expected, plain)) | {"their_norms": theirs}


def optimizers() -> dict[str, Any]:
    """Both engines with an optimizer for each type of parameter, and moments in bf16: differences of parameters, those
    with such moments apart."""
    found_in = {}
    for stage in (1, 3):
        found = []
        for engine in ("torch", "deepspeed"):
            config = settings_of(
                {"stage": stage},
                parallel__zero__engine=engine,
                precision__types__embedding__optimizer="sgd",
                precision__types__bias__optimizer="lion",
                precision__types__matrix__state_dtype="bf16",
            )
            state, steps = build(config, {"micro": 2})
            watch = StateRecorder(state)
            for _ in range(STEPS):
                watch.train(next(steps))
            found.append(watch.trajectory().parameters)
        apart: dict[bool, list[torch.Tensor]] = {True: [torch.zeros(1)], False: [torch.zeros(1)]}
        for name, one in found[0].items():
            matrix = name.startswith("layers.") and one.dim() == 2
            apart[matrix].append((one - found[1][name]).abs().flatten())
        matrices = torch.cat(apart[True])
        found_in[str(stage)] = {
            "others": torch.cat(apart[False]).max().item(),
            "matrices": matrices.max().item(),
            "rounded": int((matrices > 1e-6).sum()),
        }
    return found_in


@patch.object(scaler, "GROWTH_INTERVAL", 2)
def overflows(cases: list[dict[str, Any]], victims: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    """fp16 under both engines: one rank's gradient of one parameter is infinite in a step, each victim in turn; a step
    without any target; then the loss alone."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True  # torch computes it here, if slowly
    results, (first, second, third, fourth) = [], victims
    for case in cases:
        seen = {}
        for engine in (
            ("torch", "deepspeed") if not results else ("deepspeed",)
        ):  # torch's numbers are those of any plan
            config = settings_of(
                case | {"compute": "fp16"},
                parallel__zero__engine=engine,
                precision__loss_scale=1024.0,
                optimizer__clip_norm=0.0,
            )
            state, steps = build(config, case)
            seen[engine] = [
                one_step(state, next(steps), victim)
                for victim in (None, first, second, None, third, None, "targets", None, fourth, "loss", None)
            ]
            tracker = state.scaler.state_dict()
            state.scaler.load_state_dict(tracker)
            assert state.scaler.state_dict() == tracker
            state.scaler.load_state_dict({})  # of a run without a loss scale
            assert state.scaler.state_dict() == tracker
            seen[engine].append({"scaler": tracker})
            state.close()
        results.append(
            {"case": case, "torch": results[0]["torch"] if results else None}
            | {engine: gather(steps) for engine, steps in seen.items()}
        )
    return results


def lost_losses() -> list[dict[str, Any]]:
    """Without a loss scale and with all gradients finite, a step whose loss is not."""
    results = []
    for case in [
        {"stage": stage, "offload": offload, "compute": compute}
        for stage, offload, compute in ((1, True, "bf16"), (2, False, "fp32"), (3, True, "fp32"))
    ]:
        state, steps = build(settings_of(case, **THEIRS), {"micro": 2}, 2)
        results.append(
            {"case": case, "steps": [one_step(state, next(steps), victim) for victim in (None, "loss", None)]}
        )
    return results


def one_step(state: TrainState, batches: list[MicroBatch], victim: int | str | None) -> dict[str, Any]:
    handle, train = None, state.runtime.train
    if victim == state.world.rank:
        layer = next(iter(next(iter(state.stages.values())).layers.values()))
        handle = layer.feed_forward.down.register_full_backward_hook(
            lambda module, inputs, outputs: (torch.full_like(inputs[0], torch.inf),)
        )
    if victim == "targets":
        for batch in batches:
            batch.targets.fill_(IGNORE)
    if victim == "loss":
        state.runtime.train = lambda *arguments: train(*arguments) + torch.inf
    before = [local_values(parameter).detach().clone() for parameter in state.parameters.values()]
    scalars = train_step(state, batches, False)
    state.runtime.train = train
    if handle:
        handle.remove()
    changed = any(
        not torch.equal(old, local_values(parameter)) for old, parameter in zip(before, state.parameters.values())
    )
    return {
        "loss": scalars["loss"].item(),
        "norm": scalars["grad_norm"].item(),
        "found_inf": scalars["found_inf"].item(),
        "scale": scalars["loss_scale"].item(),
        "updates": state.optimizer.updates.item(),
        "changed": changed,
    }


def gathered() -> list[int]:
    """Stage 3 without recompute: how many gathered parameters of layers are in memory when the head begins, each time,
    and of how many."""
    zero = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    case = {"micro": 2, "stage": 3, "deepspeed": {"zero_optimization": zero}}
    state, steps = build(settings_of(case, **THEIRS), case, 2)
    model, storages, found = state.stages[0], {}, []

    def remember(layer: torch.nn.Module, *_: Any) -> None:
        storages.update(
            {
                (id(layer), name): StorageWeakRef(parameter.untyped_storage())
                for name, parameter in layer.named_parameters()
            }
        )

    def count(*_: Any) -> None:
        found.extend([sum(not storage.expired() for storage in storages.values()), len(storages)])

    for layer in model.layers.values():
        layer.attention_norm.register_forward_pre_hook(lambda *_, layer=layer: remember(layer))
    model.head.register_forward_pre_hook(count)
    train_step(state, next(steps), False)
    return found


LEGS = [  # plans of one run, two steps each: from each engine to the other, and to another stage of DeepSpeed's
    {
        "parallel.tp": 2,
        "parallel.pp": 2,
        "parallel.pipeline.schedule": "zb_v",
        "parallel.zero.stage": 1,
        "parallel.zero.engine": "deepspeed",
        "batch.micro_size": 1,
    },
    {"parallel.zero.stage": 3},
    {"parallel.zero.stage": 3, "parallel.zero.engine": "deepspeed", "parallel.zero.offload": True},
    {"parallel.zero.stage": 2, "parallel.zero.engine": "deepspeed"},
]


ADAPTED_LEGS = [
    {"parallel.zero.stage": 3, "parallel.zero.engine": "deepspeed"},
    {"parallel.tp": 2, "parallel.zero.stage": 3},
    {"parallel.tp": 2, "parallel.zero.stage": 1, "parallel.zero.engine": "deepspeed"},
]


def four(root: Path) -> dict[str, Any]:
    references: dict[str, Any] = {}
    results: dict[str, Any] = {
        "parity": {name: parity(name, case, references) for name, case in CASES.items()},
        "optimizers": optimizers(),
        "gathered": gathered(),
        "lost": lost_losses(),
        "overflows": overflows(OVERFLOWS, (0, 1, 2, 3)),
    }
    adapter = {"model.adapter.rank": 4, "model.adapter.trained": ["norm.weight"]}
    for name, legs, more in (("legs", LEGS, {}), ("adapters", ADAPTED_LEGS, adapter)):
        common = {"model.tied": True, "eval.every": 2, "precision.compute": "fp32", "lr.warmup": 1} | more
        results[name] = {"whole": run(root / f"{name}_whole", 2 * len(legs), **common, **{"parallel.zero.stage": 1})}
        results[name]["legs"] = [run(root / name, 2 * leg, **common, **plan) for leg, plan in enumerate(legs, start=1)]
    return results


def eight() -> dict[str, Any]:
    references: dict[str, Any] = {}
    return {"parity": {name: parity(name, case, references) for name, case in CUBES.items()}}


def main(root: Path) -> None:
    fork(deepspeed=True)
    join_world(resolve_plan(Config().parallel, int(os.environ["WORLD_SIZE"])), torch.device("cpu"))
    results = four(root) if dist.get_world_size() == 4 else eight()
    if dist.get_rank() == 0:
        (root / f"{dist.get_world_size()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
