"""The rules by which rooms import each other, held on the text of every file: lazy and type-only imports count."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "trainer"

ROOMS = (
    "config",
    "kernels",
    "util",
    "planning",
    "diagnosis",
    "precision",
    "distributed",
    "model",
    "hf",
    "optim",
    "data",
    "checkpointing",
    "observe",
    "pages",
    "parallel",
    "generate",
    "plots",
    "cluster",
    "training",
    "parity",
    "sweep",
    "tuning",
    "commands",
)
"""From the ground up: a room may import rooms that stand before it. The files at the top may import all."""

ALONE = ("config", "kernels")
"""Rooms that import nothing else of the project."""

PURE = ("config", "util", "planning", "diagnosis", "pages")
"""Rooms that need no process group, and no torch."""


def modules() -> dict[str, Path]:
    """Dotted name -> file, of the whole package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """Every module that a file names in an import statement, wherever it stands; of the project, files rather than
    folders."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (
                name if (name := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names
            )


@cache
def graph() -> dict[str, list[str]]:
    """Module -> modules that it imports."""
    return {name: sorted(set(imports(path))) for name, path in MODULES.items()}


def room(module: str) -> str:
    """The room that a module of the project stands in; empty for the files at the top."""
    parts = module.split(".")
    if is_plan(module):
        return "planning"
    return parts[1] if len(parts) > 2 or (PACKAGE / parts[-1]).is_dir() and len(parts) > 1 else ""


def is_plan(module: str) -> bool:
    """Whether a module is the pure half of a feature of `parallel/`: it decides, and its neighbours do."""
    return module.startswith("trainer.parallel.") and module.endswith("plan")


def ours(module: str) -> bool:
    return module.split(".")[0] == "trainer"


def test_every_folder_is_a_room():
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in MODULES.values() if path.parent != PACKAGE}
    assert folders == set(ROOMS)


@pytest.mark.parametrize("place", ROOMS)
def test_a_room_imports_only_rooms_below(place):
    above = [
        f"{name} imports {other}"
        for name, others in graph().items()
        if room(name) == place
        for other in others
        if ours(other) and room(other) != place and (room(other) not in ROOMS[: ROOMS.index(place)])
    ]
    assert not above


@pytest.mark.parametrize("place", ALONE)
def test_a_room_that_stands_alone_imports_nothing_of_the_project(place):
    assert not [
        f"{name} imports {other}"
        for name, others in graph().items()
        if room(name) == place
        for other in others
        if ours(other) and room(other) != place
    ]


def test_no_circle_of_files():
    left = {name: {other for other in others if other in graph() and other != name} for name, others in graph().items()}
    for name in left:  # a package's own face may name its files, and they not it
        left[name].discard(name)
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    assert not left, "\n".join(f"{name} -> {', '.join(sorted(others & set(left)))}" for name, others in left.items())


def test_only_plots_import_matplotlib():
    assert {
        room(name) for name, others in graph().items() if any(other.split(".")[0] == "matplotlib" for other in others)
    } == {"plots"}


@pytest.mark.parametrize("place", PURE)
def test_what_is_asked_and_decided_needs_no_torch(place):
    named = [
        f"{name} imports {other}"
        for name, others in graph().items()
        if room(name) == place
        for other in others
        if other.split(".")[0] == "torch"
    ]
    assert not named
    own = [name for name in MODULES if room(name) == place]
    code = f"import sys, importlib; [importlib.import_module(name) for name in {own}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_what_starts_runs_or_reads_of_them_needs_no_torch():
    """Importing it takes seconds, and these start often: before and after each job, and beside runs."""
    names = ["cluster.job", "sweep", "tuning.search", "observe.diagnose_run", "plots.templates"]
    code = f"import sys, importlib\nfor name in {names}: importlib.import_module(f'trainer.{{name}}')\n"
    assert (
        subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], cwd=PACKAGE.parent).returncode
        == 0
    )


NAMED = re.compile(r"`((?:\w+/)*\w+\.py)`")
"""A file that a comment or docstring names."""

FOREIGN = {"modeling_rope_utils.py"}
"""Files of other projects."""


def test_files_that_comments_name_are_there():
    """A name is a path from the repository, from the package, or from the folder of the file that has it."""
    lost = [
        f"{path.relative_to(PACKAGE)} names {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in NAMED.findall(path.read_text())
        if name not in FOREIGN
        and not any((folder / name).is_file() for folder in (PACKAGE.parent, PACKAGE, path.parent))
    ]
    assert not lost
