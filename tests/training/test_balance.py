"""Biases of experts and losses that balance them: in steps of one process, and in runs that stop, resume, evaluate and
are used afterwards."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from support.checkpoints import read_tensors
from support.reference import random_batch, settings, tiny_spec

import trainer
from trainer.checkpointing.loading import open_saved
from trainer.commands import export, merge
from trainer.config import ConfigError
from trainer.data.batches import MicroBatch
from trainer.distributed.mesh import join_world
from trainer.generate.sharded_model import place_saved
from trainer.model.experts import WHOLE
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.planning.features import resolve_plan
from trainer.planning.plan import BatchPlan
from trainer.training.metrics_tracker import load_metrics
from trainer.training.state import TrainState
from trainer.training.step import evaluate, train_step

CPU = torch.device("cpu")
EXPERTS = {"count": 5, "top_k": 2, "bias_rate": 0.01, "balance": 0.5, "z_loss": 0.1}
OVER = ("sequence", "previous")
BIASES = ({}, {"bias_rule": "quantile", "bias_rate": 0.5})


@pytest.fixture(scope="module")
def world():
    """The mesh of one process."""
    joined = dist.is_initialized()
    yield join_world(resolve_plan(settings().parallel, 1, tiny_spec()), CPU)
    if not joined:
        dist.destroy_process_group()


def begin(world, micro_batches: int, over: str, biases: dict[str, object], **changes: object) -> TrainState:
    spec = tiny_spec(feed_forward={"width": 40, "experts": {**EXPERTS, "balance_over": over, **biases}})
    config = settings(**changes)
    plan = resolve_plan(config.parallel, 1, spec)
    pipeline = resolve_pipeline(config, spec, plan, BatchPlan(16, 8, 8 // micro_batches, micro_batches))
    return TrainState.build(config, spec, plan, pipeline, world)


def batch_of(step: int, micro_batches: int) -> list[MicroBatch]:
    batch, size = random_batch(step, 8, 16, 61, False), 8 // micro_batches
    parts = [slice(start, start + size) for start in range(0, 8, size)]
    return [MicroBatch(batch.tokens[rows], batch.targets[rows], None, batch.ids[rows]) for rows in parts]


def buffers_of(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.router_buffers.items()}


@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("over", OVER)
def test_accumulation_changes_neither_biases_nor_losses(world, over, biases):
    """Nor does recompute; each layer moves its biases by whole steps of the rate, and counts each token once."""
    runs = []
    for micro_batches, recompute in ((1, "none"), (4, "none"), (2, "full")):
        state = begin(world, micro_batches, over, biases, activation__mode=recompute)
        assert not any(value.any() for value in buffers_of(state).values())
        seen = [train_step(state, batch_of(step, micro_batches), 0) for step in range(3)]
        runs.append((buffers_of(state), [one["statistics"] for one in seen], [one["grad_norm"] for one in seen]))
    for buffers, statistics, norms in runs[1:]:
        torch.testing.assert_close(buffers, runs[0][0], rtol=0, atol=1e-7 if biases else 0)
        for one, other in zip(statistics, runs[0][1]):
            found, wanted = (dict(zip(state.reports, some.split([*state.reports.values()]))) for some in (one, other))
            for name in found:  # of a margin of some rounding errors, one of the two points may differ
                margins = name.endswith("margins")
                sums = (some.view(5, -1).cumsum(1) if margins else some for some in (found[name], wanted[name]))
                torch.testing.assert_close(*sums, rtol=1e-5 * (not margins), atol=2 * WHOLE if margins else 1e-9)
        torch.testing.assert_close(norms, runs[0][2], rtol=1e-6, atol=0)
    layers = 1 + (over == "previous")
    assert len(runs[0][0]) == 3 * layers
    moved = torch.stack([value for name, value in runs[0][0].items() if name.endswith("balance")])
    assert moved.any(1).all() and (biases or moved.abs().max() <= 0.031)
    if biases:
        torch.testing.assert_close(moved.mean(1), torch.zeros(3))
    else:
        torch.testing.assert_close((moved / 0.01).round(), moved / 0.01)
    load = dict(zip(state.reports, runs[0][1][2].split([*state.reports.values()])))["layers.1.feed_forward.load"]
    assert load.sum() == 8 * 16 * 2


@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("over", OVER)
def test_a_skipped_step_and_an_evaluation_leave_everything_as_it_was(world, over, biases, monkeypatch):
    state = begin(world, 2, over, biases)
    train_step(state, batch_of(0, 2), 0)
    before = buffers_of(state)
    evaluate(state, batch_of(1, 2))
    with monkeypatch.context() as patched:
        patched.setattr(state.shared, "squares", lambda gradients: torch.full((len(gradients),), math.inf).double())
        assert train_step(state, batch_of(1, 2), 0)["found_inf"]
    empty = [MicroBatch(one.tokens, torch.full_like(one.targets, -100), None, one.ids) for one in batch_of(1, 2)]
    assert train_step(state, empty, 0)["found_inf"]
    assert all(torch.equal(value, before[name]) for name, value in buffers_of(state).items())
    assert not train_step(state, batch_of(1, 2), 0)["found_inf"]
    assert not any(torch.equal(value, before[name]) for name, value in buffers_of(state).items())


@profile(max_examples=60, deadline=None)
@given(loads=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), min_size=1, max_size=3))
def test_metrics_of_the_load_are_those_of_the_worst_layer(loads):
    arrays = {f"{index}.load": torch.tensor(load).double().numpy() for index, load in enumerate(loads)}
    arrays |= {f"{index}.bias": torch.tensor([0.5 * index * sum(load)]).numpy() for index, load in enumerate(loads)}
    found = load_metrics(arrays | {"0.balance": torch.tensor([6.0]).numpy()}, [str(i) for i in range(len(loads))], 4)
    assert found["fullest"] == pytest.approx(max(max(load) * len(load) / sum(load) for load in loads))
    assert found["idle"] == pytest.approx(max(load.count(0) / len(load) for load in loads))
    even = [[count / sum(load) for count in load] for load in loads]
    entropies = [-math.fsum(p * math.log(p) for p in row if p) / (math.log(len(row)) or 1) for row in even]
    assert found["entropy"] == pytest.approx(min(e if len(r) > 1 else 1 for e, r in zip(entropies, even)), abs=1e-12)
    assert found["balance"] == 1.5 and "z_loss" not in found
    assert found["bias"] == pytest.approx(0.5 * (len(loads) - 1))


# Whole runs.


def overrides(folder: Path, steps: int, *more: str) -> list[str]:
    return [
        *("+config=debug", "run.device=cpu", f"run.dir={folder}", f"run.steps={steps}", "logging.console=plain"),
        *("checkpoint.resume=auto", "checkpoint.at_end=true", "checkpoint.keep_last=0", "eval.every=1"),
        *("model=tiny_experts", "model.width=16", "model.depth=1", "model.vocab_size=260", "model.max_length=64"),
        *("model.feed_forward.width=16", "model.attention.heads=2", "model.attention.kv_heads=1", "logging.every=1"),
        *("batch.sequence_length=16", "batch.global_size=2", "lr.warmup=0", "eval.sequences=4"),
        *("data.eval_fraction=0.3", "data.sources.stdlib.limit=5", f"data.cache={folder}/../cache", *more),
    ]


def experts(**fields: object) -> list[str]:
    return [f"model.feed_forward.experts.{name}={value}" for name, value in fields.items()]


def run(folder: Path, steps: int, *more: str) -> list[dict]:
    return [
        line
        for line in trainer.run(trainer.compose(overrides(folder, steps, *more), world_size=1)).metrics
        if "loss" in line
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run of three steps, one that was stopped after two of them, and two without biases."""
    folder = tmp_path_factory.mktemp("balance")
    settings = experts(bias_rate=0.125, balance=0.1, balance_over="previous", z_loss=0.01)
    for steps, name in ((3, "whole"), (2, "part")):
        run(folder / name, steps, *settings, "optimizer.ema.decay=0.9")
    for name, factor in (("one", 0.5), ("two", 0.25)):
        run(folder / name, 1, *experts(balance=factor, z_loss=factor))
    return folder


