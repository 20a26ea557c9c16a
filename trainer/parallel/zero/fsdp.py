"""ZeRO stages 0 to 3 as one setting on FSDP2 (Rajbhandari et al., arXiv 1910.02054).

| stage | parameters between steps | gathered | gradients are reduced |
|---|---|---|---|
| 0 | whole on every rank | never | once a step (all-reduce) |
| 1 | sharded fp32 masters | once a step, kept to the last backward | once a step (reduce-scatter) |
| 2 | as 1 | as 1 | every micro-batch, kept sharded |
| 3 | as 1 | for each layer's forward and backward | every micro-batch, kept sharded |

With fewer shards than data-parallel ranks (HSDP), the sharded gradients are also all-reduced over the replicas, once a
step. What a rank holds whole (one shard, experts that no other rank has) is reduced once a step in every stage.

Offload: gradients that are reduced every micro-batch are accumulated on the device and copied to host memory once a
step. FSDP keeps partial sums on the device only if its mesh has a replica dimension. Offloaded plans therefore get one,
of size one where there are no replicas. Without it, FSDP would copy the gradients of every micro-batch to pageable host
memory, wait for the copy, and add on the host.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from trainer.config import Config, ConfigError
from trainer.distributed.mesh import World
from trainer.distributed.tensors import Fragment
from trainer.model.experts import WideLinear
from trainer.model.initial import DeclaredModule, ParameterInfo, Weights, fill_parameters
from trainer.model.layers import ExpertUnit
from trainer.model.stage import Stage
from trainer.optim.optimizer import Optimizer, ParameterPolicy
from trainer.parallel.compress.reduction import Compression, NoCompression, compression_of
from trainer.parallel.pipeline.runtime import StageSharding
from trainer.parallel.tensor.apply import SharedParameters
from trainer.parallel.zero.fsdp_internals import (
    PassStates,
    accumulate_gradients,
    accumulate_in_one_pass,
    cast_shards,
    copy_shards,
    end_backward,
    end_reductions_in_forward,
    fsdp_units,
    gather_in_float8,
    is_set_up,
    keep_wide,
    reduce_accumulated,
    unit_tensors,
)
from trainer.planning.parameters import UpdateSettings
from trainer.planning.plan import Plan
from trainer.planning.states import sums_on_device
from trainer.precision.products import DTYPES, E4M3
from trainer.precision.scaler import GradScaler, LossScale

# ZeRO by DeepSpeed: its engine, imported only where `parallel.zero.engine=deepspeed` asks for it.


def import_engine(device: torch.device) -> ModuleType:
    """`deepspeed_engine.py`, imported for the kind of the run's device: DeepSpeed settles on one when it is imported,
    and left to itself on a GPU where there is one. Raises `ConfigError` if it has been imported for another."""
    if "deepspeed" not in sys.modules:
        os.environ["DS_ACCELERATOR"] = device.type
    module = importlib.import_module("trainer.parallel.zero.deepspeed_engine")
    if (kind := module.get_accelerator().device_name()) != device.type:
        raise ConfigError(
            [
                f"run.device={device.type}: DeepSpeed has already been imported in this process, for "
                f"run.device={kind}; set that, or run in a process of its own"
            ]
        )
    return module


class FSDP:
    """ZeRO by FSDP2, with this project's optimizer and loss scale (`parallel.zero.engine=torch`). See `Engine`."""

    keeps_gradients = True

    @staticmethod
    def check(config: Config, device: torch.device) -> None:
        """Does nothing: the engine is a part of torch."""

    def __init__(self, config: Config, plan: Plan, world: World):
        self.config, self.plan, self.world = config, plan, world
        self.compression = compression_of(config.parallel.grad_comm, plan, world)
        self.modules: dict[int, nn.Module] = {}
        self.whole: set[nn.Parameter] = set()

    def placements(self, model: Stage) -> dict[nn.Parameter, Shard]:
        """Of the parameters that are not cut by rows: the dimension that ranks cut."""
        if self.compression.adds_replicas or self.config.parallel.zero.collectives == "copy_engine":
            return {}  # messages of our own have rows
        declared = [module for module in model.modules() if isinstance(module, DeclaredModule)]
        found = {
            getattr(module, name): info.sharded_dimension(*self.plan.shards(info.stacked))
            for module in declared
            for name, info in module.declared.items()
        }
        return {parameter: Shard(dimension) for parameter, dimension in found.items() if dimension}

    def shard(self, model: Stage) -> None:
        """Wraps each layer as an FSDP unit, and then the stage itself as the outer unit, with embedding, final norm and
        head. A unit is what FSDP gathers and reduces together.

        Parameters stay in fp32. Forward and backward see them in `precision.compute`; gradients are reduced in
        `precision.reduce`.
        """
        plan, compute, reduce = self.plan, DTYPES[self.config.precision.compute], DTYPES[self.config.precision.reduce]
        sums = sums_on_device(plan, reduce is torch.float32)
        replicas = (plan.replicate > 1 or sums) and not self.compression.adds_replicas
        names = ("replicate", "shard") if replicas else ("shard",)
        # Hidden states are in the compute type already and token numbers are integers, so FSDP has no inputs to cast.
        policy = MixedPrecisionPolicy(
            param_dtype=None if compute is torch.float32 else compute, reduce_dtype=reduce, cast_forward_inputs=False
        )
        offload = CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda") if plan.offload else OffloadPolicy()
        placements = self.placements(model)
        experts = [module for module in model.modules() if isinstance(module, ExpertUnit)]
        folded = plan.expert_mesh
        alike = {True: folded["expert_replicate"] * folded["expert_shard"], False: plan.replicate * plan.shard}
        more = ("expert_replicate",) * (folded["expert_replicate"] > 1 or sums)
        inside = {one for unit in experts for one in unit.parameters()}
        # Where parameters are whole during a step anyway, frozen ones stay whole on each rank: they have no optimizer
        # state to share, and FSDP would only copy them. Elsewhere they are gathered with the others, and not reduced.
        frozen = (one for _, one in model.named_parameters() if not one.requires_grad)
        self.whole = {one for one in frozen if plan.stage < 3 or plan.shards(one in inside)[0] == 1}
        # Layers come before the stage: a call on it takes all parameters that are not in a unit yet.
        for module in [*experts, *model.layers.values(), model]:
            fully_shard(
                module,
                mesh=self.world.experts[*more, "expert_shard"] if module in experts else self.world.mesh[names],
                mp_policy=policy,
                offload_policy=offload,
                shard_placement_fn=placements.get,
                # The outer unit holds the head, which backward needs right after forward: freeing it would gather it
                # twice.
                reshard_after_forward=plan.stage == 3 and module is not model,
                ignored_params=self.whole
                if module in experts
                else self.whole.union(*(unit.parameters() for unit in experts)),
            )
        end_reductions_in_forward(model)
        wide = {
            one
            for module in model.modules()
            for one in module.parameters(recurse=False)
            if isinstance(module, WideLinear) or one.dtype is E4M3
        }
        units = fsdp_units(model)
        if compute is not torch.float32:
            keep_wide(units, wide)
        accumulate_in_one_pass(units)
        if experts and plan.stage == 3:
            # The host waits for the router in every layer. A gather that it started afterwards would not overlap.
            for some in (list(model.layers.values()), experts):
                for unit, following in zip(some, some[1:]):
                    unit.set_modules_to_forward_prefetch([following])
        cast_shards(whole_units(plan, units))
        if self.config.parallel.zero.collectives == "copy_engine" and plan.shard > 1:
            copy_shards([unit for unit in units if unit not in experts], self.world.mesh["shard"].get_group())
        if self.config.precision.float8.gather and plan.shard > 1:
            gather_in_float8(model, compute, wide, self.config.compile)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Losses are already divided by the global number of valid tokens, so gradients are summed and never
                # averaged. On a rank alone the factor stays unset: FSDP would divide by one in a pass over all
                # gradients.
                if alike[module in experts] > 1:
                    module.set_gradient_divide_factor(1.0)
                # A plain SUM. Otherwise FSDP divides inside of the reduction (PREMUL_SUM), which gloo does not have.
                module.set_force_sum_reduction_for_comms(True)

    def materialize(self, model: Stage) -> None:
        """Gives a stage storage. With offload, shards live in host memory; what no ranks share stays on the device."""
        whole = [
            (module, name)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter in self.whole
        ]
        model.to_empty(device="cpu" if self.plan.offload else self.world.device)
        for module, name in whole if self.plan.offload else ():
            value = torch.empty_like(getattr(module, name), device=self.world.device)
            setattr(module, name, nn.Parameter(value, requires_grad=False))
        model.tie()

    def build_optimizer(
        self,
        stages: dict[int, Stage],
        parameters: dict[str, nn.Parameter],
        infos: dict[str, ParameterInfo],
        policies: dict[str, ParameterPolicy],
        shared: SharedParameters,
        weights: Weights,
    ) -> tuple[Optimizer, GradScaler]:
        self.modules.update(stages)
        for model in stages.values():
            fill_parameters(model, weights)
            self.compression.attach(model, policies)
        # Muon's process groups are made by all ranks together, also by ranks that hold no matrix for Muon. Hence the
        # settings decide, and not this rank's policies.
        muon = "muon" in UpdateSettings.of(self.config).names()
        optimizer = Optimizer(parameters, policies, self.config.optimizer, self.world if muon else None)
        return optimizer, GradScaler(self.config.precision, self.world.device)

    def holds(self) -> dict[str, Iterable[Tensor]]:
        tensors = unit_tensors([unit for model in self.modules.values() for unit in fsdp_units(model)])
        return {
            "gradients": [*tensors.gradients, *self.compression.partial_sums],
            "gathered parameters": tensors.gathered,
            "communication buffers": tensors.messages,
        }

    def sharding(self, reductions: int) -> FSDPSharding:
        return FSDPSharding(self.modules, self.plan, reductions, self.compression)


