"""bench/soak.py: a few faults of it, and that it notices what is wrong with a run."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.launch import program_of, warm_python


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", Path(__file__).parents[2] / "bench" / "soak.py")
    module = sys.modules["soak"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def soaked(soak, tmp_path_factory) -> Any:
    """After four faults."""
    said: list[str] = []
    one = soak.Soak(
        tmp_path_factory.mktemp("soak"),
        random.randrange(10**6),
        warm_python(),
        program_of,
        lambda text: said.append(text),
    )
    try:
        one.run(1200, kills=4)  # a guard against hangs, not slow machines
    finally:
        one.close()
    return one, said


def test_runs_survive_what_kills_them(soak, soaked):
    one, said = soaked
    summary = one.summary()
    assert summary["kills"] >= 4 and not one.wrong, (one.seed, said)
    assert all(summary[name] == 0 for name in ("lost", "wrong_losses", "damaged", "otherwise_wrong"))
    assert summary["seconds_to_next_step"]["median"] > 0
    assert not [folder for folder in one.folder.glob("*") if soak.processes(folder)]


@pytest.fixture
def run(soak, soaked, tmp_path) -> Any:
    """A finished run, and what finds out what is wrong with it."""
    one, _ = soaked
    plan = next(iter(one.undisturbed))
    shutil.copytree(one.folder / f"undisturbed-{plan}", tmp_path / "run")
    (tmp_path / "run.log").touch()
    checked = soak.Soak(tmp_path, 0, say=lambda _: None)
    return checked, tmp_path / "run", one.undisturbed[plan]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


DAMAGE = {
    "losses differ in 1 steps, first in step 7": lambda folder: write(
        folder, [line | {"loss": line["loss"] + 1e-6 * (line["step"] == 7)} for line in lines_of(folder)]
    ),
    "steps are missing, or there twice": lambda folder: write(folder, [*lines_of(folder)[:5], *lines_of(folder)[4:]]),
    "lost: the run ended with": lambda folder: (folder / "status.json").write_text('{"status": "running", "step": 3}'),
    "damaged: a checkpoint was passed over": lambda folder: folder.with_suffix(".log").write_text(
        "passing over the damaged checkpoint"
    ),
}


def test_a_whole_run_passes(soak, run):
    one, folder, expected = run
    one.compare(folder, expected)
    assert not one.wrong and one.is_whole(folder) and not soak.untrue(folder)


@pytest.mark.parametrize("said", DAMAGE)
def test_what_is_wrong_with_a_run_is_said(run, said):
    one, folder, expected = run
    DAMAGE[said](folder)
    one.compare(folder, expected)
    assert len(one.wrong) == 1 and one.wrong[0].startswith(said), one.wrong


@pytest.mark.parametrize("status", ["done", "stopped"])
def test_a_status_that_is_not_true_is_said(soak, run, status):
    _, folder, _ = run
    (folder / "status.json").write_text(json.dumps({"status": status, "step": soak.STEPS - 1}))
    shutil.rmtree(folder / "checkpoints" / f"step-{soak.STEPS:08d}")
    assert soak.untrue(folder)


def test_a_run_that_was_set_aside_in_part_is_not_whole(run):
    one, folder, _ = run
    (folder / "metrics.jsonl").unlink()
    assert not one.is_whole(folder)
