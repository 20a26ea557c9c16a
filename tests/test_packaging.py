"""What is imported is declared, and for a package of an extra that is missing the error says how to install it."""

from __future__ import annotations

import ast
import re
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
