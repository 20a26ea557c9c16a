"""parallel.zero.engine=deepspeed: ZeRO by DeepSpeed behind our model, runtime, checkpoints and metrics.

DeepSpeed keeps fp32 masters and moments, flat and cut without regard to rows, a part on each data-parallel rank; the model
has its parameters in the compute type. It reduces gradients, judges overflows, moves the loss scale, clips and skips. The
arithmetic of an update is ours (`Updates`), so that every optimizer and policy works, and nothing is compiled for a CPU.

Stages 1 and 2 (`FlatZero`): DeepSpeed sees shadows of our parameters, plain tensors that share their memory, and knows nothing
of tensor parallelism, of pipelines, or of who runs backward. Gradients go to it by hand: in stage 1 once a step, until when the
parameters accumulate them in fp32; in stage 2 from hooks. Stage 3 (`PartitionedZero`): DeepSpeed's own hooks gather each
layer and reduce its gradients.

Importing this module imports DeepSpeed.
"""
from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # or it looks for every kind
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.utils import set_z3_leaf_modules

from trainer.config import Config, ConfigError, OptimizerConfig
from trainer.model.axes import ParameterInfo, extent
from trainer.model.fragment import Fragment
from trainer.model.init import Weights
from trainer.model.layers import Layer
from trainer.model.transformer import Transformer
from trainer.optim.optimizer import MOMENTS, Optimizer, local
from trainer.parallel.deepspeed_config import generate
from trainer.parallel.gradients import SharedParameters
from trainer.parallel.mesh import World
from trainer.parallel.tensor import is_split
from trainer.precision.policy import DTYPES, Policy

deepspeed.utils.logger.setLevel(logging.ERROR)
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # which it calls in every step


def check(config: Config, device: torch.device) -> None:
    """Whether DeepSpeed takes the configuration, and finds what it needs on the machine. Raises `ConfigError`."""
    zero, problems = config.parallel.zero, []
    if config.precision.compute == "fp16" and not get_accelerator().is_fp16_supported():
        problems.append(f"precision.compute=fp16: DeepSpeed has none on a {device.type.upper()} like this one; set precision.compute=bf16, or "
                        "parallel.zero.engine=torch")
    if zero.nvme is not None:
        if not os.access(zero.nvme, os.W_OK | os.X_OK):
            problems.append(f"parallel.zero.nvme={zero.nvme} is no folder that can be written; make it, or name another")
        if not AsyncIOBuilder().is_compatible(verbose=False):
            problems.append(f"parallel.zero.nvme={zero.nvme}: DeepSpeed compiles what reads and writes the disk with libaio, and finds none here; "
                            "install libaio-dev, or set parallel.zero.offload=true instead")
    try:
        DeepSpeedConfig(generate(config, device))
    except (ValueError, DeepSpeedConfigError) as error:  # pydantic's errors are of the former kind
        said = " ".join(line.strip() for line in str(error).splitlines() if "https://" not in line)
        problems.append(f"parallel.zero.deepspeed={zero.deepspeed}: DeepSpeed says: {said}")
    if problems:
        raise ConfigError(problems)


def materialize(model: Transformer, config: Config, world: World) -> None:
    """Gives a stage of the model that is still on the meta device storage in the compute type; in stage 3 to one layer after
    another, of each of which the rank keeps its part."""
    if config.parallel.zero.stage < 3:
        model.to_empty(device=world.device)
        return
    prepare()
    for module in [*model.layers.values(), *(child for child in model.children() if child is not model.layers)]:
        module.to_empty(device=world.device)
        model.tie()
        deepspeed.zero.Init(module=module, config_dict_or_path=generate(config, world.device), dtype=DTYPES[config.precision.compute])


def prepare() -> None:
    """What DeepSpeed wants to know of a process in which torch.distributed runs."""
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # serves inference on CPUs, and would be compiled first
    deepspeed.utils.groups._release_process_group_references()  # of an engine before this one, whose groups may be gone
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False, dist_init_required=False)


