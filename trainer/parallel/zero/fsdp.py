"""ZeRO stages 0 to 3 as one knob on FSDP2 (Rajbhandari et al., arXiv 1910.02054).

| stage | parameters between steps | gathered | gradients are reduced |
|---|---|---|---|
| 0 | whole on every rank | never | once a step (all-reduce) |
| 1 | sharded fp32 masters | once a step, kept to the last backward | once a step (reduce-scatter) |
| 2 | as 1 | as 1 | every micro-batch, kept sharded |
| 3 | as 1 | for each layer's forward and backward | every micro-batch, kept sharded |

With fewer shards than data-parallel ranks (HSDP) the shards are all-reduced over the replicas, once a step.

Offload: gradients that are reduced every micro-batch are added up on the device and copied to host memory once a
step. FSDP keeps partial sums on the device only if its mesh has a replica dimension, so offloaded plans get one, with a
single rank where there are no replicas. Without that dimension FSDP copies the gradients of every micro-batch to host
memory that is not page-locked, waits for the copy, and adds on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainer.config import Config
from trainer.distributed.mesh import World
from trainer.distributed.tensors import Fragment
from trainer.model.axes import ParameterInfo
from trainer.model.initial import Weights, fill_parameters
from trainer.model.stage import Stage
from trainer.optim.optimizer import Optimizer, ParameterPolicy
from trainer.parallel.compress.reduction import Compression, NoCompression, compression_of
from trainer.parallel.pipeline.runtime import StageSharding
from trainer.parallel.tensor.apply import SharedParameters
from trainer.parallel.zero import deepspeed
from trainer.parallel.zero.float8_all_gather import gather_in_float8
from trainer.parallel.zero.fsdp_internals import (
    accumulate_gradients,
    cast_shards,
    copy_shards,
    end_backward,
    end_reductions_in_forward,
    fsdp_units,
    is_set_up,
    reduce_accumulated,
    unit_tensors,
)
from trainer.planning.cost.memory import sums_on_device
from trainer.planning.cost.updates import UpdateSettings
from trainer.planning.plan import Plan
from trainer.precision.dtypes import DTYPES
from trainer.precision.scaler import GradScaler, LossScale


class FSDP:
    """ZeRO by FSDP2, with our optimizer and loss scale: `parallel.zero.engine=torch`. See `engine.Engine`."""

    keeps_gradients = True

    @staticmethod
    def check(config: Config, device: torch.device) -> None:
        """torch brings all that it needs."""

    def __init__(self, config: Config, plan: Plan, world: World):
        self.config, self.plan, self.world = config, plan, world
        self.compression = compression_of(config.parallel.grad_comm, plan, world)
        self.modules: dict[int, nn.Module] = {}

    def shard(self, model: Stage) -> None:
        """Wraps each layer and then the stage itself, with embedding, final norm and head, as one unit of gathering and
        reduction.

        Parameters stay fp32; forward and backward see them in `precision.compute`, gradients are reduced in
        `precision.reduce`."""
        plan, compute, reduce = self.plan, DTYPES[self.config.precision.compute], DTYPES[self.config.precision.reduce]
        replicas = plan.replicate > 1 or sums_on_device(plan, reduce is torch.float32)
        names = ("replicate", "shard") if replicas and not self.compression.adds_replicas else ("shard",)
        policy = MixedPrecisionPolicy(
            param_dtype=None if compute is torch.float32 else compute, reduce_dtype=reduce, cast_forward_inputs=False
        )
        offload = CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda") if plan.offload else OffloadPolicy()
        for module in [*model.layers.values(), model]:
            fully_shard(
                module,
                mesh=self.world.mesh[names],
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=plan.stage == 3 and module is not model,
            )
        end_reductions_in_forward(model)
        shards, units = self.world.mesh["shard"].get_group(), [model, *model.layers.values()]
        if shards.size() == 1 and not plan.offload:
            cast_shards(units)
        elif self.config.parallel.zero.collectives == "copy_engine":
            copy_shards(units, shards)
        if self.config.precision.float8.gather and plan.shard > 1:
            gather_in_float8(model, self.config.compile)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Losses are already divided by the global count of valid tokens: gradients are sums. A rank that is
                # alone would divide by one, in a pass over all gradients.
                if plan.replicate * plan.shard > 1:
                    module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def materialize(self, model: Stage) -> None:
        model.to_empty(device="cpu" if self.plan.offload else self.world.device)

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
        # Of a whole model's ranks, some may hold no matrix of Muon; they make its groups with the others.
        muon = "muon" in UpdateSettings.of(self.config).names()
        optimizer = Optimizer(parameters, policies, self.config.optimizer, self.world if muon else None)
        return optimizer, GradScaler(self.config.precision, self.world.device)

    def holds(self) -> dict[str, Iterable[Tensor]]:
        held = unit_tensors([unit for model in self.modules.values() for unit in fsdp_units(model)])
        return {
            "gradients": [*held.gradients, *self.compression.partial_sums],
            "gathered parameters": held.gathered,
            "communication buffers": held.messages,
        }

    def sharding(self, reductions: int) -> FSDPSharding:
        return FSDPSharding(self.modules, self.plan, reductions, self.compression)


class FSDPSharding:
    """What the schedule asks of FSDP for each stage of this rank: when gradients are reduced and what stays gathered.

    stages: number -> stage, each a unit of its own with its layers inside; reductions: of each stage in a step. Units
    are told one by one, since FSDP would look for them among all modules each time.
    """

    def __init__(
        self, stages: dict[int, nn.Module], plan: Plan, reductions: int, compression: Compression | NoCompression
    ):
        self.stages, self.gather_again = stages, plan.stage == 3
        self.units = {stage: fsdp_units(model) for stage, model in stages.items()}
        # FSDP may keep those of a unit's reductions until the last.
        self.partial_sums = plan.replicate > 1 or plan.offload
        self.reductions, self.compression = reductions, compression
        self.left = dict.fromkeys(stages, 0)

    def begin(self, stage: int) -> None:
        """Before a stage's first action of a step: nothing is reduced, and what is gathered is kept as the plan wants
        it."""
        self.left[stage] = self.reductions
        self.stages[stage].set_is_last_backward(False)
        self._reduce_next(stage, False)

    def unshard(self, stage: int) -> None:
        """Starts gathering what the stage's next pass needs first, while something else is still running."""
        model = self.stages[stage]
        if is_set_up(model):  # else the first pass gathers by itself
            for module in [model, next(iter(model.layers.values()))]:
                module.unshard(async_op=True)

    def accumulate(self, stage: int) -> None:
        """Takes over weight gradients that were computed outside of backward, in the type they are reduced in."""
        accumulate_gradients(self.units[stage])

    def begin_reducing_backward(self, stage: int) -> None:
        """Before a full backward after which gradients are due: FSDP reduces those of each layer while the next
        runs."""
        self._reduce_next(stage, True)

    def end_reducing_backward(self, stage: int) -> None:
        """After that backward."""
        self.left[stage] -= 1
        self._reduce_next(stage, False)

    def reduce_now(self, stage: int) -> None:
        """Reduces what has been accumulated, where the last gradients came from outside of backward."""
        self.accumulate(stage)
        self._reduce_next(stage, True)
        reduce_accumulated(self.units[stage], self.partial_sums, last=self.left[stage] == 1)
        self.end_reducing_backward(stage)

    def reshard(self, stage: int) -> None:
        """After the stage's last use in a step: its gathered parameters are about to change."""
        for unit in self.units[stage]:  # the next forward pass gathers again
            unit.reshard()

    def end(self, stage: int) -> None:
        """After the rank's last action of a step: the gradients are there when its next kernel runs."""
        self.stages[stage].set_is_last_backward(True)
        end_backward(self.stages[stage])

    def _reduce_next(self, stage: int, wanted: bool) -> None:
        last = wanted and self.left[stage] == 1
        self.compression.last = last
        for unit in self.units[stage]:
            unit.set_requires_gradient_sync(wanted, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            unit.set_reshard_after_backward(last or self.gather_again, recurse=False)


# Who shards the states of the model (ZeRO), reduces its gradients and updates it: what an engine has to do, and which
# there are.


class EngineOptimizer(Protocol):
    """What a training state has for its optimizer.

    parameters: global name -> what this rank holds of the fp32 parameter; it has the reduced gradient in `grad` from
    `gradients` to the end of `step`. updates: steps that were not skipped, a scalar.
    """

    updates: Tensor

    @property
    def parameters(self) -> Mapping[str, nn.Parameter | Fragment]: ...

    def gradients(self) -> list[Tensor]:
        """What this rank holds of every gradient, reduced, in the order of the model's parameters."""

    def moments(self) -> Iterable[Tensor]:
        """What is kept of each parameter beside it, as far as it is in memory; nothing is allocated."""

    def step(self, rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> Tensor:
        """One update with gradients divided by `grad_scale`; nothing changes where `found_inf` is one. All scalars on
        the device of `updates`. Returns whether it was skipped, as `found_inf`."""

    def zero_grad(self) -> None: ...

    def tensors(self) -> Mapping[str, Tensor | Fragment]:
        """What a checkpoint holds of the optimizer, by plan-independent name."""

    def after_load(self, copies: list[tuple[str, str]]) -> None:
        """Once `tensors` and `parameters` have been filled: brings into line what a checkpoint does not hold, such as
        `copies`, (name, name of its copy) of parameters that this rank has twice."""


class Engine(Protocol):
    """The ZeRO of one training state. Its methods are called in the order in which they stand here: `shard` and
    `materialize` for each stage of the rank, `build_optimizer` once, `sharding` for each schedule. All ranks call them
    together.

    modules: what the runtime calls, by stage, once there is an optimizer. compression: of gradients on their way.
    keeps_gradients: whether parameters have their reduced gradients in `grad` after the last backward pass of a step;
    else the engine hands them out in the optimizer's `gradients`.
    """

    modules: dict[int, nn.Module]
    keeps_gradients: bool

    @staticmethod
    def check(config: Config, device: torch.device) -> None:
        """What it needs of the machine and the settings, before any process group. Raises `ConfigError`."""

    def __init__(self, config: Config, plan: Plan, world: World): ...

    @property
    def compression(self) -> Compression | NoCompression: ...

    def shard(self, model: Stage) -> None:
        """Prepares a stage on the meta device, already cut over the tensor-parallel ranks."""

    def materialize(self, model: Stage) -> None:
        """Gives that stage storage; its weights are undefined."""

    def build_optimizer(
        self,
        stages: dict[int, Stage],
        parameters: dict[str, nn.Parameter],
        infos: dict[str, ParameterInfo],
        policies: dict[str, ParameterPolicy],
        shared: SharedParameters,
        weights: Weights,
    ) -> tuple[EngineOptimizer, LossScale]:
        """Sets all parameters to `weights`, and makes what updates them. parameters, infos, policies: of all stages, by
        the names of `TrainState.optimizer`."""

    def holds(self) -> Mapping[str, Iterable[Tensor] | None]:
        """Tensors in memory at this moment beside those of the optimizer, by category of the estimator; None where they
        cannot be known. Some may be views of the same memory. Nothing is allocated or sent."""

    def sharding(self, reductions: int) -> StageSharding:
        """What happens around the computation of stages whose gradients are reduced so many times in a step."""


ENGINES: dict[str, Callable[[torch.device], type[Any]]] = {
    "torch": lambda device: FSDP,
    "deepspeed": lambda device: deepspeed.import_engine(device).DeepSpeed,
}
"""`parallel.zero.engine` -> its class, loaded for the kind of the run's device."""


def load_engine(name: str, device: torch.device) -> type[Engine]:
    """The class of an engine. Raises `ConfigError` where it cannot be loaded for this kind of device."""
    return ENGINES[name](device)


def check_engine(config: Config, device: torch.device) -> None:
    """What the engine needs of the machine and the settings, before any process group. Raises `ConfigError`."""
    load_engine(config.parallel.zero.engine, device).check(config, device)
