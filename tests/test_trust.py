"""Where the project may run what it has not written itself: every name that can do so is listed with its file and the
reason, so that a new one is noticed. docs/architecture.md says the same for people."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FILES = [path for place in ("trainer", "launch", "bench", "docs") for path in sorted((ROOT / place).rglob("*.py"))]

MODULES = ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "runpy")
"""Modules that make objects, or code, of bytes."""

BUILTINS = ("eval", "exec", "compile", "__import__")

ATTRIBUTES = (
    *("import_module", "system", "popen", "instantiate", "register_new_resolver"),
    *("unsafe_load", "full_load", "UnsafeLoader", "FullLoader", "FileSystemReader"),
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "send_object_list"),
)
"""Functions that run what they are given, or unpickle what comes from a file or another rank."""

QUALIFIED = ("torch.load", "torch.jit.load", "torch.package", "np.load", "numpy.load", "yaml.load", "yaml.load_all")

FALSE = ("trust_remote_code", "allow_pickle", "shell")
"""Arguments that have to be False wherever they are given."""


class Use(NamedTuple):
    """names: what may be used; file: where; why: what makes it safe."""

    names: str
    file: str
    why: str


BETWEEN_RANKS = "between the ranks of a run, whose network is trusted as torch.distributed itself trusts it"
USES = [
    Use("pickle", "trainer/planning/parameters.py", "a snapshot of arguments in memory: the key of a cache"),
    Use(
        "pickle", "trainer/data/shards.py", "the job of a process's own children, through a pipe nobody else can write"
    ),
    Use("pickle", "trainer/observe/flight.py", "what torch's recorder in this very process hands over"),
    Use("yaml.load", "trainer/util/reading.py", "with a safe loader, after a look at the size"),
    Use("yaml.load", "trainer/planning/neighbours.py", "with the loader that makes texts, lists and mappings alone"),
    Use("import_module", "trainer/__init__.py", "names of a table in the file"),
    Use("import_module", "trainer/commands/__init__.py", "names of a table in the file"),
    Use("import_module", "trainer/config/compose.py", "modules that the user's own command line or recipe names"),
    Use("import_module", "trainer/hf/__init__.py", "names of a table in the file"),
    Use("import_module", "trainer/parallel/zero/fsdp.py", "one name, in the file"),
    Use("register_new_resolver", "trainer/config/compose.py", "an interpolation that compares two numbers"),
    Use("all_gather_object broadcast_object_list", "trainer/distributed/mesh.py", BETWEEN_RANKS),
    Use("broadcast_object_list", "trainer/checkpointing/memory.py", BETWEEN_RANKS),
    Use("all_gather_object broadcast_object_list", "trainer/distributed/symmetric_memory.py", BETWEEN_RANKS),
    Use("gather_object", "trainer/parity/watch.py", BETWEEN_RANKS),
    Use("broadcast_object_list gather_object", "trainer/checkpointing/loading.py", BETWEEN_RANKS),
    Use("broadcast_object_list", "trainer/checkpointing/remote.py", BETWEEN_RANKS),
    Use("gather_object scatter_object_list", "trainer/checkpointing/checkpointer.py", BETWEEN_RANKS),
    Use("all_gather_object", "bench/step.py", BETWEEN_RANKS),
]
LISTED = {(use.file, name) for use in USES for name in use.names.split()}


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything in a file that could run what the file does not hold."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, part) for alias in node.names if (part := alias.name.split(".")[0]) in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if (part := node.module.split(".")[0]) in MODULES:
                yield node.lineno, part
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in ATTRIBUTES)
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((node.lineno, name) for name in full if name in QUALIFIED)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in BUILTINS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            if node.attr in ATTRIBUTES or (name := ast.unparse(node)) in QUALIFIED:
                yield node.lineno, node.attr if node.attr in ATTRIBUTES else name
        elif isinstance(node, ast.Call):
            yield from _called(node)


def _called(node: ast.Call) -> Iterator[tuple[int, str]]:
    given = {argument.arg: argument.value for argument in node.keywords}
    for name in FALSE:
        if name in given and not (isinstance(given[name], ast.Constant) and given[name].value is False):
            yield node.lineno, f"{name}={ast.unparse(given[name])}"
    opens = isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    if opens and "trust_remote_code" not in given:
        yield node.lineno, "from_pretrained without trust_remote_code=False, which asks on a terminal"


@cache
def found() -> dict[str, dict[str, int]]:
    """File -> name -> a line of it."""
    return {
        path.relative_to(ROOT).as_posix(): {name: line for line, name in uses(ast.parse(path.read_text()))}
        for path in FILES
    }


def test_only_listed_places_run_what_they_are_given():
    unlisted = [
        f"{file}:{line} uses {name}: find a way that reads data, or list it in {Path(__file__).name} with a reason"
        for file, names in found().items()
        for name, line in names.items()
        if (file, name) not in LISTED
    ]
    assert not unlisted, "\n".join(unlisted)


def test_the_list_names_nothing_that_is_gone():
    stale = [f"{file} no longer uses {name}" for file, name in LISTED if name not in found().get(file, ())]
    assert not stale, "\n".join(stale)


def test_what_is_looked_for_is_found():
    text = """
import pickle as p, marshal
from torch import load
from yaml import unsafe_load
torch.load(f); np.load(f, allow_pickle=True); eval(x); yaml.load(f); hydra.utils.instantiate(c)
AutoTokenizer.from_pretrained(folder); AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
subprocess.run(c, shell=True); AutoConfig.from_pretrained(folder, trust_remote_code=False); re.compile(x)
"""
    assert {name for _, name in uses(ast.parse(text))} == {
        *("pickle", "marshal", "torch.load", "unsafe_load", "allow_pickle=True", "np.load", "eval", "yaml.load"),
        *("instantiate", "trust_remote_code=trusted", "shell=True"),
        "from_pretrained without trust_remote_code=False, which asks on a terminal",
    }
