"""The documents: every command that they name can work, what they show is what is printed, every link leads somewhere.

A command is a line of a fenced block (`bash`, `console`), an override list in a table with a column "overrides", or
inline code that begins with a program. Commands that train are composed and checked for as many processes as they name.
The first run of the README, the examples in Python and the refusals are run. What cannot be run is named in `NOT_RUN`,
with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.registries import forgotten
from test_architecture import ROOMS

import trainer
from trainer.commands import WORDS, help, load_command
from trainer.commands import main as program
from trainer.config import Config, ConfigError, typed
from trainer.config.compose import gather_values
from trainer.config.fields import CONFIGS
from trainer.config.hardware import HardwareConfig
from trainer.config.synonyms import REMOVED, find_synonym
from trainer.observe import metrics
from trainer.planning import neighbours, resolve
from trainer.sweep import plan as sweep

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[be]*/README.md")])
MODULES = {path.read_text() for path in (ROOT / "examples").glob("*.py")}
"""What pages show whole, and tests/training/test_hooks.py runs."""
pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # captured streams have no descriptor

NOT_RUN = {
    "source": "changes the shell that it is typed in",
    "eval": "changes the shell that it is typed in",
    "pre-commit": "writes into .git",
    "ruff": "launch/test.sh runs it",
    "mypy": "launch/test.sh runs it",
    "hf": "downloads from a hub",
    "sphinx-build": "tests/docs/test_site.py builds the site",
    "docker": "needs a daemon, and downloads",
    "apptainer": "needs docker's image",
    "enroot": "needs docker's image",
    "pip": "installs packages",
}
"""Programs whose commands are read, and not looked into."""

DIRECTIVES = ("{toctree}", "{eval-rst}")
"""Blocks that are for Sphinx."""

THEIRS = re.compile(r"^\| *`.*?`[^|]*\|", re.MULTILINE)
"""The first cell of a row of coming_from.md: what a setting is called elsewhere."""

PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:(?:\.venv/bin/)?(?:python3?|torchrun|pytest)|bash|sbatch|(?:launch|bench)/\S+\.sh|"
    + "|".join([f"trainer (?:{'|'.join(WORDS)})", *NOT_RUN])
    + r") \S"
)
"""How inline code begins that is a command."""


class Command(NamedTuple):
    text: str
    output: str | None = None
    """What the page shows below it, in a `console` block; of an estimate in any block."""
    whole: bool = True
    """Whether that is all that is printed, and not some of its lines."""


class Page(NamedTuple):
    """A document as text without its fenced blocks, and those blocks as (language, content)."""

    text: str
    blocks: list[tuple[str, str]]


def read(path: Path) -> Page:
    blocks: list[tuple[str, str]] = []

    def take(match: re.Match[str]) -> str:
        indent, language, body = match.groups()
        blocks.append((language, re.sub(f"^{indent}", "", body, flags=re.MULTILINE)))
        return ""

    return Page(
        re.sub(r"^( *)```([\w{}-]*)\n(.*?)^ *```$", take, path.read_text(), flags=re.MULTILINE | re.DOTALL), blocks
    )


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What commands import is forgotten: tables are of the project alone."""
    with forgotten():
        yield


# What the commands of a page are


def commands(page: Page) -> Iterator[Command]:
    for language, body in page.blocks:
        if language in DIRECTIVES:
            continue
        assert language in ("", "bash", "console", "python", "yaml"), (
            f"a block of a language that nobody tests: {language}"
        )
        if language == "bash":
            yield from map(Command, shell_lines(body))
        elif body.startswith("$ "):
            for entry in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                text, _, output = entry.partition("\n")
                shown = language == "console" or text.startswith("trainer estimate")
                yield Command(text, output if shown else None, language == "console")
        else:
            assert language not in ("console",) and not PROGRAM.match(body), (
                f"a command outside of a bash block: {body}"
            )
    for span in re.findall(r"`([^`]+)`", page.text):
        if PROGRAM.match(span):
            yield Command(span)
    yield from map(Command, table_commands(page.text))


def shell_lines(body: str) -> Iterator[str]:
    """The commands of a block: continued lines joined, comments gone, variables of the block put in."""
    variables = {}
    for line in body.replace("\\\n", " ").splitlines():
        if assigned := re.fullmatch(r"(\w+)=\"(.*)\"", line):
            variables[assigned[1]] = assigned[2]
        elif words := shlex.split(line, comments=True):
            del words
            yield re.sub(r"\$(\w+)", lambda match: variables[match[1]], line)


