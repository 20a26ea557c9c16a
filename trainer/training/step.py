"""One optimizer step: forward and backward over the micro-batches, one gradient norm, one update."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from enum import IntFlag
from functools import lru_cache

import torch
from torch import Tensor
from torch.profiler import record_function

from trainer.data.batches import MicroBatch, source_of
from trainer.model.loss import IGNORE
from trainer.optim.optimizer import learning_rate
from trainer.training.state import COPY, TrainState
from trainer.util.trace_labels import OPTIMIZER


class ControlFlag(IntFlag):
    """What a rank may ask of all: to stop, to be gone on with; to finish, as done; to save; to evaluate."""

    STOP = 1
    FINISH = 2
    SAVE = 4
    EVALUATE = 8


def train_step(state: TrainState, batches: list[MicroBatch], asked: int) -> dict[str, Tensor]:
    """Runs one optimizer step on this rank's micro-batches. Nothing is read back from the device.

    The loss of the step is the sum over all valid tokens of all ranks divided by their number, whatever the
    micro-batches and ranks. A step whose loss or gradient is not finite changes nothing, and may be run again
    (`state.gate`). `asked` is what this rank asks for, as an `ControlFlag`.

    Returns device scalars, equal on all ranks: loss, valid (tokens that it is the mean of), grad_norm, lr, loss_scale,
    found_inf; and five vectors: asked (how many ranks ask for each `ControlFlag`), squares (squared gradient norm of
    each parameter of the model, as in `state.names`), losses and targets (summed loss and number of valid tokens of
    each of this rank's own sequences; zeros but on one of the ranks that share them), statistics (what layers report of
    the step, one after the other as in `state.reports`)."""
    world, scaler, optimizer = state.world, state.scaler, state.optimizer
    targets = own_targets(state, batches)
    counts = torch.zeros(1 + len(ControlFlag), dtype=torch.float64, device=world.device)
    counts[0] = targets.sum()
    for place, ask in enumerate(ControlFlag, start=1):
        if asked & ask:
            counts[place] = 1
    valid, asking = world.sum_all(counts).split([1, len(ControlFlag)])
    valid = valid.squeeze().clamp(min=1)  # a step without any target has loss and gradients of zero

    state.compression.begin_step(state.step, scaler)
    losses = own_losses(state, state.runtime.train(batches, scaler.scale(1 / valid.float())))
    state.shared.sum()
    with record_function(OPTIMIZER):
        squares = state.shared.squares(optimizer.gradients())
    total, squares, statistics = sum_over_ranks(state, losses.sum(), squares, state.runtime.statistics)

    scale = scaler.value.double()
    loss, norm = total / valid, squares.sum().sqrt() / scale
    found_inf = state.gate.found_inf(loss, norm)
    clip = state.config.optimizer.clip_norm
    coefficient = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
    rate = learning_rate(state.config.lr, state.config.run.steps, optimizer.updates)
    target = optimizer.updates.device
    with record_function(OPTIMIZER):
        found_inf = optimizer.step(rate, (scale / coefficient).float().to(target), found_inf.to(target))
        found_inf = found_inf.to(world.device)
        if state.average is not None:
            state.average.update(found_inf)
        optimizer.zero_grad()
    state.compression.end_step(found_inf)
    result = {
        "loss": loss,
        "valid": valid,
        "grad_norm": norm,
        "lr": rate.to(world.device),
        "loss_scale": scale,
        "found_inf": found_inf,
        "asked": asking,
        "squares": squares / scale.square(),
        "losses": losses,
        "targets": targets,
        "statistics": statistics,
    }
    scaler.update(found_inf, state.gate.shut)
    state.step += 1
    return result


def own_losses(state: TrainState, losses: Tensor) -> Tensor:
    """What the executor returned, by sequence; zeros on all but one of the tensor-parallel ranks, which share it."""
    return losses.flatten() if state.world.place("tp") == 0 else torch.zeros_like(losses).flatten()


def own_targets(state: TrainState, batches: list[MicroBatch]) -> Tensor:
    """The number of valid tokens of each sequence of `batches`, fp64; zeros on ranks that do not speak for them."""
    counts = torch.stack([(batch.targets != IGNORE).sum(1) for batch in batches])
    return counts.flatten().double() * state.world.speaks_for_data


def sum_over_ranks(
    state: TrainState, loss: Tensor, squares: Tensor, statistics: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss, the squared gradient norm of every parameter of the model, and what layers report, the same bits
    on all ranks.

    One reduction of one small vector; summing per parameter first, in a fixed order, makes the global norm independent
    of the plan."""
    names = len(state.names)
    places = {name: index for index, name in enumerate(state.names, start=1)}
    mine = [places[name.removesuffix(COPY)] for name in state.shared.parameters]  # copies have squares of zero
    starts = dict(zip(state.reports, itertools.accumulate(state.reports.values(), initial=1 + names)))
    for name in statistics:
        mine += range(starts[name], starts[name] + state.reports[name])
    vector = torch.zeros(1 + names + sum(state.reports.values()), dtype=torch.float64, device=squares.device)
    vector.index_add_(0, on_device(tuple(mine), squares.device), torch.cat([squares, *statistics.values()]))
    vector[0] += loss
    vector = state.world.sum_all(vector)
    return vector[0], vector[1 : 1 + names], vector[1 + names :]


@lru_cache(maxsize=16)
def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept between steps: the host would wait for the copy, and so for all that the device still has to do."""
    return torch.tensor(numbers, device=device)


@torch.no_grad()
def evaluate(state: TrainState, batches: Iterable[MicroBatch], sources: Sequence[str] = ()) -> Tensor:
    """Mean loss per valid token over all ranks' `batches` (each rank has as many), then over those of their sequences
    that are from each of `sources` (NaN without any): [1 + sources], equal on all ranks.

    No backward pass follows that would drop the gathered parameters, so they are dropped here.
    """
    batches = list(batches)
    losses = own_losses(state, state.runtime.evaluate(batches))
    for stage in state.stages:
        state.runtime.sharding.reshard(stage)
    parts = torch.stack([losses, own_targets(state, batches)])
    ids = [sample for batch in batches for sample in batch.ids]
    whose = torch.tensor([[True] * len(ids), *([source_of(sample) == name for sample in ids] for name in sources)])
    sums = torch.where(whose.to(parts.device), parts[:, None], 0).sum(-1)
    total, valid = state.world.sum_all(sums).unbind()
    return total / valid
