"""A run folder over several starts: nothing that was trained is lost, and what the folder says is what happened."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trainer
import trainer.training.run
import trainer.training.trainer
from trainer.config import Config, ConfigError
from trainer.planning.decide import MachineMemory
from trainer.planning.estimate.report import memory_band, summarise_step
from trainer.planning.estimate.step import estimate_step
from trainer.planning.hardware import load_hardware
from trainer.planning.resolve import resolve_layout
from trainer.training.history import list_changes, set_aside, start_of
from trainer.training.run import main
from trainer.util.tables import format_sizes

train_step = trainer.training.trainer.train_step


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def settings(cache):
    """Makes the settings of a run of four steps in a folder, which keeps the checkpoint of every second."""

    def make(folder: Path, **overrides: object) -> Config:
        values = {
            "model": "tiny",
            "model.width": 32,
            "model.depth": 1,
            "data.tokenizer": "bytes",
            "data.cache": cache,
            "data.sources.stdlib.limit": 20,
            "batch.sequence_length": 16,
            "batch.micro_size": 1,
            "batch.accumulation": 2,
            "run.steps": 4,
            "run.dir": folder,
            "run.device": "cpu",
            "lr.warmup": 1,
            "checkpoint.every": 2,
            "logging.console": "plain",
            **overrides,
        }
        return trainer.compose([f"{name}={value}" for name, value in values.items()])

    return make


@pytest.fixture(scope="module")
def trained(cache, tmp_path_factory):
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def used(trained, settings, tmp_path):
    """The folder of a run that is done, to be used again."""
    if not trained.exists():
        assert trainer.run(settings(trained)).code == 0
    return Path(shutil.copytree(trained, tmp_path / "run"))


def treasure(folder: Path) -> set[tuple[str, str]]:
    """What took time to make: the files of checkpoints, and the lines of metrics, wherever they lie."""
    files = {(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in folder.rglob("step-*/*")}
    lines = {("line", text) for path in folder.rglob("metrics*.jsonl") for text in path.read_text().splitlines()}
    assert files and lines
    return files | lines


def steps(folder: Path) -> list[int]:
    return [json.loads(text)["step"] for text in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


# Nothing is lost


@pytest.mark.parametrize(
    "refused, words, followed",
    [
        pytest.param({"model.depth": 2}, ["checkpoint.resume=none"], {}, id="another model, begun anew"),
        pytest.param({"data.sources.stdlib.limit": 9}, ["checkpoint.data=restart"], {"run.steps": 5}, id="other data"),
        pytest.param(
            {"batch.accumulation": 4},
            ["batch.global_size=2", "batch.accumulation=null"],
            {"run.steps": 5},
            id="another batch, changed back",
        ),
        pytest.param({"checkpoint.resume": "nowhere"}, ["checkpoint.resume=none"], {}, id="no checkpoint, begun anew"),
    ],
)
def test_following_a_refusal_loses_nothing(used, settings, refused, words, followed):
    before = treasure(used)
    if "checkpoint.resume" in refused:  # another folder has no checkpoint to be named instead
        for path in (used / "checkpoints").iterdir():
            (path / "manifest.json").unlink()
        before = treasure(used)
    with pytest.raises(ConfigError) as refusal:
        trainer.run(settings(used, **refused))
    assert all(word in str(refusal.value) for word in words) and treasure(used) == before
    advice = dict(word.split("=") for word in words)
    result = trainer.run(settings(used, **{**refused, **followed, **advice, "checkpoint.keep_last": 0}))
    assert result.code == 0 and before <= treasure(used)


def test_a_start_anew_sets_the_earlier_run_aside_and_retention_leaves_it_alone(used, settings, capsys):
    before = treasure(used)
    anew = settings(used, **{"checkpoint.resume": "none", "checkpoint.keep_last": 1, "run.steps": 3})
    assert trainer.run(anew).code == 0
    assert f"what an earlier run left in {used} is now in {used}/earlier/1" in capsys.readouterr().out
    assert before <= treasure(used) and steps(used) == [1, 2, 3] and checkpoints(used) == [2, 3]
    earlier = used / "earlier" / "1"
    assert steps(earlier) == [1, 2, 3, 4] and checkpoints(earlier) == [2, 4]
    assert json.loads((earlier / "status.json").read_text())["step"] == 4 and (earlier / "starts.jsonl").exists()
    on = trainer.run(settings(used, **{"checkpoint.resume": earlier, "run.steps": 5}))  # a run's folder like any other
    assert on.code == 0 and steps(used) == [5] and checkpoints(used / "earlier" / "2") == [2, 3]
    assert before <= treasure(used)


def test_going_back_to_an_older_checkpoint_keeps_the_later_ones(used, settings):
    before = treasure(used)
    back = settings(used, **{"checkpoint.resume": used / "checkpoints" / "step-00000002", "lr.peak": 1e-2})
    assert trainer.run(back).code == 0
    assert before <= treasure(used) and steps(used) == [1, 2, 3, 4]
    aside = used / "earlier" / "1"
    assert checkpoints(aside) == [4] and steps(aside) == [1, 2, 3, 4]
    assert (used / "metrics.jsonl").read_text() != (aside / "metrics.jsonl").read_text()


def test_steps_that_are_trained_again_leave_their_lines(used, settings):
    before = treasure(used)
    shutil.rmtree(used / "checkpoints" / "step-00000004")  # as if the run had died before its last save
    left = treasure(used)
    assert left < before and trainer.run(settings(used)).code == 0
    assert left <= treasure(used) and steps(used) == [1, 2, 3, 4]
    replaced = [json.loads(text)["step"] for text in (used / "metrics-replaced.jsonl").read_text().splitlines()]
    assert replaced == [3, 4]


def test_what_is_not_the_runs_own_stays_where_it_is(tmp_path):
    for name in ("metrics.jsonl", "notes.txt", "slurm/7.json", "wandb/offline/x", "schedule/choice.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"step": 1}\n')
    assert set_aside(tmp_path, None, 0) == tmp_path / "earlier" / "1"
    assert {path.name for path in tmp_path.iterdir()} == {"earlier", "notes.txt", "slurm", "schedule"}
    assert (tmp_path / "earlier" / "1" / "wandb" / "offline" / "x").exists()
    assert set_aside(tmp_path, None, 0) is None


# What the folder says is what happened


def test_a_finished_run_stays_as_it_is_whatever_the_settings(used, settings, capsys):
    before = {path: path.read_bytes() for path in used.rglob("*") if path.is_file()}
    assert trainer.run(settings(used, **{"run.steps": 3, "lr.peak": 0.5})).code == 0
    assert {path: path.read_bytes() for path in used.rglob("*") if path.is_file()} == before
    assert "has 4 steps, and run.steps=3 asks for no more: raise run.steps" in capsys.readouterr().out


def test_a_run_that_was_killed_after_its_last_save_is_done(used, settings):
    for left in ('{"status": "running", "step": 4, "steps": 4}', None):
        (used / "status.json").write_text(left) if left else (used / "status.json").unlink()
        assert trainer.run(settings(used)).code == 0
        assert json.loads((used / "status.json").read_text()) == {"status": "done", "step": 4, "steps": 4}


def test_every_start_is_noted_and_what_changed_is_named(used, settings, capsys):
    assert trainer.run(settings(used, **{"run.steps": 6, "lr.peak": 5e-3})).code == 0
    first, second = (json.loads(text) for text in (used / "starts.jsonl").read_text().splitlines())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    if commit.returncode == 0:
        assert second["code"]["commit"] == commit.stdout.strip() and second["code"]["dirty"] in (True, False)
    assert (first["step"], first["resumed"], second["step"]) == (0, None, 4)
    assert second["resumed"] == f"{used}/checkpoints/step-00000004"
    assert second["command"] == shlex.join(sys.orig_argv) and second["processes"] == sum(second["hosts"].values()) == 1
    assert second["devices"] == {"CPU": 1} and second["versions"]["torch"] == torch.__version__
    assert first["settings"]["lr"]["peak"] == 3e-4 and second["settings"]["lr"]["peak"] == 5e-3
    changed = {"lr.peak": [3e-4, 5e-3], "run.steps": [4, 6], "run.dir": [first["settings"]["run"]["dir"], str(used)]}
    assert second["changed"] == changed and first["changed"] == {}
    out = capsys.readouterr().out
    assert "lr.peak 0.0003 -> 0.005" in out and "run.steps 4 -> 6" in out
    assert "peak: 0.005" in (used / "config.yaml").read_text()
    log = (used / "console.log").read_text()
    assert log.count("FLOPs per token") == 2 and "step 4/4" in log and "step 6/6" in log and "lr.peak 0.0003" in log
    times = [json.loads(text)["time"] for text in (used / "metrics.jsonl").read_text().splitlines()]
    assert times == sorted(times) and times[0] > 1.7e9
    table = second["table"]
    assert table["batch"][0] == ["sequence", "16 tokens"]
    config = settings(used)
    found = estimate_step(config, resolve_layout(config, 1, config.model), load_hardware("cpu"))
    assert [tuple(row) for row in table["time"]] == summarise_step(found)  # times and memory with their bands
    least, most = format_sizes(memory_band(found))
    assert dict(table["peak"])["with what is outside"] == f"{least} to {most}"
    page = (used / "report.html").read_text()
    assert "lr.peak 0.0003 → 0.005" in page and "step 6 of 6" in page and 'class="status done"' in page


def test_a_page_that_cannot_be_written_fails_no_run(settings, tmp_path, capsys):
    folder = tmp_path / "a run"
    (folder / "report.html").mkdir(parents=True)
    assert trainer.run(settings(folder, **{"run.steps": 2, "checkpoint": "never"})).code == 0
    told = capsys.readouterr().err
    assert f"{folder}/report.html was not written" in told and f"trainer report '{folder}' tries again" in told
    assert json.loads((folder / "status.json").read_text())["status"] == "done"
    (folder / "report.html").rmdir()
    without = settings(folder, **{"run.steps": 2, "checkpoint": "never", "logging.report": False})
    assert trainer.run(without).code == 0 and not (folder / "report.html").exists()


def test_a_run_that_fails_has_its_page(settings, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("<the reason>")

    monkeypatch.setattr(trainer.training.trainer, "train_step", fail)
    with pytest.raises(RuntimeError, match="the reason"):
        trainer.run(settings(tmp_path / "run"))
    page = (tmp_path / "run" / "report.html").read_text()
    assert "RuntimeError: &lt;the reason&gt;" in page and 'class="status failed"' in page


# Before anything exists


def test_a_model_that_does_not_fit_is_refused_before_anything_is_made(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.training.run, "memory_of", lambda device: MachineMemory(None, 2**20))
    with pytest.raises(ConfigError, match="do not fit: .* on a machine with 1 process, which has 1.00 MiB"):
        trainer.run(settings(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_table_is_printed_before_the_model_exists(settings, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no model")

    monkeypatch.setattr(trainer.training.trainer.TrainState, "build", fail)
    with pytest.raises(RuntimeError, match="no model"):
        trainer.run(settings(tmp_path / "run"))
    out = capsys.readouterr().out
    assert "activations come on top" in out and "the machine has" in out
    peak = out.split("\npeak ")[1]
    assert all(f"\n        {name} " in peak for name in ("parameters", "activations", "gathered parameters", "sum"))


def test_a_damaged_record_of_starts_is_no_obstacle(tmp_path):
    for text in ('{"step": 0, "proc', "7\n[]", '{"step": 0, "processes": 1, "settings": 3}', ""):
        (tmp_path / "starts.jsonl").write_text(text)
        assert start_of(tmp_path, 4) == {"settings": {}}
    (tmp_path / "starts.jsonl").write_text('{"step": 0, "processes": 2, "settings": {"lr": {"peak": 1.0}}}\n')
    assert start_of(tmp_path, 4)["settings"] == {"lr": {"peak": 1.0}}
    after = {"processes": 2, "settings": {"lr": {"peak": 2.0, "new": 0}, "data": {"sources": {"a": {"path": "x"}}}}}
    assert list_changes(start_of(tmp_path, 4), after) == {"lr.peak": [1.0, 2.0], "data.sources.a.path": [None, "x"]}


# Ctrl-C


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C as often as said, after a step of a run."""

    def after(step: int, times: int) -> None:
        def interrupting(state, batches, stop):
            scalars = train_step(state, batches, stop)
            for _ in range(times if state.step == step else 0):
                signal.raise_signal(signal.SIGINT)
            return scalars

        monkeypatch.setattr(trainer.training.trainer, "train_step", interrupting)

    return after


