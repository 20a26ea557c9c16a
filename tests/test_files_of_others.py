"""What others wrote is data: whatever a file holds, reading it ends in a value or in one error that names it; nothing
in it runs, and nothing is written elsewhere. docs/architecture.md says so for each kind of file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
import yaml
from support.damage import damaged_bytes, damaged_texts, damaged_values, other_files
from support.kinds import FOUND, KINDS

from trainer.config import ConfigError
from trainer.config.fields import yaml_fault
from trainer.util.reading import shorten_foreign

SLOW = {
    "tokenizer_config": 30,
    "hf_config": 60,
    "recipe": 40,
    "conditions.yaml": 20,
    "choice.yaml": 60,
    "overrides": 20,
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


SECRETS = {
    "passwords": "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n" * 20,
    "hashes": "root: $6$rounds=5000$saltsaltsalt$h4shh4shh4shh4shh4sh\nsys: $6$another$h4shh4shh4shh4shh4sh2\n",
    "a key": "-----BEGIN KEY-----\n"
    + "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSj/+AgEAAoIBAQ\n" * 30
    + "-----END-----\n",
    "variables": "PASSWORD='two words of a secret'\nTOKEN=eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3\n",
    "logins": json.dumps({"auths": {"host": {"auth": "c2VjcmV0OnNlY3JldA==c2VjcmV0OnNlY3JldA==c2VjcmV0"}}}, indent=1),
    "a text": '"a secret sentence that nobody else may read"\n',
    "a list": '["a secret sentence that nobody else may read", "another: secret, sentence"]\n',
    "rows": 'user,password\nalice,her own secret\nbob,"secret of his\n',
    "no yaml": "secret: [a secret sentence\n  of two lines\n: that: is no: yaml\n",
}
"""Files that somebody may name by mistake, or be led to name."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_quotes_nothing_of_another_file(kind, tmp_path, capsys):
    """One word of a file may be shown, and no line of it."""
    (tmp_path / "files").mkdir()
    path, read = KINDS[kind](tmp_path / "files")
    capsys.readouterr()
    for what, content in SECRETS.items():
        path.unlink()
        path.write_text(content)
        try:
            read()
            told = ""
        except (ConfigError, OSError) as error:
            told = str(error)
        told += "".join(capsys.readouterr())
        parts = {part.strip() for line in content.splitlines() for part in (line, *line.split(": "), *line.split("="))}
        quoted = [part for part in parts if len(part) > 12 and part.strip("'\"") in told]
        assert not quoted, f"{what}: {told[:1000]} quotes {quoted}"


def test_a_fault_of_yaml_is_told_without_the_line():
    """PyYAML's parser in Python quotes the line, the one in C does not."""
    with pytest.raises(yaml.YAMLError) as caught:
        yaml.load("a: 1\nsecret: sentence: of two\n", yaml.SafeLoader)
    assert "sentence" in str(caught.value)
    assert (
        shorten_foreign(caught.value)
        == yaml_fault(caught.value)
        == "line 2, column 17: mapping values are not allowed here"
    )


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
