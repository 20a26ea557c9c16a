"""The command line: what reaches the terminal, exit codes, and that it is found however the project is installed."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainer
import trainer.training
from trainer import commands
from trainer.commands import completion, help, torchrun, train
from trainer.commands.grammar import DTYPES, RecipeOptions
from trainer.config import ConfigError, SourceConfig, typed
from trainer.config.fields import CONFIGS
from trainer.config.synonyms import REMOVED, SETTINGS

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
    code = train.main(arguments)
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
    assert "lr.warmup=10\n    linear warm-up from zero; in steps; whole number; range [0, inf)" in page
    assert main(capsys, "--help", "lrr")[0] == 2
    for section in ("data.sources", "data.sources.stdlib"):
        page = main(capsys, "--help", section)[1]
        for field in dataclasses.fields(SourceConfig):
            assert f"data.sources.NAME.{field.name}={json.dumps(getattr(SourceConfig(), field.name))}" in page
    assert "in documents; whole number;\n    range [0, inf)" in page
    for section in ("model.pattern", "model.overrides", "precision.types.rules", "parallel.pipeline"):
        code, page, _ = main(capsys, "--help", section)
        assert code == 0 and page.count(f"{section}.") >= 4, section
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
    started = types.SimpleNamespace(run=lambda arguments, brief: calls.append(arguments) or 75)
    monkeypatch.setattr(torchrun, "main", started)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield calls
    logging.disable(logging.NOTSET)


def test_train_starts_the_processes_that_it_is_told(launched, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert commands.main(["train", "--processes", "2", "+config=debug", "parallel=tp2"]) == 75
    assert commands.main(["train", "--gpus", "2", "+config=debug"]) == 75
    both = ["--standalone", "--nproc-per-node", "2", "-m", "trainer"]
    assert launched == [[*both, "+config=debug", "parallel=tp2"], [*both, "run.device=cuda", "+config=debug"]]
    assert capsys.readouterr().out.count("starting 2 processes") == 2


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--processes", "4", "+config=debug", "parallel.tp=3"], "start 3 or 6 processes"),
        (["--gpus", "0", "+config=debug"], "gpus=0 must be at least 1"),
        (["--gpus", "2", "+config=debug"], "this machine has no GPUs that torch can use"),
        (["--gpus", "2", "+config=debug", "lr.peek=1"], "did you mean 'lr.peak'"),
        (["--gpus", "2", "--processes", "2"], "not allowed with"),
    ],
)
def test_train_refuses_before_it_starts_a_process(launched, capsys, arguments, words):
    assert commands.main(["train", *arguments]) == 2 and not launched
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) <= 3


def test_the_words_of_the_command_lead_where_they_say(launched, capsys):
    assert commands.main(["train", "--gpus", "8", "--help", "lr"]) == 0 and not launched
    assert capsys.readouterr().out.startswith("lr.schedule")
    assert commands.main(["sample", "--help"]) == 0 and "usage: trainer sample CHECKPOINT" in capsys.readouterr().out
    assert commands.main(["sweep", "+config=debug", "lr.peek=1,2"]) == 2
    assert "did you mean 'lr.peak'" in capsys.readouterr().err
    for word in ("sweep", "tune"):
        for more in (["--processes", "4"], ["--gpus", "4"], ["processes=4"]):
            assert commands.main([word, "+config=debug", *more]) == 2
            error = capsys.readouterr().err
            assert "sweep.processes" in error and len(error.splitlines()) == 1, error
    for nothing in ([], ["sweep"], ["tune"]):
        assert commands.main(nothing) == 2 and "usage: " in capsys.readouterr().err


@pytest.mark.parametrize("told", ["WORLD_SIZE", "--gpus", "--processes"])
def test_cfg_job_checks_the_plan_for_the_processes_that_it_is_told(capsys, monkeypatch, told):
    arguments = ["--cfg", "job", "+config=llama3_8b", "parallel=tp2_pp2"]
    if told == "WORLD_SIZE":
        monkeypatch.setenv(told, "64")
    else:
        arguments += [told, "64"]
    code, shown, error = main(capsys, *arguments, "parallel.tp=3", "parallel.pp=2")
    assert code == 2 and not shown and "start 60 or 66 processes" in error
    code, shown, error = main(capsys, *arguments)
    assert code == 0 and "tp: 2" in shown and not error


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--cfg", "job", "run.stepz=1"], ["run.stepz", "run.steps"]),
        (["--cfg", "jobb"], ["--cfg", "job"]),
        (["--conf", "x"], ["--conf is no option of trainer train", "did you mean '--cfg'"]),
        (["--batch-size", "8"], ["--batch-size is no option of trainer train; here it is 'batch.global_size'"]),
        (["lr.peak=1,2"], ["lr.peak=1,2", "--multirun", "lr.peak=[...]"]),
        (["--config-dir", "/not/there"], ["--config-dir /not/there"]),
        (["--resolve", "+config=debug"], ["--resolve goes with --cfg job"]),
        (["--multirun", "--gpus", "2", "lr.peak=1,2"], ["--multirun", "leave --gpus out"]),
        (["--multirun", "--processes", "2", "lr.peak=1,2"], ["--multirun", "leave --processes out"]),
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


def test_torchrun_never_meets_a_part_of_an_error(training, capsys, tmp_path, monkeypatch):
    """A rank may be killed while it writes one, and torchrun would crash on the part."""

    def crash(config):
        raise RuntimeError("boom")

    def note(part, path):
        seen.append((json.loads(Path(part).read_text())["message"]["message"], Path(path).exists()))
        replace(part, path)

    seen, replace = [], os.replace
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(os, "replace", note)
    training(crash)
    assert main(capsys, "+config=debug")[0] == 1 and seen == [("RuntimeError: boom", False)]


def test_wheel_ships_the_configurations_and_the_templates(tmp_path):
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("trainer", "configs"):
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
    modules = {path.relative_to(site) for path in (site / "trainer").rglob("*.py")}
    assert modules == {path.relative_to(ROOT) for path in (ROOT / "trainer").rglob("*.py")}
    for name in ("trainer/pages/templates", "trainer/pages/vendor"):
        assert {path.name for path in (site / name).iterdir()} == {path.name for path in (ROOT / name).iterdir()}
    (tmp_path / "elsewhere").mkdir()
    done = python("-m", "trainer", "+config=debug", "--cfg", "job", cwd=tmp_path / "elsewhere", path=site)
    assert done.returncode == 0 and "name: debug" in done.stdout, done.stderr


@pytest.mark.parametrize("words", ["--help model", "tune --help", "--cfg job +config=debug"])
def test_a_page_into_a_closed_pipe_is_quiet(words):
    done = subprocess.run(
        f"set -o pipefail; {sys.executable} -m trainer {words} | true",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parent.parent,
    )
    assert not done.stderr and done.returncode == 0


def test_a_recipe_given_as_a_path_points_at_config_dir():
    with pytest.raises(ConfigError, match="--config-dir FOLDER \\+config=mine"):
        trainer.compose(["+config=/somewhere/mine.yaml"])


# Each command: what it answers without torch, and what its page says


def answers(*command_lines: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of command lines, in one process, in which torch cannot be imported."""
    code = (
        "import contextlib, io, json, sys\n"
        "sys.modules['torch'] = None\n"
        "from trainer.commands import main\n"
        "found = []\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    out, error = io.StringIO(), io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):\n"
        "        found.append((main(words), out.getvalue(), error.getvalue()))\n"
        "print(json.dumps([found, 'hydra' in sys.modules]))\n"
    )
    done = python("-c", code, json.dumps(command_lines), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found, hydra = json.loads(done.stdout)
    answers.hydra = hydra
    return [tuple(one) for one in found]


REQUIRED = {word: [*commands.load_command(word).required] for word in commands.WORDS}


def test_missing_arguments_are_named_without_torch_or_hydra():
    words = [word for word, needed in REQUIRED.items() if needed]
    assert {"sample", "export", "merge", "eval", "report", "diagnose", "preflight"} <= set(words)
    for word, (code, out, error) in zip(words, answers(*([word] for word in words)), strict=True):
        assert code == 2 and not out and error.startswith("configuration error"), (word, error)
        assert all(f"{name}=... is needed" in error for name in REQUIRED[word]), (word, error)
    assert not answers.hydra


def wrong_arguments() -> list[tuple[str, list[str], str]]:
    """Of every command, each kind of wrong argument that it can be given, and what the answer has to name."""
    found = []
    for word in commands.WORDS:
        command = commands.load_command(word)
        if command.foreign:
            continue
        found.append((word, ["--nothing-like-it"], f"--nothing-like-it is no option of trainer {word}"))
        for name in command.fields:
            metadata, flag = command.fields[name].metadata, f"--{name.replace('_', '-')}"
            if command.hints[name] in (int, float):
                found.append((word, [flag, "many"], f"{'--' * (name not in command.keys)}{name}"))
            if metadata["choices"]:
                found.append((word, [f"{flag}=neither"], "neither is not legal"))
            if metadata["range"]:
                low = metadata["range"].strip("([").split(",")[0]
                found.append((word, [f"{flag}={int(float(low)) - 1}"], f"{name}="))
        if not issubclass(command.options, RecipeOptions):
            found.append((word, ["nothing_like_it=1"], "nothing_like_it is no option"))
        elif command.keys:
            mistyped = command.keys[0] + "e"
            found.append((word, [f"{mistyped}=1"], f"did you mean '{command.keys[0]}'"))
    return found


def test_wrong_arguments_are_named_without_torch_or_hydra():
    """In one format, whatever the command, before anything is read or computed."""
    cases = wrong_arguments()
    assert len(cases) > 60 and {word for word, *_ in cases} == set(commands.WORDS) - {"torchrun"}
    for (word, arguments, wanted), (code, out, error) in zip(
        cases, answers(*([word, *arguments] for word, arguments, _ in cases)), strict=True
    ):
        assert code == 2 and not out and error.startswith("configuration error"), (word, arguments, error)
        assert wanted in error and "Traceback" not in error, (word, arguments, error)
    assert not answers.hydra


def test_each_command_has_a_page_with_an_example_without_torch_or_hydra():
    words = sorted(set(commands.WORDS) - {"train", "help"})
    for word, (code, page, error) in zip(words, answers(*([word, "--help"] for word in words)), strict=True):
        command = commands.load_command(word)
        assert code == 0 and not error and page.startswith(f"usage: trainer {word}"), word
        assert f"\n{command.purpose}\n\nexample:\n  {command.example}\n" in page, word
        assert all(f"--{name.replace('_', '-')}" in page for name in command.fields), word
    assert not answers.hydra


@pytest.mark.parametrize("word", sorted(set(commands.WORDS) - {"torchrun", "completion", "train", "sweep"}))
def test_examples_are_understood(word):
    command = commands.load_command(word)
    program, name, *arguments = shlex.split(command.example)
    assert (program, name) == ("trainer", word)
    given, problems = command.read(arguments)
    assert not problems
    assert command.convert(given, problems)


def test_a_removed_command_names_another(capsys):
    assert commands.main(["watch", "runs/demo"]) == 2 and "trainer report RUN" in capsys.readouterr().err


def test_a_stray_word_stops_a_command_before_it_computes():
    words = ["probe", "tune", "estimate", "parity", "train"]
    for word, (code, out, error) in zip(words, answers(*([word, "+config=debug", "stray"] for word in words))):
        assert code == 2 and not out and "'stray' is not SETTING=VALUE" in error, (word, error)


@pytest.mark.parametrize("word", sorted(commands.WORDS))
def test_a_mistyped_command_is_answered_with_the_nearest(word, capsys):
    for typo in (word[:-1], word + "s", word[:1] + word):
        if typo in commands.WORDS or len(word) < 5:
            continue
        assert commands.main([typo, "+config=debug"]) == 2
        assert f"'{typo}' is no command; did you mean '{word}'?" in capsys.readouterr().err


def test_the_name_of_a_recipe_is_no_mistyped_command(capsys):
    """Such as pretrain, which is near to train."""
    recipes = sorted(path.stem for path in CONFIGS.glob("config/*.yaml"))
    for recipe in recipes:
        assert commands.main([recipe]) == 2
        assert f"did you mean +config={recipe}" in capsys.readouterr().err, recipe
    assert "pretrain" in recipes
    assert commands.main(["evaluate"]) == 2 and "did you mean 'eval'" in capsys.readouterr().err


def test_every_spelling_of_an_option_means_the_same():
    options = commands.load_command("sample").parse(["runs/a", "top_k=3", "stop=[a,b]", "prompt=x=y"])
    for spelled in (
        ["--checkpoint", "runs/a", "--top-k", "3", "--stop", "a", "b", "--prompt", "x=y"],
        ["checkpoint=runs/a", "--top-k=3", "--stop=[a,b]", "--prompt=x=y"],
        ["--top_k", "3", "prompt=x=y", "runs/a", "stop=['a',\"b\"]"],
    ):
        assert commands.load_command("sample").parse(spelled) == options, spelled
    merged = commands.load_command("merge")
    for spelled in (["a", "b", "c"], ["a", "b", "out=c"], ["models=[a,b]", "c"], ["--out", "c", "a", "b"]):
        assert (merged.parse(spelled).models, merged.parse(spelled).out) == (["a", "b"], "c"), spelled


def test_a_folder_whose_name_has_an_equals_sign_is_no_option():
    """As trials of sweeps have them."""
    assert commands.load_command("report").parse(["runs/x/lr.peak=1", "out=a"]).runs == ["runs/x/lr.peak=1"]


def test_names_of_types_are_those_that_torch_has_types_for():
    from trainer.precision import products

    assert DTYPES == tuple(products.DTYPES)


def test_version(tmp_path):
    done = python("-m", "trainer", "--version", cwd=tmp_path)
    assert done.stdout == f"trainer {trainer.__version__}\n" and done.returncode == 0


# --help WORD


SETTINGS_LISTED = [*typed.list_settings()]


@given(st.sampled_from(SETTINGS_LISTED), st.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_help_finds_a_setting_by_any_word_of_its_meaning(setting, data):
    word = data.draw(st.sampled_from(re.findall(r"[a-z]{4,}", setting.doc.lower()) or [setting.path]))
    if any(f"{one.path}.".startswith(f"{word}.") for one in SETTINGS_LISTED):  # a section, which is listed alone
        return
    page = help.find_help(word)
    parts = [part for part in re.split(r"\n(?! )", page) if "\n" in part]  # others tell of removed values
    entry = next((part for part in parts if part.startswith(f"{setting.path}=")), None)
    assert entry is not None, word
    text = " ".join(entry.split())
    assert " ".join(setting.doc.split()) in text
    assert ("one of " if setting.choices else help.describe_type(setting.hint)) in text


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_help_answers_a_name_of_another_program_with_the_setting(name):
    page = help.find_help(name)
    assert re.search(rf"^{re.escape(SETTINGS[name])}(=|\.)", page, re.MULTILINE), page[:500]


@pytest.mark.parametrize("name", sorted(name for name in REMOVED if "=" not in name))
def test_help_answers_a_removed_setting_with_what_to_set(name):
    assert f"{name}: {REMOVED[name]}" in help.find_help(name)


def test_help_without_a_match_names_the_nearest(capsys):
    assert commands.main(["--help", "warmpu"]) == 2 and "the nearest names are warmup" in capsys.readouterr().err
    assert commands.main(["help", "zzzz"]) == 2 and "lists all sections" in capsys.readouterr().err
    assert commands.main(["sample", "--help", "top-k"]) == 0
    assert "trainer sample --top-k\n" in capsys.readouterr().out


# Completion


def completed(line: str) -> list[str]:
    return completion.complete_line(line)


@pytest.mark.parametrize(
    "line, some, none",
    [
        ("trainer ", ["train", "estimate", "completion", "--version"], ["+config="]),
        ("trainer est", ["estimate"], ["train"]),
        ("trainer +config=deb", ["+config=debug"], ["+config=demo"]),
        ("trainer train lr.", ["lr.peak=", "lr.warmup="], ["lr.", "model."]),
        ("trainer train model.at", ["model.attention."], ["model.attention.heads="]),
        ("trainer train ", ["+config=", "parallel=", "lr.", "compile="], ["hardware=", "config="]),
        ("trainer sweep lr.schedule=", ["lr.schedule=wsd"], []),
        ("trainer train model.tied=", ["model.tied=true", "model.tied=false"], []),
        ("trainer train parallel=[zero3,tp", ["parallel=[zero3,tp2"], []),
        ("trainer train --", ["--gpus", "--config-dir", "--help"], ["--hardware"]),
        ("trainer train --cfg ", ["job"], []),
        ("trainer estimate hardware=h2", ["hardware=h200"], ["hardware=h100"]),
        ("trainer estimate --hardware h2", ["h200"], ["h100"]),
        ("trainer sample runs/x --dtype=b", ["--dtype=bf16"], []),
        ("trainer sample --to", ["--tokens"], []),
        ("trainer sample runs/x dt", ["dtype="], ["lr."]),
        ("trainer completion ", ["bash", "zsh"], []),
        ("trainer export runs/", [], ["out="]),
    ],
)
def test_completion(line, some, none):
    found = completed(line)
    assert set(some) <= set(found) and not set(none) & set(found), found


def test_completion_knows_recipes_of_ones_own(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").touch()
    assert completed(f"trainer train --config-dir {tmp_path} +config=mi") == ["+config=mine"]
    assert completed("trainer train --config-dir /not/there +config=deb") == ["+config=debug"]


@pytest.mark.parametrize("path", [setting.path for setting in SETTINGS_LISTED])
def test_completion_leads_to_every_setting(path):
    typed_so_far = ""
    while typed_so_far != f"{path}=":
        reached = [word for word in completed(f"trainer train {typed_so_far}") if f"{path}=".startswith(word)]
        typed_so_far, before = max(reached, key=len), typed_so_far
        assert len(typed_so_far) > len(before)


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """What bash's completion puts in the place of the last word, by a script that it has read."""
    folder = tmp_path_factory.mktemp("bash")
    (folder / "trainer").write_text(f'#!/bin/bash\nexec {sys.executable} -m trainer "$@"\n')
    (folder / "trainer").chmod(0o755)

    def complete(line: str, *words: str) -> list[str]:
        script = (
            'eval "$(trainer completion bash)"; COMP_LINE=$1 COMP_POINT=${#1}; shift; COMP_WORDS=("$@"); '
            "COMP_CWORD=$(($# - 1)); complete -p trainer >/dev/null && _trainer; "
            'echo ${#COMPREPLY[@]} "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", script, "bash", line, *words],
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        count, *replies = done.stdout.split()
        assert int(count) == len(replies), "without a reply, bash completes names of files"
        return replies

    return complete


def test_bash_completes(bash):
    """bash hands over words that it has split at `=`, and replaces the last part alone."""
    assert bash("trainer est", "trainer", "est") == ["estimate"]
    assert bash("trainer train +config=deb", "trainer", "train", "+config", "=", "deb") == ["debug"]
    assert bash("trainer train lr.schedule=w", "trainer", "train", "lr.schedule", "=", "w") == ["wsd"]
    assert bash("trainer train lr.pe", "trainer", "train", "lr.pe") == ["lr.peak="]
    assert bash("trainer sample --dtype b", "trainer", "sample", "--dtype", "b") == ["bf16"]
    assert bash("trainer export runs/nothing", "trainer", "export", "runs/nothing") == []


def test_completion_is_fast():
    """It imports neither torch nor Hydra, for any command."""
    code = (
        "import sys\nfrom trainer.commands import WORDS, completion\n"
        "for word in WORDS:\n"
        "    for current in ('', '--', '+config=', 'lr.', 'lr.schedule=', 'hardware='):\n"
        "        completion.complete_line(f'trainer {word} {current}')\n"
        "print([name for name in ('torch', 'hydra') if name in sys.modules])"
    )
    done = python("-c", code, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_zsh_script_asks_for_words(capsys):
    assert commands.main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert "compdef _trainer trainer" in script and "completion words" in script
