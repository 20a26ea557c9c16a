"""What both ways of running DeepSpeed share: our update behind its interface, its loss scale in our form, and fragments
of its flat tensors by name. See `deepspeed_engine.py`."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config import Config, OptimizerConfig, ParallelConfig
from trainer.distributed.mesh import World
from trainer.distributed.tensors import Fragment, local_extent
from trainer.model.initial import Weights
from trainer.optim.optimizer import Optimizer, ParameterPolicy
from trainer.parallel.tensor.apply import SharedParameters
from trainer.planning.parameters import ParameterInfo, moment_count
from trainer.precision import scaler
from trainer.precision.scaler import BACKOFF, GROWTH

# DeepSpeed's configuration from ours.


def _zero(parallel: ParallelConfig) -> dict[str, Any]:
    """DeepSpeed's section on ZeRO, but for what is given."""
    zero = parallel.zero
    section: dict[str, Any] = {"stage": zero.stage}
    place = (
        {"device": "nvme", "nvme_path": zero.nvme}
        if zero.nvme is not None
        else {"device": "cpu"}
        if zero.offload
        else None
    )
    if place:
        section["offload_optimizer"] = place
        if zero.stage == 3:
            section["offload_param"] = place
    return section


def generate_config(config: Config, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's configuration for a run on `device`."""
    precision, own = config.precision, config.parallel.zero.deepspeed
    zero = {
        "reduce_bucket_size": 100_000_000,
        "overlap_comm": config.parallel.zero.stage == 3,
        "memory_efficient_linear": False,
    }
    zero |= _zero(config.parallel)
    for name, value in own.get("zero_optimization", {}).items():
        zero[name] = zero.get(name, {}) | value if isinstance(value, dict) else value
    for name in zero.keys() & {"offload_optimizer", "offload_param"}:
        zero[name] = {"pin_memory": device.type == "cuda"} | zero[name]
    return (
        {"steps_per_print": 10**9}
        | own
        | {
            "zero_optimization": zero,
            # Our runtime says when a step is complete, and a micro-batch is whatever it makes of one.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": config.optimizer.clip_norm,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # the updates are ours, on CPUs too
            "data_types": {} if config.parallel.zero.stage == 1 else {"grad_accum_dtype": "fp32"},
            "communication_data_type": precision.reduce,
            "gradient_allreduce_op": "mean" if config.parallel.zero.stage == 3 else "sum",  # stage 3 knows no sum
            "bf16": {"enabled": precision.compute == "bf16"},
            "fp16": {
                "enabled": precision.compute == "fp16",
                "initial_scale_power": max(0, round(math.log2(precision.loss_scale))),
                "loss_scale_window": scaler.GROWTH_INTERVAL,
                "hysteresis": 1,
            },
        }
    )


deepspeed.utils.logger.setLevel(logging.ERROR)
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning
)  # which it calls in every step


def prepare_deepspeed() -> None:
    """What DeepSpeed wants to know of a process in which torch.distributed runs."""
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # serves inference on CPUs, and would be compiled first
    )
    deepspeed.utils.groups._release_process_group_references()  # of an engine before this one, whose groups may be gone
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False, dist_init_required=False)


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """Our optimizer in the form that DeepSpeed wants: updates the flat tensors which it puts into the groups.

    rate: learning rate of the step; updates: steps that were not skipped; scalars on the device of the flat tensors.
    """

    def __init__(self, groups: list[list[Tensor]], config: OptimizerConfig):
        super().__init__([{"params": group, "lr": 0.0} for group in groups], {})
        self.config, self.rate, self.updates = config, torch.zeros(()), torch.zeros(())
        self.by_flat: dict[Tensor, tuple[Optimizer, dict[str, slice]]] = {}

    def add(self, flat: Tensor, parts: dict[str, slice], policies: dict[str, ParameterPolicy], swapped: bool) -> None:
        """Makes the moments of a flat tensor in which parameters are at `parts`. A swapped one is of one policy and
        updated as a whole, and DeepSpeed moves its moments between disk and memory with it."""
        if swapped:
            optimizer, parts = Optimizer({"": flat}, {"": policies[next(iter(parts))]}, self.config), {}
            self.state[flat] = {moment: value for (_, moment), value in optimizer.state.items()}
        else:
            optimizer = Optimizer({name: flat.detach()[part] for name, part in parts.items()}, policies, self.config)
        optimizer.updates = self.updates
        self.by_flat[flat] = optimizer, parts

    def step(self, closure: None = None) -> None:
        one = torch.ones_like(self.rate)
        for flat in (flat for group in self.param_groups for flat in group["params"] if flat in self.by_flat):
            optimizer, parts = self.by_flat[flat]
            for name, part in parts.items():
                optimizer.parameters[name].grad = flat.grad[part]
            optimizer.update(self.rate, one, one - 1)  # DeepSpeed has unscaled, clipped and not skipped
            for name in parts:
                optimizer.parameters[name].grad = None


