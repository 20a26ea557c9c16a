"""Trains under a plan and records what reaches the optimizer on every rank, assembled to whole tensors."""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.data.batches import MicroBatch
from trainer.distributed.mesh import World, gather_objects
from trainer.distributed.tensors import local_regions, local_values
from trainer.model.initial import Weights
from trainer.parallel.pipeline.plan import PipelinePlan
from trainer.parity.reference import Trajectory
from trainer.planning.cost.parameters import declare_parameters
from trainer.planning.plan import Plan
from trainer.training.session import numeric_mode
from trainer.training.state import COPY, TrainState
from trainer.training.step import train_step


class TensorRegion(NamedTuple):
    """A rectangle of a recorded tensor. kind: "initial" or "parameters" (weights), or "gradient N" of step N."""

    kind: str
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class StateRecorder:
    """Records a training state: what this rank holds of weights and gradients, and what is wrong with them.

    agreed: scalars that all ranks must have alike."""

    def __init__(self, state: TrainState):
        self.state, self.overflows = state, 0
        self.boxes_held: list[tuple[TensorRegion, Tensor]] = []
        self.problems: list[str] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.agreed: list[str] = []
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
            scalars = train_step(state, batches, False)
            self.agreed.append(f"{scalars['loss'].item()} {scalars['grad_norm'].item()}")
            if not scalars["found_inf"] or not state.scaler.enabled or scalars["loss_scale"] <= 1:
                break
            self.overflows += 1
            self.problems += [
                f"step {number}: {name} changed although the step overflowed"
                for old, (name, parameter) in zip(before, state.optimizer.parameters.items())
                if not torch.equal(old, local_values(parameter))
            ]
        if scalars["found_inf"]:
            self.problems.append(f"step {number}: the loss or a gradient is not finite")
        self.losses.append(scalars["loss"].item())
        self.norms.append(scalars["grad_norm"].item())

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
        if not found_inf:
            self.record(f"gradient {len(self.losses)}")
        return self._update(rate, grad_scale, found_inf)

    def record(self, kind: str) -> None:
        """Copies what this rank holds to the CPU: the weights, or the gradients without the loss scale."""
        for name, parameter in self.state.optimizer.parameters.items():
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
        whole, differing = assemble_tensors(
            self.boxes_held, {name: info.shape for name, info in declare_parameters(self.state.spec).items()}
        )
        everyone = self.state.world.gather((self.agreed, self.problems))
        problems = [f"{box.kind}: {box.name} differs between ranks that hold the same part of it" for box in differing]
        problems += ["found_inf, clipping, loss or gradient norm differ between ranks"] * any(
            agreed != everyone[0][0] for agreed, _ in everyone
        )
        problems += dict.fromkeys(problem for _, some in everyone for problem in some)
        gradients = [whole.get(f"gradient {number}", {}) for number in range(len(self.losses))]
        return Trajectory(
            whole.get("initial", {}),
            self.losses,
            self.norms,
            gradients,
            whole.get("parameters", {}),
            problems,
            self.overflows,
        )


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
) -> Trajectory:
    """Trains under a plan. steps: this rank's micro-batches. All ranks call it together; rank 0 gets the tensors."""
    with numeric_mode(config):
        state = TrainState.build(config, spec, plan, pipeline, world, weights)
        watch = StateRecorder(state)
        for batches in steps:
            watch.train(batches)
        seen = watch.trajectory()
    state.close()
    del state, watch
    gc.collect()  # FSDP's modules refer to each other in cycles, and the next plan needs their memory
    return seen
