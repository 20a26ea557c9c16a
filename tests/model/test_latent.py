"""Latent attention: its definition, its scale, what it refuses, and the tensors of DeepSeek's folders."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.config.model import AttentionSpec, LatentSpec, ModelSpec, NormSpec, RopeSpec
from trainer.model.attention import build_mask
from trainer.model.layers import LatentAttention
from trainer.model.rotary import Rotary
from trainer.planning.layer import attention_flops

WIDTH, LENGTH = 12, 9
CPU = torch.device("cpu")


def resolved(latent: LatentSpec, **changes: Any) -> AttentionSpec:
    spec = AttentionSpec(kind="latent", latent=latent, **changes)
    spec.resolve(WIDTH)
    return spec


def normalise(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turn(x: Tensor, theta: float) -> Tensor:
    """Each pair of neighbouring elements of x [tokens, ..., size] as a complex number, turned by its token's place."""
    size = x.shape[-1]
    angles = torch.outer(torch.arange(len(x)).float(), 1 / theta ** (torch.arange(0, size, 2).float() / size)).double()
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles), angles).view(len(x), *[1] * (x.dim() - 2), -1)
    return torch.view_as_real(turned).flatten(-2)


def defined(block: LatentAttention, spec: AttentionSpec, x: Tensor, seen: Tensor) -> Tensor:
    """The definition (arXiv 2405.04434, equations 37 to 47) for one sequence [tokens, width], head by head."""
    latent, nope = spec.latent, spec.latent.nope_dim
    queries = (
        normalise(x @ block.q_a.weight.t(), block.q_norm.weight) @ block.q_b.weight.t()
        if latent.q_rank
        else x @ block.q.weight.t()
    ).view(len(x), spec.heads, -1)
    compressed = x @ block.kv_a.weight.t()
    shared = compressed[:, latent.kv_rank :]
    expanded = normalise(compressed[:, : latent.kv_rank], block.kv_norm.weight) @ block.kv_b.weight.t()
    expanded = expanded.view(len(x), spec.heads, -1)
    rotated = queries[..., nope:]
    if spec.positions == "rope":
        shared, rotated = turn(shared, spec.rope.theta), turn(rotated, spec.rope.theta)
    heads = []
    for head in range(spec.heads):
        scores = queries[:, head, :nope] @ expanded[:, head, :nope].t() + rotated[:, head] @ shared.t()
        weights = (scores * spec.scale).masked_fill(~seen, -math.inf).softmax(-1)
        heads.append(weights @ expanded[:, head, nope:])
    return torch.cat(heads, -1) @ block.o.weight.t()


@settings(max_examples=40, deadline=None)
@given(
    q_rank=st.sampled_from([0, 5]),
    kv_rank=st.integers(1, 6),
    nope=st.integers(1, 5),
    rope=st.sampled_from([2, 4]),
    value=st.integers(1, 7),
    heads=st.integers(1, 3),
    window=st.sampled_from([0, 1, 4]),
    positions=st.sampled_from(["rope", "none"]),
)
def test_latent_attention_is_its_definition(q_rank, kv_rank, nope, rope, value, heads, window, positions) -> None:
    """Outputs, and the gradients of tokens and all parameters, of two sequences."""
    latent = LatentSpec(q_rank, kv_rank, nope, rope, min(value, nope + rope))
    spec = resolved(latent, heads=heads, window=window, positions=positions, rope=RopeSpec(theta=50.0))
    assert not latent.check(spec)
    torch.manual_seed(0)
    block = LatentAttention(spec, NormSpec(eps=0.1), WIDTH).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    rotary = Rotary(spec.rope, spec.rotary_dim, 64)
    rotary.reset_buffers()
    x = torch.randn(2 * LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = build_mask(None, LENGTH, window, 0.0, CPU)
    found = block(x, (2, LENGTH), rotary(torch.arange(LENGTH), LENGTH), mask)
    place = torch.arange(LENGTH)
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < (window or LENGTH))
    expected = torch.cat([defined(block, spec, part, seen) for part in x.split(LENGTH)])
    inputs, gradient = [x, *block.parameters()], torch.randn_like(expected)
    of_found, of_expected = (torch.autograd.grad(y, inputs, gradient) for y in (found, expected))
    for one, other in ((found, expected), *zip(of_found, of_expected)):  # rotations are in fp32
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item() + 1e-9)


@given(factor=st.floats(1, 64), weight=st.floats(0, 2), scaling=st.sampled_from(["yarn", "linear"]))
def test_yarn_changes_the_scale_of_scores(factor: float, weight: float, scaling: str) -> None:
    """DeepSeek-V3: 0.1 ln(40) + 1, squared, beside 192 ** -0.5. A scale that is given stays."""
    rope = RopeSpec(scaling=scaling, factor=factor, mscale=1.0, mscale_all_dim=weight)
    expected = 192**-0.5 * ((0.1 * weight * math.log(factor) + 1) ** 2 if scaling == "yarn" else 1)
    assert resolved(LatentSpec(), rope=rope).scale == pytest.approx(expected)
    assert resolved(LatentSpec(), rope=rope, scale=0.3).scale == 0.3
    plain = AttentionSpec(heads=2, rope=rope)
    plain.resolve(WIDTH)
    assert plain.scale == (WIDTH // 2) ** -0.5


def test_attention_counts_keys_and_values_of_their_sizes() -> None:
    spec = resolved(LatentSpec(), heads=16)
    assert attention_flops(spec, 100.0) == 2 * 16 * (192 + 128) * 100 == 4 * attention_flops(spec, 100.0, 4)


def model(**attention: Any) -> ModelSpec:
    spec = ModelSpec(width=24, depth=2)
    spec.attention = AttentionSpec(kind="latent", heads=4, latent=LatentSpec(8, 8, 6, 4, 8))
    spec.attention = replace(spec.attention, **attention)
    return spec


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kv_heads": 2}, ["attention.kv_heads=2", "heads=4", "kv_heads=0"]),
        ({"head_dim": 16}, ["attention.head_dim=16", "head_dim=10, or 0"]),
        ({"qk_norm": "head"}, ["attention.qk_norm=head", "qk_norm=none"]),
        ({"rope": RopeSpec(fraction=0.5)}, ["attention.rope.fraction=0.5", "fraction=1"]),
        ({"rope": RopeSpec(scaling="yarn", theta=1.0)}, ["rope.theta=1.0", "yarn"]),
        ({"latent": LatentSpec(8, 8, 6, 3, 8)}, ["latent.rope_dim=3", "even"]),
        ({"latent": LatentSpec(-1, 8, 6, 4, 8)}, ["latent.q_rank=-1"]),
        ({"latent": LatentSpec(0, 0, 6, 4, 8)}, ["latent.kv_rank=0", "positive"]),
        ({"latent": LatentSpec(0, 8, 0, 4, 4)}, ["latent.nope_dim=0", "positive"]),
        ({"latent": LatentSpec(0, 8, 6, 4, 0)}, ["latent.value_dim=0", "positive"]),
        ({"latent": LatentSpec(0, 8, 6, 4, 11)}, ["latent.value_dim=11", "up to 10"]),
        ({"kind": "softmax"}, ["attention.latent", "kind=latent", "softmax"]),
    ],
)
def test_what_contradicts_latent_attention_is_refused_by_name(changes: dict, words: list[str]) -> None:
    assert model().check() == []
    problems = model(**changes).check()
    assert len(problems) == 1 and all(word in problems[0] for word in words), problems