class DeepSpeedScaler:
    """DeepSpeed's dynamic loss scale with the state of our own."""

    def __init__(self, theirs: Any, config: Config, world: World):
        self.theirs, self.precision, self.device = theirs, config.precision, world.device
        self.enabled = config.precision.compute == "fp16"
        self.can_hold = not self.enabled  # DeepSpeed's step moves the scale by itself
        if self.enabled:  # theirs would stop the run at the lowest scale, and knows powers of two only
            theirs.raise_error_at_min_scale, theirs.min_scale = False, 0.0
            theirs.cur_scale, theirs.scale_factor = config.precision.loss_scale, GROWTH
            self._set_tracker(0)

    @property
    def value(self) -> Tensor:
        return torch.tensor(float(self.theirs.cur_scale), device=self.device)

    def scale(self, loss: Tensor) -> Tensor:
        self.before = self.state_dict()
        return loss * self.theirs.cur_scale

    def update(self, found_inf: Tensor, held: Tensor | None = None) -> None:
        """DeepSpeed's step has moved the scale; it counts one good step more than we do before the scale may grow."""
        if held is not None and held > 0:
            self.load_state_dict(self.before)
        elif self.enabled and self.theirs.last_overflow_iter == self.theirs.cur_iter - 1:
            self._set_tracker(0)

    def _set_tracker(self, good_steps: int) -> None:
        self.theirs.last_overflow_iter = self.theirs.cur_iter - 2 - good_steps

    def state_dict(self) -> dict[str, Any]:
        if not self.enabled:
            return {}
        interval = scaler.GROWTH_INTERVAL
        good_steps = (self.theirs.cur_iter - 2 - self.theirs.last_overflow_iter) % interval
        return {
            "scale": float(self.theirs.cur_scale),
            "growth_factor": GROWTH,
            "backoff_factor": BACKOFF,
            "growth_interval": interval,
            "_growth_tracker": good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.enabled and state:
            self.theirs.cur_scale = state["scale"]
            self._set_tracker(state["_growth_tracker"])


class NoSharding:
    """What the schedule asks around a stage's computation, where parameters stay as they are and gradients
    accumulate."""

    def begin(self, stage: int) -> None: ...
    def unshard(self, stage: int) -> None: ...
    def reshard(self, stage: int) -> None: ...
    def accumulate(self, stage: int) -> None: ...
    def begin_reducing_backward(self, stage: int) -> None: ...
    def end_reducing_backward(self, stage: int) -> None: ...
    def reduce_now(self, stage: int) -> None: ...
    def end(self, stage: int) -> None: ...
    def change_pass(self) -> None: ...


class DeepSpeedZero:
    """What a training state has for its optimizer (`trainer.parallel.zero.fsdp.EngineOptimizer`).

    parameters: global name -> this rank's fragment of the fp32 master; it has the reduced gradient from `gradients` to
    `step`. Copies of a tied embedding on one rank are one parameter here. modules: what the runtime calls, by stage.
    scaler: the loss scale. masters: DeepSpeed's flat fp32 tensors of this rank."""

    masters: list[Tensor]
    modules: dict[int, nn.Module]
    swapped = False
    """Whether masters and moments are on a disk, so that fragments have no values but between `tensors` and the next
    step."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        infos: dict[str, ParameterInfo],
        policies: dict[str, ParameterPolicy],
        shared: SharedParameters,
        config: Config,
        world: World,
    ):
        self.config, self.world, self.ours, self.infos = config, world, parameters, infos
        self.copies = dict(map(reversed, shared.copies))
        self.counted = dict(zip(parameters, shared.counted.tolist()))
        self.policies = {name: policies[name] for name in parameters if name not in self.copies}
        prepare_deepspeed()

    def start(self, module: nn.Module, theirs: dict[str, Tensor], groups: list[list[Tensor]], mpu: Any = None) -> None:
        """Hands `module` to DeepSpeed. theirs: its parameters by their global names; groups: what may share a flat
        tensor. All ranks have as many groups, or their collectives would not match."""
        self.theirs = theirs
        self.updater = DeepSpeedOptimizer(groups, self.config.optimizer)
        self.engine, self.zero, *_ = deepspeed.initialize(
            model=module,
            optimizer=self.updater,
            mpu=mpu,
            dist_init_required=False,
            config=generate_config(self.config, self.world.device),
        )
        self.scaler = DeepSpeedScaler(self.zero.loss_scaler, self.config, self.world)
        # It would move the scale before it unscales by it: half of every gradient, in a step after which the scale
        # grows.
        self.zero._update_scale = lambda has_overflow=False: None

    def share_out(self) -> None:
        """After `start`: makes moments, and finds which part of what this rank has."""
        places = self.places()
        device = torch.device("cpu") if self.swapped else self.masters[0].device
        self.updates = self.updater.updates = torch.zeros((), device=device)
        self.held: list[dict[str, slice]] = [{} for _ in self.masters]
        self.parameters: dict[str, Fragment] = {}
        for name in self.theirs:
            parameter, whole = self.ours[name], torch.Size(self.infos[name].shape)
            part, offset = (
                local_extent(parameter) if isinstance(parameter, DTensor) else (whole, torch.Size([0] * len(whole)))
            )
            index, at, start, size = places.get(name, (0, 0, 0, 0))
            self.parameters[name] = Fragment(
                torch.empty(0, device=device), start, part, offset, whole, self.counted[name]
            )
            if size:
                self.held[index][name] = slice(at, at + size)
        for index, (flat, held) in enumerate(zip(self.masters, self.held)):
            if held:
                with self.resident(index):
                    self.updater.add(flat, held, {name: self.policies[name] for name in held}, self.swapped)
        if not self.swapped:
            for name, values in self.values():
                self.parameters[name].values = values["model"]

    def sharding(self, micro_batches: int) -> NoSharding:
        """For a schedule of so many micro-batches."""
        raise NotImplementedError

    def places(self) -> dict[str, tuple[int, int, int, int]]:
        """By name, where this rank's elements of a parameter are: which master, where in it, from which element of the
        rank's part of the parameter on, how many."""
        raise NotImplementedError

    def resident(self, index: int) -> AbstractContextManager[None]:
        """Has a master and its moments in memory meanwhile."""
        return nullcontext()

    def moments(self) -> Iterator[Tensor]:
        """What is kept of each parameter beside it, as far as it is in memory."""
        return (value for optimizer, _ in self.updater.by_flat.values() for value in optimizer.state.values())

    def values(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Every parameter that this rank has elements of, with these: the master's (`model`) and each moment's."""
        for index, (flat, held) in enumerate(zip(self.masters, self.held)):
            with self.resident(index) if held else nullcontext():
                for name, part in held.items():
                    state = self.updater.by_flat[flat][0].state
                    yield (
                        name,
                        {
                            "model": flat.detach()[part],
                            **{
                                moment: state["", moment][part] if self.swapped else state[name, moment]
                                for moment in moment_count(self.policies[name].optimizer)
                            },
                        },
                    )

    @torch.no_grad()
    def fill(self, value: Weights) -> None:
        """Sets all parameters from whole tensors."""
        for name, values in self.values():
            values["model"].copy_(self.parameters[name].of(values["model"]).take(value(name, self.infos[name])))
        self.refresh()

    def refresh(self) -> None:
        """Brings the model's parameters into line with the masters."""
        raise NotImplementedError

    def gradients(self) -> list[Tensor]:
        """Reduces what still has to be; returns what this rank holds of every gradient, in the order of the model's
        parameters."""
        reduced = self.reduce()
        for name, fragment in self.parameters.items():
            fragment.grad = fragment.of(reduced.get(name, fragment.values[:0]).flatten())
        nothing = torch.empty(0, device=self.updates.device)
        return [nothing if name in self.copies else self.parameters[name].grad.values for name in self.ours]

    def reduce(self) -> dict[str, Tensor]:
        """By name, what this rank holds of the reduced gradients."""
        raise NotImplementedError

    def step(self, rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> Tensor:
        """One update; DeepSpeed unscales and clips by itself, and skips where a gradient is not finite. `found_inf`,
        which also knows the loss, makes it skip too. Returns whether it skipped."""
        if found_inf:
            self.force_overflow()
        self.updater.rate = rate
        self.zero.step()
        self.zero.loss_scaler.update_scale(self.zero.overflow)
        self.zero_grad()
        skipped = torch.full_like(found_inf, float(self.zero.overflow))
        self.updates += 1 - skipped
        return skipped

    def force_overflow(self) -> None:
        """Makes a gradient non-finite where DeepSpeed looks for it."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        self.zero.zero_grad()
        for fragment in self.parameters.values():
            fragment.grad = None
            if self.swapped:
                fragment.values = fragment.values[:0].clone()

    def tensors(self) -> dict[str, Any]:
        """What a checkpoint holds of the optimizer. Of masters and moments on a disk these are copies, which
        `after_load` writes back."""
        named: dict[str, Any] = {"optimizer.updates": self.updates}
        for name, values in self.values():
            values = {kind: value.to("cpu", copy=True) if self.swapped else value for kind, value in values.items()}
            self.parameters[name].values = values.pop("model")
            named |= {f"optimizer.{moment}.{name}": self.parameters[name].of(value) for moment, value in values.items()}
        self.copied = named if self.swapped else {}
        return named

    @torch.no_grad()
    def after_load(self, copies: list[tuple[str, str]]) -> None:
        """After `tensors` have been filled. Copies of a tied embedding share its memory."""
        for name, values in self.values() if self.swapped else ():
            for kind, value in values.items():
                value.copy_(
                    (self.parameters[name] if kind == "model" else self.copied[f"optimizer.{kind}.{name}"]).values
                )
        self.copied = {}
        self.refresh()
