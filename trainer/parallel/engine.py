"""Who shards the states of the model (ZeRO), reduces its gradients and updates it: what an engine has to do, and which
there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.config import Config
from trainer.distributed.tensors import Fragment
from trainer.distributed.world import World
from trainer.model.axes import ParameterInfo
from trainer.model.initial import Weights
from trainer.model.stage import Stage
from trainer.optim.groups import ParameterPolicy
from trainer.parallel import deepspeed
from trainer.parallel.compress.reduction import Compression, NoCompression
from trainer.parallel.fsdp import FSDP
from trainer.parallel.gradients import SharedParameters
from trainer.parallel.pipeline.runtime import StageSharding
from trainer.planning.plan import Plan
from trainer.precision.scaler import LossScale


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
