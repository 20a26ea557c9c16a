"""The plans that are compared. Trains under one, and records what reaches the optimizer on every rank, assembled to
whole tensors."""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import Config, ConfigError, ParallelConfig
from trainer.config.fields import list_divisors
from trainer.config.model import ModelSpec
from trainer.data.batches import MicroBatch
from trainer.distributed.mesh import World, gather_objects
from trainer.distributed.tensors import local_regions, local_values
from trainer.model.initial import Weights
from trainer.parallel.compress.plan import describe_codecs
from trainer.parallel.parallelize import check_compiler, check_model
from trainer.parallel.pipeline.plan import PipelinePlan
from trainer.parallel.zero.fsdp import check_engine
from trainer.parity.compare import Trajectory
from trainer.parity.routing import Choices, RoutingReplay
from trainer.planning.features import check_plan, resolve_plan
from trainer.planning.float8 import numeric_types
from trainer.planning.neighbours import build_variant, fit_batch
from trainer.planning.parameters import declare_parameters, router_shapes
from trainer.planning.plan import Plan, node_size
from trainer.planning.resolve import Layout, check_config, resolve_layout
from trainer.training.session import numeric_mode
from trainer.training.state import COPY, TrainState
from trainer.training.step import own_targets, train_step


class TensorRegion(NamedTuple):
    """A rectangle of a recorded tensor. kind: "initial" or "parameters" (weights), or "gradient N" of step N."""

    kind: str
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


NORM_ERROR = 1e-5
"""How far the norm of a parameter's gradient that a step computes may be, relatively, from that of the recorded
gradient. Both are sums in fp64 over the same values."""


