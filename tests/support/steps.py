"""Steps that the host queues ahead, and steps that are replayed as one CUDA graph, beside the same steps one by one."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from support.reference import random_batch
from support.streams import delay_streams

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
ONE_BY_ONE, AHEAD, REPLAYED = "one by one", "ahead", "replayed"


def compare_steps(
    config: Config,
    spec: ModelSpec,
    device: torch.device,
    world_size: int,
    weights: Weights | None = None,
    ways: tuple[str, ...] = (AHEAD, REPLAYED),
) -> list[list[float]]:
    """Asserts that steps train alike if the host waits for each, if it queues them ahead while streams fall behind, and
    if it replays them; and that a model is evaluated alike between them. In the last step but one, the last rank asks
    for a checkpoint. All ranks call it together. Returns the numbers of each step."""
    plan = resolve_plan(config.parallel, world_size, spec)
    assert not check_whole_plan(config, spec, plan, world_size)
    pipeline = resolve_pipeline(config, spec, plan, BatchPlan(16, 4 * plan.dp, 2, 2))
    world, found = join_world(plan, device), {}
    part = partial(random_batch, sequences=2, length=16, vocab=spec.vocab_size, documents=False, device=device)
    places = [2 * (number * plan.dp + world.data.get_local_rank()) for number in range(STEPS)]
    steps = [[part(first), part(first + 1)] for first in places]  # an upload would make the host wait
    for way in (ONE_BY_ONE, *ways):
        state = TrainState.build(config, spec, plan, pipeline, world, weights)
        step = CUDAGraphStep(state) if way == REPLAYED else partial(train_step, state)
        numbers, asked = [], []
        with delay_streams(world.rank) if way == AHEAD and device.type == "cuda" else nullcontext():
            for number, batches in enumerate(steps):
                asks = number == STEPS - 2 and world.rank == world_size - 1
                scalars = step(batches, ControlFlag.SAVE if asks else ControlFlag(0))
                numbers.append(
                    torch.stack(
                        [scalars[name].double() for name in ("loss", "grad_norm", "loss_scale", "found_inf", "lr")]
                    )
                )
                asked.append(scalars["asked"])
                if way == ONE_BY_ONE:
                    numbers[-1] = numbers[-1].cpu()
                if number % 3 == 1:  # waits for the device
                    numbers.append(evaluate(state, batches)[:1])
        tensors = [*state.optimizer.parameters.values(), *state.optimizer.tensors().values()]
        found[way] = (
            [some.tolist() for some in numbers],
            [flags.tolist() for flags in asked],
            state.step,
            [local_values(tensor).detach().clone() for tensor in tensors],
        )
        if way == REPLAYED:
            assert step.graph is not None
            step.close()
        state.free()
    plain = found.pop(ONE_BY_ONE)
    assert plain[1][-2] != plain[1][-1]
    for some in found.values():
        torch.testing.assert_close(some[0], plain[0], rtol=1e-5, atol=1e-7, equal_nan=True)
        assert some[1:3] == plain[1:3]
        torch.testing.assert_close(some[3], plain[3], rtol=1e-4, atol=1e-6)
    return [numbers for numbers in plain[0] if len(numbers) > 1]
