"""Frequencies and factors of rotary positions, beside transformers' own functions."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.model import RopeSpec
from trainer.hf.config import ROPE_NAMES, ROPE_TYPES, SCALING_FIELDS
from trainer.model.rotary import SCALINGS, Rotary, attention_factor, rope_frequencies
from trainer.model.transformer import document_lengths, document_positions

rope = pytest.importorskip("transformers.modeling_rope_utils")
LlamaConfig = pytest.importorskip("transformers").LlamaConfig
MAX_LENGTH = 4096


def theirs(spec: RopeSpec, head_dim: int, length: int) -> tuple[torch.Tensor, float]:
    kind = next(name for name, ours in ROPE_TYPES.items() if ours == spec.scaling)
    values = {name: value for name, value in asdict(spec).items() if name in SCALING_FIELDS[spec.scaling]}
    unset = {name for name in ("attention_factor", "mscale", "mscale_all_dim") if not values.get(name)}
    parameters = {ROPE_NAMES[name]: value for name, value in values.items() if name not in unset}
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": kind, "rope_theta": spec.theta, **parameters},
    )
    return rope.ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(set(SCALINGS) - {"none"})),
    st.sampled_from([8, 64, 96, 128]),
    st.sampled_from([100, 4096, 5000, 131072]),
    st.data(),
)
def test_frequencies_are_those_of_transformers_to_the_bit(scaling, head_dim, length, data):
    def drawn(low: float, high: float) -> float:
        return data.draw(st.floats(low, high))

    spec = RopeSpec(
        theta=drawn(100, 1e6),
        scaling=scaling,
        factor=drawn(1, 64),
        low_frequency_factor=drawn(0.5, 2),
        high_frequency_factor=drawn(3, 8),
        original_length=data.draw(st.integers(64, 8192)),
        beta_fast=drawn(8, 64),
        beta_slow=drawn(0.1, 4),
        truncate=data.draw(st.booleans()),
        attention_factor=data.draw(st.sampled_from([0.0, 1.3])),
        mscale=data.draw(st.sampled_from([0.0, 0.7])),
        mscale_all_dim=data.draw(st.sampled_from([0.0, 1.0])),
        short_factor=[drawn(1, 4) for _ in range(head_dim // 2)] if scaling == "longrope" else [],
        long_factor=[drawn(1, 64) for _ in range(head_dim // 2)] if scaling == "longrope" else [],
    )
    frequencies, factor = theirs(spec, head_dim, length)
    assert torch.equal(rope_frequencies(spec, head_dim, MAX_LENGTH, length), frequencies)
    assert attention_factor(spec) == factor


@pytest.mark.parametrize(
    "spec, limit",
    [
        (RopeSpec(scaling="dynamic", factor=2.0), 64),
        (RopeSpec(scaling="longrope", original_length=32, short_factor=[1.0] * 4, long_factor=[2.0] * 4), 32),
        (RopeSpec(scaling="yarn", factor=2.0, original_length=32), math.inf),
    ],
    ids=lambda value: getattr(value, "scaling", ""),
)
def test_frequencies_follow_the_sequence_where_they_do(spec, limit):
    """By its length alone: positions that are a part of the sequence change nothing."""
    rotary = Rotary(spec, 8, 64)
    rotary.reset_buffers()
    part = torch.arange(8)
    for length in (32, 33, 64, 65, 200):
        expected = rope_frequencies(spec, 8, 64, length if length > limit else 0)
        cos, sin = rotary(part, length)
        angles = part[:, None] * expected
        factor = attention_factor(spec)
        assert torch.equal(cos, angles.cos()[None, :, None] * factor)
        assert torch.equal(sin, angles.sin()[None, :, None] * factor)
    assert torch.equal(rotary(part, 32)[0], rotary(part, 20)[0])


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(sorted(SCALINGS)),
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=3),
    st.sampled_from([1, 16, 24, 200]),
)
def test_a_packed_document_has_the_rotation_of_the_document_alone(scaling, rows, limit):
    """To the bit, for every token of every document. Rows are padded with a document of their own."""
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 7.0]}
    rotary = Rotary(RopeSpec(scaling=scaling, factor=4.0, original_length=max(2, limit), **factors), 8, limit)
    rotary.reset_buffers()
    width = max(map(sum, rows))
    rows = [[*row, width - sum(row)] for row in rows]
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])
    found = rotary(document_positions(documents), document_lengths(documents))
    for index, row in enumerate(rows):
        alone = [rotary(torch.arange(length), length) for length in row]
        for part, values in enumerate(found):
            expected = torch.cat([one[part][0] for one in alone])
            assert torch.equal(values[index], expected)
