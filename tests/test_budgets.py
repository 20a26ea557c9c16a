"""How large the project may be. A line in CHANGELOG.md says why a budget is raised; after a removal it is lowered.

The targets are 310,000 tokens, 215 files, 190 settings and 45,000 words."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trainer.config import Config

ROOT = Path(__file__).parents[1]
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count_tokens(path: Path) -> int:
    """Python's tokens of a file without comments, docstrings and layout: longer lines do not make it smaller."""
    strings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    with path.open("rb") as file:
        return sum(
            token.type not in LAYOUT and not (token.type == tokenize.STRING and token.start in strings)
            for token in tokenize.tokenize(file.readline)
        )


def count_words(*pages: Path) -> int:
    return sum(len(page.read_text().split()) for page in pages)


def count_settings() -> int:
    """Declared settings: those of one section that stands in several places, as in `precision.types`, count once."""
    found: set[tuple[type, str]] = set()

    def visit(section: Any) -> None:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            visit(value) if dataclasses.is_dataclass(value) else found.add((type(section), field.name))

    visit(Config())
    return len(found)


FILES = sorted((ROOT / "trainer").rglob("*.py"))


@cache
def count_loaded() -> list[int]:
    """Files of the project that a process loads with a step, and with a run, which loads the step. The targets are 60
    and 120."""
    count = "print(sum(name.startswith('trainer') for name in sys.modules))"
    code = f"import sys, trainer.training.step; {count}; import trainer.training.run; {count}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


BUDGETS = {
    "tokens of trainer/": (lambda: sum(map(count_tokens, FILES)), 420_100),
    "files of trainer/": (lambda: len(FILES), 228),
    "files loaded with trainer.training.run": (lambda: count_loaded()[1], 151),
    "files loaded with trainer.training.step": (lambda: count_loaded()[0], 91),
    "settings": (count_settings, 220),
    "pages of docs/": (lambda: len(list((ROOT / "docs").glob("*.md"))), 16),
    "words of docs/": (lambda: count_words(*(ROOT / "docs").glob("*.md")), 45_800),
    "words of README.md": (lambda: count_words(ROOT / "README.md"), 1_700),
    "files of bench/": (lambda: len(list((ROOT / "bench").glob("*.py"))), 17),
}


@cache
def count_once(name: str) -> int:
    return BUDGETS[name][0]()


@pytest.mark.parametrize("name", BUDGETS)
def test_budget(name):
    budget = BUDGETS[name][1]
    assert count_once(name) <= budget, (
        f"{name}: more than {budget}; make it smaller, or say in CHANGELOG.md why it grows"
    )


@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_is_near_what_it_limits(name):
    count, budget = count_once(name), BUDGETS[name][1]
    assert count >= 0.97 * budget - 2, f"{name}: {count}; lower the budget of {budget}"
