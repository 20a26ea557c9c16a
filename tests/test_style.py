"""The linters, as pyproject.toml sets them up; CONTRIBUTING.md says what they are for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command, remedy",
    [
        (["ruff", "check"], "ruff check --fix"),
        (["ruff", "format", "--check"], "ruff format"),
        (["mypy"], "mypy, and put the types right that it names"),
    ],
    ids=["lint", "format", "types"],
)
def test_linters(command, remedy):
    assert importlib.util.find_spec(command[0]), f"{command[0]} is not installed: bash launch/setup.sh"
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"run {remedy}\n{done.stdout}{done.stderr}"


def test_hooks_run_the_same():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert all(f"entry: {command}" in hooks for command in ("ruff check", "ruff format", "mypy"))
