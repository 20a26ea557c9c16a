"""One optimizer step: forward and backward over the micro-batches, one gradient norm, one update."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from enum import IntFlag
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from trainer.data.batches import MicroBatch, source_of
from trainer.model.loss import IGNORE
from trainer.optim.optimizer import learning_rate
from trainer.training.state import COPY, TrainState
from trainer.util.tables import OPTIMIZER


class ControlFlag(IntFlag):
    """What one rank may request of all ranks. STOP: end the run and leave it resumable. FINISH: end the run as
    complete. SAVE: write a checkpoint. EVALUATE: run an evaluation."""

    STOP = 1
    FINISH = 2
    SAVE = 4
    EVALUATE = 8


def train_step(state: TrainState, batches: list[MicroBatch], requested: int | Tensor) -> dict[str, Tensor]:
    """Runs one optimizer step on this rank's micro-batches. Nothing is read back from the device.

    The loss of the step is the sum of the token losses over all ranks and micro-batches, divided by the global number
    of valid tokens. It therefore does not depend on how the batch is split. A step whose loss or gradient is not finite
    changes nothing and can be run again (see `state.gate`). A step without any valid token changes nothing either.

    batches: one per micro-batch of the schedule. requested: the `ControlFlag`s that this rank requests, or the
    `flag_vector` of them, which a CUDA graph reads anew in every replay.

    Returns device tensors that are equal on all ranks, except where noted. Scalars: loss (nats per token; 0 without any
    valid token), valid (number of tokens that the loss is the mean of), grad_norm (before clipping), lr, loss_scale,
    found_inf (1 where the update was skipped). Vectors: asked (number of ranks that request each `ControlFlag`),
    squares (squared gradient norm of each parameter of the whole model, in the order of `state.names`), losses and
    targets (summed loss and number of valid tokens of each of this rank's sequences; they differ by rank and are parts
    of a sum over the ranks that share a sequence), statistics (the statistics that layers report, concatenated in the
    order of `state.reports`). With expert parallelism also fullest_rank, of which the largest of all ranks counts: see
    `measure_load`.
    """
    world, scaler, optimizer = state.world, state.scaler, state.optimizer
    # The gradient of every micro-batch is divided by the number of valid tokens of the global batch, so this number has
    # to be known before the first forward pass. The control flags travel in the same all-reduce.
    targets = own_targets(state, batches)
    flags = requested if isinstance(requested, Tensor) else flag_vector(requested, world.device)
    counts = torch.cat([targets.sum()[None], flags])
    valid, requests = world.sum_all(counts).split([1, len(ControlFlag)])
    valid = valid.squeeze()
    # A step without any valid token has gradients of zero, but weight decay and moments would change the weights.
    empty = (valid == 0).float()
    divisor = valid.clamp(min=1)

    state.compression.begin_step(scaler)
    # The runtime backpropagates each micro-batch's summed loss times (loss scale / valid tokens), so gradients are sums
    # and no rank divides by a number of ranks afterwards.
    losses = own_losses(state, state.runtime.train(batches, scaler.scale((1 - empty) / divisor.float())))
    # FSDP has reduced over the data-parallel ranks only. Parameters that tensor-parallel ranks hold whole, and tied
    # embeddings on two pipeline stages, still have partial gradients.
    state.shared.sum()
    with record_function(OPTIMIZER):
        squares = state.shared.squares(optimizer.gradients())
    total, squares, statistics = sum_over_ranks(state, losses.sum(), squares, state.runtime.statistics)

    # From here on, all ranks compute the same values from the same bits, so they skip or apply the update together.
    scale = scaler.value.double()
    # The gradients still contain the loss scale. The optimizer divides by it inside of its update.
    loss, norm = total / divisor, squares.sum().sqrt() / scale
    if state.config.parallel.ep_capacity:
        # Choices of experts without room are missing from this step's numbers. It is run again, as one that is not
        # finite.
        missing = statistics[state.overflow].sum() > 0
        loss, norm = (value.masked_fill(missing, torch.nan) for value in (loss, norm))
    found_inf = torch.maximum(state.gate.found_inf(loss, norm), empty)
    clip = state.config.optimizer.clip_norm
    coefficient = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
    rate = learning_rate(state.config.lr, state.config.run.steps, optimizer.updates)
    # With offload the optimizer runs on the CPU: these scalars move there, and the host waits for the device. Otherwise
    # both devices are the same and `to` does nothing.
    target = optimizer.updates.device
    with record_function(OPTIMIZER):
        found_inf = optimizer.step(rate, (scale / coefficient).float().to(target), found_inf.to(target))
        found_inf = found_inf.to(world.device)
        if state.average is not None:
            state.average.update(found_inf)
        state.rebalance_experts(statistics, found_inf)
        optimizer.zero_grad()
    state.compression.end_step(found_inf)
    result = {
        "loss": loss,
        "valid": valid,
        "grad_norm": norm,
        "lr": rate.to(world.device),
        "loss_scale": scale,
        "found_inf": found_inf,
        "asked": requests,
        "squares": squares / scale.square(),
        "losses": losses,
        "targets": targets,
        "statistics": statistics,
    }
    if state.plan.ep > 1:
        result["fullest_rank"] = measure_load(state, state.runtime.statistics)
    # Last, because everything above has to use the scale that this step's gradients were computed with.
    scaler.update(found_inf, torch.maximum(state.gate.shut, empty))
    state.step += 1
    return result


def flag_vector(requested: int, device: torch.device) -> Tensor:
    """1 for each `ControlFlag` that is requested, else 0: fp64 [flags]."""
    flags = torch.zeros(len(ControlFlag), dtype=torch.float64, device=device)
    for index, flag in enumerate(ControlFlag):
        if requested & flag:
            flags[index] = 1
    return flags


def own_losses(state: TrainState, losses: Tensor) -> Tensor:
    """The runtime's losses, one per sequence: [sequences]. Tensor-parallel ranks compute the same losses, so all but
    the first of them return zeros, and a sum over ranks counts each loss once."""
    return losses.flatten() if state.world.place("tp") == 0 else torch.zeros_like(losses).flatten()


def own_targets(state: TrainState, batches: list[MicroBatch]) -> Tensor:
    """The number of valid tokens of each sequence of `batches`, fp64: [sequences]. Zeros on all ranks but one of those
    that read the same data, so that a sum over ranks counts each token once."""
    counts = torch.stack([(batch.targets != IGNORE).sum(1) for batch in batches])
    return counts.flatten().double() * state.world.speaks_for_data


def sum_over_ranks(
    state: TrainState, loss: Tensor, squares: Tensor, statistics: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over all ranks in one all-reduce of one small fp64 vector: the loss (scalar), the squared gradient norm of
    every parameter of the model [names], and the layers' statistics [sum of `state.reports`]. All ranks get the same
    bits.

    loss, squares [this rank's parameters], statistics: this rank's parts. Squares are summed per parameter first and
    over parameters afterwards, in a fixed order, which makes the global norm independent of the plan.
    """
    names = len(state.names)
    own = tuple(state.shared.parameters), tuple(statistics)
    places = find_places(tuple(state.names), tuple(state.reports.items()), *own, squares.device)
    # Layout: [loss, squares of all parameters of the model, statistics]. A rank adds its parts to zeros at their
    # positions.
    vector = torch.zeros(1 + names + sum(state.reports.values()), dtype=torch.float64, device=squares.device)
    vector.index_add_(0, places, torch.cat([squares, *statistics.values()]))
    vector[0] += loss
    vector = state.world.sum_all(vector)
    return vector[0], vector[1 : 1 + names], vector[1 + names :]


