"""What a run says at its end is what it has done: steps that updated the weights, saves that were due, failures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import read_tensors
from support.corpora import MARKED, chat_tokenizer

import trainer
from trainer.checkpointing.manifest import list_checkpoints
from trainer.config import ConfigError, register
from trainer.observe import metrics
from trainer.optim.optimizer import learning_rate
from trainer.training.run import main

END = 256
"""The end mark of the tokenizer of bytes."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
    """A token file of text, and one of end marks alone: with masked documents, no token of it is learned."""
    folder = tmp_path_factory.mktemp("corpora")
    text = np.random.default_rng(0).integers(0, 256, 4000, np.uint16)
    text[-1] = END
    text.tofile(folder / "text.bin")
    np.full(4000, END, np.uint16).tofile(folder / "marks.bin")
    return folder


def settings(folder: Path, corpora: Path, *overrides: str, sources: tuple[str, ...] = ("text",)) -> trainer.Config:
    named = ",".join(f"{name}: {{kind: tokens, path: '{corpora / name}.bin'}}" for name in sources)
    return trainer.compose(
        [
            "~data.sources.stdlib",
            f"+data.sources={{{named}}}",
            f"data.cache={corpora / 'cache'}",
            "data.tokenizer=bytes",
            "data.mask_documents=true",
            "data.eval_fraction=0",
            "model.width=32",
            "model.depth=2",
            "batch.sequence_length=32",
            "batch.global_size=2",
            "batch.micro_size=1",
            "lr.warmup=0",
            "run.steps=4",
            "run.device=cpu",
            f"run.dir={folder / 'run'}",
            "logging.console=plain",
            "logging.hardware=0",
            "logging.report=false",
            *overrides,
        ]
    )


def status(folder: Path) -> dict:
    return json.loads((folder / "run" / "status.json").read_text())


def steps(folder: Path) -> list[dict]:
    return [line for line in metrics.read_metrics(folder / "run") if "loss" in line]


def test_no_step_updates_the_weights(tmp_path, corpora, capfd, kept_registries):
    """For each reason: the exit code, status.json, the page and what is printed say that the run failed, and why."""

    @register.schedule("none_at_all")
    def none_at_all(settings, progress):
        return torch.zeros_like(progress.done)

    cases = {
        "scale": (["precision=fp16", "precision.loss_scale=1e30"], ("text",), "precision.loss_scale=1e+30"),
        "targets": ([], ("marks",), "no token of it is learned"),
        "rate": (["lr.schedule=none_at_all", "lr.final=0"], ("text",), "the learning rate was 0"),
        "one": (["run.steps=1", "lr.final=0"], ("text",), "the learning rate was 0"),
        "finish": (
            ["callbacks={end_at_two: {}}", "precision=fp16", "precision.loss_scale=1e30"],
            ("text",),
            "3 of 3 steps",
        ),
    }

    @register.callback("end_at_two")
    class EndAtTwo:
        def __init__(self, settings): ...
        def step(self, run):
            if run.step == 2:
                run.finish()

    for name, (overrides, sources, reason) in cases.items():
        folder = tmp_path / name
        shown = name == "scale"
        config = settings(folder, corpora, *overrides, f"logging.report={shown}", sources=sources)
        for _ in range(1 + shown):  # nothing has been saved that would be done
            assert main(config) == 1, name
            printed = capfd.readouterr()
            assert "no step updated the weights" in printed.err and reason in printed.err, (name, printed.err)
            assert "done:" not in printed.out and not list_checkpoints(folder / "run" / "checkpoints")
            assert status(folder)["status"] == "failed" and reason in status(folder)["reason"]
            if shown:
                page = (folder / "run" / "report.html").read_text()
                assert "failed" in page and "no step updated the weights" in page


def test_some_steps_update_the_weights(tmp_path, corpora, capfd):
    """The loss scale is halved twice before a step is taken."""
    for exponent in (20, 24, 28, 32, 36):  # the lowest first scale of these that overflows
        config = settings(tmp_path / str(exponent), corpora, "precision=fp16", f"precision.loss_scale={2**exponent}")
        config.run.steps, config.logging.report = 8, False
        assert main(config) == 0
        skipped = steps(tmp_path / str(exponent))[-1]["skipped"]
        printed = capfd.readouterr().out
        if skipped:
            break
        assert "of which updated the weights" not in printed
    assert 0 < skipped < 8 and f"in steps 1 to 8, {8 - skipped} of which updated the weights;" in printed
    assert status(tmp_path / str(exponent)) == {"status": "done", "step": 8, "steps": 8}
    assert main(config) == 0 and f"has 8 steps ({8 - skipped} of them updated the weights)" in capfd.readouterr().out


