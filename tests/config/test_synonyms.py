"""Names from elsewhere, and words where an override is expected: each gets the setting, the command, or the truth."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from trainer.config import Config, ConfigError, synonyms, typed
from trainer.config.fields import CONFIGS
from trainer.planning.resolve import compose


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        compose(overrides, world_size=1)
    return refusal.value.problems


def test_every_synonym_leads_to_a_setting_and_hides_none():
    settings = [setting.path for setting in typed.list_settings()]
    top = {path.split(".")[0] for path in settings}
    for name, setting in synonyms.SETTINGS.items():
        assert setting in settings, name
        assert name == "lr" or name not in top, name
        assert typed.describe_unknown("", name, settings).endswith(f"; here it is '{setting}'"), name
    assert not synonyms.SETTINGS.keys() & synonyms.ABSENT.keys() and not top & synonyms.ABSENT.keys()


def test_names_from_elsewhere_get_the_setting_or_the_truth():
    found = problems(
        "learning_rate=1", "optimizer.lr=1", "Seq-Len=8", "run.max_steps=3", "epochs=2", "max_hours=1", "lora.rank=8"
    )
    assert len(found) == 7
    text = "\n".join(found)
    for words in (
        "'learning_rate'; here it is 'lr.peak'",
        "'optimizer.lr'; here it is 'lr.peak'",
        "'Seq-Len'; here it is 'batch.sequence_length'",
        "'run.max_steps'; here it is 'run.steps'",
        "'epochs'; a run's length is run.steps",
        "'max_hours'; here it is 'run.hours'",
        "'lora'; here it is 'model.adapter.rank'",
    ):
        assert words in text, words
    assert "(one setting: lr.peak=VALUE)" in problems("lr=1e-3")[0]
    assert "did you mean 'lr.warmup'?" in problems("lr.warmpu=1")[0], "a slip of the pen is no other name"


@pytest.mark.parametrize("removed", synonyms.REMOVED)
def test_what_earlier_versions_had_is_refused_with_what_to_set(removed, tmp_path):
    """On the command line, and in a recipe such as the config.yaml of an old run. No setting has it now."""
    path, _, value = removed.partition("=")
    setting = next((one for one in typed.list_settings() if one.path == path), None)
    assert setting is None if not value else value not in setting.choices
    nested = unflat(f"{path}={value or 4}")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "old.yaml").write_text(f"# @package _global_\n{yaml.safe_dump(nested)}")
    for words, folder in (([f"{path}={value or 4}"], None), (["+config=old"], str(tmp_path))):
        with pytest.raises(ConfigError) as refusal:
            compose(words, folder, 2)
        [problem] = refusal.value.problems
        assert removed in problem and "was removed" in problem and "\n" not in problem
        ways = re.findall(rf"({re.escape(path.rpartition('.')[2])}=\w+)", problem.replace(removed, ""))
        assert ways if value else "leave it out" in problem
        for way in ways:
            typed.build_typed(typed.complete_values(Config(), unflat(f"{path.rpartition('.')[0]}.{way}")), found := {})
            assert not found


def unflat(assignment: str) -> dict:
    path, _, value = assignment.partition("=")
    nested: Any = value
    for name in reversed(path.split(".")):
        nested = {name: nested}
    return nested


@pytest.mark.parametrize(
    "word, answer",
    [
        ("debug", "did you mean +config=debug?"),
        ("zero3", "did you mean parallel=zero3?"),
        ("demo", "did you mean +config=demo or model=demo or parallel=demo?"),
        ("quickly", "recipes: debug, demo"),
        ("mine/config/try.yaml", "say --config-dir mine +config=try"),
        ("try.yml", "put it into FOLDER/config/ and say --config-dir FOLDER +config=try"),
        ("mine/model/small.yaml", "say --config-dir mine model=small"),
        ("model=mine/model/small.yaml", "say --config-dir mine model=small"),
        ("+config=mine/try.yaml", "put it into FOLDER/config/ and say --config-dir FOLDER +config=try"),
    ],
)
def test_words_and_paths_are_answered_in_one_line_of_ours(word, answer):
    [problem] = problems(word)
    assert answer in problem and "\n" not in problem and len(problem) < 250
    assert not any(words in problem for words in ("expecting", "mismatched", "missing EQUAL", "searchpath"))


def test_what_a_path_is_answered_with_works(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "try.yaml").write_text((CONFIGS / "config" / "debug.yaml").read_text())
    [problem] = problems(f"{tmp_path}/config/try.yaml")
    assert problem.endswith(f"--config-dir {tmp_path} +config=try")
    assert compose(["+config=try"], str(tmp_path), 1).run.name == "debug"
