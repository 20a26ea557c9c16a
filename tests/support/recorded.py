"""Steps that are replayed as one CUDA graph beside the same steps as they come."""

from __future__ import annotations

from functools import partial

import torch
from support.reference import random_batch

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.distributed.mesh import join_world
from trainer.distributed.tensors import local_values
from trainer.model.initial import Weights
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.planning.features import check_whole_plan, resolve_plan
from trainer.planning.plan import BatchPlan
from trainer.training.state import TrainState
from trainer.training.step import ControlFlag, evaluate, train_step
from trainer.training.trainer import WARM, CUDAGraphStep

STEPS = WARM + 4


def compare_replayed(
    config: Config, spec: ModelSpec, device: torch.device, world_size: int, weights: Weights | None = None
) -> list[list[float]]:
    """Asserts that replayed steps train as steps do that run as they come, and that a model is evaluated alike between
    them. In the last step but one, the last rank asks for a checkpoint. All ranks call it together. Returns the numbers
    of each step."""
    plan = resolve_plan(config.parallel, world_size, spec)
    assert not check_whole_plan(config, spec, plan, world_size)
    pipeline = resolve_pipeline(config, spec, plan, BatchPlan(16, 4 * plan.dp, 2, 2))
    world, found = join_world(plan, device), []
    part = partial(random_batch, sequences=2, length=16, vocab=spec.vocab_size, documents=False, device=device)
    for recorded in (False, True):
        state = TrainState.build(config, spec, plan, pipeline, world, weights)
        step = CUDAGraphStep(state) if recorded else partial(train_step, state)
        losses, asked = [], []
        for number in range(STEPS):
            first = 2 * (number * plan.dp + world.data.get_local_rank())
            batches = [part(first), part(first + 1)]
            asks = number == STEPS - 2 and world.rank == world_size - 1
            scalars = step(batches, ControlFlag.SAVE if asks else ControlFlag(0))
            losses.append([scalars[name].item() for name in ("loss", "grad_norm", "loss_scale", "found_inf", "lr")])
            losses[-1].append(evaluate(state, batches)[0].item())
            asked.append(scalars["asked"].tolist())
        tensors = [*state.optimizer.parameters.values(), *state.optimizer.tensors().values()]
        found.append((losses, asked, state.step, [local_values(tensor).detach().clone() for tensor in tensors]))
        if recorded:
            assert step.graph is not None
            step.close()
        state.free()
    plain, replayed = found
    torch.testing.assert_close(replayed[0], plain[0], rtol=1e-5, atol=1e-7, equal_nan=True)
    assert replayed[1:3] == plain[1:3] and replayed[1][-2] != replayed[1][-1]
    torch.testing.assert_close(replayed[3], plain[3], rtol=1e-4, atol=1e-6)
    return plain[0]
