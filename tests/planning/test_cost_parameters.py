"""The table of parameters says what the modules declare, and its cache never answers for another spec."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.model import AttentionSpec, FeedForwardSpec, ModelSpec, NormSpec, assign_fields
from trainer.model.initial import parameter_infos
from trainer.model.transformer import Transformer
from trainer.planning.layer import BLOCK_OPS, INNER_OPS
from trainer.planning.parameters import ATTENTION, FEED_FORWARD, ParameterInfo, declare_parameters, layer_tables
from trainer.planning.states import local_parameters

MODELS = Path(__file__).parents[2] / "configs" / "model"
LAYERS = [
    {"attention": {"heads": 8, "kv_heads": 1, "bias": True}, "repeat": 2},
    {"norm": {"placement": "both", "kind": "layer"}},
]
ODD = {
    "override": {
        "overrides": {"1": {"feed_forward": {"width": 20}}, "-2:": {"feed_forward": {"kind": "plain", "bias": True}}}
    },
    "pattern": {"pattern": LAYERS, "tied": True},
    "pattern and overrides": {
        "pattern": LAYERS,
        "overrides": {"0": {"attention": {"qk_norm": "full", "output_bias": True}}},
    },
}


def shipped(name: str) -> ModelSpec:
    """A file of the configuration folder, with those it builds on."""
    values = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    bases = [base for base in values.pop("defaults", []) if base != "_self_"]
    spec = shipped(bases[0]) if bases else ModelSpec()
    assign_fields(spec, values, "model")
    return spec


def small(**changes: object) -> ModelSpec:
    spec = ModelSpec(vocab_size=61, width=32, depth=5, max_length=64, feed_forward=FeedForwardSpec(width=44))
    spec.attention = AttentionSpec(heads=4, kv_heads=2)
    assign_fields(spec, changes, "model")
    return spec


def choices(cls: type, name: str) -> st.SearchStrategy:
    choices = next(field for field in dataclasses.fields(cls) if field.name == name).metadata["choices"]
    return st.sampled_from(tuple(choices))


SPECS = st.builds(
    small,
    depth=st.integers(1, 3),
    tied=st.booleans(),
    learned_positions=st.booleans(),
    parallel_residual=st.booleans(),
    attention=st.fixed_dictionaries(
        {
            "kind": choices(AttentionSpec, "kind"),
            "kv_heads": st.sampled_from([0, 1, 2, 4]),
            "head_dim": st.sampled_from([0, 6]),
            "bias": st.booleans(),
            "output_bias": st.booleans(),
            "qk_norm": choices(AttentionSpec, "qk_norm"),
            "positions": choices(AttentionSpec, "positions"),
        }
    ),
    feed_forward=st.fixed_dictionaries({"kind": choices(FeedForwardSpec, "kind"), "bias": st.booleans()}),
    norm=st.fixed_dictionaries({"kind": choices(NormSpec, "kind"), "placement": choices(NormSpec, "placement")}),
    pattern=st.sampled_from([[], LAYERS]),
)


def declared(spec: ModelSpec, layers: range | None = None) -> list[tuple[str, dict]]:
    """What the modules of a stage declare, in their order; each parameter has the shape that is declared."""
    with torch.device("meta"):
        model = Transformer(spec, layers)
    infos = parameter_infos(model)
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == {
        n: i.shape for n, i in infos.items()
    }
    return plain(infos)


def plain(infos: dict) -> list[tuple[str, dict]]:
    return [(name, {"active": 1.0} | dataclasses.asdict(info)) for name, info in infos.items()]


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.yaml")))
def test_shipped_models_declare_what_the_table_says(name: str) -> None:
    spec = shipped(name)
    assert declared(spec) == plain(declare_parameters(spec))


@pytest.mark.parametrize("layers", [range(5), range(2), range(2, 4), range(3, 5)])
@pytest.mark.parametrize("name", ODD)
def test_stages_of_odd_models_declare_what_the_table_says(name: str, layers: range) -> None:
    spec = small(**ODD[name])
    assert declared(spec, layers) == plain(declare_parameters(spec, layers))


@given(SPECS, st.data())
@settings(deadline=None, max_examples=60)
def test_any_stage_of_any_model_declares_what_the_table_says(spec: ModelSpec, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, spec.depth - 1))
    layers = range(start, data.draw(st.integers(start + 1, spec.depth)))
    assert declared(spec, layers) == plain(declare_parameters(spec, layers))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ODD)
def test_parameters_held_are_those_of_the_modules(name: str, tp: int) -> None:
    spec = small(**ODD[name])
    for layers in (range(5), range(2), range(1, 4), range(3, 5)):
        with torch.device("meta"):
            infos = parameter_infos(Transformer(spec, layers))
        units: dict[str, int] = {"outer": 0}
        for parameter, info in infos.items():
            unit = parameter.split(".")[1] if parameter.startswith("layers.") else "outer"
            whole = info.tensor_dimension(tp) is None
            units[unit] = units.get(unit, 0) + (info.size if whole else math.ceil(info.size / tp))
        assert local_parameters(spec, tp).units(layers) == list(units.values())


def test_every_kind_of_block_has_its_table() -> None:
    described = {*INNER_OPS, *BLOCK_OPS}
    for cls, table in ((AttentionSpec, ATTENTION), (FeedForwardSpec, FEED_FORWARD)):
        kinds = next(field for field in dataclasses.fields(cls) if field.name == "kind").metadata["choices"]
        assert tuple(table) == tuple(kinds) and described >= set(kinds)
        described -= set(kinds)
    assert not described


def test_a_changed_spec_has_another_table() -> None:
    """Specs can be changed after they were looked at, down to a list inside of them."""
    spec = small(pattern=copy.deepcopy(LAYERS))
    before = declare_parameters(spec)
    spec.pattern[0]["attention"]["heads"] = 16
    assert declare_parameters(spec) == declare_parameters(copy.deepcopy(spec)) != before
    assert declare_parameters(spec)["layers.0.attention.q.weight"].units == 16
    spec.pattern[0]["attention"]["heads"] = 8
    assert declare_parameters(spec) == before
    changed = declare_parameters(spec)
    changed.clear()  # a caller's own
    assert declare_parameters(spec) == before


def test_equal_layers_share_one_table() -> None:
    spec = small(depth=80, overrides={"7": {"feed_forward": {"width": 20}}})
    tables = layer_tables(spec)
    assert len({id(table) for table in tables}) == 2
    assert tables is layer_tables(copy.deepcopy(spec))
    with pytest.raises(TypeError):
        tables[0]["attention.q.weight"] = None


def test_what_a_tensor_parallel_rank_holds() -> None:
    def info(axes: tuple[str, ...], units: int = 0) -> ParameterInfo:
        return ParameterInfo((12, 5), axes, "matrix", units=units)

    assert [info(("embed", "seq")).held(4), info(("mlp", "embed")).held(4), info(("embed", "mlp")).held(4)] == [
        60,
        15,
        15,
    ]
    assert [info(("mlp", "embed")).held(7), info(("kv_heads", "embed"), 3).held(3)] == [9, 20]
    assert info(("kv_heads", "embed"), 3).held(6) == 60  # fewer heads than ranks: each holds them all


@pytest.mark.parametrize("axes, role", [(("mlp",), "matrix"), (("mlp", "embed"), "matrices")])
def test_faulty_declarations(axes: tuple[str, ...], role: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"with axes {axes} and role {role}")):
        ParameterInfo((4, 3), axes, role)