def whole_units(plan: Plan, units: Iterable[FSDPModule]) -> set[FSDPModule]:
    """The units whose parameters are whole on this rank's device between steps."""
    return {unit for unit in units if plan.shards(isinstance(unit, ExpertUnit))[0] == 1 and not plan.offload}


class FSDPSharding:
    """When FSDP gathers, reduces and frees, as the pipeline schedule requires it for each stage of this rank.

    stages: number -> stage, a unit with its layers as inner units. reductions: number of reductions of each stage in a
    step. The switches of each unit are set one by one: FSDP's recursive setters would walk over all modules each time.
    """

    def __init__(
        self, stages: dict[int, nn.Module], plan: Plan, reductions: int, compression: Compression | NoCompression
    ):
        self.stages, self.gather_again = stages, plan.stage == 3
        self.units = {stage: fsdp_units(model) for stage, model in stages.items()}
        self.first_units: dict[int, list[FSDPModule]] = {}
        # Whether FSDP's mesh of a unit has a replica dimension, so that it may keep partial sums until the step's last
        # reduction.
        replicas = {True: plan.expert_mesh["expert_replicate"], False: plan.replicate}
        units = [unit for units in self.units.values() for unit in units]
        self.partial_sums = {unit: replicas[isinstance(unit, ExpertUnit)] > 1 or plan.offload for unit in units}
        self.whole = whole_units(plan, units)
        self.reductions, self.compression = reductions, compression
        self.remaining = dict.fromkeys(stages, 0)
        self.passes: PassStates | None = None  # created when FSDP has found its roots, in the first forward passes

    def begin(self, stage: int) -> None:
        """Before a stage's first action of a step: nothing is reduced yet, and gathered parameters stay or go as the
        ZeRO stage says."""
        self.remaining[stage] = self.reductions
        # Otherwise FSDP would finish the step after the first backward pass: wait for reductions and drop its record of
        # the forward order.
        self.stages[stage].set_is_last_backward(False)
        self._reduce_next(stage, False)

    def unshard(self, stage: int) -> None:
        """Starts to gather what the stage's next pass needs first, while other work is still running."""
        model = self.stages[stage]
        if is_set_up(model):  # before, FSDP has not found its root; the first pass gathers by itself
            # Only the outer unit and the first layer: FSDP gathers each further layer while the one before it
            # computes.
            if stage not in self.first_units:
                first = next(iter(model.layers.values()))
                self.first_units[stage] = [
                    model,
                    first,
                    *(one for one in first.modules() if isinstance(one, ExpertUnit)),
                ]
            for unit in self.first_units[stage]:
                unit.unshard(async_op=True)

    def accumulate(self, stage: int) -> None:
        """Takes over weight gradients that were computed outside of backward, in the type in which they are reduced."""
        accumulate_gradients(self.units[stage])

    def begin_reducing_backward(self, stage: int) -> None:
        """Before a full backward after which gradients are due. FSDP reduces the gradients of each layer while backward
        computes the next one."""
        self._reduce_next(stage, True)

    def end_reducing_backward(self, stage: int) -> None:
        """After that backward."""
        self.remaining[stage] -= 1
        self._reduce_next(stage, False)

    def reduce_now(self, stage: int) -> None:
        """Reduces the accumulated gradients, where the last of them came from outside of backward (W)."""
        self.accumulate(stage)
        self._reduce_next(stage, True)
        reduce_accumulated(self.units[stage], self.partial_sums, last=self.remaining[stage] == 1)
        self.end_reducing_backward(stage)

    def reshard(self, stage: int) -> None:
        """After the stage's last use in a step: the optimizer is about to change the shards, so the gathered copies are
        void."""
        for unit in self.units[stage]:
            unit.reshard()

    def end(self, stage: int) -> None:
        """After the rank's last action of a step: makes the current stream wait for the reductions, so that the
        optimizer's kernels see the gradients."""
        self.stages[stage].set_is_last_backward(True)
        end_backward(self.stages[stage])

    def change_pass(self) -> None:
        """Called where a forward and a backward pass take turns: the other pass goes on from here."""
        if self.passes is None:
            self.passes = PassStates([*self.partial_sums])  # of all units
        self.passes.change()

    def _reduce_next(self, stage: int, wanted: bool) -> None:
        # Replicas are summed, and gathered parameters freed (stages 0 to 2), only in the last reduction of a step.
        last = wanted and self.remaining[stage] == 1
        self.compression.last = last
        for unit in self.units[stage]:
            unit.set_requires_gradient_sync(last if unit in self.whole else wanted, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            # Stage 3 frees after every backward. The other stages keep what they have gathered for the next
            # micro-batch.
            unit.set_reshard_after_backward(last or self.gather_again, recurse=False)


# The interface of an engine: what shards the states of the model (ZeRO), reduces its gradients and updates it.


class EngineOptimizer(Protocol):
    """The optimizer of a training state, as the step and checkpoints use it.

    parameters: global name -> what this rank holds of the fp32 parameter. Its `grad` is the reduced gradient from the
    call of `gradients` to the end of `step`. updates: number of steps that were not skipped, a scalar tensor.
    """

    updates: Tensor

    @property
    def parameters(self) -> Mapping[str, nn.Parameter | Fragment]: ...

    def gradients(self) -> list[Tensor]:
        """This rank's part of every reduced gradient, in the order of the model's parameters."""

    def moments(self) -> Iterable[Tensor]:
        """The optimizer state of each parameter, as far as it is in memory. Nothing is allocated."""

    def step(self, rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> Tensor:
        """One update with gradients divided by `grad_scale`. Nothing changes where `found_inf` is one. All arguments
        are scalars on the device of `updates`. Returns whether the update was skipped, in the form of `found_inf`."""

    def zero_grad(self) -> None: ...

    def tensors(self) -> Mapping[str, Tensor | Fragment]:
        """The tensors of the optimizer in a checkpoint, by plan-independent name."""

    def after_load(self, copies: list[tuple[str, str]]) -> None:
        """To be called after `tensors` and `parameters` have been filled: restores what a checkpoint does not hold,
        such as `copies`, pairs (name, name of its copy) of parameters that this rank holds twice."""


class Engine(Protocol):
    """The ZeRO implementation of one training state. Its methods are called in the order in which they stand here:
    `shard` and `materialize` for each stage of the rank, `build_optimizer` once, `sharding` for each schedule. All
    ranks call them together.

    modules: stage number -> the module that the runtime calls, filled by `build_optimizer`. compression: of gradients
    on their way to other ranks. keeps_gradients: whether parameters have their reduced gradients in `grad` after the
    last backward pass of a step; otherwise the optimizer's `gradients` returns them.
    """

    modules: dict[int, nn.Module]
    keeps_gradients: bool

    @staticmethod
    def check(config: Config, device: torch.device) -> None:
        """Checks what the engine needs of the machine and the settings, before any process group exists. Raises
        `ConfigError`."""

    def __init__(self, config: Config, plan: Plan, world: World): ...

    @property
    def compression(self) -> Compression | NoCompression: ...

    def shard(self, model: Stage) -> None:
        """Prepares a stage on the meta device that is already split over the tensor-parallel ranks."""

    def materialize(self, model: Stage) -> None:
        """Gives that stage storage. The values of its weights are undefined."""

    def build_optimizer(
        self,
        stages: dict[int, Stage],
        parameters: dict[str, nn.Parameter],
        infos: dict[str, ParameterInfo],
        policies: dict[str, ParameterPolicy],
        shared: SharedParameters,
        weights: Weights,
    ) -> tuple[EngineOptimizer, LossScale]:
        """Sets all parameters to `weights` and creates the optimizer that updates them. parameters, infos, policies: of
        all stages, by the names of `TrainState.optimizer`."""

    def holds(self) -> Mapping[str, Iterable[Tensor] | None]:
        """Tensors in memory at this moment, besides those of the optimizer, by category of the memory estimator; None
        for a category that cannot be known. Some may be views of the same memory. Nothing is allocated or sent."""

    def sharding(self, reductions: int) -> StageSharding:
        """The `StageSharding` of stages whose gradients are reduced `reductions` times in a step."""


ENGINES: dict[str, Callable[[torch.device], type[Any]]] = {
    "torch": lambda device: FSDP,
    "deepspeed": lambda device: import_engine(device).DeepSpeed,
}
"""`parallel.zero.engine` -> function that loads its class for the kind of the run's device."""


def load_engine(name: str, device: torch.device) -> type[Engine]:
    """The class of an engine. Raises `ConfigError` where it cannot be loaded for this kind of device."""
    return ENGINES[name](device)


def check_engine(config: Config, device: torch.device) -> None:
    """Checks what the engine needs of the machine and the settings, before any process group exists. Raises
    `ConfigError`."""
    load_engine(config.parallel.zero.engine, device).check(config, device)
