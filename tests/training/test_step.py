"""One optimizer step, in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.reference import random_batch, settings, tiny_spec
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

import trainer
import trainer.precision.scaler
from trainer.config import Float8Config
from trainer.distributed.mesh import join_world
from trainer.distributed.tensors import local_values
from trainer.model.layers import AdaptableLinear
from trainer.model.loss import IGNORE
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.parallel.zero.fsdp_internals import UnshardedSum
from trainer.planning.features import resolve_plan
from trainer.planning.layer import parameter_counts
from trainer.planning.plan import BatchPlan
from trainer.planning.states import state_bytes
from trainer.training.out_of_memory import memory_breakdown
from trainer.training.state import TrainState
from trainer.training.step import train_step
from trainer.training.trainer import Trainer


@pytest.fixture
def step():
    """A function from a device to one that trains for a step on it, and the state; with products in fp8 by a recipe."""
    joined = dist.is_initialized()

    def begin(device: torch.device, float8: str = "none", **changes: object):
        config, spec = settings(**changes), tiny_spec(width=64, feed_forward={"width": 96})
        spec.adapter = config.model.adapter
        if float8 != "none":
            config.precision.compute, config.precision.float8 = "bf16", Float8Config(float8, ends=0)
        plan = resolve_plan(config.parallel, 1, spec)
        pipeline = resolve_pipeline(config, spec, plan, BatchPlan(16, 4, 2, 2))
        state = TrainState.build(config, spec, plan, pipeline, join_world(plan, device))
        batches = [random_batch(number, 2, 16, spec.vocab_size, False, device) for number in range(2)]
        return (lambda: train_step(state, batches, False)), state, batches

    yield begin
    if not joined:
        dist.destroy_process_group()


def test_losses_of_repeated_batches_fall(step):
    train, *_ = step(torch.device("cpu"))
    losses = [train()["loss"].item() for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_one_process_adds_up_gradients_in_gemms_and_reduces_once(step, monkeypatch, stage):
    reduced, added, reduce, add = [], [], _fsdp_param_group.foreach_reduce, UnshardedSum.add
    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", lambda *given: reduced.append(1) or reduce(*given))
    monkeypatch.setattr(UnshardedSum, "add", lambda *given: added.append(1) or add(*given))
    train, state, batches = step(torch.device("cpu"), parallel__zero__stage=stage)
    train()
    linears = sum(isinstance(one, AdaptableLinear) for one in state.stages[0].modules())
    assert len(reduced) == len(state.stages[0].layers) + 1 and linears > 6
    assert len(added) == (linears + (not state.spec.tied)) * len(batches)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_frozen_parameters_take_what_is_predicted(step, ema):
    """Two bytes each in bf16, also after a step, with neither gradient, moments nor average; nothing is gathered."""
    changes = {"model__adapter__rank": 4, "model__adapter__trained": ["norm.weight"], "precision__compute": "bf16"}
    train, state, _ = step(torch.device("cpu"), **changes, optimizer__ema__decay=ema)
    losses = [train()["loss"].item() for _ in range(4)]
    assert losses[-1] < losses[0]
    counts, held = parameter_counts(state.spec), memory_breakdown(state)
    predicted = state_bytes(state.spec, state.plan, 2)
    assert predicted.frozen == 2 * (counts["total"] - counts["trained"]) > 0
    assert held["parameters"] == predicted.frozen + predicted.parameters
    assert held["optimizer"] == predicted.optimizer == 8 * counts["trained"]
    assert held["average of weights"] == 4 * counts["trained"] * bool(ema)
    assert not any(parameter.grad is not None for _, parameter in state.frozen)
    assert {parameter.dtype for _, parameter in state.frozen} == {torch.bfloat16}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_an_infinity_in_fp8_skips_the_step(step, recipe):
    """In the gradient of one layer's output alone: the loss is finite, and nothing saturates."""
    train, state, _ = step(torch.device("cpu"), recipe)
    train()
    before = [local_values(parameter).clone() for parameter in state.parameters.values()]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt[3, 5] = float("inf")
        return spoilt

    hook = (
        state.stages[0]
        .layers["1"]
        .feed_forward.down.register_forward_hook(lambda module, inputs, output: output.register_hook(spoil) and None)
    )
    scalars = train()
    assert scalars["found_inf"].item() == 1 and scalars["loss"].isfinite()
    assert all(map(torch.equal, before, (local_values(parameter) for parameter in state.parameters.values())))
    hook.remove()
    assert train()["found_inf"].item() == 0


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd", "muon"])
def test_a_step_without_targets_changes_nothing(step, optimizer, precision, monkeypatch):
    """No weight, moment, average or loss scale; the number of updates, and with it the learning rate, stands still."""
    changes = {"optimizer__name": optimizer, "optimizer__ema__decay": 0.5, "precision__compute": precision}
    monkeypatch.setattr(trainer.precision.scaler, "GROWTH_INTERVAL", 2)
    train, state, batches = step(torch.device("cpu"), **changes)
    assert train()["found_inf"].item() == 0
    before = {name: local_values(tensor).clone() for name, tensor in state.tensors().items()}
    scale, targets = state.scaler.state_dict(), [batch.targets.clone() for batch in batches]
    for batch in batches:
        batch.targets.fill_(IGNORE)
    scalars = train()
    assert (scalars["found_inf"].item(), scalars["valid"].item(), scalars["grad_norm"].item()) == (1, 0, 0)
    after = {name: local_values(tensor) for name, tensor in state.tensors().items()}
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert state.scaler.state_dict() == scale
    batches[0].targets.copy_(targets[0])  # the second micro-batch still has none
    assert (again := train())["found_inf"].item() == 0 and again["valid"].item() == (targets[0] != IGNORE).sum()
    assert all(not torch.equal(value, after[name]) for name, value in before.items() if name.endswith("q.weight"))


@pytest.mark.parametrize("recipe", ["none", "tensorwise", "rowwise"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_does_not_wait_for_the_gpu_in_a_step(step, recipe):
    train, *_ = step(torch.device("cuda", 0), recipe)
    for _ in range(3):  # compiles, and leaves small tables on the device
        train()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_queues_a_step_of_a_run_while_the_gpu_computes_the_one_before(tmp_path, monkeypatch):
    """With all that a run records of a step, which is read a step later."""
    one_step, watched = Trainer.one_step, []

    def watch(run: Trainer) -> None:
        warm = run.state.step > 2
        watched.append(warm)
        torch.cuda.set_sync_debug_mode("error" if warm else "default")
        try:
            one_step(run)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "one_step", watch)
    overrides = ["+config=debug", "run.steps=6", "lr.warmup=1", "checkpoint=never", f"run.dir={tmp_path}"]
    trainer.run(trainer.compose(overrides, world_size=1))
    assert sum(watched) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_on_a_gpu_are_whole_when_the_stream_that_adds_them_is_late(step, monkeypatch):
    """Of the second micro-batch, while the next layer's recompute takes memory."""
    device, changes = torch.device("cuda", 0), {"parallel__zero__stage": 2, "activation__mode": "full"}
    expected = step(device, **changes)[0]()["squares"]
    # FSDP calls it between a reduction and the sum of the gradients of all micro-batches.
    monkeypatch.setattr(_fsdp_collectives, "_div_if_needed", lambda *_: torch.cuda._sleep(20_000_000))
    assert torch.equal(step(device, **changes)[0]()["squares"], expected)
