"""What a training run consists of: the stages of the model on this rank, what runs them, and what updates them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.distributed.channels import Channels, edges
from trainer.distributed.tensors import Fragment
from trainer.distributed.world import World
from trainer.model.axes import parameter_infos
from trainer.model.initial import Weights, initial_weights, initialize, reset_buffers
from trainer.model.linear import DeferredGrads
from trainer.model.stage import Make
from trainer.model.transformer import Transformer
from trainer.optim.groups import parameter_policies
from trainer.optim.optimizer import Optimizer
from trainer.parallel.compress.reduction import Compression
from trainer.parallel.deepspeed import load
from trainer.parallel.fsdp import Sharding
from trainer.parallel.gradients import SharedParameters
from trainer.parallel.parallelize import Stages, build_stages
from trainer.parallel.pipeline.runtime import Runtime
from trainer.planning.gradient_comm import asked
from trainer.planning.pipeline import Pipeline
from trainer.planning.plan import Plan
from trainer.planning.schedules.ir import Schedule
from trainer.precision.dtypes import DTYPES
from trainer.precision.scaler import GradScaler

if TYPE_CHECKING:
    from trainer.parallel.deepspeed.base import Scaler, Zero

COPY = " (copy)"
"""Ends the name of the last stage's copy of a tied embedding where its rank also holds the first stage's."""


@dataclass
class TrainState:
    """All that a checkpoint has to hold besides the position in the data, and the machinery around it.

    names: every parameter of the whole model, in the order in which their gradient norms are kept. reports: by name,
    how many values the whole model's layers report of a step.
    """

    config: Config
    spec: ModelSpec
    plan: Plan
    pipeline: Pipeline
    world: World
    stages: Stages
    deferred: DeferredGrads
    channels: Channels | None
    compression: Compression | None
    shared: SharedParameters
    optimizer: Optimizer | Zero
    scaler: GradScaler | Scaler
    runtime: Runtime
    names: list[str]
    reports: dict[str, int]
    step: int = 0

    @classmethod
    def build(
        cls,
        config: Config,
        spec: ModelSpec,
        plan: Plan,
        pipeline: Pipeline,
        world: World,
        weights: Weights | None = None,
        make: Make = Transformer,
    ) -> TrainState:
        """Builds the parallel model on every rank, with `weights` or freshly drawn ones. All ranks call it together."""
        deferred = DeferredGrads()
        compression = Compression(config.parallel.grad_comm, plan, world) if asked(config.parallel.grad_comm) else None
        stages = build_stages(
            config,
            spec,
            pipeline.stages(world.place("pp")),
            plan,
            world,
            deferred if pipeline.splits_backward else None,
            hsdp=compression is None,
            make=make,
        )
        with torch.device("meta"):
            whole = make(spec, None)
        parameters, infos, copies = {}, {}, []
        for model in stages.values():
            if plan.engine == "deepspeed":
                reset_buffers(model)
            else:
                initialize(model, spec, config.run.seed, world.device, weights)
            declared = parameter_infos(model)
            for name, parameter in model.named_parameters():
                if name in parameters:
                    copies.append((name, name + COPY))
                name += COPY * (name in parameters)
                parameters[name], infos[name] = parameter, declared[name.removesuffix(COPY)]
        policies = parameter_policies(
            {name.removesuffix(COPY): info for name, info in infos.items()}, config.precision.types, config.optimizer
        )
        policies = {name: policies[name.removesuffix(COPY)] for name in parameters}
        if compression is not None:
            for model in stages.values():
                compression.attach(model, policies)
        channels = (
            Channels(world.pipeline, edges(pipeline.schedule.placement), world.device, timeout=world.timeout)
            if plan.pp > 1
            else None
        )
        first, last = pipeline.schedule.placement[0], pipeline.schedule.placement[-1]
        here = world.place("pp")
        apart = spec.tied and first != last and here in (first, last)
        shared = SharedParameters(
            parameters,
            copies,
            ["embedding.weight"] if apart else [],
            channels.connect((first, last), "tied") if apart else None,
            here == first,
            world,
        )
        if plan.engine == "deepspeed":
            engine = load(world.device)
            optimizer = (engine.PartitionedZero if plan.stage == 3 else engine.FlatZero)(
                stages, parameters, infos, policies, shared, config, world
            )
            optimizer.fill(weights or initial_weights(spec, config.run.seed, world.device))
            scaler = optimizer.scaler
        else:
            optimizer, scaler = (
                Optimizer(parameters, policies, config.optimizer),
                GradScaler(config.precision, world.device),
            )
        state = cls(
            config,
            spec,
            plan,
            pipeline,
            world,
            stages,
            deferred,
            channels,
            compression,
            shared,
            optimizer,
            scaler,
            None,
            list(parameter_infos(whole)),
            whole.reports,
        )
        state.follow(pipeline.schedule)
        return state

    def follow(self, schedule: Schedule) -> None:
        """Trains by `schedule` from the next step on; stages and their ranks stay as they are."""
        self.pipeline = Pipeline(schedule, self.pipeline.split)
        tokens, width = self.plan.tp, self.spec.width
        compute = DTYPES[self.config.precision.compute]
        every = self.plan.stage >= 2 and not (self.compression and self.compression.once)
        reductions = schedule.microbatches if every else 1
        if self.plan.engine == "deepspeed":
            modules, sharding = self.optimizer.modules, self.optimizer.sharding(reductions)
        else:
            modules, sharding = self.stages, Sharding(self.stages, self.plan, reductions, self.compression)
        self.runtime = Runtime(
            schedule,
            modules,
            self.channels,
            sharding,
            self.deferred,
            lambda batch: (torch.Size((batch.tokens.numel() // tokens, width)), compute),
            self.world.device,
            reduce="every" if every else "last",
        )

    def close(self) -> None:
        """Ends the communicators that only this state uses. All ranks call it together."""
        for part in (self.channels, self.compression):
            if part is not None:
                part.close()

    @property
    def parameters(self) -> dict[str, nn.Parameter | Fragment]:
        """The fp32 parameters of this rank by global name. Between forward and backward the modules' own attributes are
        gathered copies in the compute type."""
        return {name: parameter for name, parameter in self.optimizer.parameters.items() if not name.endswith(COPY)}

    def tensors(self) -> dict[str, Tensor | Fragment]:
        """Everything sharded, by plan-independent name."""
        optimizer = {name: tensor for name, tensor in self.optimizer.tensors().items() if not name.endswith(COPY)}
        return {f"model.{name}": parameter for name, parameter in self.parameters.items()} | optimizer

    def loaded(self) -> None:
        """After `tensors` have been filled: brings what a checkpoint does not hold into line."""
        self.optimizer.loaded(self.shared.copies)
