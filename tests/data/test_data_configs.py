"""The shipped data groups are data configurations, and ask for what they cannot know."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trainer.config import Config, SourceConfig
from trainer.config.schema import CorpusConfig
from trainer.config.typed import build_typed
from trainer.planning.resolve import config_problems

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


@pytest.mark.parametrize("field, value", [("path", "x"), ("field", "x"), ("split", "x"), ("dtype", "uint16")])
@pytest.mark.parametrize("kind", ["stdlib", "text", "jsonl", "hub", "tokens", "chat"])
def test_a_setting_that_a_kind_does_not_read_is_refused(kind, field, value):
    """A file without its kind would leave the run with the standard library."""
    given = {"kind": kind, "path": "y" if kind != "stdlib" else None} | {field: value}
    config = Config()
    config.data.sources = {"mine": SourceConfig(**given)}
    config.eval.sets, config.eval.every = {"held": CorpusConfig(**given)}, 1
    reads = {"path": kind != "stdlib", "field": kind in ("jsonl", "hub")}
    reads |= {"split": kind == "hub", "dtype": kind == "tokens"}
    told = f"{field}={value} is not read by kind={kind}; leave it out, or set"
    found = [problem for problem in config_problems(config) if "is not read by" in problem]
    wanted = [] if reads[field] else [f"eval.sets.held.{told} eval.sets", f"data.sources.mine.{told} data.sources"]
    assert len(found) == len(wanted) and all(map(str.startswith, found, wanted))


def test_every_kind_has_a_group_and_the_default_is_the_schemas():
    kinds = {"stdlib", "text", "jsonl", "parquet", "hub", "chat", "tokens"}
    assert {path.stem for path in GROUPS} == kinds | {"mix"}
    problems = {}
    [default] = [path for path in GROUPS if path.stem == "stdlib"]
    assert (
        build_typed({"data": OmegaConf.to_container(OmegaConf.load(default))}, problems).data == Config().data
        and not problems
    )