def test_a_start_that_finds_all_steps_made_says_that_none_updated_the_weights(tmp_path, corpora, capfd):
    """A save within the run is not held back by steps without targets."""
    assert main(settings(tmp_path, corpora, "checkpoint.every=2", sources=("marks",))) == 1
    assert [*list_checkpoints(tmp_path / "run" / "checkpoints")] == [2] and status(tmp_path)["status"] == "failed"
    capfd.readouterr()
    assert main(settings(tmp_path, corpora, "run.steps=2", sources=("marks",))) == 1
    assert "has 2 steps (0 of them updated the weights)" in capfd.readouterr().out
    assert status(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(("every", "saved"), [(2, [4, 2]), (3, [3]), (4, [4]), (0, [])])
def test_a_save_that_is_due_at_the_last_step_is_made(every, saved, tmp_path, corpora):
    overrides = ("checkpoint.at_end=false", f"checkpoint.every={every}")
    assert main(settings(tmp_path, corpora, *overrides)) == 0
    assert [*list_checkpoints(tmp_path / "run" / "checkpoints")] == saved


def test_steps_without_targets_change_nothing_and_are_told(tmp_path, corpora, capfd):
    """Of a mixture in which every other step has no target, the others train as if it were not there."""
    common = ("batch.global_size=1", "checkpoint.every=1", "checkpoint.keep_last=0", "optimizer.ema.decay=0.9")
    assert main(settings(tmp_path, corpora, *common, sources=("text", "marks"))) == 0
    lines, printed = steps(tmp_path), capfd.readouterr().out
    empty = [line["step"] for line in lines if not line["learned"]]
    assert len(empty) == 2 and [line["loss"] is None for line in lines] == [line["step"] in empty for line in lines]
    assert lines[-1]["skipped"] == 2 and "in steps 1 to 4, 2 of which updated the weights" in printed
    for number in empty:
        assert f"step {number}: no update, no token of it is learned" in printed
    assert all(line["targets/marks"] == 0 for line in lines)
    found = {step: read_tensors(path) for step, path in list_checkpoints(tmp_path / "run" / "checkpoints").items()}
    for number in range(2, 5):
        same = [name for name, value in found[number].items() if torch.equal(value, found[number - 1][name])]
        assert (len(same) == len(found[number])) == (number in empty), number
    rates = [line["lr"] for line in lines if line["learned"]]
    shape = dataclasses.replace(trainer.Config().lr, warmup=0)
    expected = [learning_rate(shape, 4, torch.tensor(float(updates))).item() for updates in range(2)]
    assert rates == pytest.approx(expected), "the schedule stands still in a step without targets"


def conversation(prompt: int) -> str:
    """A line of one that answers a prompt of so many characters with ten."""
    messages = [{"role": "user", "content": "a" * prompt}, {"role": "assistant", "content": "b" * 10}]
    return json.dumps({"messages": messages}) + "\n"


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    (folder / "tokenizer").mkdir()
    chat_tokenizer(folder / "tokenizer", MARKED)
    (folder / "short.jsonl").write_text(conversation(10) * 40)
    (folder / "long.jsonl").write_text(conversation(200) * 40)
    return folder


def chat_settings(folder: Path, chats: Path, source: str, *overrides: str) -> trainer.Config:
    return settings(
        folder,
        chats,
        f"data.sources={{talk: {{kind: chat, path: '{chats / source}.jsonl'}}}}",
        "~data.sources.text",
        f"data.tokenizer={chats / 'tokenizer'}",
        "data.workers=1",
        "batch.sequence_length=64",
        "model.vocab_size=512",
        *overrides,
    )


def test_a_run_or_set_in_which_nothing_is_learned_is_refused(tmp_path, chats):
    some = f"eval.sets={{other: {{kind: chat, path: '{chats / 'long'}.jsonl'}}}}"
    for config, place in (
        (chat_settings(tmp_path, chats, "long"), "data.sources.talk"),
        (chat_settings(tmp_path, chats, "long", "data.eval_fraction=0.3", "eval.every=1"), "data.sources.talk"),
        (chat_settings(tmp_path, chats, "short", some, "eval.every=1"), "eval.sets.other"),
    ):
        with pytest.raises(ConfigError, match=f"^{place}: no token would be learned; batch.sequence_length=64"):
            trainer.run(config)
        assert not (tmp_path / "run").exists()


def test_the_share_of_learned_tokens_is_told(tmp_path, chats, capfd):
    assert main(chat_settings(tmp_path, chats, "short", "lr.peak=1e-5")) == 0
    printed = capfd.readouterr().out
    lines = steps(tmp_path)
    assert 0.1 < lines[0]["learned"] < 0.5
    share = np.mean([line["learned"] for line in lines])
    assert f"{100 * share:.1f}% of talk" in printed and f"learned {100 * share:.1f}%" in printed