class StateRecorder:
    """Records a training state: what this rank holds of weights and gradients, and what is wrong with them.

    agreed: scalars that all ranks must have alike. replay: has tokens go to known experts, or is None."""

    def __init__(self, state: TrainState, replay: RoutingReplay | None = None):
        self.state, self.overflows, self.empty = state, 0, False
        self.boxes_held: list[tuple[TensorRegion, Tensor]] = []
        self.problems: list[str] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.squares: list[list[float]] = []
        self.agreed: list[str] = []
        self.replay = replay
        for model in state.stages.values() if replay is not None else ():
            replay.watch(model)
        self.frozen = [(*held, local_values(held[1]).detach().clone()) for held in state.frozen]
        self._sum, self._update = state.shared.sum, state.optimizer.step
        state.shared.sum, state.optimizer.step = self.sum, self.update
        self.record("initial")

    def train(self, batches: list[MicroBatch]) -> None:
        """One optimizer step. A step that the loss scaler skips is repeated, with the lower scale."""
        state, number = self.state, len(self.losses) + 1
        while True:
            before = (
                [local_values(parameter).detach().clone() for parameter in state.optimizer.parameters.values()]
                if state.scaler.enabled
                else []
            )
            self.empty = not state.world.sum_all(own_targets(state, batches).sum())
            if self.replay is not None:
                self.replay.begin_step(number - 1, batches)
            with nullcontext() if self.replay is None else self.replay.active():
                scalars = train_step(state, batches, False)
            self.agreed.append(f"{scalars['loss'].item()} {scalars['grad_norm'].item()}")
            if self.empty or not scalars["found_inf"] or not state.scaler.enabled or scalars["loss_scale"] <= 1:
                break
            self.overflows += 1
            self.problems += [
                f"step {number}: {name} changed although the step overflowed"
                for old, (name, parameter) in zip(before, state.optimizer.parameters.items())
                if not torch.equal(old, local_values(parameter))
            ]
        if scalars["found_inf"] and not self.empty:
            self.problems.append(f"step {number}: the loss or a gradient is not finite")
        self.losses.append(scalars["loss"].item())
        self.norms.append(scalars["grad_norm"].item())
        self.squares.append(scalars["squares"].tolist())

    def sum(self) -> None:
        """Stands in for the sum over replicas of shared parameters: reports gradients that are missing."""
        for name, parameter in self.state.shared.parameters.items() if self.state.engine.keeps_gradients else ():
            if parameter.grad is None:
                self.problems.append(
                    f"step {len(self.losses) + 1}: {name} has no gradient on rank {self.state.world.rank}"
                )
                parameter.grad = torch.zeros_like(parameter)
        self._sum()

    def update(self, rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> Tensor:
        """Stands in for the optimizer's step: records the gradients that it gets."""
        self.agreed.append(f"{found_inf.item()} {grad_scale.item()}")
        if not found_inf or self.empty:
            self.record(f"gradient {len(self.losses)}")
        return self._update(rate, grad_scale, found_inf)

    def record(self, kind: str) -> None:
        """Copies what this rank holds to the CPU: the weights, or the gradients without the loss scale."""
        held = dict(self.state.optimizer.parameters)
        if not kind.startswith("gradient"):
            held |= self.state.router_buffers
        for name, parameter in held.items():
            for offset, value in local_regions(parameter.grad if kind.startswith("gradient") else parameter):
                if value.numel():
                    value = value / self.state.scaler.value.item() if kind.startswith("gradient") else value
                    self.boxes_held.append(
                        (
                            TensorRegion(kind, name.removesuffix(COPY), tuple(offset), tuple(value.shape)),
                            value.to("cpu", copy=True),
                        )
                    )

    def trajectory(self) -> Trajectory:
        """The records of all ranks together; whole tensors on rank 0 only. All ranks call it together."""
        self.record("parameters")
        self.problems += [
            f"{name} is frozen, and has {'a gradient' if parameter.grad is not None else 'changed'}"
            for name, parameter, before in self.frozen
            if parameter.grad is not None
            or not torch.equal(*(one.contiguous().view(torch.uint8) for one in (local_values(parameter), before)))
        ]
        shapes = {name: info.shape for name, info in declare_parameters(self.state.spec).items()}
        whole, differing = assemble_tensors(self.boxes_held, shapes | router_shapes(self.state.spec))
        replay, counts = self.replay, torch.zeros(2)
        if replay is not None:
            self.problems += replay.problems
            counts = torch.tensor([replay.differing, replay.tokens], dtype=torch.float64)
            counts = self.state.world.sum_all(counts.to(self.state.world.device))
        everyone = self.state.world.gather((self.agreed, self.problems))
        problems = [f"{box.kind}: {box.name} differs between ranks that hold the same part of it" for box in differing]
        problems += ["found_inf, clipping, loss or gradient norm differ between ranks"] * any(
            agreed != everyone[0][0] for agreed, _ in everyone
        )
        problems += dict.fromkeys(problem for _, some in everyone for problem in some)
        gradients = [whole.get(f"gradient {number}", {}) for number in range(len(self.losses))]
        problems += self.find_miscounted(gradients)
        return Trajectory(
            whole.get("initial", {}),
            self.losses,
            self.norms,
            gradients,
            whole.get("parameters", {}),
            problems,
            self.overflows,
            differing=None if replay is None else (counts[0] / counts[1].clamp(min=1)).item(),
        )

    def find_miscounted(self, gradients: list[dict[str, Tensor]]) -> Iterator[str]:
        """Parameters that the gradient norm does not count as they are in `gradients`, the whole ones of each step. The
        norm of all parameters hardly changes if it leaves out a small one."""
        for number, (squares, tensors) in enumerate(zip(self.squares, gradients), 1):
            counts = dict(zip(self.state.names, squares))
            for name, value in tensors.items():
                counted, norm = math.sqrt(counts[name]), value.norm(dtype=torch.float64).item()
                if abs(counted - norm) > NORM_ERROR * norm:
                    yield f"step {number}: the gradient norm counts {name} as {counted:.3e}, and its own is {norm:.3e}"


def assemble_tensors(
    boxes_held: list[tuple[TensorRegion, Tensor]], shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, dict[str, Tensor]], list[TensorRegion]]:
    """Whole tensors by kind and name on rank 0 (none elsewhere), and the boxes of which ranks hold different bits.

    All replicas send a digest, and one of them its values. Boxes are gathered over the host as the ranks hold them, so
    that the mesh and uneven shards do not matter."""
    mine = [(box, hashlib.blake2b(value.contiguous().numpy(), digest_size=16).digest()) for box, value in boxes_held]
    everyone = gather_objects(mine)
    owners: dict[TensorRegion, tuple[int, bytes]] = {}
    differing: list[TensorRegion] = []
    for rank, some in enumerate(everyone):
        differing += [box for box, digest in some if owners.setdefault(box, (rank, digest))[1] != digest]
    rank = dist.get_rank()
    collected: list[Any] | None = [None] * len(everyone) if rank == 0 else None
    # As arrays: tensors take ten times as long to pickle, and each box is small.
    dist.gather_object({box: value.numpy() for box, value in boxes_held if owners[box][0] == rank}, collected)
    whole: dict[str, dict[str, Tensor]] = {}
    for some in collected or []:
        for box, value in some.items():
            target = whole.setdefault(box.kind, {}).setdefault(box.name, torch.full(shapes[box.name], math.nan))
            place = tuple(slice(start, start + size) for start, size in zip(box.offset, value.shape))
            target[place] = torch.from_numpy(value)
    return whole, differing