class Updates(torch.optim.Optimizer):
    """Our optimizer in the form that DeepSpeed wants: updates the flat tensors which it puts into the groups.

    rate: learning rate of the step; updates: steps that were not skipped; scalars on the device of the flat tensors.
    """

    def __init__(self, groups: list[list[Tensor]], config: OptimizerConfig):
        super().__init__([{"params": group, "lr": 0.0} for group in groups], {})
        self.config, self.rate, self.updates = config, torch.zeros(()), torch.zeros(())
        self.by_flat: dict[Tensor, tuple[Optimizer, dict[str, slice]]] = {}

    def add(self, flat: Tensor, parts: dict[str, slice], policies: dict[str, Policy], swapped: bool) -> None:
        """Makes the moments of a flat tensor in which parameters are at `parts`. A swapped one is of one policy and updated as a
        whole, and DeepSpeed moves its moments between disk and memory with it."""
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


class Scaler:
    """DeepSpeed's dynamic loss scale with the state of our own."""

    def __init__(self, theirs: Any, config: Config, world: World):
        self.theirs, self.precision, self.device = theirs, config.precision, world.device
        self.enabled = config.precision.compute == "fp16"
        if self.enabled:  # theirs would stop the run at the lowest scale, and knows powers of two only
            theirs.raise_error_at_min_scale, theirs.min_scale = False, 0.0
            theirs.cur_scale, theirs.scale_factor = config.precision.loss_scale, config.precision.scale_growth
            self._set_tracker(0)

    @property
    def value(self) -> Tensor:
        return torch.tensor(float(self.theirs.cur_scale), device=self.device)

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.theirs.cur_scale

    def update(self, found_inf: Tensor) -> None:
        """DeepSpeed's step has moved the scale; it counts one good step more than we do before the scale may grow."""
        if self.enabled and self.theirs.last_overflow_iter == self.theirs.cur_iter - 1:
            self._set_tracker(0)

    def _set_tracker(self, good_steps: int) -> None:
        self.theirs.last_overflow_iter = self.theirs.cur_iter - 2 - good_steps

    def state_dict(self) -> dict[str, Any]:
        """The keys of torch.amp.GradScaler."""
        interval = self.precision.growth_interval
        good_steps = (self.theirs.cur_iter - 2 - self.theirs.last_overflow_iter) % interval if self.enabled else 0
        return {"scale": float(self.theirs.cur_scale), "growth_factor": self.precision.scale_growth,
                "backoff_factor": self.precision.scale_backoff, "growth_interval": interval, "_growth_tracker": good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.enabled:
            self.theirs.cur_scale = state["scale"]
            self._set_tracker(state["_growth_tracker"])


class Unsharded:
    """What the schedule asks around a stage's computation, where parameters stay as they are and gradients accumulate."""

    def begin(self, stage: int) -> None: ...
    def unshard(self, stage: int) -> None: ...
    def reshard(self, stage: int) -> None: ...
    def accumulate(self, stage: int) -> None: ...
    def reducing(self, stage: int) -> None: ...
    def reduced(self, stage: int) -> None: ...
    def reduce(self, stage: int) -> None: ...
    def end(self, stage: int) -> None: ...


class Zero:
    """What a training state has for its optimizer.

    parameters: global name -> this rank's fragment of the fp32 master; it has the reduced gradient from `gradients` to `step`.
    Copies of a tied embedding on one rank are one parameter here. modules: what the runtime calls, by stage. scaler: the
    loss scale. masters: DeepSpeed's flat fp32 tensors of this rank.
    """
    masters: list[Tensor]
    modules: dict[int, nn.Module]
    swapped = False
    """Whether masters and moments are on a disk, so that fragments have no values but between `tensors` and the next step."""

    def __init__(self, parameters: dict[str, nn.Parameter], infos: dict[str, ParameterInfo], policies: dict[str, Policy],
                 shared: SharedParameters, config: Config, world: World):
        self.config, self.world, self.ours, self.infos = config, world, parameters, infos
        self.copies = dict(map(reversed, shared.copies))
        self.counted = dict(zip(parameters, shared.counted.tolist()))
        self.policies = {name: policies[name] for name in parameters if name not in self.copies}
        prepare()

    def start(self, module: nn.Module, theirs: dict[str, Tensor], groups: list[list[Tensor]], mpu: Any = None) -> None:
        """Hands `module` to DeepSpeed. theirs: its parameters by their global names; groups: what may share a flat tensor. All
        ranks have as many groups, or their collectives would not match."""
        self.theirs = theirs
        self.updater = Updates(groups, self.config.optimizer)
        self.engine, self.zero, *_ = deepspeed.initialize(model=module, optimizer=self.updater, mpu=mpu, dist_init_required=False,
                                                          config=generate(self.config, self.world.device))
        self.scaler = Scaler(self.zero.loss_scaler, self.config, self.world)
        # It would move the scale before it unscales by it: half of every gradient, in a step after which the scale grows.
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
            part, offset = extent(parameter) if isinstance(parameter, DTensor) else (whole, torch.Size([0] * len(whole)))
            index, at, start, size = places.get(name, (0, 0, 0, 0))
            self.parameters[name] = Fragment(torch.empty(0, device=device), start, part, offset, whole, self.counted[name])
            if size:
                self.held[index][name] = slice(at, at + size)
        for index, (flat, held) in enumerate(zip(self.masters, self.held)):
            if held:
                with self.resident(index):
                    self.updater.add(flat, held, {name: self.policies[name] for name in held}, self.swapped)
        if not self.swapped:
            for name, values in self.values():
                self.parameters[name].values = values["model"]

    def sharding(self, micro_batches: int) -> Unsharded:
        """For a schedule of so many micro-batches."""
        raise NotImplementedError

    def places(self) -> dict[str, tuple[int, int, int, int]]:
        """By name, where this rank's elements of a parameter are: which master, where in it, from which element of the rank's
        part of the parameter on, how many."""
        raise NotImplementedError

    def resident(self, index: int) -> AbstractContextManager[None]:
        """Has a master and its moments in memory meanwhile."""
        return nullcontext()

    def values(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Every parameter that this rank has elements of, with these: the master's (`model`) and each moment's."""
        for index, (flat, held) in enumerate(zip(self.masters, self.held)):
            with self.resident(index) if held else nullcontext():
                for name, part in held.items():
                    moments, state = MOMENTS[self.policies[name].optimizer], self.updater.by_flat[flat][0].state
                    yield name, {"model": flat.detach()[part], **{
                        moment: state["", moment][part] if self.swapped else state[name, moment] for moment in moments}}

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
        """Reduces what still has to be; returns what this rank holds of every gradient, in the order of the model's parameters."""
        reduced = self.reduce()
        for name, fragment in self.parameters.items():
            fragment.grad = fragment.of(reduced.get(name, fragment.values[:0]).flatten())
        nothing = torch.empty(0, device=self.updates.device)
        return [nothing if name in self.copies else self.parameters[name].grad.values for name in self.ours]

    def reduce(self) -> dict[str, Tensor]:
        """By name, what this rank holds of the reduced gradients."""
        raise NotImplementedError

    def step(self, rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> Tensor:
        """One update; DeepSpeed unscales and clips by itself, and skips where a gradient is not finite. `found_inf`, which also
        knows the loss, makes it skip too. Returns whether it skipped."""
        if found_inf:
            self.spoil()
        self.updater.rate = rate
        self.zero.step()
        self.zero.loss_scaler.update_scale(self.zero.overflow)
        self.zero_grad()
        skipped = torch.full_like(found_inf, float(self.zero.overflow))
        self.updates += 1 - skipped
        return skipped

    def spoil(self) -> None:
        """Makes a gradient non-finite where DeepSpeed looks for it."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        self.zero.zero_grad()
        for fragment in self.parameters.values():
            fragment.grad = None
            if self.swapped:
                fragment.values = fragment.values[:0].clone()

    def tensors(self) -> dict[str, Any]:
        """What a checkpoint holds of the optimizer. Of masters and moments on a disk these are copies, which `loaded` writes back."""
        named: dict[str, Any] = {"optimizer.updates": self.updates}
        for name, values in self.values():
            values = {kind: value.to("cpu", copy=True) if self.swapped else value for kind, value in values.items()}
            self.parameters[name].values = values.pop("model")
            named |= {f"optimizer.{moment}.{name}": self.parameters[name].of(value) for moment, value in values.items()}
        self.copied = named if self.swapped else {}
        return named

    @torch.no_grad()
    def loaded(self, copies: list[tuple[str, str]]) -> None:
        """After `tensors` have been filled. Copies of a tied embedding share its memory."""
        for name, values in self.values() if self.swapped else ():
            for kind, value in values.items():
                value.copy_((self.parameters[name] if kind == "model" else self.copied[f"optimizer.{kind}.{name}"]).values)
        self.copied = {}
        self.refresh()


class FlatZero(Zero):
    """Stages 1 and 2."""

    def __init__(self, stages: dict[int, Transformer], parameters: dict[str, nn.Parameter], infos: dict[str, ParameterInfo],
                 policies: dict[str, Policy], shared: SharedParameters, config: Config, world: World):
        super().__init__(parameters, infos, policies, shared, config, world)
        self.modules, self.by_hand = dict(stages), config.parallel.zero.stage == 1
        shadows = {}
        for name in self.policies:
            shadows[name] = shadow = nn.Parameter(local(parameters[name]).detach())
            # What DeepSpeed counts in the norm: what is marked as split, and the rest on the first tensor-parallel rank.
            shadow.model_parallel = is_split(parameters[name])
            shadow.ds_pipe_replicated = name in shared.tied and not self.counted[name]
        module = nn.Module()
        module.shadows = nn.ParameterList(shadows.values())
        self.start(module, shadows, [list(shadows.values())], ModelParallel(world) if world.mesh["pp"].size() * world.mesh["tp"].size() > 1 else None)
        self.masters = self.zero.single_partition_of_fp32_groups
        if self.by_hand:  # the setting would make DeepSpeed take another optimizer for bf16, which offloads nothing
            self.zero.gradient_accumulation_dtype = torch.float32
            self.zero.use_grad_accum_attribute = config.precision.compute != "fp32"
        for name, parameter in parameters.items():
            flat = shadows[self.copies.get(name, name)].data  # now a part of DeepSpeed's flat tensor
            if isinstance(parameter, DTensor):
                whole = DTensor.from_local(flat, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                                           stride=parameter.stride())
                torch.utils.swap_tensors(parameter, nn.Parameter(whole))
            else:
                parameter.data = flat
            if self.by_hand:
                parameter.grad_dtype = torch.float32  # what comes from backward is widened, and then added
            else:
                parameter.register_post_accumulate_grad_hook(self.hook(name))
        self.share_out()

    def places(self) -> dict[str, tuple[int, int, int, int]]:
        places = {}
        for name, shadow in self.theirs.items():
            if (mapping := shadow._hp_mapping) is not None:
                mine, theirs = mapping.lp_fragment_address, mapping.hp_fragment_address
                places[name] = 0, theirs.start, mine.start, theirs.numel
        return places

    def sharding(self, micro_batches: int) -> Unsharded:
        return Unsharded() if self.by_hand else ReducedEach(self.zero, micro_batches)

    def refresh(self) -> None:
        self.zero.update_lp_params()

    def hook(self, name: str) -> Any:
        """Hands over a gradient as soon as it is complete."""
        shadow = self.theirs[name]

        def hand_over(parameter: nn.Parameter) -> None:
            shadow.grad, parameter.grad = local(parameter.grad).contiguous(), None
            self.zero.process_gradients(shadow, 0)
        return hand_over

    @torch.no_grad()
    def reduce(self) -> dict[str, Tensor]:
        zero = self.zero
        if self.by_hand:
            place = "grad_accum" if zero.use_grad_accum_attribute else "grad"
            for name, parameter in self.ours.items():
                gradient, parameter.grad = parameter.grad, None
                if name in self.theirs:
                    setattr(self.theirs[name], place, local(gradient).contiguous())
            zero.setup_buckets()
            zero.reduce_gradients()
        if zero.cpu_offload:
            zero._wait_for_offload_copies()
            return {name: self.masters[0].grad[part] for name, part in self.held[0].items()}
        names = {shadow: name for name, shadow in self.theirs.items()}
        return {names[shadow]: gradient for shadow, gradient in zip(zero.params_in_partition[0], zero.averaged_gradients[0])}

    def spoil(self) -> None:
        if self.zero.cpu_offload:
            self.zero.local_overflow = True
        else:
            self.zero.averaged_gradients[0][0].view(-1)[:1] = torch.nan

    def zero_grad(self) -> None:
        super().zero_grad()
        # A skipped step on the host would leave these, and the next one add to them.
        self.zero.averaged_gradients = dict.fromkeys(self.zero.averaged_gradients)


class ReducedEach(Unsharded):
    """Stage 2: gradients are reduced during each backward pass; `zero` has to know which is the last."""

    def __init__(self, zero: Any, micro_batches: int):
        self.zero, self.micro_batches, self.left = zero, micro_batches, 0

    def begin(self, stage: int) -> None:
        self.left = self.micro_batches

    def reducing(self, stage: int) -> None:
        self.zero.set_gradient_accumulation_boundary(self.left == 1)

    def reduced(self, stage: int) -> None:
        self.zero.overlapping_partition_gradients_reduce_epilogue()
        self.left -= 1


class ModelParallel:
    """Which ranks are which to DeepSpeed. Its model-parallel group is tensor and pipeline parallelism together."""

    def __init__(self, world: World):
        self.world, self.model = world, world.mesh["pp", "tp"]._flatten("model")

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.world.data.get_group()

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.world.data.get_group())

    def get_data_parallel_rank(self) -> int:
        return self.world.data.get_local_rank()

    def get_data_parallel_world_size(self) -> int:
        return self.world.data.size()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.model.get_group()

    def get_model_parallel_rank(self) -> int:
        return self.model.get_local_rank()

    def get_model_parallel_world_size(self) -> int:
        return self.model.size()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self.world.mesh["tp"].get_group()

    def get_tensor_model_parallel_rank(self) -> int:
        return self.world.place("tp")

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.world.mesh["tp"].size()

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.world.place("pp")

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.world.mesh["pp"].size()


class PartitionedZero(Zero):
    """Stage 3."""

    def __init__(self, stages: dict[int, Transformer], parameters: dict[str, nn.Parameter], infos: dict[str, ParameterInfo],
                 policies: dict[str, Policy], shared: SharedParameters, config: Config, world: World):
        super().__init__(parameters, infos, policies, shared, config, world)
        (number, model), = stages.items()
        set_z3_leaf_modules(model, [Layer])  # gathered as one, as its parts are not called one by one
        groups: dict[Policy, list[Tensor]] = {}
        for name, policy in self.policies.items():
            groups.setdefault(policy, []).append(parameters[name])
            parameters[name].dropped_after_use = True
        self.start(model, {name: parameters[name] for name in self.policies}, list(groups.values()))
        self.zero._gradient_averaging_world_size = lambda parameters, ranks: 1  # gradients are sums here
        self.masters, self.swapped = self.zero.fp32_partitioned_groups_flat, self.zero.swap_optimizer
        self.modules = {number: self.engine}
        self.share_out()

    def sharding(self, micro_batches: int) -> Unsharded:
        return Scaled(self.engine)

    def places(self) -> dict[str, tuple[int, int, int, int]]:
        places = {}
        for name, parameter in self.theirs.items():
            index, at, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
            start = size * self.world.data.get_local_rank()
            if start < parameter.ds_numel:  # behind the last element is padding
                places[name] = index, at, start, min(size, parameter.ds_numel - start)
        return places

    @contextmanager
    def resident(self, index: int) -> Iterator[None]:
        if not self.zero._swappable_optimizer_subgroup(index):
            yield
            return
        self.zero._optimizer_states_and_gradient_swap_in(index)
        yield
        self.zero._optimizer_states_and_gradient_swap_out(index)

    def refresh(self) -> None:
        self.zero._partition_all_parameters()
        for index in range(len(self.masters)):
            with self.resident(index):
                self.zero._reassign_or_swap_out_partitioned_parameters(index)
        self.zero._post_step(set())

    @torch.no_grad()
    def reduce(self) -> dict[str, Tensor]:
        zero = self.zero
        zero.finalize_gradient_accumulation_boundary()
        if self.swapped:  # they are on the disk already; of their norms there is one number each, which has itself as its norm
            norms = {name: zero.norm_for_param_grads.get(zero.get_param_id(self.theirs[name])) for held in self.held for name in held}
            return {name: norm.cpu().view(1) for name, norm in norms.items() if norm is not None}
        found = zero.get_fp32_grad_partitions()
        by_parameter = {parameter: found[index][number] for index, group in enumerate(zero.fp16_groups) for number, parameter in enumerate(group)}
        return {name: by_parameter[self.theirs[name]].flatten()[:part.stop - part.start] for held in self.held for name, part in held.items()}

    def spoil(self) -> None:
        self.zero.grad_partitions_flat_buffer[:1] = torch.nan
        for norm in self.zero.norm_for_param_grads.values() if self.zero.offload_optimizer else ():
            norm.fill_(torch.nan)


class Scaled(Unsharded):
    """Stage 3: DeepSpeed refuses backward passes under fp16 that it has not scaled itself, unless it is told that one is."""

    def __init__(self, engine: Any):
        self.engine = engine

    def reducing(self, stage: int) -> None:
        self.engine.scale(torch.zeros((), requires_grad=True).clone())


def build_zero(*arguments: Any, stage: int) -> Zero:
    return (PartitionedZero if stage == 3 else FlatZero)(*arguments)
