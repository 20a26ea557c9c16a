"""The optimizer: updates local shards in place, with one parameter group for each policy.

Muon's matrices are orthogonalised whole (`muon.py`). All other updates are elementwise, so a shard is updated without
communication.

The factor that unscales and clips gradients, and the decision to skip, are scalars on the device, so a step needs no
host synchronisation. On a GPU one kernel reads and writes each element once (`kernels/multi_tensor.py`). State is kept
by global parameter name, and saved as tensors in the layout of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.config import ConfigError, LearningRateConfig, OptimizerConfig, ParameterTypes
from trainer.config.registry import OPTIMIZERS, SCHEDULES
from trainer.distributed.mesh import World
from trainer.distributed.tensors import Fragment, local_values, with_values
from trainer.optim.muon import MOMENTUM, Orthogonaliser, lr_factor
from trainer.planning.parameters import ParameterInfo, UpdateSettings, moment_count
from trainer.precision.products import DTYPES

# An exponential moving average of the weights, in fp32 and sharded as they are.


PREFIX = "ema."
"""Prefix of the name of a parameter's average in checkpoints."""


class WeightAverage:
    """average <- decay x average + (1 - decay) x weight after every update. It begins with the weights as they are.

    parameters: global name -> this rank's part of the fp32 parameter. A skipped step changes nothing.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | Fragment], decay: float):
        self.parameters, self.decay = parameters, decay
        self.values = {name: local_values(parameter).detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """To be called after the optimizer's step. found_inf: a scalar, 1 where that step was skipped."""
        for name, value in self.values.items():
            # In a skipped step the interpolation weight is zero, and the weights are the unchanged ones of the step
            # before.
            value.lerp_(local_values(self.parameters[name]), (1 - self.decay) * (1 - found_inf.to(value.device)))

    @torch.no_grad()
    def begin(self) -> None:
        """Restarts the average with the weights as they are."""
        for name, value in self.values.items():
            value.copy_(local_values(self.parameters[name]))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the average and the weights."""
        for name, value in self.values.items():
            weight = local_values(self.parameters[name])
            trained = weight.clone()
            weight.copy_(value)
            value.copy_(trained)

    def tensors(self) -> dict[str, Tensor | Fragment]:
        """The average as a checkpoint holds it: tensors in the layout of the parameters."""
        return {PREFIX + name: with_values(self.parameters[name], value) for name, value in self.values.items()}


# Parameter groups: the optimizer settings of each parameter, by its role and name (`precision.types`).


@dataclass(frozen=True)
class ParameterPolicy:
    """Optimizer settings of one parameter. Parameters with equal policies form a parameter group."""

    optimizer: str
    state_dtype: torch.dtype
    weight_decay: float
    lr_scale: float
    quantise: bool = field(default=True, compare=False)


def parameter_policies(
    infos: dict[str, ParameterInfo], types: ParameterTypes, optimizer: OptimizerConfig
) -> dict[str, ParameterPolicy]:
    """Global name -> policy. See `UpdateSettings.policies`."""
    found = {}
    for name, chosen in UpdateSettings(optimizer, types).policies(infos).items():
        assert chosen.optimizer is not None and chosen.weight_decay is not None  # nothing is left open
        dtype, scale = DTYPES[chosen.state_dtype], float(chosen.lr_scale)
        found[name] = ParameterPolicy(chosen.optimizer, dtype, chosen.weight_decay, scale, bool(chosen.quantise))
    return found


class ParameterUpdate(NamedTuple):
    """What Lion, SGD and registered optimizers receive of a parameter: this rank's part of it, in fp32.

    gradient: unscaled and clipped. moments: by name. rate: the learning rate, number: the number of the update from 1;
    both scalar tensors.
    """

    weight: Tensor
    gradient: Tensor
    moments: dict[str, Tensor]
    rate: Tensor
    number: Tensor
    weight_decay: float


def update_by_lion(config: OptimizerConfig, update: ParameterUpdate) -> tuple[Tensor, dict[str, Tensor]]:
    """The update uses beta1, the new momentum beta2 (arXiv 2302.06675, algorithm 2)."""
    weight, gradient, moment = update.weight, update.gradient, update.moments["exp_avg"]
    direction = torch.sign(moment.lerp(gradient, 1 - config.beta1)) + update.weight_decay * weight
    return weight - direction * update.rate, {"exp_avg": moment.lerp(gradient, 1 - config.beta2)}


def update_by_sgd(config: OptimizerConfig, update: ParameterUpdate) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradient descent with momentum beta1."""
    moment = config.beta1 * update.moments["momentum"] + update.gradient
    return update.weight - (moment + update.weight_decay * update.weight) * update.rate, {"momentum": moment}


FORMULAS = {"lion": update_by_lion, "sgd": update_by_sgd}
"""Optimizers that a CPU computes parameter by parameter: the weight and the moments after an update."""


class Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101; on a CPU torch's fused kernel), Lion (Chen et al., arXiv
    2302.06675), SGD with momentum, Muon, and registered optimizers, by parameter group.

    parameters: global name -> parameter (sharded or not), with its gradient in `.grad`. world: of the ranks that hold
    parts of matrices for Muon; None where each matrix is whole on this rank.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        policies: dict[str, ParameterPolicy],
        config: OptimizerConfig,
        world: World | None = None,
    ):
        self.parameters, self.policies, self.config = parameters, policies, config
        self.groups: dict[ParameterPolicy, list[str]] = {}
        for name in parameters:
            self.groups.setdefault(policies[name], []).append(name)
        # A rank may have nothing to train, as its pipeline stage has no adapters.
        device = local_values(next(iter(parameters.values()), torch.empty(0))).device
        self.updates = torch.zeros((), device=device)  # steps that were not skipped
        self.state = {
            (name, moment): torch.zeros_like(local_values(parameters[name]), dtype=policy.state_dtype)
            for policy, names in self.groups.items()
            for name in names
            for moment in moment_count(policy.optimizer)
        }
        matrices = {name: parameter for name, parameter in parameters.items() if policies[name].optimizer == "muon"}
        self.orthogonaliser = Orthogonaliser(matrices, config.muon, world) if matrices or world else None

    def moments(self) -> Iterable[Tensor]:
        """The optimizer state of all parameters."""
        return self.state.values()

    def gradients(self) -> list[Tensor]:
        """This rank's part of every gradient, in the order of the parameters."""
        return [local_values(parameter.grad) for parameter in self.parameters.values()]

    @torch.no_grad()
    def step(self, rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> Tensor:
        """One update with gradients divided by `grad_scale`; skipped where `found_inf` is one.

        All arguments are scalars on the parameters' device. Returns `found_inf`.
        """
        self.update(rate, grad_scale, found_inf)
        self.updates += 1 - found_inf
        return found_inf

    @torch.no_grad()
    def update(self, rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> None:
        """`step` without counting the update."""
        if self.orthogonaliser is not None:
            # First, and on every rank of its groups: orthogonalisation communicates, also on a rank that holds no
            # matrix.
            self._muon(rate, grad_scale, found_inf)
        for policy, names in self.groups.items():
            # A shard may be empty where a parameter has fewer rows than there are ranks.
            names = [
                name for name in names if policy.optimizer != "muon" and local_values(self.parameters[name]).numel()
            ]
            if names:
                run = self._by_formula
                if policy.optimizer not in OPTIMIZERS.registered:
                    run = self._launch if self.updates.is_cuda else self._adamw if policy.optimizer == "adamw" else run
                run(policy, names, rate * policy.lr_scale, grad_scale, found_inf)

    def _launch(
        self, policy: ParameterPolicy, names: list[str], rate: Tensor, grad_scale: Tensor, found_inf: Tensor
    ) -> None:
        from trainer.kernels import multi_tensor  # Triton, which is needed on a GPU only

        beta1, beta2 = self.config.beta1, self.config.beta2
        multi_tensor.update_parameters(
            policy.optimizer,
            [local_values(self.parameters[name]) for name in names],
            [local_values(self.parameters[name].grad) for name in names],
            [[self.state[name, moment] for name in names] for moment in moment_count(policy.optimizer)],
            multi_tensor.update_scalars(rate, grad_scale, found_inf, self.updates + 1, (beta1, beta2)),
            (beta1, beta2),
            self.config.eps,
            policy.weight_decay,
        )

    def _adamw(
        self, policy: ParameterPolicy, names: list[str], rate: Tensor, grad_scale: Tensor, found_inf: Tensor
    ) -> None:
        first, second = ([self.state[name, moment] for name in names] for moment in moment_count("adamw"))
        weights = [local_values(self.parameters[name]) for name in names]
        gradients = [local_values(self.parameters[name].grad) for name in names]
        groups = [(weights, gradients, first, second)]
        # The kernel takes one type. Moments in another are widened for one parameter at a time, and copied back below.
        if policy.state_dtype is not torch.float32:
            groups = [([w], [g], [m.float()], [v.float()]) for w, g, m, v in zip(weights, gradients, first, second)]
        for index, (w, g, m, v) in enumerate(groups):
            torch._fused_adamw_(
                w,
                g,
                m,
                v,
                [],
                # The number of this update, for the bias correction. The kernel does not advance it.
                [self.updates + 1] * len(w),
                lr=rate,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                weight_decay=policy.weight_decay,
                eps=self.config.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
            if policy.state_dtype is not torch.float32:
                first[index].copy_(m[0])
                second[index].copy_(v[0])

    def _muon(self, rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> None:
        applied = 1 - found_inf

        # `run` calls `direction` for each matrix, orthogonalises the whole matrices, and hands the parts to `apply`.
        def direction(name: str) -> Tensor:
            moment, (_, gradient) = self.state[name, "momentum_buffer"], self._inputs(name, grad_scale, found_inf)
            updated = moment.float().lerp(gradient, 1 - MOMENTUM)
            moment.copy_(torch.where(found_inf > 0, moment.float(), updated))
            return gradient.lerp(updated, MOMENTUM)  # Nesterov momentum

        def apply(name: str, part: Tensor) -> None:
            parameter, policy = self.parameters[name], self.policies[name]
            weight, step = local_values(parameter), rate * policy.lr_scale * applied
            weight.mul_(1 - step * policy.weight_decay)
            weight.sub_(part.to(weight) * (step * lr_factor(parameter.shape)))

        assert self.orthogonaliser is not None  # made where there is a matrix
        self.orthogonaliser.run(direction, apply)

    def _by_formula(
        self, policy: ParameterPolicy, names: list[str], rate: Tensor, grad_scale: Tensor, found_inf: Tensor
    ) -> None:
        """Lion and SGD on a CPU, and registered optimizers."""
        # A formula need not know of skipped steps: it computes on a gradient of zero, and its results are discarded.
        entry = OPTIMIZERS.registered.get(policy.optimizer)
        formula: Any = entry.made if entry else FORMULAS[policy.optimizer]
        settings = entry.chosen(self.config.settings) if entry else self.config
        for name in names:
            weight, gradient = self._inputs(name, grad_scale, found_inf)
            before = {moment: self.state[name, moment] for moment in moment_count(policy.optimizer)}
            moments = {moment: value.float() for moment, value in before.items()}
            update = ParameterUpdate(weight, gradient, moments, rate, self.updates + 1, policy.weight_decay)
            updated, after = formula(settings, update)
            if entry and set(after) != set(before):
                raise ConfigError(
                    f"the optimizer '{entry.name}' ({entry.home}) returns the moments {', '.join(after)}, and is "
                    f"registered with {', '.join(before)}"
                )
            for old, new in [(weight, updated), *((before[moment], after[moment]) for moment in before)]:
                old.copy_(torch.where(found_inf > 0, old, new.to(old.dtype)))

    def _inputs(self, name: str, grad_scale: Tensor, found_inf: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and gradient of a parameter, local parts. The gradient is divided by `grad_scale`, and zero in a
        skipped step: it may hold NaN then, and a product with zero would not remove that."""
        parameter = self.parameters[name]
        return local_values(parameter), torch.where(found_inf > 0, 0, local_values(parameter.grad) / grad_scale)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's tensors in a checkpoint: moments in the layout of their parameters, and the number of
        updates."""
        named: dict[str, Tensor] = {"optimizer.updates": self.updates}
        for (name, moment), value in self.state.items():
            named[f"optimizer.{moment}.{name}"] = with_values(self.parameters[name], value)
        return named

    @torch.no_grad()
    def after_load(self, copies: list[tuple[str, str]]) -> None:
        """To be called after `tensors` and the parameters have been filled: restores copies, which a checkpoint does
        not hold."""
        for name, copy in copies:
            local_values(self.parameters[copy]).copy_(local_values(self.parameters[name]))
            for (other, moment), value in self.state.items():
                if other == copy:
                    value.copy_(self.state[name, moment])


# Learning-rate schedules, computed on the device from the number of updates. A skipped step does not advance them, and
# the host need not know that it was skipped.


class ScheduleProgress(NamedTuple):
    """Where a learning-rate schedule stands; registered schedules receive it. done: fraction of the way from the end of
    the warm-up to the last step, 0 to 1. update: number of the update, from 1. Both are scalar tensors. warmup, steps:
    of the run."""

    done: Tensor
    update: Tensor
    warmup: int
    steps: int


def learning_rate(config: LearningRateConfig, steps: int, updates: Tensor) -> Tensor:
    """The learning rate of the update that follows `updates` finished ones (a scalar tensor), in a run of `steps`
    steps.

    Linear warm-up over `warmup` updates, then one of: cosine to final x peak (Loshchilov and Hutter, arXiv 1608.03983);
    linear to that value; constant; wsd, which is constant and then linear over the last `decay` updates (MiniCPM, arXiv
    2404.06395); a registered schedule.
    """
    number = updates.float() + 1
    warm = (number / max(config.warmup, 1)).clamp(max=1.0)
    length = max(steps - config.warmup, 1)
    if config.schedule == "wsd":
        length = config.decay or max(steps // 5, 1)
    start = steps - length if config.schedule == "wsd" else config.warmup
    progress = ((number - start) / length).clamp(0.0, 1.0)
    if config.schedule in SCHEDULES.registered:
        entry = SCHEDULES[config.schedule]
        share = entry.made(entry.chosen(config.settings), ScheduleProgress(progress, number, config.warmup, steps))
    elif config.schedule == "cosine":
        share = (1 + torch.cos(math.pi * progress)) / 2
    elif config.schedule == "constant":
        share = torch.ones_like(progress)
    else:
        share = 1 - progress
    return config.peak * torch.where(number <= config.warmup, warm, config.final + (1 - config.final) * share)
