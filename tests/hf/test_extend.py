"""`model.extend` beside transformers given the same fields: frequencies, the factor on attention, logits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

from trainer.config import ConfigError  # noqa: E402
from trainer.config.extend import extend_spec  # noqa: E402
from trainer.config.model import SCALING_FIELDS, ModelSpec, RopeSpec  # noqa: E402
from trainer.hf.agreement import find_disagreement  # noqa: E402
from trainer.hf.config import ROPE_NAMES, spec_from_config  # noqa: E402
from trainer.model.rotary import Rotary  # noqa: E402

READS_LENGTH = ("yarn", "llama3", "longrope")


def config_of(length: int, head_dim: int, theta: float, **rope: Any) -> dict[str, Any]:
    """A Llama of one layer, whose own length is `length`, with fields of rope_parameters."""
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=2 * head_dim,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": theta, **rope},
        architectures=["LlamaForCausalLM"],
    ).to_dict()


def changes_of(draw: st.DrawFn, scaling: str, half: int) -> dict[str, Any]:
    """Fields of one kind of scaling, those left out that may be."""
    numbers = {
        "factor": st.floats(1, 64),
        "low_frequency_factor": st.floats(0.5, 2),
        "high_frequency_factor": st.floats(3, 8),
        "beta_fast": st.floats(8, 64),
        "beta_slow": st.floats(0.1, 4),
        "truncate": st.booleans(),
        "attention_factor": st.just(1.3),
        "short_factor": st.lists(st.floats(1, 4), min_size=half, max_size=half),
        "long_factor": st.lists(st.floats(1, 64), min_size=half, max_size=half),
    }
    needed = {"short_factor", "long_factor"}
    if scaling in ("linear", "dynamic", "llama3"):
        needed |= {"factor"}
    names = [name for name in SCALING_FIELDS[scaling] if name in numbers]
    return {"scaling": scaling} | {name: draw(numbers[name]) for name in names if name in needed or draw(st.booleans())}


@st.composite
def extensions(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]:
    """config.json of a model, the fields of `model.extend`, transformers' config.json of the same, head_dim."""
    own, head_dim = draw(st.sampled_from([256, 1000, 2048, 4096, 8192, 32768])), draw(st.sampled_from([8, 32, 128]))
    theta, scaling = (
        draw(st.sampled_from([500.0, 1e4, 5e5])),
        draw(st.sampled_from(sorted(set(SCALING_FIELDS) - {"none"}))),
    )
    changes = changes_of(draw, scaling, head_dim // 2)
    length = own
    if scaling != "dynamic" and draw(st.booleans()):
        length = changes["max_length"] = own * draw(st.integers(1, 16))
    fields = {name: value for name, value in changes.items() if name not in ("scaling", "max_length")}
    if scaling == "llama3":  # which transformers wants to be told
        fields = {"low_frequency_factor": 1.0, "high_frequency_factor": 4.0} | fields
    theirs = {ROPE_NAMES[name]: value for name, value in fields.items()} | {"rope_type": scaling}
    if scaling in ("yarn", "longrope"):
        theirs.setdefault("factor", None)
    if scaling in READS_LENGTH and length != own:  # else it is what transformers takes by itself
        theirs["original_max_position_embeddings"] = own
    return config_of(own, head_dim, theta), changes, config_of(length, head_dim, theta, **theirs), head_dim


@settings(deadline=None, max_examples=200)
@given(extensions(), st.sampled_from([16, 5000, 100_000]))
def test_frequencies_are_those_of_transformers_given_the_same_fields(case, length: int) -> None:
    config, changes, theirs, head_dim = case
    spec = extend_spec(spec_from_config(config), changes)
    scaling = spec.attention.rope.scaling
    assert scaling == changes["scaling"]
    opened = transformers.LlamaConfig.from_dict(theirs)
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling](opened, seq_len=length)
    rotary = Rotary(spec.attention.rope, head_dim, spec.max_length)
    rotary.reset_buffers()
    assert torch.equal(rotary.at(length), frequencies) and rotary.factor == factor


@settings(deadline=None, max_examples=25)
@given(extensions())
def test_logits_are_those_of_transformers_given_the_same_fields(case) -> None:
    config, changes, theirs, _ = case
    spec = extend_spec(spec_from_config(config), changes)
    if theirs["rope_parameters"].get("factor", 0) is None:  # in files it is written
        theirs["rope_parameters"]["factor"] = spec.attention.rope.factor
    assert find_disagreement(spec, theirs) is None


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_a_model_that_is_stretched_already_keeps_its_original_length_and_fields() -> None:
    spec = spec_from_config(config_of(1024, 8, 1e4, original_max_position_embeddings=128, **LLAMA3))
    more = extend_spec(spec, {"max_length": 2048, "factor": 16.0})
    expected = RopeSpec(theta=1e4, scaling="llama3", factor=16.0, original_length=128)
    assert more.max_length == 2048 and more.attention.rope == expected
    other = extend_spec(spec, {"max_length": 4096, "scaling": "yarn"})
    assert other.attention.rope == RopeSpec(theta=1e4, scaling="yarn", factor=32.0, original_length=128)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"factor": 2.0}, "model.extend.factor=2.0 has no effect with scaling=none"),
        ({"scaling": "linear", "factor": 2.0, "beta_fast": 3.0}, "model.extend.beta_fast=3.0 has no effect"),
        ({"scaling": "llama3", "max_length": 4096}, "model.extend.factor, such as 4"),
        ({"scaling": "dynamic"}, "model.extend.factor, such as 2"),
        ({"scaling": "dynamic", "factor": 2.0, "max_length": 4096}, "model.extend.max_length=4096 contradicts"),
        ({"max_length": True}, "model.extend.max_length=True must be a number of tokens"),
    ],
)
def test_what_would_have_no_effect_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        extend_spec(spec_from_config(config_of(1024, 8, 1e4)), changes)


def test_nothing_changes_nothing() -> None:
    spec = ModelSpec()
    assert extend_spec(spec, {}) is spec