def table_commands(text: str) -> Iterator[str]:
    """Each override list of a table behind the last command that is named before the table."""
    base, head = "", []
    for line in re.sub(r"`[^`]+`", lambda match: match[0].replace("\n", " "), text).splitlines():
        if not line.startswith("|"):
            base, head = ([*re.findall(r"`((?:torchrun|python|trainer train) [^`]+)`", line), base][0]), []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not head:
            head = cells
        elif "overrides" in head and not set(cells[0]) <= set("-: "):
            start = (
                re.sub(r"(-per-node|--processes) N", rf"\1 {cells[head.index('processes')]}", base)
                if "processes" in head
                else base
            )
            yield from (
                f"{start} {overrides}" for overrides in re.findall(r"`([^`]+)`", cells[head.index("overrides")])
            )


# What is done with a command


def check(command: Command, capsys: pytest.CaptureFixture) -> None:
    """Raises where a command cannot work, is of no known program, or prints something else than the page shows."""
    words = shlex.split(command.text, comments=True)
    environment = {}
    while "=" in words[0]:
        name, _, environment[name] = words.pop(0).partition("=")
    program = words[0].removeprefix(".venv/bin/")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        if program == "torchrun":
            torchrun(words[1:], patch)
        elif program == "python" and words[1] == "-m":
            module(words[2], words[3:], int(environment.get("WORLD_SIZE", 1)), command.output, capsys)
        elif program == "trainer":
            module("trainer", words[1:], 1, command.output, capsys, command.whole)
        elif program in ("python", "bash") or "/" in program:
            script(words[program in ("python", "bash") :], environment)
        elif program == "sbatch":
            slurm(words[1:], patch)
        elif program == "pytest":
            pytest_options(words[1:])
        else:
            assert program in NOT_RUN, (
                f"{program} is a program that nobody tests: add it here, or to NOT_RUN with the reason"
            )


