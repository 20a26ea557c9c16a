"""Every plan of the matrix against the one-process reference, many in one launch; and fp16 overflows on one rank.

    plans.py OUT [PART PARTS | deepspeed]

PART: of so many parts that launches beside each other do, from 0; deepspeed: what runs on its engine instead of the
matrix.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.launch import CAN_COMPILE, fork, leave
from support.matrix import PLAIN, SEQUENCES, Case, cases, deepspeed, depth, parts, sample
from support.reference import random_batch, rows, settings, tiny_spec
from support.schedules import merge_backward
from support.streams import delay_streams
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.modules.module import register_module_forward_pre_hook

from trainer.config import Config, Float8Config
from trainer.config.model import ModelSpec
from trainer.data.batches import MicroBatch
from trainer.distributed.mesh import World, join_world, local_device
from trainer.distributed.tensors import local_regions, local_values
from trainer.model.experts import WideLinear
from trainer.model.initial import DeclaredModule, InitialWeights, parameter_infos
from trainer.model.layers import ExpertUnit
from trainer.model.loss import IGNORE
from trainer.optim.optimizer import Optimizer
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.parallel.zero.copy_engine import CopyEngineShards
from trainer.parity.compare import (
    RunComparison,
    StartedAdapters,
    Trajectory,
    coarsest_tolerance,
    compare_runs,
    judge_plan,
    train_reference,
)
from trainer.parity.routing import known_choices
from trainer.parity.watch import train_plan
from trainer.planning import parameters as cost_parameters
from trainer.planning.features import resolve_plan
from trainer.planning.float8 import can_cast_once
from trainer.planning.plan import BatchPlan
from trainer.planning.schedules import ir
from trainer.planning.schedules.templates import build_schedule
from trainer.precision import scaler
from trainer.precision.products import DTYPES
from trainer.training.state import TrainState
from trainer.training.step import train_step

STEPS, LENGTH = 2, 16
GRAPHS = "aot_eager_decomp_partition"
"""A backend of torch.compile that captures, cuts and recomputes as the default one, and runs what is left eagerly."""

PATIENCE = 150 if torch.cuda.is_available() else 500
"""Seconds that a plan may take, with what is compiled for it; then all ranks say where they are, and end."""

GROUPED_EXPERTS = {
    "count": 8,
    "top_k": 3,
    "score": "sigmoid",
    "groups": 4,
    "top_groups": 2,
    "group_score": "top2",
    "shared_width": 0,
    "shared_gate": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {
        "norm": {"kind": "layer"},
        "learned_positions": True,
        "attention": {"positions": "none", "output_bias": True},
        "feed_forward": {"kind": "plain", "activation": "gelu_tanh", "bias": True},
    },
    "neox": {"norm": {"kind": "layer"}, "parallel_residual": True, "feed_forward": {"kind": "plain", "bias": True}},
    "experts": {
        "feed_forward": {
            "width": 40,
            "experts": {"count": 6, "top_k": 2, "shared_width": 20, "shared_gate": True, "scale": 1.5},
        },
        "overrides": {
            "0": {"feed_forward": {"width": 38, "experts": {"count": 0}}},
            "-1": {"feed_forward": {"experts": GROUPED_EXPERTS}},
        },
    },
    "balanced experts": {
        "feed_forward": {
            "width": 40,
            "experts": {"count": 6, "top_k": 2, "bias_rate": 0.02, "balance": 0.2, "z_loss": 0.02},
        },
        "overrides": {
            "1": {"feed_forward": {"experts": {"bias_rate": 0.5, "bias_rule": "quantile"}}},
            "-1": {"feed_forward": {"experts": GROUPED_EXPERTS | {"balance_over": "previous"}}},
        },
    },
    "all experts": {"feed_forward": {"width": 40, "experts": {"count": 3, "top_k": 3, "normalise": False}}},
    "eight experts": {"feed_forward": {"width": 40, "experts": GROUPED_EXPERTS | {"shared_width": 20}}},
    "two experts": {"feed_forward": {"width": 40, "experts": {"count": 2, "top_k": 1, "normalise": False}}},
    "gpt_oss": {
        "attention": {"output_bias": True, "sinks": True, "window": 5},
        "pattern": [{}, {"attention": {"window": 0}}],
        "feed_forward": {
            "width": 40,
            "bias": True,
            "activation": "clamped_swiglu",
            "experts": {"count": 6, "top_k": 2, "router_bias": True},
        },
    },
    "latent": {
        "attention": {
            "kind": "latent",
            "kv_heads": 0,
            "qk_norm": "none",
            "latent": {"q_rank": 16, "kv_rank": 14, "nope_dim": 6, "rope_dim": 4, "value_dim": 8},
            "rope": {"scaling": "yarn", "factor": 4.0, "original_length": 16, "mscale": 0.7, "mscale_all_dim": 1.0},
        },
        "overrides": {"1": {"attention": {"latent": {"q_rank": 0}}}},
    },
    "gemma": {"norm": {"placement": "both", "offset": 1.0}, "embedding_scale": 24**0.5, "logit_soft_cap": 5.0},
}
ADAPTERS = {
    "all": {"rank": 4, "alpha": 6.0},
    "some": {"rank": 3, "alpha": 5.0, "scale": "root", "targets": ["*.attention.[qv]", "*.down"]},
    "dense": {
        "rank": 4,
        "alpha": 6.0,
        "targets": ["*.attention.*", "*.shared.*"],
        "trained": ["*.router.*", "*.experts.gate.*"],
    },
    "experts": {
        "rank": 8,
        "alpha": 6.0,
        "targets": ["*.q", "*.experts.*", "*.feed_forward.gate"],
        "trained": ["*.experts.up.weight"],
    },
    "first layer": {"rank": 4, "alpha": 6.0, "targets": ["layers.0.*"]},
    "last layer": {"rank": 4, "alpha": 6.0, "targets": ["layers.2.*"]},
    "trained": {
        "rank": 4,
        "alpha": 6.0,
        "targets": ["*.attention.[qo]", "*.up"],
        "trained": ["*norm*", "embedding.weight", "*.attention.v.*", "*.attention.o.weight", "layers.1.*.down.weight"],
    },
}
WIDE_LATENT = {"attention": {"latent": {"q_rank": 32, "kv_rank": 32, "nope_dim": 16, "rope_dim": 16, "value_dim": 16}}}
WIDE_BLOCKS = {"width": 256, "feed_forward": {"width": 256}, "init": {"std": 0.025}}
"""Two ranks share the layers in blocks of 128. Products of the four times wider layers keep their size with half the
deviation of weights; with all of it, losses of two runs in bf16 differ by 3e-3 through rounding alone."""

RECOMPUTE = {
    "none": {},
    "full": {"mode": "full"},
    "every2": {"mode": "selective", "save": ["all@1"]},
    "selective": {"mode": "selective"},
    "attention": {"mode": "selective", "save": ["attention", "attention.*"]},
    "tiles": {"mode": "selective", "tile": 7, "offload": True},
    "layers": {"mode": "selective", "save": ["attention@1-2", "attention.*@1", "feed_forward.up@1-2", "all@0"]},
}


def spec_of(case: Case, device: torch.device) -> ModelSpec:
    attention = {"bias": case["bias"], "qk_norm": case["qk_norm"], "kv_heads": case["kv_heads"]}
    spec = tiny_spec(tied=case["tied"], depth=depth(case), attention=attention, init={"std": 0.05})
    windows = {"attention": {"window": 5, "soft_cap": 2.0}, "pattern": [{}, {"attention": {"window": 0}}]}
    # FlexAttention on a GPU wants heads of a power of two.
    for changes in (
        FAMILIES[case["family"]],
        WIDE_LATENT if case["family"] == "latent" and ("float8" in case or device.type == "cuda") else {},
        windows if case["attention"] == "window_cap" else {},
        {"width": 64} if device.type == "cuda" else {},
        {"width": 64, "feed_forward": {"width": 96}} if "float8" in case else {},
        WIDE_BLOCKS if case.get("float8") == "blockwise" else {},
        {"adapter": ADAPTERS[case["adapter"]]} if "adapter" in case else {},
        {"adapter": {"weights": "fp8"}} if case.get("frozen") == "fp8" else {},
    ):
        spec = ModelSpec.from_dict(merged(spec.to_dict(), changes))
    return spec


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return values | {
        name: merged(values.get(name, {}), change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }


def context_of(case: Case) -> dict[str, Any]:
    method, _, order = case["way"].partition(" ")
    return {"parallel__context__method": method, "parallel__context__order": order or "auto"}


MIXED = {
    "mixed": ("rowwise", {"*.feed_forward.*": "tensorwise", "*.attention.[kv].*": "none"}),
    "mixed rows": ("rowwise", {"*.feed_forward.*": "rowwise_with_gw_hp", "*.feed_forward.up.*": "none"}),
}
"""Recipes by the parameter-type map: that of all, and others by pattern. With one scale for a matrix, tensor-parallel
ranks have numbers of their own, so there it is left out."""


def config_of(case: Case, folder: Path) -> Config:
    schedule, recipe = case["schedule"], case.get("float8", "none")
    recipe, rules = MIXED.get(recipe, (recipe, {}))
    config = settings(
        batch__sequence_length=LENGTH,
        data__mask_documents=case["attention"] != "causal",
        parallel__tp=case["tp"],
        parallel__tp_overlap=case.get("tp_overlap", "off"),
        data__cache=str(folder),
        parallel__cp=case["cp"],
        **(context_of(case) if case["cp"] > 1 else {}),
        parallel__ep=case.get("ep", 1),
        parallel__ep_dispatch=case.get("ep_dispatch", "auto"),
        parallel__ep_capacity=case.get("ep_capacity", 0.0),
        parallel__pp=case["pp"],
        parallel__zero__stage=case["stage"],
        parallel__shard=case.get("shard", -1),
        parallel__zero__offload=case.get("offload", False),
        parallel__zero__engine=case.get("engine", "torch"),
        parallel__zero__collectives=case.get("collectives", "nccl"),
        precision__compute="bf16" if "float8" in case and torch.cuda.is_available() else case["precision"],
        precision__float8=Float8Config(recipe, ends=0, gather=case.get("gather", False)),
        precision__reduce=case.get("reduce", "fp32"),
        compile="compile" in case,
        optimizer__name="muon" if case.get("optimizer") == "muon" else "adamw",
        optimizer__muon__compute="fp32",
        **{f"activation__{name}": value for name, value in RECOMPUTE[case["recompute"]].items()},
        **{f"parallel__grad_comm__{name}": value for name, value in case.get("gradients", {}).items()},
    )
    config.loss.chunk, config.loss.z_loss, config.loss.tile = (
        (5 if case["loss"] == "chunk" else 2048),
        (1e-2 if case["loss"] == "z_loss" else 0.0),
        (7 if case["loss"] == "tile" else 0),
    )
    if schedule == "interleaved3":
        config.parallel.pipeline.schedule, config.parallel.pipeline.chunks = "interleaved", 3
    elif schedule == "csv":  # with full and split backwards side by side
        path = folder / f"{case['pp']}x{case['micro_batches']}-{os.getpid()}.csv"
        path.write_text(ir.format_schedule(merge_backward(build_schedule("zb_v", case["pp"], case["micro_batches"]))))
        config.parallel.pipeline.schedule = str(path)
    elif schedule != "none":
        config.parallel.pipeline.schedule = schedule
    config.precision.types.rules = {pattern: {"float8": other} for pattern, other in rules.items()}
    if case.get("optimizer") == "muon_in_one_layer":
        config.precision.types.rules = {"layers.0.attention.[qkvo].weight": {"optimizer": "muon"}}
    scaler.BACKOFF = 2.0**-10 if case.get("overflow") else 0.5
    if case.get("overflow"):
        config.precision.loss_scale = 2.0**40
    return config


def batches(
    case: Case, spec: ModelSpec, device: torch.device, rank: int = 0, ranks: int = 1, micro_batches: int = 1
) -> Iterator[list[MicroBatch]]:
    """The steps of a data-parallel rank."""
    micro = SEQUENCES // ranks // micro_batches
    for step in range(STEPS):
        batch = random_batch(step, SEQUENCES, LENGTH, spec.vocab_size, case["attention"] != "causal", device)
        batch.targets[: step * SEQUENCES // 2] = IGNORE  # in the second step, some ranks have no target
        yield [
            rows(batch, start, start + micro)
            for start in range(rank * micro * micro_batches, (rank + 1) * micro * micro_batches, micro)
        ]


def digest(seen: Trajectory) -> str:
    """Equal where all gradients are, bit by bit."""
    found = hashlib.sha256()
    for gradients in seen.gradients:
        for name in sorted(gradients):
            found.update(gradients[name].numpy())
    return found.hexdigest()


class Worlds(dict[tuple, World]):
    """Meshes by shape; each is made once."""

    def of(self, plan: Any, device: torch.device) -> World:
        shape = plan.pp, plan.replicate, plan.shard, plan.cp, plan.tp, *plan.expert_mesh.values()
        if shape not in self:
            self[shape] = join_world(plan, device)
        return self[shape]


def measure(chosen: list[Case], worlds: Worlds, device: torch.device, folder: Path) -> list[dict[str, Any]]:
    """Runs cases; the results are on rank 0."""
    references: dict[str, Trajectory] = {}
    plain: dict[str, RunComparison | None] = {}
    results, compile = [], torch.compile
    for number, case in enumerate(chosen, 1):
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        started, spec, config = time.perf_counter(), spec_of(case, device), config_of(case, folder)
        seed = config.run.seed
        weights = StartedAdapters(InitialWeights(spec, seed, device), seed) if "adapter" in case else None
        if dist.get_rank() == 0:
            print(f"{number} of {len(chosen)}: {describe(case)}", flush=True)
        plan = resolve_plan(config.parallel, dist.get_world_size(), spec)
        plan = dataclasses.replace(plan, casts_once=can_cast_once(config, spec, plan, case["micro_batches"]))
        batch = BatchPlan(LENGTH, SEQUENCES, SEQUENCES // plan.dp // case["micro_batches"], case["micro_batches"])
        pipeline, world = resolve_pipeline(config, spec, plan, batch), worlds.of(plan, device)
        own = batches(case, spec, device, world.data.get_local_rank(), plan.dp, case["micro_batches"])
        # Scales are those of a micro-batch, so the reference in fp8 has the same.
        float8 = config.precision if "float8" in case else None
        parts = 1 if float8 is None else plan.dp * case["micro_batches"]
        others = [case["loss"] == "z_loss", *map(case.get, ("attention", "optimizer", "float8"))]
        key = json.dumps([spec.to_dict(), *others, parts])
        kind = coarsest_tolerance(config.precision, config.parallel.grad_comm)
        base = settings(loss__z_loss=config.loss.z_loss)
        base.optimizer, base.precision.types = config.optimizer, config.precision.types
        if world.rank == 0:
            if key not in references:
                compute = DTYPES[config.precision.compute] if float8 else torch.float32
                data = batches(case, spec, device, micro_batches=parts)
                references[key] = train_reference(base, spec, data, device, weights, compute, float8)
            if key + kind not in plain:  # fp32 has to do with the table
                plain[key + kind] = (
                    None
                    if kind not in DTYPES or kind == "fp32"
                    else compare_runs(
                        train_reference(
                            base,
                            spec,
                            batches(case, spec, device),
                            device,
                            weights,
                            DTYPES[kind],
                            choices=known_choices(kind, references[key].choices),
                        ),
                        references[key],
                        kind,
                    )
                )
        choices = world.agree(lambda: known_choices(kind, references[key].choices))
        graphs = case.get("compile") == "graphs" and device.type == "cpu"
        counters.clear()
        routers: set[str] = set()

        def note_type(module: nn.Module, _: Any) -> None:
            if isinstance(module, WideLinear):
                routers.add(str(module.weight.dtype))
            if isinstance(module, DeclaredModule) and any(info.float8 for info in module.declared.values()):
                # Also where it has been gathered.
                assert module.weight.dtype is torch.float8_e4m3fn, describe(case)

        def set_factor(
            unit: FSDPModule, factor: float, set_of_torch: Any = FSDPModule.set_gradient_divide_factor
        ) -> None:
            """Experts that are on one rank alone need no factor, with which FSDP would copy all of their gradients."""
            ranks = plan.expert_mesh["expert_replicate"] * plan.expert_mesh["expert_shard"]
            assert ranks > 1 or not isinstance(unit, ExpertUnit), describe(case)
            set_of_torch(unit, factor)

        added: list[bool] = []

        def note_sum(shards: CopyEngineShards, *what: Any, really: Any = CopyEngineShards.sum) -> Any:
            added.append(what[-1] is True)
            return really(shards, *what)

        late: set[int] = set()  # groups whose gradients are taken up after a backward pass, and not within
        ends: list[bool] = []

        def note_end(state: FSDPState, really: Any = FSDPState._root_post_backward_final_callback) -> None:
            ends.append(True)
            really(state)
            ends.pop()

        def note_reduction(group: FSDPParamGroup, *unused: Any, really: Any = FSDPParamGroup.post_backward) -> None:
            gradients = [getattr(one, "_unsharded_param", None) for one in group.fsdp_params]
            if ends and any(one is not None and one.grad is not None for one in gradients):
                late.add(id(group))
            really(group, *unused)

        watch = None if "compile" in case else register_module_forward_pre_hook(note_type)
        try:
            with (
                patch.object(torch, "compile", partial(compile, backend=GRAPHS)) if graphs else nullcontext(),
                patch.object(FSDPModule, "set_gradient_divide_factor", set_factor),
                patch.object(CopyEngineShards, "sum", note_sum),
                patch.object(FSDPState, "_root_post_backward_final_callback", note_end),
                patch.object(FSDPParamGroup, "post_backward", note_reduction),
            ):
                seen = train_plan(config, spec, plan, pipeline, world, own, weights, choices)
        except Exception as error:
            error.add_note(f"in the case {describe(case)}")
            raise
        finally:
            if watch is not None:
                watch.remove()
        if plan.overlaps:  # only the embedding's, whose input has no gradient
            assert len(late) <= len(pipeline.stages(world.place("pp"))), describe(case)
        # Copies add later micro-batches to the sums of earlier ones, as they arrive.
        several = plan.stage > 1 and plan.replicate == 1 and case["micro_batches"] > 1
        if added and "adapter" not in case and config.precision.reduce == "fp32":
            assert any(added) == several, describe(case)
        if plan.cp == 1 or device.type == "cpu":  # a GPU's kernel for the last queries is not compiled
            assert not counters["graph_break"], f"{describe(case)}: compiled in parts: {dict(counters['graph_break'])}"
        if world.rank == 0:
            result = judge_plan(describe(case), [], kind, seen, references[key], plain[key + kind])
            results.append(
                dataclasses.asdict(result)
                | {"case": case, "digest": digest(seen), "seconds": time.perf_counter() - started}
                | {"routers": sorted(routers)}
            )
        gc.freeze()  # what was imported, compiled and found stays: after each case the collector would look at it again
    faulthandler.cancel_dump_traceback_later()
    return results


def describe(case: Case) -> str:
    """What is not plain about a case."""
    return " ".join(f"{name}={value}" for name, value in case.items() if PLAIN.get(name) != value) or "plain"


def overflow(worlds: Worlds, device: torch.device) -> list[dict[str, Any]]:
    """fp16 steps in which one rank's part of one gradient is infinite, that of a tied embedding where the rank has it;
    then a step without any target. Seen by every rank."""
    results = []
    for layout in (
        {"tp": 2, "pp": 2, "schedule": "1f1b", "tied": True},
        {"tp": 2, "pp": 2, "schedule": "zb_v", "tied": True},
        {"dp": 2, "pp": 2, "stage": 2, "schedule": "1f1b"},
        {"dp": 2, "tp": 2, "stage": 3, "tied": True},
    ):
        case = PLAIN | layout | {"precision": "fp16"}
        spec, config = spec_of(case, device), config_of(case, Path())
        plan = resolve_plan(config.parallel, dist.get_world_size(), spec)
        batch = BatchPlan(LENGTH, SEQUENCES, SEQUENCES // plan.dp // 2, 2)
        world = worlds.of(plan, device)
        state = TrainState.build(config, spec, plan, resolve_pipeline(config, spec, plan, batch), world)
        whole_sum, (first, second) = (
            state.shared.sum,
            batches(case, spec, device, world.data.get_local_rank(), plan.dp, 2),
        )
        train_step(state, first, False)
        for victim in range(world.size):

            def broken_sum() -> None:
                if world.rank == victim:
                    broken = "embedding.weight" if spec.tied else "feed_forward.down.weight"
                    names = sorted(state.parameters, key=lambda name: not name.endswith(broken))
                    local_values(state.parameters[names[0]].grad).view(-1)[0] = float("inf")
                whole_sum()

            before = [local_values(parameter).detach().clone() for parameter in state.parameters.values()]
            scale, updates = state.scaler.value.item(), state.optimizer.updates.item()
            state.shared.sum = broken_sum
            scalars = train_step(state, second, False)
            state.shared.sum = whole_sum
            mine = {
                "loss": scalars["loss"].item(),
                "found_inf": scalars["found_inf"].item(),
                "backoff": state.scaler.value.item() / scale,
                "updates": state.optimizer.updates.item() - updates,
                "unchanged": all(
                    torch.equal(old, local_values(parameter))
                    for old, parameter in zip(before, state.parameters.values())
                ),
            }
            everyone: list[Any] = [None] * world.size
            dist.all_gather_object(everyone, mine)
            results.append({"case": f"{describe(case)}, rank {victim}", "ranks": everyone})
        before = {name: local_values(tensor).detach().clone() for name, tensor in state.tensors().items()}
        scale = state.scaler.state_dict()
        empty = [dataclasses.replace(some, targets=torch.full_like(some.targets, IGNORE)) for some in second]
        skipped = train_step(state, empty, False)["found_inf"].item()
        same = [torch.equal(old, local_values(state.tensors()[name])) for name, old in before.items()]
        everyone = world.gather((skipped, all(same), state.scaler.state_dict() == scale))
        scalars = train_step(state, second, False)
        results.append(
            {
                "case": describe(case),
                "next": scalars["found_inf"].item(),
                "loss": scalars["loss"].item(),
                "empty": everyone,
            }
        )
        if state.channels is not None:
            state.channels.close()
    return results


def whole_matrices(worlds: Worlds, device: torch.device) -> list[dict[str, Any]]:
    """Muon in bf16 under plans that hold parts of matrices: whether a rank's parts have the bits of an update of whole
    ones, and whether it keeps momentum of its parts alone."""
    results = []
    for layout in (
        {"dp": 4, "stage": 3},
        {"dp": 4, "stage": 2, "shard": 2},
        {"dp": 2, "tp": 2, "stage": 3},
        {"dp": 2, "tp": 2, "stage": 0, "kv_heads": 1},
    ):
        case = PLAIN | {"optimizer": "muon"} | layout
        spec, config = spec_of(case, device), config_of(case, Path())
        config.optimizer.muon.compute = "bf16"
        plan = resolve_plan(config.parallel, dist.get_world_size(), spec)
        batch = BatchPlan(LENGTH, SEQUENCES, SEQUENCES // plan.dp // 2, 2)
        world = worlds.of(plan, device)
        state = TrainState.build(config, spec, plan, resolve_pipeline(config, spec, plan, batch), world)
        policies = {name: policy for name, policy in state.optimizer.policies.items() if policy.optimizer == "muon"}
        infos, weights = parameter_infos(state.stages[0]), InitialWeights(spec, config.run.seed, device)
        whole = {name: nn.Parameter(weights(name, infos[name])) for name in policies}
        alone, generator = Optimizer(whole, policies, config.optimizer), torch.Generator(device).manual_seed(3)
        rate, one, zero = (torch.tensor(value, device=device) for value in (1e-2, 1.0, 0.0))
        for _ in range(2):
            for name, parameter in state.parameters.items():
                parameter.grad = torch.zeros_like(parameter)
                if name in whole:
                    whole[name].grad = torch.randn(infos[name].shape, generator=generator, device=device)
                    for offset, values in local_regions(parameter.grad):
                        place = tuple(slice(first, first + size) for first, size in zip(offset, values.shape))
                        values.copy_(whole[name].grad[place])
            state.optimizer.step(rate, one, zero)
            alone.step(rate, one, zero)
        differing = [
            name
            for name, expected in whole.items()
            for offset, values in local_regions(state.parameters[name])
            if not torch.equal(
                values, expected[tuple(slice(first, first + size) for first, size in zip(offset, values.shape))]
            )
        ]
        kept = all(
            state.optimizer.state[name, "momentum_buffer"].shape == local_values(state.parameters[name]).shape
            for name in whole
        )
        results.append({"case": describe(case), "ranks": world.gather((differing, kept)), "matrices": len(whole)})
    return results


def main(out: str, *which: str) -> None:
    device, worlds = local_device(Config().run), Worlds()
    cost_parameters.FEW_ROWS = 0  # products of the head take rows of zeros, as those of large vocabularies do
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 2000  # of all plans
    processes = int(os.environ.get("WORLD_SIZE", 1))
    worlds.of(resolve_plan(Config().parallel, processes), device)
    if which == ("deepspeed",):
        chosen = deepspeed(processes)
    else:
        chosen = cases(processes, CAN_COMPILE)
        chosen = parts(chosen, int(which[1]))[int(which[0])] if which else chosen
    # torch counts in each process how often it has set up shared memory, and hangs where ranks of a group have counted
    # differently. Stages of a pipeline do: their buffers do not grow equally often. These cases come last.
    shares = {"collectives": "copy_engine", "tp_overlap": "copy_engine"}.items()
    chosen = sorted(chosen, key=lambda case: case["pp"] > 1 and ("ep" in case or not shares.isdisjoint(case.items())))
    delays = device.type == "cuda" and which != ("deepspeed",)  # whose engine has streams of its own
    with delay_streams(dist.get_rank()) if delays else nullcontext():
        results = {
            "cases": measure(chosen, worlds, device, Path(out).parent),
            "overflow": overflow(worlds, device) if processes == 4 and not which else [],
            "matrices": whole_matrices(worlds, device) if processes == 4 and not which else [],
        }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    sample()  # once, not by every rank
    fork(compiles=os.environ.get("WORLD_SIZE") == "2")
    main(*sys.argv[1:])
    leave()
