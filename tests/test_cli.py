"""The command line: what reaches the terminal, exit codes, and that it is found however the project is installed."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

import trainer
import trainer.training
from trainer import cli, command, torchrun
from trainer.config import ConfigError, SourceConfig
from trainer.sweep.slurm import SCRIPT

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # captured streams have no descriptor


def python(*arguments: str, cwd: Path, path: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path), **environment},
    )


def test_import_is_light(tmp_path):
    done = python(
        "-c",
        "import trainer, sys; trainer.ConfigError; print('torch' in sys.modules, 'hydra' in sys.modules); "
        "trainer.compose(['+config=debug', 'run.steps=7'], world_size=4); print('torch' in sys.modules)",
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["False", "False", "False"], done.stderr[-2000:]
    assert not list(tmp_path.iterdir())
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        getattr(trainer, "nothing_" + "of_the_kind")


def test_wrong_input_on_the_terminal(tmp_path):
    done = python(
        "-m", "trainer", "+config=debug", "+parallel.tpp=3", "optimizer.name=adamv", "run.steps=abc", cwd=tmp_path
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("configuration error, 3 problems:") and "Traceback" not in done.stderr
    assert "did you mean 'parallel.tp'" in done.stderr and "did you mean 'adamw'" in done.stderr
    assert not list(tmp_path.iterdir()), "no output folders, no log files"


def test_cfg_job(tmp_path):
    done = python("-m", "trainer", "+config=debug", "--cfg", "job", "--resolve", "lr.peak=0.5", cwd=tmp_path)
    assert (
        done.returncode == 0
        and "dir: runs/debug" in done.stdout
        and "peak: 0.5" in done.stdout
        and done.stdout.endswith("\n")
    )


def test_torchrun_prints_once_and_first(tmp_path):
    done = python(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "trainer",
        "+parallel.tpp=3",
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert done.stderr.count("unknown setting 'parallel.tpp'") == 1
    assert done.stderr.index("unknown setting") < done.stderr.index("FAILED")
    assert not list(tmp_path.iterdir())


def main(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    return code, *capsys.readouterr()


def test_pages(capsys, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "my_own.yaml").write_text("name: my_own\n")
    code, page, _ = main(capsys, "--help", "--config-dir", str(tmp_path))
    assert code == 0 and all(
        word in page for word in ("usage: trainer train", "+config=", "debug", "zero3_offload", "my_own", "precision")
    )
    code, page, _ = main(capsys, "--help", "lr")
    assert code == 0 and page.startswith("lr.schedule") and "one of cosine, wsd" in page
    assert "lr.warmup=10\n    linear warm-up from zero; in steps; range [0, inf)" in page
    assert main(capsys, "--help", "lrr")[0] == 2
    for section in ("data.sources", "data.sources.stdlib"):
        page = main(capsys, "--help", section)[1]
        for field in dataclasses.fields(SourceConfig):
            assert f"data.sources.NAME.{field.name}={json.dumps(getattr(SourceConfig(), field.name))}" in page
    assert "in documents; range [0, inf)" in page
    for section in ("model.pattern", "model.overrides", "precision.types.rules", "sweep.slurm", "parallel.pipeline"):
        code, page, _ = main(capsys, "--help", section)
        assert code == 0 and page.count(f"{section}.") >= 5, section
    assert all(len(line) <= 120 for line in main(capsys, "--help", "model")[1].splitlines())
    code, shown, _ = main(capsys, "--cfg", "job", "+config=debug")
    assert code == 0 and "dir: runs/${run.name}" in shown
    code, shown, _ = main(capsys, "--cfg", "job", "--resolve", "parallel.dp=4")
    assert code == 0 and "dp: 4" in shown, "the plan of a later launch is not held against this process"
    assert main(capsys, "--cfg", "job", "lr.warmup=100")[0] == 2, "what is wrong on any number of processes is"


def test_no_arguments_are_answered_with_the_usage(capsys, monkeypatch):
    code, out, error = main(capsys)
    assert code == 2 and not out and error.startswith("usage: ") and "--help" in error
    monkeypatch.setenv("RANK", "1")
    assert main(capsys) == (2, "", "")


@pytest.fixture
def launched(monkeypatch):
    """What our launcher would have been given."""
    calls = []
    monkeypatch.setattr(torchrun, "main", lambda arguments, brief: calls.append(arguments) or 75)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield calls
    logging.disable(logging.NOTSET)


def test_train_starts_the_processes_that_it_is_told(launched, capsys):
    assert command.main(["train", "--processes", "2", "+config=debug", "parallel=tp2"]) == 75
    assert command.main(["train", "--gpus", "2", "+config=debug"]) == 75
    both = ["--standalone", "--nproc-per-node", "2", "-m", "trainer"]
    assert launched == [[*both, "+config=debug", "parallel=tp2"], [*both, "run.device=cuda", "+config=debug"]]
    assert capsys.readouterr().out.count("starting 2 processes") == 2


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--processes", "4", "+config=debug", "parallel.tp=3"], "start 3 or 6 processes"),
        (["--gpus", "0", "+config=debug"], "'0' is no number of processes"),
        (["--gpus", "2", "--processes", "2"], "not allowed with"),
    ],
)
def test_train_refuses_before_it_starts_a_process(launched, capsys, arguments, words):
    assert command.main(["train", *arguments]) == 2 and not launched
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) <= 3


def test_the_words_of_the_command_lead_where_they_say(launched, capsys):
    assert command.main(["train", "--gpus", "8", "--help", "lr"]) == 0 and not launched
    assert capsys.readouterr().out.startswith("lr.schedule")
    assert command.main(["sample", "--help"]) == 0 and "trainer.sample" in capsys.readouterr().out
    assert command.main(["sweep", "+config=debug", "lr.peek=1,2"]) == 2
    assert "did you mean 'lr.peak'" in capsys.readouterr().err
    for nothing in ([], ["sweep"], ["tune"]):
        assert command.main(nothing) == 2 and "usage: " in capsys.readouterr().err


def test_cfg_job_checks_the_plan_for_the_processes_that_it_is_told(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "64")
    arguments = ["--cfg", "job", "+config=llama3_8b", "parallel=tp2_pp2"]
    code, shown, error = main(capsys, *arguments, "parallel.tp=3", "parallel.pp=2")
    assert code == 2 and not shown and "start 60 or 66 processes" in error
    code, shown, error = main(capsys, *arguments)
    assert code == 0 and "tp: 2" in shown and not error


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--cfg", "job", "run.stepz=1"], ["run.stepz", "run.steps"]),
        (["--cfg", "jobb"], ["--cfg", "job"]),
        (["--conf", "x"], ["--conf", "--help"]),
        (["lr.peak=1,2"], ["lr.peak=1,2", "--multirun", "lr.peak=[...]"]),
        (["--config-dir", "/not/there"], ["--config-dir /not/there"]),
    ],
)
def test_refused_flags(capsys, arguments, words):
    code, out, error = main(capsys, *arguments)
    assert code == 2 and not out and all(word in error for word in words), error


@pytest.fixture
def training(monkeypatch):
    """Puts a function in the place of `trainer.training.run.main`, and returns the setter."""

    def put(function):
        module = types.ModuleType("trainer.training.run")
        module.main = function
        monkeypatch.setitem(sys.modules, "trainer.training.run", module)
        monkeypatch.setattr(trainer.training, "run", module, raising=False)

    return put


def test_exit_code_and_configuration_reach_training(training, capsys):
    seen = []
    training(lambda config: seen.append(config) or 75)
    assert main(capsys, "+config=debug", "run.steps=9")[0] == 75 and seen[0].run.steps == 9


def test_late_configuration_error(training, capsys, tmp_path, monkeypatch):
    def refuse(config):
        raise ConfigError("data.sources.a.path=x cannot be read")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    training(refuse)
    code, _, error = main(capsys, "+config=debug")
    assert code == 2 and error == "configuration error: data.sources.a.path=x cannot be read\n"
    assert not (tmp_path / "error.json").exists(), "torchrun is told of crashes only"


def test_crash_is_handed_to_torchrun(training, capsys, tmp_path, monkeypatch):
    def crash(config):
        raise RuntimeError("boom")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    training(crash)
    code, _, error = main(capsys, "+config=debug")
    assert code == 1 and "RuntimeError: boom" in error
    assert "boom" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_wheel_ships_the_configurations_the_templates_and_the_script_for_slurm(tmp_path):
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("trainer", "configs", "launch"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = python(
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "dist",
        ".",
        cwd=tmp_path,
        path=tmp_path,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("dist/*.whl"))) as wheel:
        wheel.extractall(site)
    shipped = {path.relative_to(site / "trainer" / "configs") for path in site.rglob("*.yaml")}
    assert shipped == {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    assert (site / "trainer/launch/slurm/train.sbatch").read_text() == SCRIPT.read_text(), "which sweeps submit"
    modules = {path.relative_to(site) for path in (site / "trainer").rglob("*.py")}
    assert modules == {path.relative_to(ROOT) for path in (ROOT / "trainer").rglob("*.py")}
    for name in ("trainer/pages/templates", "trainer/pages/vendor"):
        assert {path.name for path in (site / name).iterdir()} == {path.name for path in (ROOT / name).iterdir()}
    (tmp_path / "elsewhere").mkdir()
    done = python("-m", "trainer", "+config=debug", "--cfg", "job", cwd=tmp_path / "elsewhere", path=site)
    assert done.returncode == 0 and "name: debug" in done.stdout, done.stderr


@pytest.mark.parametrize("words", ["--help model", "tune --help"])
def test_help_into_a_closed_pipe_is_quiet(words):
    done = subprocess.run(
        f"{sys.executable} -m trainer {words} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parent.parent,
    )
    assert done.stdout.strip() and "Traceback" not in done.stderr


def test_a_recipe_given_as_a_path_points_at_config_dir():
    with pytest.raises(ConfigError, match="--config-dir FOLDER \\+config=mine"):
        trainer.compose(["+config=/somewhere/mine.yaml"])
