"""What somebody does who meets the project for the first time, as far as no other test does it: names of a hub,
several runs in one Python, the runs of a sweep, hours, pictures of schedules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainer
from trainer.commands import plot
from trainer.config import ConfigError
from trainer.observe import metrics
from trainer.pages.folder import MetricCurves
from trainer.planning.schedules.simulate import simulate_schedule
from trainer.plots import templates
from trainer.util import lines as run_folder

TINY = ["+config=debug", "run.steps=2", "logging=quiet", "checkpoint.at_end=false"]


def problems(config: trainer.config.Config) -> str:
    with pytest.raises(ConfigError) as refusal:
        trainer.run(config)
    return str(refusal.value)


@pytest.mark.parametrize("setting", ["data.tokenizer", "model.from_hf"])
def test_a_name_of_the_hub_is_answered_with_the_command_that_downloads_it(setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = problems(trainer.compose([*TINY, f"{setting}=gpt2"]))
    assert f"{setting}=gpt2" in said and "hf download NAME" in said and "--local-dir DIR" in said


def test_two_runs_in_one_python(tmp_path):
    """The second is the first again, to the bit; what is changed by hand is checked when it is run."""
    config = trainer.compose([*TINY, f"run.dir={tmp_path}/a"])
    first = trainer.run(config)
    config.run.dir = f"{tmp_path}/b"
    second = trainer.run(config)
    losses = [[line["loss"] for line in result.metrics] for result in (first, second)]
    assert first.code == second.code == 0 and losses[0] == losses[1] and len(losses[0]) == 2
    config.lr.warmup, config.optimizer.beta1 = 9, 1.5
    said = problems(config)
    assert "lr.warmup=9 must be below run.steps=2" in said and "optimizer.beta1=1.5" in said


@pytest.fixture
def sweep(tmp_path) -> Path:
    """The folder of a sweep of three trials, the last of which was refused; none has ended yet."""
    (tmp_path / "results.jsonl").touch()
    for trial in ("peak-0.1", "peak-0.2"):
        (tmp_path / trial).mkdir()
        lines = [
            metrics.format_line({"step": n, "loss": 5 - n, "time": 1e9 + 1800 * n}, metrics.STEP) for n in (1, 2, 3)
        ]
        (tmp_path / trial / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "peak-nan").mkdir()
    return tmp_path


def test_a_sweep_stands_for_its_trials(sweep):
    assert run_folder.of_sweeps([sweep, sweep / "peak-0.1"]) == [
        sweep / "peak-0.1",
        sweep / "peak-0.2",
        sweep / "peak-0.1",
    ]


def test_runs_are_told_apart(tmp_path):
    paths = [tmp_path / "x/demo", tmp_path / "y/demo", tmp_path / "y/other"]
    assert run_folder.label_runs(paths) == ["x/demo", "y/demo", "y/other"]
    assert run_folder.label_runs(paths[1:]) == ["demo", "other"]


def test_hours_are_those_since_the_first_line(sweep):
    for folder in run_folder.of_sweeps([sweep]):
        curves = MetricCurves()
        curves.read(folder / "metrics.jsonl")
        drawn = curves.drawn(100, set())
        [loss] = [one for one in drawn["series"] if one["name"] == "loss"]
        assert [drawn["x"]["hours"][at] for at in loss["i"]] == [0, 0.5, 1] and loss["v"] == [4, 3, 2]


def test_the_greedy_schedule_can_be_drawn_beside_the_others(tmp_path):
    bubbles = [
        simulate_schedule(schedule, templates.uniform_costs(schedule.stages, schedule.chunks)).bubble
        for schedule in (templates.schedule_of(name, 4, 8, None) for name in ("1f1b", "greedy"))
    ]
    assert bubbles[1] < bubbles[0]
    out = tmp_path / "schedule.png"
    options = ["--schedule", "1f1b", "greedy", "--ranks", "2", "--microbatches", "4", "--out", str(out)]
    assert plot.main(options) == 0 and out.stat().st_size