ROUTER = "model.layers.0.feed_forward.router."


def test_a_resumed_run_has_the_biases_of_one_that_was_not_stopped(trained):
    shutil.copytree(trained / "part", trained / "again")
    settings = experts(bias_rate=0.125, balance=0.1, balance_over="previous", z_loss=0.01)
    lines = run(trained / "again", 3, *settings, "optimizer.ema.decay=0.9")
    one, other = (read_tensors(trained / name / "checkpoints/step-00000003") for name in ("whole", "again"))
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
    assert one[f"{ROUTER}balance"].dtype == one[f"{ROUTER}usage"].dtype == torch.float32
    assert one[f"{ROUTER}balance"].any() and one[f"{ROUTER}usage"].mean() == 1
    assert not any("router.balance" in name for name in one if not name.startswith("model."))
    # The bias of a step is the one before its update.
    before = read_tensors(trained / "part/checkpoints/step-00000002")[f"{ROUTER}balance"]
    assert lines[2]["experts/bias"] == (before.max() - before.min()).item()
    assert (
        lines[0]["experts/bias"]
        == lines[0]["experts/balance"]
        == 0
        < min(line[f"experts/{name}"] for line in lines[1:] for name in ("balance", "z_loss", "bias", "entropy"))
    )
    assert lines[2]["experts/fullest"] == one[f"{ROUTER}usage"].max().item()


