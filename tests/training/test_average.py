"""The average of the weights: what it is, in runs that begin, resume and evaluate with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoints import read_tensors
from torch import nn

import trainer
from trainer.config import ConfigError
from trainer.optim.optimizer import WeightAverage

DECAY = "optimizer.ema.decay=0.999999"


def overrides(folder: Path, steps: int, *more: str) -> list[str]:
    return [
        *("+config=debug", "run.device=cpu", f"run.dir={folder}", f"run.steps={steps}", "logging.console=plain"),
        *("checkpoint.resume=auto", "checkpoint.at_end=true", "checkpoint.keep_last=0", "eval.every=1"),
        *("model.width=16", "model.depth=1", "model.vocab_size=260", "model.feed_forward.width=32"),
        *("model.attention.heads=2", "model.attention.kv_heads=1", "batch.sequence_length=16", "batch.global_size=2"),
        *("lr.warmup=0", "lr.peak=0.05", "eval.sequences=4", "data.eval_fraction=0.3", "data.sources.stdlib.limit=5"),
        *(f"data.cache={folder}/../cache", *more),
    ]


def run(folder: Path, steps: int, *more: str) -> dict[str, dict[int, float]]:
    """By kind of loss and step, the losses of a run that goes on in `folder`."""
    lines = trainer.run(trainer.compose(overrides(folder, steps, *more), world_size=1)).metrics
    return {
        kind: {line["step"]: line[kind] for line in lines if line.get(kind) is not None}
        for kind in ("loss", "eval_loss")
    }


def test_it_follows_updates_and_passes_over_skipped_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(4, 3, generator=generator)) for name in "ab"}
    average = WeightAverage(weights, 0.75)
    expected = {name: weight.detach().clone() for name, weight in weights.items()}
    for skipped in (0.0, 1.0, 0.0):
        for name, weight in weights.items():
            weight.data.add_(torch.randn(4, 3, generator=generator))
            if not skipped:
                expected[name] = 0.75 * expected[name] + 0.25 * weight.detach()
        average.update(torch.tensor(skipped))
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    average.swap()
    for name, weight in weights.items():
        torch.testing.assert_close(weight.detach(), expected[name])
    average.swap()
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())


def test_a_run_takes_it_up_evaluates_it_and_leaves_it_out(tmp_path, capsys) -> None:
    """An average that hardly moves has the loss of the weights that it began with, and changes nothing of the run."""
    plain, folder = tmp_path / "plain", tmp_path / "run"
    first = run(plain, 1)["eval_loss"][1]
    shutil.copytree(plain, folder)
    seen = run(plain, 3)
    capsys.readouterr()
    averaged = run(folder, 2, DECAY, "eval.ema=true")
    assert "no average of the weights: it begins with those of step 1" in capsys.readouterr().out
    averaged = run(folder, 3, DECAY, "eval.ema=true")
    assert "it begins with" not in capsys.readouterr().out
    assert averaged["loss"] == seen["loss"] and averaged["eval_loss"][3] == pytest.approx(first, rel=1e-4)
    assert seen["eval_loss"][3] != pytest.approx(first, rel=1e-2)
    saved = [read_tensors(folder / f"checkpoints/step-{step:08d}") for step in (1, 2, 3)]
    names = [name for name in saved[0] if name.startswith("model.")]
    for name in names:
        average = saved[2]["ema." + name.removeprefix("model.")]
        assert average.dtype == torch.float32 and torch.allclose(average, saved[0][name], atol=1e-5), name
    capsys.readouterr()
    run(folder, 4)
    assert "average of the weights is left out, as optimizer.ema.decay=0" in capsys.readouterr().out
    assert not any(name.startswith("ema.") for name in read_tensors(folder / "checkpoints/step-00000004"))


@pytest.mark.parametrize(
    "more, words",
    [
        (["eval.ema=true"], "eval.ema=true evaluates an average of the weights; set optimizer.ema.decay=0.999"),
        (["optimizer.ema.decay=1"], "optimizer.ema.decay=1.0 must lie in [0, 1)"),
        (
            ["optimizer.ema.decay=0.9", "parallel.zero.engine=deepspeed", "parallel.zero.stage=1"],
            "optimizer.ema.decay=0.9: DeepSpeed's states are its own",
        ),
    ],
)
def test_settings_that_contradict_it_are_refused(tmp_path, more, words) -> None:
    with pytest.raises(ConfigError) as refused:
        trainer.compose(overrides(tmp_path, 1, *more), world_size=1)
    assert words in str(refused.value)