def measure_load(state: TrainState, statistics: dict[str, Tensor]) -> Tensor:
    """The rows that this rank's experts received in a step, over the mean of the ranks that share them: fp64 scalar, of
    the layer in which that is most; 0 without a layer with experts. All ranks call it together.

    statistics: this rank's, of which the load of its tokens is summed over its `ep` group alone."""
    mesh = state.world.dimensions["ep"]
    loads = [load.view(mesh.size(), -1).sum(1) for name, load in statistics.items() if name.endswith(".load")]
    if not loads:
        return torch.zeros((), dtype=torch.float64, device=state.world.device)
    rows = torch.stack(loads)
    dist.all_reduce(rows, group=mesh.get_group())
    return (rows[:, mesh.get_local_rank()] / rows.mean(1)).max()


@lru_cache(maxsize=16)
def find_places(
    names: tuple[str, ...],
    reports: tuple[tuple[str, int], ...],
    parameters: tuple[str, ...],
    statistics: tuple[str, ...],
    device: torch.device,
) -> Tensor:
    """Where a rank's squares and statistics stand in the vector of `sum_over_ranks`: int64 [values].

    names, reports: of the whole model. parameters, statistics: of this rank. Cached between steps: an upload from
    pageable memory would make the host wait for all queued device work in every step.
    """
    positions = {name: index for index, name in enumerate(names, start=1)}
    # A copy of a tied embedding goes to the position of its original. Its square is zero, so nothing is counted twice.
    mine = [positions[name.removesuffix(COPY)] for name in parameters]
    sizes = dict(reports)
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=1 + len(names))))
    for name in statistics:
        mine += range(starts[name], starts[name] + sizes[name])
    return torch.tensor(mine, dtype=torch.int64, device=device)


@torch.no_grad()
def evaluate(state: TrainState, batches: Iterable[MicroBatch], sources: Sequence[str] = ()) -> Tensor:
    """Mean loss per valid token over `batches` of all ranks, then over those of their sequences that are from each of
    `sources` (NaN for a source without any): fp64 [1 + sources], equal on all ranks.

    Every rank passes as many batches as the others. All ranks call it together.
    """
    batches = list(batches)
    losses = own_losses(state, state.runtime.evaluate(batches))
    # In training, the backward pass frees the gathered parameters. No backward pass follows here, so they are freed
    # explicitly.
    for stage in state.stages:
        state.runtime.sharding.reshard(stage)
    parts = torch.stack([losses, own_targets(state, batches)])
    # Row 0 selects all sequences, each further row those of one source.
    ids = [sample for batch in batches for sample in batch.ids]
    selected = torch.tensor([[True] * len(ids), *([source_of(sample) == name for sample in ids] for name in sources)])
    sums = torch.where(selected.to(parts.device), parts[:, None], 0).sum(-1)
    total, valid = state.world.sum_all(sums).unbind()
    return total / valid
