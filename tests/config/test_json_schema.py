"""The JSON schema that editors complete YAML with: it accepts what a run accepts, and knows every setting."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from trainer.commands import train
from trainer.config import Config, typed
from trainer.config.fields import CONFIGS, parse_bounds
from trainer.config.json_schema import json_schema
from trainer.planning.resolve import compose

RECIPE = Draft7Validator(json_schema())


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def legal(path: str, value: Any) -> bool:
    return RECIPE.is_valid(nested(path, value))


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_shipped_files_are_legal(file):
    section = "" if file.parent.name == "config" else file.parent.name
    found = Draft7Validator(json_schema(section)).iter_errors(OmegaConf.to_container(OmegaConf.load(file)))
    assert not [f"{error.json_path}: {error.message}" for error in found]


def test_a_resolved_configuration_is_legal():
    config = compose(
        [
            "+config=debug",
            "model.pattern=[{attention: {window: 8}, repeat: 2}]",
            "+model.overrides.1.attention.window=16",
            "precision.types.rules={a.*: {lr_scale: 2}}",
            "data=mix",
            "data.sources.text.path=x",
        ]
    )
    Draft7Validator.check_schema(RECIPE.schema)
    assert not list(RECIPE.iter_errors(typed.to_plain(config)))


def test_every_setting_is_described_with_its_limits():
    for setting in typed.list_settings():
        entry: dict[str, Any] = RECIPE.schema
        for name in setting.path.split("."):
            entry = entry["properties"][name]
        assert setting.doc in entry["description"]
        assert not legal(f"{setting.path}x", setting.default), setting.path
        if setting.choices:
            assert all(legal(setting.path, choice) for choice in setting.choices)
            assert not legal(setting.path, "no such choice")
        if setting.range:
            low, high = parse_bounds(setting.range)
            shape = (lambda value: [value]) if isinstance(setting.default, list) else (lambda value: value)
            assert not legal(setting.path, shape(low - 1))
            assert legal(setting.path, shape(low)) == (setting.range[0] == "[")
            assert legal(setting.path, shape(high)) == (setting.range[-1] == "]") or high == float("inf")
            assert high == float("inf") or not legal(setting.path, shape(high + 1))


@pytest.mark.parametrize(
    "path, value, accepted",
    [
        ("run.steps", "${lr.decay}", True),
        ("run.steps", "many", False),
        ("run.steps", True, False),
        ("run.name", 7, True),
        ("compile", "maybe", False),
        ("batch.micro_size", None, True),
        ("run.steps", None, False),
        ("data.sources.mine", {"kind": "text", "path": "???"}, True),
        ("data.sources.mine", {"kind": "txt"}, False),
        ("model.pattern", [{"attention": {"window": 4}, "repeat": 2}], True),
        ("model.pattern", [{"attention": {"windw": 4}}], False),
        ("model.overrides", {"0": {"feed_forward": {"width": 704}}}, True),
        ("precision.types.rules", {"layers.*": {"lr_scale": -1}}, False),
        ("defaults", ["override /parallel: zero3", "_self_"], True),
        ("parallel", "zero3", False),
    ],
)
def test_values(path, value, accepted):
    assert legal(path, value) == accepted


def test_the_command_prints_it_and_the_line_for_editors_is_only_a_comment(capsys, tmp_path):
    assert train.main(["--schema"]) == 0 and json.loads(capsys.readouterr().out) == json_schema()
    assert train.main(["--schema", "model"]) == 0 and "width" in json.loads(capsys.readouterr().out)["properties"]
    assert train.main(["--schema", "modle"]) == 2 and "did you mean 'model'" in capsys.readouterr().err
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text(
        "# @package _global_\n# yaml-language-server: $schema=../../trainer.schema.json\nrun: {steps: 30}\n"
    )
    config = compose(["+config=mine"], tmp_path)
    assert config.run.steps == 30 != Config().run.steps
