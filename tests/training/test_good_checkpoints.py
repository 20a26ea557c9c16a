"""Which states become checkpoints, and from which a run goes on, when steps are not finite or starts are repeated."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path

import pytest
import torch
from support.launch import launch

import trainer
from trainer.checkpointing import checkpointer
from trainer.checkpointing.manifest import list_checkpoints, read_manifest
from trainer.config import ConfigError
from trainer.distributed.tensors import local_values
from trainer.observe import metrics
from trainer.training import trainer as loop
from trainer.training.metrics_tracker import NonFiniteError

STEPS, LIMIT = 14, 3


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory) -> None:
    """One folder of tokens for all runs."""
    CACHE.append(tmp_path_factory.mktemp("cache"))


CACHE: list[Path] = []


def run(folder: Path, *overrides: str) -> trainer.Result:
    settings = ["+config=debug", f"run.dir={folder}", f"data.cache={CACHE[-1]}", "logging=quiet"]
    settings += [
        "model.depth=1",
        "model.width=32",
        "data.tokenizer=bytes",
        "logging.report=false",
        f"guard.max_skipped={LIMIT}",
        f"run.steps={STEPS}",
    ]
    return trainer.run(trainer.compose([*settings, "checkpoint.every=1", "run.device=cpu", *overrides]))


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics.read_metrics(folder)}


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
        weight = local_values(state.parameters["head.weight"]).data
        if state.step == after and not kept:
            kept["weight"] = weight.clone()
            weight.mul_(factor)
        if state.step == until:
            weight.copy_(kept["weight"])
        return result

    monkeypatch.setattr(loop, "train_step", train_step)


@pytest.mark.parametrize(
    "factor, keep_last",
    [(float("nan"), 1), (float("inf"), 2), (1e38, 1), (1e38, 2)],  # nan and inf are one question, and huge another
    ids=["nan-1", "inf-2", "huge-1", "huge-2"],
)
def test_a_run_goes_on_from_before_the_steps_that_were_not_finite(tmp_path, monkeypatch, calm, factor, keep_last):
    folder, keep = tmp_path / "run", f"checkpoint.keep_last={keep_last}"
    with monkeypatch.context() as patch:
        spoil(patch, 7, factor)
        with pytest.raises(NonFiniteError):
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


def stop_after(patch, step: int) -> None:
    patch.setattr(loop.Trainer, "time_is_up", lambda self: self.state.step >= step)


@pytest.mark.parametrize("every, left", [(1, [5, 4]), (3, [5, 3])])
def test_a_run_that_is_stopped_within_skipped_steps_loses_nothing(tmp_path, monkeypatch, every, left):
    """The step before them is saved, once. Nothing older is removed, since nobody knows whether that step is good. The
    next start trains the skipped steps again, so that a streak is counted to its end however often a run is stopped."""
    folder, settings = tmp_path / "run", [f"checkpoint.every={every}", "checkpoint.keep_last=1"]
    with monkeypatch.context() as patch:
        spoil(patch, 5, 1e38)
        stop_after(patch, 6)
        assert run(folder, *settings).code == 75
    assert list(list_checkpoints(folder / "checkpoints")) == left
    manifest = read_manifest(folder / "checkpoints" / "step-00000005")
    assert manifest["samples"] == 5 * manifest["batch"]["global_size"] and manifest["skipped"] == 0
    assert manifest["tokens"] == 5 * manifest["batch"]["global_size"] * manifest["batch"]["sequence_length"]
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "stopped" and "the last 2 steps made no update" in (folder / "console.log").read_text()
    for _ in range(2):  # the weight is saved as it is
        stop_after(monkeypatch, 6)
        assert run(folder, *settings).code == 75
        assert list(list_checkpoints(folder / "checkpoints")) == left
    monkeypatch.undo()
    with pytest.raises(NonFiniteError):
        run(folder, *settings)
    run(folder, *settings)
    starts = [json.loads(line)["step"] for line in (folder / "starts.jsonl").read_text().splitlines()]
    assert starts == [0, 5, 5, 5, left[1]]


def test_a_run_whose_first_steps_all_fail_has_nothing_to_save(tmp_path, monkeypatch):
    spoil(monkeypatch, 0, 1)
    stop_after(monkeypatch, 1)
    monkeypatch.setattr(loop, "train_step", failing_step(loop.train_step, range(1, STEPS)))
    assert run(tmp_path / "run").code == 75
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")
    assert "there is nothing to save" in (tmp_path / "run" / "console.log").read_text()


def failing_step(step, failing: range):
    """`train_step` whose gradients are infinite in some steps."""

    def train_step(state, batches, asked):
        if state.step + 1 not in failing:
            return step(state, batches, asked)
        output = state.stages[0].layers["0"].attention.o
        handle = output.register_full_backward_hook(lambda *_: (torch.full_like(_[1][0], math.inf),))
        try:
            return step(state, batches, asked)
        finally:
            handle.remove()

    return train_step


@pytest.mark.parametrize("stop", [False, True])
def test_an_fp16_run_saves_although_its_loss_scale_settles(tmp_path, stop, monkeypatch):
    """Its first steps overflow until the scale is small enough. A periodic save waits for that. A run that is stopped
    meanwhile, or has its last step then, saves the step that it has reached."""
    folder = tmp_path / "run"
    monkeypatch.setattr(loop, "train_step", failing_step(loop.train_step, range(3, 7)))
    if stop:
        stop_after(monkeypatch, 3)
    code = run(
        folder, "precision=fp16", "precision.loss_scale=1024", "checkpoint.every=4", "checkpoint.at_end=true"
    ).code
    saved = list(list_checkpoints(folder / "checkpoints"))
    assert (code, saved) == ((75, [4]) if stop else (0, [14, 12])), (folder / "console.log").read_text()
    scale = read_manifest(folder / "checkpoints" / f"step-{saved[0]:08d}")["scaler"]["scale"]
    assert scale == (256 if stop else 64)


def test_an_fp16_run_that_is_stopped_when_its_scale_helps_no_more_saves_the_step_before(tmp_path, monkeypatch):
    """With the loss scale of that step, so that the skipped ones are trained again as they were."""
    folder = tmp_path / "run"
    monkeypatch.setattr(loop, "train_step", failing_step(loop.train_step, range(3, 9)))
    stop_after(monkeypatch, 4)
    assert run(folder, "precision=fp16", "precision.loss_scale=2", "checkpoint.every=0").code == 75
    assert list(list_checkpoints(folder / "checkpoints")) == [2]
    scaler = read_manifest(folder / "checkpoints" / "step-00000002")["scaler"]
    assert scaler["scale"] == 2 and scaler["_growth_tracker"] == 0


def test_a_save_in_the_background_is_completed_before_failing_steps_end_the_run(tmp_path, monkeypatch):
    write = checkpointer.write_parts
    monkeypatch.setattr(checkpointer, "write_parts", lambda *given: time.sleep(1.5) or write(*given))
    monkeypatch.setattr(loop, "train_step", failing_step(loop.train_step, range(5, 15)))
    with pytest.raises(NonFiniteError):
        run(tmp_path / "run", "checkpoint.every=4", "guard.max_skipped=1")
    assert list(list_checkpoints(tmp_path / "run" / "checkpoints")) == [4]


def test_a_save_that_still_waits_at_the_end_is_made_up_for(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "train_step", failing_step(loop.train_step, range(12, 15)))
    folder, settings = tmp_path / "run", ["checkpoint.every=12", "checkpoint.at_end=false", "guard.max_skipped=9"]
    assert run(folder, *settings).code == 0
    assert list(list_checkpoints(folder / "checkpoints")) == [11]


def test_going_back_leaves_no_half_of_a_checkpoint_that_was_being_replaced(tmp_path):
    folder = tmp_path / "run"
    checkpoints = folder / "checkpoints"
    run(folder, "checkpoint.every=4", "checkpoint.keep_last=0", "checkpoint.at_end=true")
    shutil.copytree(checkpoints / "step-00000012", checkpoints / "step-00000012.replaced")  # killed before its removal
    run(folder, "checkpoint.every=0", f"checkpoint.resume={checkpoints}/step-00000004", "run.steps=6")
    assert list(list_checkpoints(checkpoints))[-1] == 4 and max(list_checkpoints(checkpoints)) <= 6


@pytest.mark.parametrize("name", ["model.embedding.weight", "optimizer.exp_avg_sq.final_norm.weight"])
def test_a_state_that_is_not_finite_ends_the_run_when_it_would_be_saved(tmp_path, monkeypatch, name):
    """Even where no loss shows it: a row of the embedding that no sample has, or a moment that stops its parameter."""
    step, folder = loop.train_step, tmp_path / "run"

    def train_step(state, batches, asked):
        result = step(state, batches, asked)
        if state.step == 6:
            found = {key: value for key, value in state.tensors().items() if key.startswith(name.rsplit(".", 2)[0])}
            local_values(found.get(name, next(iter(found.values())))).detach().view(-1)[-1] = math.inf
        return result

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        with pytest.raises(NonFiniteError, match="step 8 is not saved: .*the same command resumes"):
            run(folder, "checkpoint.every=4", "guard.max_skipped=100")
    assert list(list_checkpoints(folder / "checkpoints")) == [4]
    assert json.loads((folder / "status.json").read_text())["status"] == "failed"
    assert run(folder, "checkpoint.every=4").code == 0


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


def test_the_data_restart_in_a_run_that_goes_on_from_another(tmp_path):
    """That the other run had restarted its data does not count."""
    other, folder, restart = tmp_path / "other", tmp_path / "run", "checkpoint.data=restart"
    run(other, "run.steps=3", restart)
    for steps, samples in ((5, 2), (7, 4)):
        run(folder, f"run.steps={steps}", restart, f"checkpoint.resume={other}")
        newest = read_manifest(next(iter(list_checkpoints(folder / "checkpoints").values())))
        assert newest["samples"] == samples * newest["batch"]["global_size"]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path):
    folder = tmp_path / "run"
    run(folder, "run.steps=3")
    before = (folder / "metrics.jsonl").read_bytes()
    for path in list_checkpoints(folder / "checkpoints").values():
        (path / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="step-00000003.*step-00000002.*checkpoint.resume=none"):
        run(folder)
    assert (folder / "metrics.jsonl").read_bytes() == before and not (folder / "earlier").exists()
    assert run(folder, "run.steps=2", "checkpoint.resume=none").code == 0


def test_values_that_are_not_finite_are_named(tmp_path, monkeypatch):
    spoil(monkeypatch, 7, float("nan"))
    with pytest.raises(NonFiniteError):
        run(tmp_path / "run")
    log = (tmp_path / "run" / "console.log").read_text()
    assert "step 7 is not saved: 1 tensors of the state hold values that are not finite (model.head.weight)" in log
    assert torch.isfinite(torch.tensor(list(filter(None, losses(tmp_path / "run").values())))).all()


def test_all_ranks_decide_alike(tmp_path):
    """Where one rank has values that are not finite, is asked to stop, or cannot do its part with files."""
    launch("good_checkpoints.py", 2, tmp_path, forks=True)
    answers = json.loads((tmp_path / "answers.json").read_text())
    for name, ranks in answers.items():
        assert ranks[0] == ranks[1], name
    ended = {name: ranks[0] for name, ranks in answers.items()}
    assert ended["spoiled"].startswith("NonFiniteError: step 6 is not saved: 1 tensors") and ended["spoiled"].endswith(
        " 4 2"
    )
    assert ended["spoiled, restarted"] == "code 0 8 6"
    assert ended["stopped"] == "code 75 3" and ended["stopped, restarted"] == "code 0 8 3"
    assert ended["leftovers"] == "code 0 8 6", (tmp_path / "leftovers" / "console.log").read_text()
    assert "passing over" in (tmp_path / "leftovers" / "console.log").read_text()
    assert ended["damaged"].startswith("ConfigError: checkpoint.resume=auto: no checkpoint in")
    assert all(f"step-0000000{step}" in ended["damaged"] for step in (8, 6))
    assert ended["blocked"] == "code 0 8 6"
    assert "the schedule was not written" in (tmp_path / "blocked" / "console.log").read_text()
