"""One optimizer step: forward and backward over the micro-batches, one gradient norm, one update."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.config import Config
from trainer.model.loss import IGNORE
from trainer.optim.optimizer import Optimizer, local
from trainer.optim.schedule import learning_rate
from trainer.parallel.mesh import World
from trainer.parallel.plan import Plan
from trainer.parallel.zero import drop_gathered, prepare_micro_batch
from trainer.precision.scaler import GradScaler

if TYPE_CHECKING:
    from trainer.data.batches import Batch


@dataclass
class TrainState:
    """What a training run consists of, and all that a checkpoint has to hold besides the position in the data."""
    config: Config
    plan: Plan
    world: World
    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    step: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """Everything sharded, by plan-independent name. The weights are the optimizer's fp32 ones: between forward and
        backward the model's own attributes are gathered copies in the compute type."""
        return {f"model.{name}": parameter for name, parameter in self.optimizer.parameters.items()} | self.optimizer.tensors()


def train_step(state: TrainState, batches: list[Batch], stop: bool) -> dict[str, Tensor]:
    """Runs one optimizer step on this rank's micro-batches. Nothing is read back from the device.

    The loss of the step is the sum over all valid tokens of all ranks divided by their number, whatever the micro-batches
    and ranks. A step whose loss or gradient is not finite changes nothing. `stop` is this rank's wish to end the run.

    Returns device scalars, equal on all ranks: loss, grad_norm, lr, loss_scale, found_inf, stop (ranks that wish to end);
    and two vectors: squares (squared gradient norm of each parameter), losses (this rank's own micro-batch losses).
    """
    world, scaler, optimizer = state.world, state.scaler, state.optimizer
    counts = torch.stack([sum((batch.targets != IGNORE).sum() for batch in batches).double(),
                          torch.full((), float(stop), dtype=torch.float64, device=world.device)])
    valid, stopping = world.sum_data(counts).unbind()
    valid = valid.clamp(min=1)  # a step without any target has loss and gradients of zero

    losses = []
    for number, batch in enumerate(batches):
        prepare_micro_batch(state.model, state.plan, last=number == len(batches) - 1)
        objective, entropy = state.model(batch.tokens, batch.targets, batch.documents)
        scaler.scale(objective / valid.to(objective.dtype)).backward()
        losses.append(entropy.detach())
    losses = torch.stack(losses)
    loss = world.sum_data(losses.sum().double()) / valid

    squares = gradient_squares(optimizer.parameters, world)
    scale = scaler.value.double()
    norm = squares.sum().sqrt() / scale
    found_inf = (~(torch.isfinite(norm) & torch.isfinite(loss))).float()
    clip = state.config.optimizer.clip_norm
    coefficient = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
    rate = learning_rate(state.config.lr, state.config.run.steps, optimizer.updates)
    target = optimizer.updates.device
    optimizer.step(rate, (scale / coefficient).float().to(target), found_inf.to(target))
    optimizer.zero_grad()
    result = {"loss": loss, "grad_norm": norm, "lr": rate.to(world.device), "loss_scale": scale, "found_inf": found_inf,
              "stop": stopping, "squares": squares / scale.square(), "losses": losses}
    scaler.update(found_inf)
    state.step += 1
    return result


def gradient_squares(parameters: dict[str, nn.Parameter], world: World) -> Tensor:
    """Squared norm of each parameter's whole gradient in fp64, in the order of `parameters`: [parameters], on every rank.

    One reduction of one small vector; summing per parameter first makes the global norm independent of the plan.
    """
    gradients = [local(parameter.grad) for parameter in parameters.values()]
    norms = iter(torch._foreach_norm([g for g in gradients if g.numel()], 2, torch.float64))
    zero = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    norms = torch.stack([next(norms) if gradient.numel() else zero for gradient in gradients])
    return world.sum_shards(norms.square().to(world.device))


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], world: World) -> Tensor:
    """Mean loss per valid token over all ranks' `batches` (each rank has as many); a scalar, equal on all ranks.

    No backward pass follows that would drop the gathered parameters, so they are dropped here.
    """
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    for batch in batches:
        _, entropy = model(batch.tokens, batch.targets, batch.documents)
        sums += torch.stack([entropy.double(), (batch.targets != IGNORE).sum().double()])
    model.train()
    drop_gathered(model)
    total, valid = world.sum_data(sums).unbind()
    return total / valid