def pytest_options(words: list[str]) -> None:
    """Tests that exist, selected by a marker that is registered."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-q", action="store_true")
    for option in ("-n", "--dist", "-m"):
        parser.add_argument(option, default="")
    parser.add_argument("paths", nargs="*")
    given = parser.parse_args(words)
    missing = [path for path in given.paths if not (ROOT / path).exists()]
    assert not missing, f"there is no {missing}"
    registered = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    unknown = set(re.findall(r"\w+", given.m)) - {"not", "and", "or"} - {line.split(":")[0] for line in registered}
    assert not unknown, f"pyproject.toml registers no marker {unknown}"


def torchrun(words: list[str], patch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    if not words or "-m" not in words and not any(word.endswith(".py") for word in words):
        return module("torch.distributed.run", [], 1)  # the program as such is spoken of
    words = [
        "0" if word == "N" and before == "--node-rank" else "4" if word == "N" else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    given = get_args_parser().parse_args(words)
    node = int(given.nproc_per_node)
    patch.setenv("LOCAL_WORLD_SIZE", str(node))
    if given.module:
        module(given.training_script, given.training_script_args, int(given.nnodes.split(":")[-1]) * node)
    else:
        script([given.training_script, *given.training_script_args], {})


def module(
    name: str,
    words: list[str],
    world: int,
    output: str | None = None,
    capsys: pytest.CaptureFixture | None = None,
    whole: bool = True,
) -> None:
    """`python -m NAME WORDS`, or the same in `world` processes."""
    if name != "trainer":
        found = None if words else importlib.util.find_spec(name)
        runs = found and (not found.submodule_search_locations or importlib.util.find_spec(f"{name}.__main__"))
        assert runs, f"{name} is a module that nobody tests"
        return
    words = words[: words.index(">")] if ">" in words else words
    words = ["2" if word == "N" else word for word in words]
    word, rest = (words[0], words[1:]) if words and words[0] in WORDS else ("train", words)
    command = load_command(word)
    if output is not None and (word == "estimate" or output.startswith("configuration error")):
        capsys.readouterr()
        code = program(words)
        shown = capsys.readouterr()
        printed = (shown.out + shown.err).strip()
        kept = printed if whole else "\n".join(line for line in printed.splitlines() if line in output.splitlines())
        assert kept == output.strip() and code == 2 * (not shown.out)
    elif not command.foreign:
        given, problems = command.read(rest)
        if "help" in given:
            assert not given["help"] or help.find_help(
                {"SECTION": "run", "WORD": "run"}.get(given["help"], given["help"])
            )
        elif rest:
            understood(word, command.convert(given, problems), world)


def understood(word: str, given: Any, world: int) -> None:
    """Raises where a command would refuse what it is given."""
    if word in ("train", "probe", "parity", "sample"):
        world = max(world, given.count())
    if word in ("sweep", "tune") or word == "train" and given.multirun:
        given.take_changes("hardware.")
        settings, common, swept = sweep.expand_sweep(given.overrides, given.config_dir)
        if word == "tune":
            for values in swept:
                neighbours.compose_variant([*common, *values], given.config_dir, world, corpus=False)
        else:
            sweep.make_trials(settings, common, swept, given.config_dir, gpus=0)
    elif word in ("estimate", "probe"):
        given.take_changes("hardware.")
        assert neighbours.compose_variant(given.overrides, given.config_dir, world, corpus=False)
    elif word in ("prepare", "show"):
        assert resolve.check_values(*gather_values(given.overrides, given.config_dir), None)
    elif word in ("train", "parity"):
        composed(tuple(given.overrides), world, given.config_dir)
    if word == "parity":
        for text in neighbours.plan_list(given.plans) if given.plans else []:
            chosen = [one if "=" in one else f"parallel={one}" for one in shlex.split(text)]
            neighbours.compose_variant([*given.overrides, *chosen], given.config_dir, world)
    if word == "plot" and given.schedule:
        from trainer.plots.templates import schedule_of

        assert [schedule_of(one, given.ranks, given.microbatches, given.chunks) for one in given.schedule]


seen: dict[tuple, Config] = {}


def composed(overrides: tuple[str, ...], world: int, config_dir: str | None = None) -> Config:
    key = (overrides, world, config_dir, os.environ.get("LOCAL_WORLD_SIZE"))
    if key not in seen:
        seen[key] = trainer.compose(overrides, config_dir, world)
    return seen[key]


def script(words: list[str], environment: dict[str, str]) -> None:
    """A file of the checkout: it can be read by its interpreter, and takes what is given."""
    path, arguments = ROOT / words[0], words[1:]
    assert path.is_file(), f"there is no {words[0]}"
    if path.suffix == ".py":
        compile(path.read_text(), path, "exec")
    else:
        assert subprocess.run(["bash", "-n", path]).returncode == 0
    overrides = [argument for argument in arguments if "=" in argument]
    if words[0] in ("launch/demo.sh", "launch/elastic.sh"):
        for nodes in environment.get("NODES", "1").split(":"):
            composed(tuple(overrides), 8 * int(nodes))
    elif words[0].startswith("bench/"):  # cases and options of its own stand in its text
        names = {
            name
            for argument in arguments
            for name in re.split("[=,]", argument.removeprefix("--"))[: 1 + ("only" in argument)]
        }
        unknown = [
            name
            for name in names
            if re.fullmatch("[a-z_]+", name)
            and name not in path.read_text() + (ROOT / "bench/slow_network.py").read_text()
        ]
        assert not unknown, f"{words[0]} knows no {unknown}"
    else:
        assert words[0] in ("launch/test.sh", "launch/setup.sh", "docs/generate.py", "tests/code_sweep.py"), (
            f"{words[0]} is a script that nobody tests"
        )


def slurm(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """sbatch: options for the allocation, then launch/slurm/train.sbatch and its overrides."""
    place = words.index("launch/slurm/train.sbatch")
    assert subprocess.run(["bash", "-n", ROOT / words[place]]).returncode == 0
    given = dict(zip(words[:place:2], words[1:place:2], strict=True))
    assert set(given) <= {"--nodes", "--gpus-per-node", "--time", "--array"}
    overrides = [word.replace("{task}", "1") for word in words[place + 1 :] if not word.startswith("@")]
    node = int(given.get("--gpus-per-node", 8))
    patch.setenv("LOCAL_WORLD_SIZE", str(node))
    composed(tuple(overrides), int(given.get("--nodes", 1)) * node)


# Tests


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages tell their readers to write."""
    folder = tmp_path_factory.mktemp("documents")
    blocks = [body for path in PAGES for _, body in read(path).blocks]
    for name, begins in {
        "mine/model/small.yaml": "name: small",
        "mine/config/try.yaml": "# @package",
        "mine.csv": "0F0,0F1",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(next(body for body in blocks if body.startswith(begins)))
    return folder


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands(path: Path, place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(place)
    problems = []
    for command in dict.fromkeys(commands(read(path))):
        try:
            check(command, capsys)
        except (ConfigError, AssertionError, SystemExit, KeyError, ValueError, IndexError) as error:
            problems.append(f"{command.text}\n    {type(error).__name__}: {error}")
    assert not problems, "\n".join([f"{path.name}:", *problems])


def test_what_is_not_run_is_in_a_page():
    found = {shlex.split(command.text, comments=True)[0] for path in PAGES for command in commands(read(path))}
    assert set(NOT_RUN) <= found


def test_first_run(place: Path, monkeypatch: pytest.MonkeyPatch):
    """The README's first run has the losses that the README and the table of plans show."""
    monkeypatch.chdir(place)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert program(["+config=debug"]) == 0
    table = next(body for _, body in read(ROOT / "docs/first_hour.md").blocks if body.startswith("model "))
    lines = [re.split(" {2,}", line)[-2:] for line in table.splitlines() if "machine has" not in line]
    found = [re.split(" {2,}", line)[-2:] for line in printed.getvalue().splitlines()]
    assert len(lines) >= 10 and not [line for line in lines if line not in found]
    losses = {line["step"]: line["loss"] for line in metrics.read_metrics(place / "runs/debug")}
    shown = next(body for _, body in read(ROOT / "README.md").blocks if body.startswith("step 1/5"))
    shown += (ROOT / "docs/first_hour.md").read_text()
    found = re.findall(r"step (\d)/5  loss  ([\d.]+)", shown)
    assert len(found) == 4
    for step, loss in found:
        assert f"{losses[int(step)]:.4f}" == loss
    rows = re.findall(r"^\| \d \|.*(?:\| [\d.]{8} ){5}\|$", (ROOT / "docs/plans.md").read_text(), re.MULTILINE)
    assert len(rows) == 7
    for row in rows:
        assert [float(cell) for cell in row.split("|")[-6:-1]] == pytest.approx(list(losses.values()), abs=2e-6)


def test_sweep(place: Path, monkeypatch: pytest.MonkeyPatch):
    """The sweep that is shown has these trials, and refuses these."""
    monkeypatch.chdir(place)
    page = read(ROOT / "docs/recipes.md")
    body = next(body for _, body in page.blocks if body.startswith("$ trainer sweep"))
    given = load_command("sweep").parse(shlex.split(body.partition("\n")[0])[3:])
    trials = sweep.make_trials(*sweep.expand_sweep(given.overrides), None, gpus=0)
    assert f"{len(trials)} trials, {sum(bool(trial.refusal) for trial in trials)} refused" in body
    for trial in trials:
        row = next(
            line for line in body.splitlines() if re.match(rf"{re.escape(trial.name)} +{trial.processes} ", line)
        )
        assert row.endswith("; ".join(trial.refusal)) and ("refused" in row) == bool(trial.refusal)


def test_commands_in_scripts(place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """What launch/ says that one can type: in comments, and at the end of the demo."""
    monkeypatch.chdir(place)
    found = [
        line for path in (ROOT / "launch").glob("**/*[!py]") if path.is_file() for line in path.read_text().splitlines()
    ]
    found = [line[2:].strip() for line in found if re.match(r"(#   |  )(\.venv/bin/|sbatch|NODES=)", line)]
    assert len(found) >= 8
    for line in found:
        words = shlex.split(line.split("  ")[0], comments=True)
        if "run.steps=200" not in words:
            check(Command(shlex.join(words)), capsys)


def test_continued_run(place: Path, monkeypatch: pytest.MonkeyPatch):
    """The undisturbed run has the losses that the page shows for one that changed its plan."""
    monkeypatch.chdir(place)
    with contextlib.redirect_stdout(io.StringIO()):
        assert program(["+config=debug", "run.name=undisturbed", "run.steps=10"]) == 0
    losses = [line["loss"] for line in metrics.read_metrics(place / "runs/undisturbed")]
    assert f"`loss {losses[0]:.3f} -> {losses[-1]:.3f}`" in (ROOT / "docs/plans.md").read_text()
    assert f"undisturbed run, {losses[-1]:.3f} " in (ROOT / "README.md").read_text()
    first_hour = (ROOT / "docs/first_hour.md").read_text()
    assert f"done: loss {losses[4]:.3f} -> {losses[-1]:.3f} in steps 5 to 10" in first_hour


def test_python(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(place)
    examples = list(
        dict.fromkeys(
            body
            for path in PAGES
            for language, body in read(path).blocks
            if language == "python" and "trainer" in body and body not in MODULES
        )
    )
    assert len(examples) == 2
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for example in examples:
            exec(compile(example.replace("run.steps=20", "run.steps=3"), "example", "exec"), {})
    assert "runs/debug 0 5.4" in printed.getvalue() and "parallel.tp=3 does not divide" in printed.getvalue()


def test_generated_tables():
    """The pages hold what the code says now; otherwise `python docs/generate.py` rewrites them."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import generate
    finally:
        del sys.path[0]
    assert len(generate.pages()) >= 6
    for page in generate.pages():
        assert generate.rendered(page.read_text()) == page.read_text(), (
            f"run python docs/generate.py: {page.name} differs from the code"
        )


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links(path: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", read(path).text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        assert page.exists(), f"{path.name}: {target} leads nowhere"
        headings = re.findall(r"^#+ (.*)$", read(page).text, re.MULTILINE) if page.suffix == ".md" else []
        assert not anchor or anchor in map(slug, headings), f"{path.name}: {target}: there is no such heading"


WRITTEN = {"launch/slurm/site.sh", "flight/", "traces/", "tokenizer/", "schedule/", "exports/", "earlier/"}
"""Files and folders that users or runs write: in no checkout."""


MISSPELT = {"parallel.tpp"}
"""What a page names as a mistake."""


@pytest.fixture(scope="module")
def known() -> tuple[set[str], set[str], dict[str, set[str]]]:
    """Files and folders; settings (also without their sections) and options of commands; options by group."""
    tree = [path for path in ROOT.glob("[!.]*/**/*") if "__pycache__" not in path.parts]
    files = {
        "/".join(parts[place:]) + "/" * path.is_dir()
        for path in [*ROOT.glob("*"), *tree]
        for parts in [path.relative_to(ROOT).parts]
        for place in range(len(parts))
    }
    extra = [typed.list_settings(sweep.SweepConfig(), "sweep"), typed.list_settings(HardwareConfig(), "hardware")]
    settings = [setting for found in [typed.list_settings(), *extra] for setting in found]
    tails = {setting.path.split(".", place)[-1] for setting in settings for place in range(setting.path.count(".") + 1)}
    own = {name for word in WORDS for name in load_command(word).keys} | {"only"}
    groups = {
        folder.name: {file.stem for file in folder.glob("*.yaml")} for folder in CONFIGS.iterdir() if folder.is_dir()
    }
    return files | WRITTEN, tails | own, groups


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_named_files_and_settings(path: Path, known: tuple[set[str], set[str], dict[str, set[str]]]):
    """Files, rooms, settings and options of groups that a page names in inline code exist."""
    files, settings, groups = known
    problems, text = [], read(path).text
    for span in re.findall(r"`([^`\n]+)`", THEIRS.sub("|", text) if path.stem == "coming_from" else text):
        if re.search(r"[A-Z]{2}", span) or PROGRAM.match(span):  # a placeholder; a command, which has been checked
            continue
        if (
            re.fullmatch(r"[\w./]+(?:\.(?:py|sh|sbatch)|/)", span)
            and not span.startswith("runs/")
            and span not in files
        ):
            problems.append(f"`{span}`: there is no such file or folder")
        section, dot, _ = span.partition(".")
        if re.fullmatch(r"[a-z_.\d]+", span) and dot and typed.is_setting(section) and span not in files:
            gone = path.stem == "CHANGELOG" and span in REMOVED  # entries of earlier versions name it
            if not (typed.is_setting(span) or typed.is_entry(span) or span in settings or gone):
                problems.append(f"`{span}`: there is no such setting")
        for word in span.split():
            key, equals, value = word.strip("'").lstrip("+~").partition("=")
            if not equals or not re.fullmatch(r"[a-z][\w.]*", key):
                continue
            gone = path.stem == "CHANGELOG" and find_synonym(key)
            if key not in MISSPELT and not (
                key in groups or key in settings or typed.is_setting(key) or typed.is_entry(key) or gone
            ):
                problems.append(f"`{span}`: there is no setting {key}")
            if re.fullmatch(r"[a-z]\w*", value) and value not in groups.get(key, {value}) and key not in settings:
                problems.append(f"`{span}`: {key} has no option {value}")
    assert not problems, "\n".join([f"{path.name}:", *problems])


def test_drawing_of_the_floors():
    """From the bottom up, from left to right, the rooms stand in the order of the import rules."""
    drawing = next(body for _, body in read(ROOT / "docs/architecture.md").blocks if "config/ kernels/" in body)
    rooms = [name for line in reversed(drawing.splitlines()) for name in re.findall(r"(\w+)/", line)]
    assert rooms == list(ROOMS)
    commands = {path.stem for path in (ROOT / "trainer/commands").glob("*.py")} - {"__init__"}
    assert commands == set(drawing.partition("---")[0].split()[1:])


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
