"""The names of `trainer/`: a function is a verb phrase or a quantity in two words or more, and no name uses a word that
the field has another word for."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "trainer"

STANDARD = {"attention", "compose", "decide", "dequantize", "evaluate", "main", "option", "parallelize", "quantize"}
STANDARD |= {"run", "softmax", "train"}
"""Functions of one word that need no second one."""

DECORATORS = PACKAGE / "config" / "register.py"
"""`trainer.register.metric` and the like read as one name."""

INSTEAD = {
    "apart": "separate, split",
    "arriving": "overlapped",
    "asked": "requested",
    "attending": "attention",
    "box": "buffer",
    "boxes": "buffers",
    "churn": "fragmentation",
    "course": "timeline",
    "kept": "saved, retained",
    "lacking": "missing",
    "lasting": "the thing that lasts",
    "lay": "resolve, place",
    "laid": "resolved, placed",
    "looks": "polls",
    "meetings": "backends",
    "pace": "throughput",
    "remarks": "warnings",
    "room": "memory limit, free memory",
    "said": "reported",
    "shown": "formatted",
    "slots": "KV cache entries",
    "spoken": "reported",
    "stretch": "segment",
    "strike": "record",
    "told": "reported, notified",
    "typical": "median, profile",
    "ways": "backends",
    "wish": "request",
    "workshop": "suggestions",
}
"""Word of this project's past -> what the field says."""


@cache
def definitions() -> list[tuple[Path, ast.stmt, str]]:
    """File, statement and name of every function, class and constant at the top of a file."""
    found: list[tuple[Path, ast.stmt, str]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for statement in ast.parse(path.read_text()).body:
            match statement:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.append((path, statement, name))
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    found.append((path, statement, name))
    return found


def words(name: str) -> list[str]:
    """The words of a name: of snake_case, CamelCase, or both."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def place(path: Path, statement: ast.stmt, name: str) -> str:
    return f"{path.relative_to(PACKAGE.parent)}:{statement.lineno} {name}"


def test_functions_are_named_by_more_than_one_word():
    bare = [
        place(*found)
        for found in definitions()
        if isinstance(found[1], ast.FunctionDef) and not found[2].startswith("_") and found[0] != DECORATORS
        if len(words(found[2])) < 2 and found[2] not in STANDARD
    ]
    assert not bare, "\n".join(["name the action and its object, such as read_manifest:", *bare])


@pytest.mark.parametrize("word", INSTEAD)
def test_names_use_words_of_the_field(word):
    used = [place(*found) for found in definitions() if word in words(found[2])]
    assert not used, "\n".join([f"instead of '{word}': {INSTEAD[word]}", *used])


def test_few_functions_share_a_name():
    files = defaultdict(set)
    for path, statement, name in definitions():
        if isinstance(statement, ast.FunctionDef) and not name.startswith("__") and name not in STANDARD:
            files[name].add(path)
    often = {name: len(places) for name, places in files.items() if len(places) > 2}
    assert len(often) < 15, often