def train_plan(
    config: Config,
    spec: ModelSpec,
    plan: Plan,
    pipeline: PipelinePlan,
    world: World,
    steps: Iterable[list[MicroBatch]],
    weights: Weights | None = None,
    choices: Choices | None = None,
) -> Trajectory:
    """Trains under a plan. All ranks call it together; rank 0 gets the tensors.

    steps: this rank's micro-batches. choices: of the reference, alike on all ranks, where tokens are to go to the
    experts that they went to there."""
    with numeric_mode(config):
        state = TrainState.build(config, spec, plan, pipeline, world, weights)
        watch = StateRecorder(state, None if choices is None else RoutingReplay(choices))
        for batches in steps:
            watch.train(batches)
        seen = watch.trajectory()
    state.close()
    del state, watch
    gc.collect()  # FSDP's modules refer to each other in cycles, and the next plan needs their memory
    return seen


# The plans that are compared: each a text, resolved to a configuration whose micro-batches fit, or refused.


SCHEDULES = ("1f1b", "zb_h1", "interleaved", "zb_v")
"""The schedules that `generate_plans` runs on each pipeline, where the model has enough layers."""


@dataclass
class PlanCase:
    """A requested plan, with its configuration and layout, or with the reasons why it is refused."""

    text: str
    reasons: list[str] = field(default_factory=list)
    config: Config | None = None
    layout: Layout | None = None

    def describe(self) -> list[str]:
        """The resolved plan, in short lines."""
        precision, activation = self.config.precision, self.config.activation
        plan, batch = self.layout.plan, self.layout.batch
        extras = [f"{activation.mode} recompute"] * (activation.mode != "none") + ["compiled"] * self.config.compile
        gradients = describe_codecs(self.config.parallel.grad_comm)
        extras += [f"gradients {gradients}"] * bool(gradients)
        pipe = self.layout.pipeline.describe() if plan.pp > 1 else f"{batch.accumulation} micro-batches"
        return [
            f"{plan.describe()}, {', '.join([numeric_types(precision), *extras])}",
            f"{pipe} of {batch.micro_size} x {batch.sequence_length} tokens",
        ]


def make_case(
    text: str,
    base: Config,
    spec: ModelSpec,
    overrides: Sequence[str],
    config_dir: str | None,
    global_size: int,
    processes: int,
    device: torch.device,
) -> PlanCase:
    """A plan's text as a case, refused or not."""
    try:
        config, named = build_variant(text, base, overrides, config_dir, processes)
        if config.parallel.pipeline.schedule == "auto" and config.parallel.pp > 1:
            raise ConfigError(
                "parallel.pipeline.schedule=auto is chosen while a run trains; name the CSV file that the run saved, "
                "or interleaved"
            )
        if config.activation.mode == "auto":
            raise ConfigError(
                "activation.mode=auto is chosen by a run's free memory; set activation.mode and activation.save as "
                "config.yaml of the run's folder has them"
            )
        fit_batch(config, resolve_plan(config.parallel, processes, spec, node_size(processes)), global_size, named)
        problems = check_config(config, processes)
        if problems:
            raise ConfigError(problems)
        check_compiler(config, device)
        check_engine(config, device)
        check_model(config, spec, device)
        return PlanCase(text, [], config, resolve_layout(config, processes, spec))
    except ConfigError as error:
        return PlanCase(text, error.problems)


def generate_plans(spec: ModelSpec, processes: int) -> list[str]:
    """Every (dp, tp, pp) that the model can be laid out in, each with ZeRO stages and schedules; and sequences shared
    by any number of ranks."""
    node, plain = node_size(processes), "parallel.dp=-1 parallel.shard=-1 parallel.zero.offload=false"
    plans = [
        f"{plain} parallel.cp={cp} parallel.tp=1 parallel.pp=1 parallel.zero.stage=3"
        for cp in list_divisors(processes)[1:]
    ]
    for tp in list_divisors(processes):
        for pp in list_divisors(processes // tp):
            if check_plan(ParallelConfig(tp=tp, pp=pp), processes, spec, node):
                continue
            stages = [0] if processes == tp * pp else [0, 1, 2, 3] if tp * pp == 1 else [0, 3]
            schedules = (
                [name for name in SCHEDULES if spec.depth >= pp * (1 + (name in ("interleaved", "zb_v")))]
                if pp > 1
                else [""]
            )
            chosen = [(stage, schedules[0]) for stage in stages] + [(stages[-1], name) for name in schedules[1:]]
            plans += [
                f"{plain} parallel.cp=1 parallel.tp={tp} parallel.pp={pp} parallel.zero.stage={stage}"
                + f" parallel.pipeline.schedule={name} parallel.pipeline.chunks=null parallel.pipeline.split=balanced"
                * bool(name)
                for stage, name in chosen
            ]
    return plans