def test_factors_may_change_in_a_run_and_biases_may_not_come_or_go(trained):
    shutil.copytree(trained / "part", trained / "changed")
    changed = experts(bias_rate=0.25, balance=0.3, balance_over="previous", z_loss=0)
    run(trained / "changed", 3, *changed)
    old = read_tensors(trained / "part/checkpoints/step-00000002")[f"{ROUTER}balance"]
    new = read_tensors(trained / "changed/checkpoints/step-00000003")[f"{ROUTER}balance"]
    assert set((new - old).abs().tolist()) <= {0.0, 0.25} and not torch.equal(new, old)
    with pytest.raises(ConfigError, match=r"model\.feed_forward\.experts\.bias_rate=0\.0 but the checkpoint has 0\.25"):
        run(trained / "changed", 4, *experts(balance=0.3, balance_over="previous"))
    with pytest.raises(ConfigError, match=r"router\.usage"):  # of which a loss over sequences keeps none
        run(trained / "one", 2, *experts(balance=0.5, balance_over="previous"))


@pytest.mark.parametrize("weights", ["trained", "ema"])
def test_a_saved_model_chooses_with_its_biases(trained, weights):
    """Also the average of the weights, with the biases of the last step."""
    saved = open_saved(str(trained / "whole"), weights)
    for dtype in ("fp32", "bf16"):
        (model,) = place_saved(saved, CPU, dtype).stages.values()
        router = model.layers["0"].feed_forward.router
        stored = read_tensors(trained / "whole/checkpoints/step-00000003")
        assert router.balance.dtype == router.weight.dtype == torch.float32
        assert torch.equal(router.balance, stored[f"{ROUTER}balance"])
        source = f"{ROUTER}weight" if weights == "trained" else f"{ROUTER}weight".replace("model.", "ema.")
        assert torch.equal(router.weight, stored[source])
    router.balance.copy_(torch.eye(8)[3] * 100)
    assert (router(torch.randn(20, 16).bfloat16()).chosen[:, 0] == 3).all()


def test_transformers_has_no_biases_and_needs_no_losses(trained, capsys):
    out = trained / "exported"
    assert export.main([f"checkpoint={trained / 'whole'}", f"out={out}"]) == 2
    message = capsys.readouterr().err
    assert "model.feed_forward.experts.bias_rate=0.125 (layer 0)" in message and "train without it" in message
    assert export.main([f"checkpoint={trained / 'one'}", f"out={out}"]) == 0
    assert open_saved(str(out)).spec.layer(0).feed_forward.experts.balance == 0
    assert merge.main([str(trained / "one"), str(trained / "two"), str(trained / "merged")]) == 0
