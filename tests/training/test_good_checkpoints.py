"""Which states become checkpoints, and from which a run goes on, when steps are not finite or starts are repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import trainer
from trainer.checkpointing.manifest import list_checkpoints, read_manifest
from trainer.config import ConfigError
from trainer.distributed.tensors import local
from trainer.observe import metrics
from trainer.training import trainer as loop
from trainer.training.ledger import NonFinite

STEPS, LIMIT = 14, 3


def run(folder: Path, *overrides: str) -> trainer.Result:
    settings = ["+config=debug", f"run.dir={folder}", f"data.cache={folder.parent / 'cache'}", "logging=quiet"]
    settings += ["model.depth=1", "logging.report=false", f"guard.max_skipped={LIMIT}", f"run.steps={STEPS}"]
    return trainer.run(trainer.compose([*settings, "checkpoint.every=1", "run.device=cpu", *overrides]))


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics.read(folder)}


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("calm") / "run"
    run(folder)
    return losses(folder)


def spoil(monkeypatch, after: int, factor: float, until: int | None = None) -> None:
    """Multiplies a weight with `factor` when the step `after` is done, and restores it when `until` is done."""
    step, kept = loop.train_step, {}

    def train_step(state, batches, asked):
        result = step(state, batches, asked)
        weight = local(state.parameters["head.weight"]).data
        if state.step == after and not kept:
            kept["weight"] = weight.clone()
            weight.mul_(factor)
        if state.step == until:
            weight.copy_(kept["weight"])
        return result

    monkeypatch.setattr(loop, "train_step", train_step)


@pytest.mark.parametrize("keep_last", [1, 2])
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e38], ids=["nan", "inf", "huge"])
def test_a_run_goes_on_from_before_the_steps_that_were_not_finite(tmp_path, monkeypatch, calm, factor, keep_last):
    folder, keep = tmp_path / "run", f"checkpoint.keep_last={keep_last}"
    with monkeypatch.context() as patch:
        spoil(patch, 7, factor)
        with pytest.raises(NonFinite):
            run(folder, keep)
    saved = list(list_checkpoints(folder / "checkpoints"))
    assert 6 in saved and max(saved) == (7 if factor == 1e38 else 6), "no save within the skipped steps"
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "failed" and status["non_finite"] == 8
    run(folder, keep)
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 6]
    assert losses(folder) == calm
    assert "non_finite" not in json.loads((folder / "status.json").read_text())


def test_a_save_waits_for_the_end_of_skipped_steps(tmp_path, monkeypatch):
    spoil(monkeypatch, 7, float("nan"), until=10)  # the step 10 is not finite at first, and is when it is run again
    run(tmp_path / "run", "checkpoint.every=4", "checkpoint.keep_last=0")
    assert list(list_checkpoints(tmp_path / "run" / "checkpoints")) == [12, 10, 4]
    assert "step 8 was skipped: its save waits" in (tmp_path / "run" / "console.log").read_text()


def test_a_run_that_is_stopped_within_skipped_steps_loses_nothing(tmp_path, monkeypatch):
    """The weights of before are saved. Nothing older is removed, since nobody knows whether they are good."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil(patch, 5, 1e38)
        patch.setattr(loop.Trainer, "time_is_up", lambda self: self.state.step >= 6)
        assert run(folder, "checkpoint.keep_last=1").code == 75
    stopped, *older = list_checkpoints(folder / "checkpoints")
    assert stopped > 5 and older == [5, 4]


def test_the_data_restart_once(tmp_path):
    folder, other = tmp_path / "run", ["run.seed=5", "checkpoint.data=restart"]
    run(folder, "run.steps=3")
    for steps in (5, 8):  # the same command again, as after a preemption
        run(folder, f"run.steps={steps}", *other)
    newest = next(iter(list_checkpoints(folder / "checkpoints").values()))
    batch = read_manifest(newest)["batch"]["global_size"]
    assert read_manifest(newest)["samples"] == 5 * batch, "five steps since the restart at step 3"
    run(folder, "run.steps=9", "run.seed=5")
    run(folder, "run.steps=10", *other)
    newest = next(iter(list_checkpoints(folder / "checkpoints").values()))
    assert read_manifest(newest)["samples"] == batch, "asked for again after a start without it"


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path):
    folder = tmp_path / "run"
    run(folder, "run.steps=3")
    before = (folder / "metrics.jsonl").read_bytes()
    for path in list_checkpoints(folder / "checkpoints").values():
        (path / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="step-00000002.*step-00000001.*checkpoint.resume=none"):
        run(folder)
    assert (folder / "metrics.jsonl").read_bytes() == before and not (folder / "earlier").exists()
    assert run(folder, "run.steps=2", "checkpoint.resume=none").code == 0


def test_values_that_are_not_finite_are_named(tmp_path, monkeypatch):
    spoil(monkeypatch, 7, float("nan"))
    with pytest.raises(NonFinite):
        run(tmp_path / "run")
    log = (tmp_path / "run" / "console.log").read_text()
    assert "step 7 is not saved: 1 tensors of the state hold values that are not finite (model.head.weight)" in log
    assert torch.isfinite(torch.tensor(list(filter(None, losses(tmp_path / "run").values())))).all()