@pytest.mark.parametrize(
    "resume, words", [("auto", "the same command resumes"), ("none", "with checkpoint.resume=auto resumes")]
)
def test_ctrl_c_saves_and_says_how_to_go_on(settings, interrupted, tmp_path, capfd, resume, words):
    folder = tmp_path / "run"
    interrupted(after := 1, times=1)
    before = signal.getsignal(signal.SIGINT)
    code = main(settings(folder, **{"checkpoint.every": 0, "checkpoint.at_end": False, "checkpoint.resume": resume}))
    out, error = capfd.readouterr()
    assert code == 75 and signal.getsignal(signal.SIGINT) == before
    assert words in out and "Ctrl-C again leaves at once" in error
    assert checkpoints(folder) == [steps(folder)[-1]] and after <= steps(folder)[-1] < 4
    assert json.loads((folder / "status.json").read_text())["status"] == "stopped"


def test_ctrl_c_twice_leaves_at_once(settings, interrupted, tmp_path, capfd):
    interrupted(3, times=2)
    assert main(settings(tmp_path / "run", **{"checkpoint.asynchronous": False})) == 130
    error = capfd.readouterr().err
    assert "left at once" in error and "step-00000002 is the last that was saved; the same command resumes" in error
    assert checkpoints(tmp_path / "run") == [2] and "Traceback" not in error
