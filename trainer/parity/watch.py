"""A plan under observation: what reaches its optimizer on every rank, put together to whole tensors."""

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
from trainer.data.batches import Batch
from trainer.distributed.tensors import boxes, local
from trainer.distributed.world import World, gather
from trainer.model.initial import Weights
from trainer.parity.reference import Trajectory
from trainer.planning.cost.parameters import declarations
from trainer.planning.pipeline import Pipeline
from trainer.planning.plan import Plan
from trainer.training.session import numeric_mode
from trainer.training.state import COPY, TrainState
from trainer.training.step import train_step


class Piece(NamedTuple):
    """Which part of which tensor: the initial weights, the last ones, or the gradients of a step."""

    kind: str
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Watch:
    """A training state under observation: what this rank holds of weights and gradients, and what is wrong with
    them."""

    def __init__(self, state: TrainState):
        self.state, self.overflows = state, 0
        self.pieces: list[tuple[Piece, Tensor]] = []
        self.problems: list[str] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.told: list[str] = []
        self._sum, self._update = state.shared.sum, state.optimizer.step
        state.shared.sum, state.optimizer.step = self.sum, self.update
        self.keep("initial")

    def train(self, batches: list[Batch]) -> None:
        """One optimizer step; a step that the loss scaler skips is repeated with the lower scale."""
        state, number = self.state, len(self.losses) + 1
        while True:
            before = (
                [local(parameter).detach().clone() for parameter in state.optimizer.parameters.values()]
                if state.scaler.enabled
                else []
            )
            scalars = train_step(state, batches, False)
            self.told.append(f"{scalars['loss'].item()} {scalars['grad_norm'].item()}")
            if not scalars["found_inf"] or not state.scaler.enabled or scalars["loss_scale"] <= 1:
                break
            self.overflows += 1
            self.problems += [
                f"step {number}: {name} changed although the step overflowed"
                for old, (name, parameter) in zip(before, state.optimizer.parameters.items())
                if not torch.equal(old, local(parameter))
            ]
        if scalars["found_inf"]:
            self.problems.append(f"step {number}: the loss or a gradient is not finite")
        self.losses.append(scalars["loss"].item())
        self.norms.append(scalars["grad_norm"].item())

    def sum(self) -> None:
        for name, parameter in self.state.shared.parameters.items() if self.state.engine.keeps_gradients else ():
            if parameter.grad is None:
                self.problems.append(
                    f"step {len(self.losses) + 1}: {name} has no gradient on rank {self.state.world.rank}"
                )
                parameter.grad = torch.zeros_like(parameter)
        self._sum()

    def update(self, rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> Tensor:
        self.told.append(f"{found_inf.item()} {grad_scale.item()}")
        if not found_inf:
            self.keep(f"gradient {len(self.losses)}")
        return self._update(rate, grad_scale, found_inf)

    def keep(self, kind: str) -> None:
        """Copies what this rank holds: the weights, or the gradients without the loss scale."""
        for name, parameter in self.state.optimizer.parameters.items():
            for offset, value in boxes(parameter.grad if kind.startswith("gradient") else parameter):
                if value.numel():
                    value = value / self.state.scaler.value.item() if kind.startswith("gradient") else value
                    self.pieces.append(
                        (
                            Piece(kind, name.removesuffix(COPY), tuple(offset), tuple(value.shape)),
                            value.to("cpu", copy=True),
                        )
                    )

    def trajectory(self) -> Trajectory:
        """What was seen by all ranks together; whole tensors on rank 0 only. All ranks call it together."""
        self.keep("parameters")
        whole, differing = assemble(
            self.pieces, {name: info.shape for name, info in declarations(self.state.spec).items()}
        )
        everyone = self.state.world.gather((self.told, self.problems))
        problems = [
            f"{piece.kind}: {piece.name} differs between ranks that hold the same part of it" for piece in differing
        ]
        problems += ["found_inf, clipping, loss or gradient norm differ between ranks"] * any(
            told != everyone[0][0] for told, _ in everyone
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


def assemble(
    pieces: list[tuple[Piece, Tensor]], shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, dict[str, Tensor]], list[Piece]]:
    """Whole tensors by kind and name on rank 0 (none elsewhere), and the pieces of which ranks hold different bits.

    Of replicas one is sent, and a digest of each: gathering is over the host, piece by piece as ranks hold them, so
    that meshes and uneven cuts are of no concern."""
    mine = [(piece, hashlib.blake2b(value.contiguous().numpy(), digest_size=16).digest()) for piece, value in pieces]
    everyone = gather(mine)
    owners: dict[Piece, tuple[int, bytes]] = {}
    differing: list[Piece] = []
    for rank, some in enumerate(everyone):
        differing += [piece for piece, digest in some if owners.setdefault(piece, (rank, digest))[1] != digest]
    rank = dist.get_rank()
    collected: list[Any] | None = [None] * len(everyone) if rank == 0 else None
    dist.gather_object({piece: value for piece, value in pieces if owners[piece][0] == rank}, collected)
    whole: dict[str, dict[str, Tensor]] = {}
    for some in collected or []:
        for piece, value in some.items():
            target = whole.setdefault(piece.kind, {}).setdefault(piece.name, torch.full(shapes[piece.name], math.nan))
            target[tuple(slice(start, start + size) for start, size in zip(piece.offset, value.shape))] = value
    return whole, differing


def train(
    config: Config,
    spec: ModelSpec,
    plan: Plan,
    pipeline: Pipeline,
    world: World,
    steps: Iterable[list[Batch]],
    weights: Weights | None = None,
) -> Trajectory:
    """Trains under a plan. `steps`: this rank's micro-batches. All ranks call it together; the tensors are on rank
    0."""
    with numeric_mode(config):
        state = TrainState.build(config, spec, plan, pipeline, world, weights)
        watch = Watch(state)
        for batches in steps:
            watch.train(batches)
        seen = watch.trajectory()
    state.close()
    del state, watch
    gc.collect()  # FSDP's modules refer to each other; the next plan needs the room
    return seen
