"""What a training run consists of: the stages of the model on this rank, what runs them, and what updates them."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.distributed.mesh import World
from trainer.distributed.p2p import PipelineChannels, stage_edges
from trainer.distributed.tensors import Fragment
from trainer.model.experts import RoutedExperts, Router
from trainer.model.initial import InitialWeights, ParameterInfo, Weights, parameter_infos
from trainer.model.linear import DeferredGrads
from trainer.model.loss import loss_terms
from trainer.model.stage import Make, Stage
from trainer.optim.optimizer import WeightAverage, parameter_policies
from trainer.parallel.compress.reduction import Compression, NoCompression
from trainer.parallel.parallelize import make_stage, parallelize
from trainer.parallel.pipeline.plan import PipelinePlan
from trainer.parallel.pipeline.runtime import PipelineRuntime
from trainer.parallel.tensor.apply import SharedParameters
from trainer.parallel.zero.fsdp import Engine, EngineOptimizer, load_engine
from trainer.planning.parameters import router_shapes
from trainer.planning.plan import Plan
from trainer.planning.schedules.ir import Schedule
from trainer.planning.states import sums_in_gemms
from trainer.precision.products import DTYPES
from trainer.precision.scaler import LossScale

# What keeps steps behind a suspicious one from changing the state; see `StepRepeats` in `replicas.py`.


class UpdateGate:
    """Keeps steps behind a suspicious one from changing the state until the host has looked at that one.

    shut: scalar on the device, 1 from a suspicious step on. active: whether there is a host that looks; without one the
    gate stays open."""

    def __init__(self, scaler: LossScale, device: torch.device):
        self.scaled, self.active, self.shut = scaler.enabled, False, torch.zeros((), device=device)

    def found_inf(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether the update is left out: fp32 scalar, 1 where loss or gradient norm is not finite or the gate is
        shut."""
        found_inf = (~(torch.isfinite(norm) & torch.isfinite(loss))).float()
        if self.active:
            suspicious = (~torch.isfinite(loss)).float() if self.scaled else found_inf
            found_inf = torch.maximum(found_inf, self.shut)
            self.shut.copy_(torch.maximum(suspicious, self.shut))
        return found_inf

    def suspects(self, numbers: Mapping[str, Any]) -> bool:
        """The same of a step whose numbers have been read back."""
        bad = not np.isfinite(numbers["loss"]) if self.scaled else numbers["found_inf"] > 0 and numbers["valid"] > 0
        return self.active and bool(bad)

    def open(self) -> None:
        self.shut.zero_()


COPY = " (copy)"
"""Suffix of the name of the last stage's copy of a tied embedding, on a rank that also holds the first stage's
original."""


