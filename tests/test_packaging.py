"""What is imported is declared, and for a package of an extra that is missing the error says how to install it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainer.util.exit_codes import DISTRIBUTION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULES = {"pyyaml": "yaml", "hydra-core": "hydra", "nvidia-ml-py": "pynvml"}
"""Distributions whose module has another name than theirs."""

BROUGHT = {"triton"}
"""Comes with torch where there are GPUs."""


def modules(requirements: list[str]) -> set[str]:
    names = [re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements]
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def imported() -> dict[str, set[str]]:
    """The packages that are imported, and where: first part of the module's name -> files."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                found.setdefault(name.split(".")[0], set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_what_is_imported_is_declared():
    declared = modules(PROJECT["dependencies"]) | modules(
        [r for name in EXTRAS for r in EXTRAS[name] if name not in ("test", "docs")]
    )
    known = declared | BROUGHT | set(sys.stdlib_module_names) | {"trainer", "_typeshed"}
    assert not {name: files for name, files in imported().items() if name not in known}
    assert not modules(PROJECT["dependencies"]) - set(imported()), "declared and not imported"


def test_all_extras_are_in_all():
    """But for lm-eval, which brings more packages than all the rest."""
    [requirement] = EXTRAS["all"]
    assert requirement.startswith(f"{DISTRIBUTION}[") and PROJECT["name"] == DISTRIBUTION
    assert set(re.search(r"\[(.*)\]", requirement)[1].split(",")) == set(EXTRAS) - {"all", "eval"}


@pytest.mark.parametrize(
    "package, extra, code",
    [
        ("matplotlib", "plots", "from trainer.commands.plot import main; sys.exit(main(['run']))"),
        ("tensorboard", "tensorboard", "from trainer.observe.sinks import TensorBoard; TensorBoard(Path('x'), None)"),
    ],
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(package, extra, code, tmp_path):
    assert any(requirement.startswith(package) for requirement in EXTRAS[extra])
    without = (
        f"import sys; from pathlib import Path; sys.path.insert(0, {str(ROOT)!r}); sys.modules[{package!r}] = None; "
    )
    done = subprocess.run([sys.executable, "-c", without + code], cwd=tmp_path, capture_output=True, text=True)
    assert (
        done.returncode and f"{package}, which is not installed: pip install '{DISTRIBUTION}[{extra}]'" in done.stderr
    )
    if extra == "plots":
        assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_run_needs_no_extra():
    barred = [name for extra in ("plots", "tensorboard", "gpu") for name in modules(EXTRAS[extra])]
    code = f"import sys; sys.modules.update(dict.fromkeys({barred})); "
    code += "import trainer.commands.train, trainer.training.run"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_container():
    """What the Dockerfile copies is there and is let through, and what it installs is for users."""
    lines = re.sub(r" \\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if re.match(r"[A-Z]+ ", line)]
    said = {word: [rest for step, rest in steps if step == word] for word, _ in steps}
    copied = {name for rest in said["COPY"] for name in rest.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    assert {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")} == copied
    [extras] = [re.search(r"pip install .*\[(.*)\]", rest)[1] for rest in said["RUN"] if "pip install" in rest]
    assert set(extras.split(",")) == set(re.search(r"\[(.*)\]", EXTRAS["all"][0])[1].split(",")) - {"test", "docs"}
    assert re.fullmatch(r"BASE=nvidia/cuda:\d+\.\d+\.\d+-runtime-ubuntu\d+\.\d+", said["ARG"][0])
    order = [word for word, _ in steps]
    assert order.index("USER") > max(place for place, word in enumerate(order) if word == "RUN"), (
        "root runs nothing else"
    )
    assert said["USER"] == ["trainer"] and said["ENTRYPOINT"] == ['["trainer"]'] and "trainer" in PROJECT["scripts"]


@pytest.mark.parametrize(
    "gpu, version, wanted", [(False, "", "torch<2.14"), (True, "", "torch"), (False, "2.14.1", "torch==2.14.1")]
)
def test_setup_installs_the_torch_of_the_machine(gpu, version, wanted, tmp_path):
    """pip is a script that notes its arguments. A second call installs nothing; a call for another torch does."""
    for name in ("pyproject.toml", "launch/setup.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python, notes, tools = tmp_path / ".venv/bin/python", tmp_path / "notes", tmp_path / "tools"
    write_script(python, f'[ "$1" = --version ] && echo Python || printf "%s\\n" "$@" >> {notes}')
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "dirname"):
        (tools / name).symlink_to(shutil.which(name))
    if gpu:
        write_script(tools / "nvidia-smi", "exit 1")

    def set_up(version: str) -> list[str]:
        notes.write_text("")
        environment = {"PATH": str(tools), "PYTHON": sys.executable, "TORCH": version}
        subprocess.run(["bash", tmp_path / "launch/setup.sh"], env=environment, check=True)
        return notes.read_text().split()

    assert set_up(version)[-3:] == ["-e", ".[all]", wanted]
    assert not set_up(version)
    assert set_up("2.11.0")[-1] == "torch==2.11.0"


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
