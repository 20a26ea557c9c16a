"""The table of the model at the start of a run."""

from __future__ import annotations

import pytest
from support.estimates import shipped

from trainer.config.model import ModelSpec
from trainer.observe.report import model_table
from trainer.planning.layer import parameter_counts
from trainer.planning.parameters import declare_parameters
from trainer.util.tables import format_count


@pytest.mark.parametrize("name", ["llama3_8b", "gpt2", "gemma2_2b", "olmo2_7b"])
def test_equal_layers_stand_once_and_all_is_there(name):
    spec = shipped(name)
    table = {row["parameter"]: row for row in model_table(spec)}
    layers = f"layers.0-{spec.depth - 1}"
    assert table["all"]["in all"] == format_count(parameter_counts(spec)["total"]) and table["all"]["share"] == "100.0%"
    named = {
        one.replace("layers.0.", f"{layers}.") for one in declare_parameters(spec) if not one.startswith("layers.")
    }
    named |= {one.replace("layers.0.", f"{layers}.") for one in declare_parameters(spec) if one.startswith("layers.0.")}
    assert named == table.keys() - {"all", layers} and table[layers]["shape"] == f"{spec.depth} layers"


def test_layers_that_differ_stand_by_themselves():
    changed = {"attention": {"heads": 4, "kv_heads": 4}, "depth": 5, "width": 64}
    spec = ModelSpec.from_dict(changed | {"pattern": [{}, {}, {"attention": {"kv_heads": 1}}]})
    rows = [row for row in model_table(spec) if "layer" in row["shape"]]
    assert [(row["parameter"], row["shape"]) for row in rows] == [
        ("layers.0-1", "2 layers"),
        ("layers.2", "1 layer"),
        ("layers.3-4", "2 layers"),
    ]
