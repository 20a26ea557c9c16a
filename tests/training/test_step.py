"""One optimizer step, in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.reference import random_batch, settings, tiny_spec

from trainer.distributed.world import join
from trainer.planning.batch import BatchPlan
from trainer.planning.pipeline import resolve_pipeline
from trainer.planning.plan import resolve_plan
from trainer.training.state import TrainState
from trainer.training.step import train_step


@pytest.fixture
def step():
    """A function from a device to one that trains for a step on it."""
    joined = dist.is_initialized()

    def begin(device: torch.device):
        config, spec = settings(), tiny_spec()
        plan = resolve_plan(config.parallel, 1, spec)
        pipeline = resolve_pipeline(config, spec, plan, BatchPlan(16, 4, 2, 2))
        state = TrainState.build(config, spec, plan, pipeline, join(plan.mesh, device))
        batches = [random_batch(number, 2, 16, spec.vocab_size, False, device) for number in range(2)]
        return lambda: train_step(state, batches, False)

    yield begin
    if not joined:
        dist.destroy_process_group()


def test_losses_of_repeated_batches_fall(step):
    train = step(torch.device("cpu"))
    losses = [train()["loss"].item() for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_does_not_wait_for_the_gpu_in_a_step(step):
    train = step(torch.device("cuda", 0))
    for _ in range(3):  # compiles, and leaves small tables on the device
        train()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