@dataclass
class TrainState:
    """The training state: everything that a checkpoint holds besides the position in the data, and the objects that run
    it.

    stages: pipeline stage number -> this rank's part of that stage. deferred: where linear layers leave deferred weight
    gradients. channels: point-to-point transfers of the pipeline, None without one. names: all parameters of the whole
    model, in the order of the vector of gradient norms. reports: name of each statistic that layers report -> number of
    its values. step: optimizer steps taken, including skipped ones. average: the moving average of the weights, if
    there is one. gate: closed by a step that has to be run again. frozen: names and values of what this rank holds of
    the parameters that are not trained. routers: this rank's routers of experts by global name.
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
    frozen: list[tuple[str, nn.Parameter]] = field(init=False)
    routers: dict[str, Router] = field(init=False)

    def __post_init__(self) -> None:
        self.gate = UpdateGate(self.scaler, self.world.device)
        decay = self.config.optimizer.ema.decay
        self.average = WeightAverage(self.parameters, decay) if decay else None
        # Now and not later: in a step the modules have gathered copies.
        self.frozen = [
            (name, parameter)
            for model in self.stages.values()
            for infos in [parameter_infos(model)]
            for name, parameter in model.named_parameters()
            if not infos[name].trained
        ]
        modules = [pair for model in self.stages.values() for pair in model.named_modules()]
        self.routers = {name: module for name, module in modules if isinstance(module, Router)}
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
        make: Make = make_stage,
    ) -> TrainState:
        """Builds the parallel model on every rank, with `weights` or with freshly drawn ones. All ranks call it
        together."""
        # The order below is the engine's contract: shard and materialize each stage, then one optimizer over all of
        # them.
        engine = load_engine(plan.engine, world.device)(config, plan, world)
        deferred = DeferredGrads()
        # Interleaved and V-shaped schedules place several stages on one rank, and each is a module of its own.
        sums = sums_in_gemms(config, spec, plan, pipeline.schedule.microbatches)
        stages = {
            stage: parallelize(
                config, spec, layers, plan, world, engine, deferred if pipeline.splits_backward else None, make, sums
            )
            for stage, layers in pipeline.stages(world.place("pp")).items()
        }
        # Norms and statistics of all stages are summed in one vector, so each rank needs the names of the whole model.
        # On the meta device it takes no memory.
        with torch.device("meta"):
            whole = make(spec, None)
        whole.set_loss(config.loss.z_loss, config.loss.chunk, config.compile, terms=loss_terms(config.loss))
        parameters, infos, copies = named_parameters(stages)
        # A copy gets the policy of its original, or both would receive different updates.
        types = {name.removesuffix(COPY): info for name, info in infos.items()}
        policies = parameter_policies(types, config.precision.types, config.optimizer)
        policies = {name: policies[name.removesuffix(COPY)] for name in parameters}
        channels = None
        if plan.pp > 1:
            placement = pipeline.schedule.placement
            # Opening a channel blocks until its other end does so. All ranks of a pipeline therefore pass the same set
            # of edges.
            channels = PipelineChannels(world.pipeline, stage_edges(placement), world.device, timeout=world.timeout)
        shared = share_parameters(spec, pipeline, parameters, copies, channels, world)
        optimizer, scaler = engine.build_optimizer(
            stages, parameters, infos, policies, shared, weights or InitialWeights(spec, config.run.seed, world.device)
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
            [name for name, info in parameter_infos(whole).items() if info.trained],
            whole.reports,
        )

    def use_schedule(self, schedule: Schedule) -> None:
        """Trains by `schedule` from the next step on. The stages and their ranks stay as they are."""
        self.pipeline = PipelinePlan(schedule, self.pipeline.split)
        tokens, width = self.plan.token_ranks, self.spec.width
        compute = DTYPES[self.config.precision.compute]
        every = self.plan.reduces_each_micro_batch and not self.compression.once
        # Tensor- and context-parallel ranks hold different tokens between layers, so a stage sends only its
        # 1/`token_ranks` of a micro-batch's hidden states.
        self.runtime = PipelineRuntime(
            schedule,
            self.engine.modules,
            self.channels,
            self.engine.sharding(schedule.microbatches if every else 1),
            self.deferred,
            lambda batch: (torch.Size((batch.tokens.numel() // tokens, width)), compute),
            self.world.device,
            reduce="every" if every else "last",
            overlaps=self.plan.overlaps,
        )

    def close(self) -> None:
        """Closes the communicators that only this state uses. All ranks call it together."""
        if self.channels is not None:
            self.channels.close()
        self.compression.close()

    def free(self) -> None:
        """Closes the state and frees the memory of model and optimizer, even if the state itself is still referenced.
        `step`, `scaler` and the arguments of `build` remain. All ranks call it together."""
        self.close()
        del self.engine, self.stages, self.shared, self.optimizer, self.runtime, self.average, self.frozen
        gc.collect()  # FSDP's modules form reference cycles

    @property
    def compression(self) -> Compression | NoCompression:
        """The compression of gradients on their way to other ranks."""
        return self.engine.compression

    @property
    def parameters(self) -> dict[str, nn.Parameter | Fragment]:
        """The fp32 parameters of this rank by global name, without copies. Between forward and backward the attributes
        of the modules are gathered copies in the compute type, so they must not be taken for these."""
        return {name: parameter for name, parameter in self.optimizer.parameters.items() if not name.endswith(COPY)}

    def tensors(self) -> dict[str, Tensor | Fragment]:
        """All sharded tensors of the state (parameters, moments, average) by plan-independent name."""
        optimizer = {name: tensor for name, tensor in self.optimizer.tensors().items() if not name.endswith(COPY)}
        average = self.average.tensors() if self.average is not None else {}
        model = {f"model.{name}": parameter for name, parameter in self.parameters.items()}
        model |= {f"model.{name}": buffer for name, buffer in self.router_buffers.items()}
        return model | optimizer | average

    @property
    def router_buffers(self) -> dict[str, Tensor]:
        """What this rank's routers keep besides parameters, by global name. Each rank that has a layer holds the whole
        of it."""
        kept = router_shapes(self.spec)
        buffers = (pair for model in self.stages.values() for pair in model.named_buffers())
        return {name: buffer for name, buffer in buffers if name in kept}

    @cached_property
    def overflow(self) -> Tensor:
        """Where `statistics` of `train_step` holds how many choices of each layer's experts had no room: int64
        [layers], on the device."""
        starts = itertools.accumulate(self.reports.values(), initial=0)
        places = [start for name, start in zip(self.reports, starts) if name.endswith("feed_forward.overflow")]
        return torch.tensor(places, device=self.world.device)

    @contextmanager
    def exact_dispatch(self, exact: bool) -> Iterator[None]:
        """Context in which ranks have room for all rows of experts that arrive, if `exact`."""
        modules = [module for stage in self.stages.values() for module in stage.modules()]
        dispatches = {module.dispatch for module in modules if isinstance(module, RoutedExperts)}
        for dispatch in dispatches:
            dispatch.exact = exact
        try:
            yield
        finally:
            for dispatch in dispatches:
                dispatch.exact = False

    def rebalance_experts(self, statistics: Tensor, skipped: Tensor) -> None:
        """Has routers take over the load of a step. statistics: see `train_step`; skipped: whether its update was
        skipped, a scalar."""
        by_name = dict(zip(self.reports, statistics.split([*self.reports.values()])))
        for name, router in self.routers.items():
            block = name.removesuffix("router")
            router.rebalance(by_name[f"{block}load"], skipped, by_name.get(f"{block}margins"))

    def after_load(self) -> None:
        """To be called after `tensors` have been filled: restores what a checkpoint does not hold."""
        self.optimizer.after_load(self.shared.copies)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the average of the weights takes their place. No parameter may be gathered when it begins or
        ends, since a gathered copy would still have the old values."""
        # `swap` leaves copies of tied embeddings as they are, so they are set afterwards.
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
    """This rank's trained parameters and their declarations by global name, and pairs (name, name of its copy) where
    two stages on this rank hold the same parameter."""
    parameters: dict[str, nn.Parameter] = {}
    infos: dict[str, ParameterInfo] = {}
    copies = []
    for model in stages.values():
        declared = parameter_infos(model)
        for name, parameter in model.named_parameters():
            info = declared[name]
            if not info.trained:
                continue
            # Schedules that fold the stages into a V place the first and the last stage on one rank. With tied
            # embeddings it then holds the table twice.
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
    """The parameters that other ranks hold too. Where the two ends of a tied embedding are on different ranks, they get
    a communicator of their own."""
    first, last = pipeline.schedule.placement[0], pipeline.schedule.placement[-1]
    here = world.place("pp")
    trained = "embedding.weight" in parameters
    tied_across_ranks = spec.tied and trained and first != last and here in (first, last)
    return SharedParameters(
        parameters,
        copies,
        ["embedding.weight"] if tied_across_ranks else [],
        channels.connect((first, last), "tied") if tied_across_ranks else None,
        here == first,
        world,
    )
