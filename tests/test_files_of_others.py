"""What others wrote is data: whatever a file holds, reading it ends in a value or in one error that names it; nothing
in it runs, and nothing is written elsewhere. docs/trust.md says so for each kind of file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from support.damage import damaged_bytes, damaged_texts, damaged_values, other_files
from support.kinds import FOUND, KINDS

from trainer.config import ConfigError

SLOW = {
    "tokenizer_config": 30,
    "hf_config": 60,
    "recipe": 40,
    "conditions.yaml": 20,
    "choice.yaml": 60,
    **{"diagnosed_config": 20, "diagnosed_starts": 40, "diagnosed_accounts": 100},
}
SLOW |= dict.fromkeys(
    ("page_starts", "page_status", "page_diagnosis", "page_notices", "page_search", "page_trials"), 60
)
"""Kinds that a library takes long to read, and how many odd values are tried."""


def cases(content: bytes, canary: Path, most: int) -> Iterator[tuple[str, bytes]]:
    yield from damaged_bytes(content, canary)
    yield from damaged_texts(canary)
    try:
        value = json.loads(content.splitlines()[0] if content.count(b"\n") > 1 else content)
    except ValueError:
        return
    yield from damaged_values(value, most)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr("trainer.data.tables.ALWAYS", 1 << 20)
    monkeypatch.setattr("trainer.data.text.LINE", 1 << 20)
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_file_holds_is_read_as_data(kind, tmp_path, capsys):
    outside, canary = tmp_path / "outside", tmp_path / "canary"
    outside.mkdir()
    (tmp_path / "files").mkdir()
    path, read = KINDS[kind](tmp_path / "files")
    good, ends = path.read_bytes(), {"read": 0, "refused": 0}
    read()

    def attempt(what: str) -> None:
        try:
            read()
            ends["read"] += 1
        except ConfigError as error:
            ends["refused"] += 1
            text = str(error)
            assert path.name in text or str(path.parent) in text or path.stem in text, (what, text)
            assert len(error.problems) <= 20 and len(text) < 6000, (what, len(text))
        except OSError as error:
            assert str(path) in str(error) or "outside/nothing" in str(error), (
                what
            )  # the caller says what it means that there is no file
            ends["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"{kind}, {what}: {type(error).__name__}: {error}") from error
        assert not canary.exists() and not any(outside.iterdir()), what
        assert {entry.name for entry in tmp_path.iterdir()} == {"outside", "files"}, what

    for what, content in cases(good, canary, SLOW.get(kind, 250)):
        path.unlink()
        path.write_bytes(content)
        attempt(what)
    for what in [] if kind in FOUND else other_files(path, outside):
        attempt(what)
    path.write_bytes(good)
    read()
    assert sum(ends.values()) >= 50
    capsys.readouterr()
    print(kind, ends)
