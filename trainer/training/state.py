"""What a training run consists of: the stages of the model on this rank, what runs them, and what updates them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.distributed.mesh import World
from trainer.distributed.p2p import PipelineChannels, stage_edges
from trainer.distributed.tensors import Fragment
from trainer.model.axes import ParameterInfo, parameter_infos
from trainer.model.initial import Weights, initial_weights
from trainer.model.linear import DeferredGrads
from trainer.model.loss import loss_terms
from trainer.model.stage import Make, Stage
from trainer.model.transformer import Transformer
from trainer.optim.optimizer import WeightAverage, parameter_policies
from trainer.parallel.compress.reduction import Compression, NoCompression
from trainer.parallel.parallelize import parallelize
from trainer.parallel.pipeline.plan import PipelinePlan
from trainer.parallel.pipeline.runtime import PipelineRuntime
from trainer.parallel.tensor.apply import SharedParameters
from trainer.parallel.zero.fsdp import Engine, EngineOptimizer, load_engine
from trainer.planning.plan import Plan
from trainer.planning.schedules.ir import Schedule
from trainer.precision.dtypes import DTYPES
from trainer.precision.scaler import LossScale
from trainer.training.gate import UpdateGate

COPY = " (copy)"
"""Ends the name of the last stage's copy of a tied embedding where its rank also holds the first stage's."""


@dataclass
class TrainState:
    """All that a checkpoint has to hold besides the position in the data, and the machinery around it.

    stages: number of a pipeline stage -> this rank's part of the model. names: every parameter of the whole model, in
    the order in which their gradient norms are kept. reports: by name, how many values the whole model's layers report
    of a step. step: optimizer steps taken, skipped ones included. average: of the weights, where one is kept.
    gate: shut behind a step that is to be run again.
    """

    config: Config
    spec: ModelSpec
    plan: Plan
    pipeline: PipelinePlan
    world: World
    engine: Engine
    stages: dict[int, Stage]
    deferred: DeferredGrads
    channels: PipelineChannels | None
    shared: SharedParameters
    optimizer: EngineOptimizer
    scaler: LossScale
    names: list[str]
    reports: dict[str, int]
    step: int = 0
    runtime: PipelineRuntime = field(init=False)
    average: WeightAverage | None = field(init=False)
    gate: UpdateGate = field(init=False)

    def __post_init__(self) -> None:
        self.gate = UpdateGate(self.scaler, self.world.device)
        decay = self.config.optimizer.ema.decay
        self.average = WeightAverage(self.parameters, decay) if decay else None
        self.use_schedule(self.pipeline.schedule)

    @classmethod
    def build(
        cls,
        config: Config,
        spec: ModelSpec,
        plan: Plan,
        pipeline: PipelinePlan,
        world: World,
        weights: Weights | None = None,
        make: Make = Transformer,
    ) -> TrainState:
        """Builds the parallel model on every rank, with `weights` or freshly drawn ones. All ranks call it together."""
        engine = load_engine(plan.engine, world.device)(config, plan, world)
        deferred = DeferredGrads()
        stages = {
            stage: parallelize(
                config, spec, layers, plan, world, engine, deferred if pipeline.splits_backward else None, make
            )
            for stage, layers in pipeline.stages(world.place("pp")).items()
        }
        with torch.device("meta"):
            whole = make(spec, None)
        whole.set_loss(config.loss.z_loss, config.loss.chunk, config.compile, terms=loss_terms(config.loss))
        parameters, infos, copies = named_parameters(stages)
        types = {name.removesuffix(COPY): info for name, info in infos.items()}
        policies = parameter_policies(types, config.precision.types, config.optimizer)
        policies = {name: policies[name.removesuffix(COPY)] for name in parameters}
        channels = None
        if plan.pp > 1:
            placement = pipeline.schedule.placement
            channels = PipelineChannels(world.pipeline, stage_edges(placement), world.device, timeout=world.timeout)
        shared = share_parameters(spec, pipeline, parameters, copies, channels, world)
        optimizer, scaler = engine.build_optimizer(
            stages, parameters, infos, policies, shared, weights or initial_weights(spec, config.run.seed, world.device)
        )
        return cls(
            config,
            spec,
            plan,
            pipeline,
            world,
            engine,
            stages,
            deferred,
            channels,
            shared,
            optimizer,
            scaler,
            list(parameter_infos(whole)),
            whole.reports,
        )

    def use_schedule(self, schedule: Schedule) -> None:
        """Trains by `schedule` from the next step on; stages and their ranks stay as they are."""
        self.pipeline = PipelinePlan(schedule, self.pipeline.split)
        tokens, width = self.plan.token_ranks, self.spec.width
        compute = DTYPES[self.config.precision.compute]
        every = self.plan.stage >= 2 and not self.compression.once
        self.runtime = PipelineRuntime(
            schedule,
            self.engine.modules,
            self.channels,
            self.engine.sharding(schedule.microbatches if every else 1),
            self.deferred,
            lambda batch: (torch.Size((batch.tokens.numel() // tokens, width)), compute),
            self.world.device,
            reduce="every" if every else "last",
        )

    def close(self) -> None:
        """Ends the communicators that only this state uses. All ranks call it together."""
        if self.channels is not None:
            self.channels.close()
        self.compression.close()

    def free(self) -> None:
        """Closes the state and frees the memory of model and optimizer, whoever still holds the state itself; `step`,
        `scaler` and what it was built from stay. All ranks call it together."""
        self.close()
        del self.engine, self.stages, self.shared, self.optimizer, self.runtime, self.average
        gc.collect()  # FSDP's modules refer to each other

    @property
    def compression(self) -> Compression | NoCompression:
        """What happens to gradients on their way to other ranks."""
        return self.engine.compression

    @property
    def parameters(self) -> dict[str, nn.Parameter | Fragment]:
        """The fp32 parameters of this rank by global name. Between forward and backward the modules' own attributes are
        gathered copies in the compute type."""
        return {name: parameter for name, parameter in self.optimizer.parameters.items() if not name.endswith(COPY)}

    def tensors(self) -> dict[str, Tensor | Fragment]:
        """Everything sharded, by plan-independent name."""
        optimizer = {name: tensor for name, tensor in self.optimizer.tensors().items() if not name.endswith(COPY)}
        average = self.average.tensors() if self.average is not None else {}
        return {f"model.{name}": parameter for name, parameter in self.parameters.items()} | optimizer | average

    def after_load(self) -> None:
        """Once `tensors` have been filled: brings what a checkpoint does not hold into line."""
        self.optimizer.after_load(self.shared.copies)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Has the average of the weights in their place meanwhile; nothing may be gathered when it begins or ends."""
        self.average.swap()
        self.after_load()
        try:
            yield
        finally:
            self.average.swap()
            self.after_load()


