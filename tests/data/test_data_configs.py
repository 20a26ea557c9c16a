"""The shipped data groups are data configurations, and ask for what they cannot know."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trainer.config import Config
from trainer.config.typed import build_typed

GROUPS = sorted((Path(__file__).parents[2] / "configs" / "data").glob("*.yaml"))


@pytest.mark.parametrize("path", GROUPS, ids=[path.stem for path in GROUPS])
def test_group(path):
    values = OmegaConf.to_container(OmegaConf.load(path))
    problems = {}
    build_typed({"data": values}, problems)
    kinds = {name: source["kind"] for name, source in values["sources"].items()}
    asked = {f"data.sources.{name}.path" for name, kind in kinds.items() if kind != "stdlib"}
    assert set(problems) == asked | ({"data.tokenizer"} if path.stem == "tokens" else set())
    assert all("has no value; set" in text for text in problems.values())
    assert path.stem == "mix" or list(kinds.values()) == [path.stem]


def test_every_kind_has_a_group_and_the_default_is_the_schemas():
    kinds = {"stdlib", "text", "jsonl", "parquet", "hub", "chat", "tokens"}
    assert {path.stem for path in GROUPS} == kinds | {"mix"}
    problems = {}
    [default] = [path for path in GROUPS if path.stem == "stdlib"]
    assert (
        build_typed({"data": OmegaConf.to_container(OmegaConf.load(default))}, problems).data == Config().data
        and not problems
    )
