"""Pages that speak of what is elsewhere: messages are those of the code, and names of other frameworks are theirs."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from trainer.config import synonyms
from trainer.model.context_attention import ContextGroup
from trainer.parallel.context.plan import ContextPlan

ROOT = Path(__file__).parents[2]


def rows(page: str) -> Iterator[tuple[str, list[str]]]:
    """The section and the cells of each row of a page's tables that begins with code."""
    section = ""
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| `"):
            yield section, [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# Troubleshooting


@cache
def strings() -> list[str]:
    """The strings of the code, those of docstrings left out; "\\0" stands for what is formatted into one."""
    found = []
    for path in (ROOT / "trainer").rglob("*.py"):
        tree = ast.parse(path.read_text())
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
                found.append(node.value)
    return found


OF_OTHERS = "Messages of other programs"
MESSAGES = [
    row[0] for section, row in rows("troubleshooting.md") if section.startswith("Messages") and section != OF_OTHERS
]


def test_messages_are_found():
    assert len(MESSAGES) > 40 and OF_OTHERS in (section for section, _ in rows("troubleshooting.md"))


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_one_of_the_code(message: str):
    [text] = spans(message)
    parts = text.split("...")
    assert max(len(part.strip()) for part in parts) >= 8, "too short to tell it from others"
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    assert any(map(pattern.search, strings())), "no string of the code says so"


# Coming from another framework

OTHERS = list(rows("coming_from.md"))


@pytest.mark.parametrize("section", list(dict.fromkeys(section for section, _ in OTHERS)))
def test_names_of_others_are_answered_alike(section: str):
    """A name that the command line answers is answered as the table does."""
    problems, answered = [], 0
    for theirs, ours, *_ in (row for found, row in OTHERS if found == section):
        keys = {word.strip("'").partition("=")[0] for span in spans(ours) for word in span.split()}
        for name in spans(theirs):
            leaf = name.lower().lstrip("-").replace("-", "_").rpartition(".")[2]
            setting = synonyms.SETTINGS.get(leaf)
            answered += setting is not None
            if setting and not keys & {setting, setting.partition(".")[0], setting.rpartition(".")[0]}:
                problems.append(f"{name}: the command line names {setting}")
            if leaf in synonyms.ABSENT and ours != "none":
                problems.append(f"{name}: the command line says that {synonyms.ABSENT[leaf]}")
    assert not problems and answered > 2, problems


def package(name: str) -> Path:
    [folder] = importlib.util.find_spec(name).submodule_search_locations
    return Path(folder)


def test_names_of_transformers():
    tree = ast.parse((package("transformers") / "training_args.py").read_text())
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"]
    fields = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    named = {name for section, row in OTHERS if section.startswith("transformers") for name in spans(row[0])}
    assert len(named) > 40 and not named - fields


def test_names_of_deepspeed():
    folder = package("deepspeed")
    files = [*folder.glob("runtime/**/*c*.py"), *folder.glob("*/config.py"), *folder.glob("*/constants.py")]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    named = {
        part for section, row in OTHERS if section == "DeepSpeed" for name in spans(row[0]) for part in name.split(".")
    }
    assert len(named) > 40 and not named - words


# Long sequences


def test_the_page_shows_which_rank_holds_which_token():
    page = (ROOT / "docs/long_sequences.md").read_text()
    shown = dict(re.findall(r"^(zigzag|blocks) +([0-3]{32})  ", page, re.MULTILINE))
    assert len(shown) == 2
    for order, text in shown.items():
        length = 128 * len(text)
        group = ContextGroup(ContextPlan(1, 4, order), 0, None, None)
        holders = torch.empty(length, dtype=torch.int64)
        holders[group.order(length, torch.device("cpu"))] = torch.arange(4).repeat_interleave(length // 4)
        assert holders.tolist() == [int(digit) for digit in text for _ in range(128)], order