def named_parameters(
    stages: dict[int, Stage],
) -> tuple[dict[str, nn.Parameter], dict[str, ParameterInfo], list[tuple[str, str]]]:
    """This rank's parameters and their declarations by global name, and (name, name of its copy) where two stages on it
    hold the same one."""
    parameters: dict[str, nn.Parameter] = {}
    infos: dict[str, ParameterInfo] = {}
    copies = []
    for model in stages.values():
        declared = parameter_infos(model)
        for name, parameter in model.named_parameters():
            info = declared[name]
            if name in parameters:
                copies.append((name, name + COPY))
                name += COPY
            parameters[name], infos[name] = parameter, info
    return parameters, infos, copies


def share_parameters(
    spec: ModelSpec,
    pipeline: PipelinePlan,
    parameters: dict[str, nn.Parameter],
    copies: list[tuple[str, str]],
    channels: PipelineChannels | None,
    world: World,
) -> SharedParameters:
    """The parameters that other ranks hold too; a tied embedding gets a communicator between the two that have it."""
    first, last = pipeline.schedule.placement[0], pipeline.schedule.placement[-1]
    here = world.place("pp")
    tied_apart = spec.tied and first != last and here in (first, last)
    return SharedParameters(
        parameters,
        copies,
        ["embedding.weight"] if tied_apart else [],
        channels.connect((first, last), "tied") if tied_apart else None,
        here == first,
        world,
    )
