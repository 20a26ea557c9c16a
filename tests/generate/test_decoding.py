"""Logits from kept keys and values beside those of whole passes, in fp64: every family, and features at random."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from support.generation import generate_tokens
from support.variations import small
from torch import Tensor

from trainer.config.model import ModelSpec, assign_fields
from trainer.generate.sampling import SamplingOptions, TokenGenerator
from trainer.generate.sharded_model import ShardedModel
from trainer.hf.families import FAMILIES
from trainer.model.cache import attend_new_tokens
from trainer.model.initial import initialize_model
from trainer.model.layers import Attention
from trainer.model.transformer import Transformer
from trainer.parallel.parallelize import keep_buffers

CPU = torch.device("cpu")
LENGTHS = (1, 17, 62)  # the last one outgrows a block of slots


def build(spec: ModelSpec) -> Transformer:
    """A model in fp64 whose logits are far from ties, and whose sinks differ."""
    spec.init.std = 0.3
    model = Transformer(spec)
    initialize_model(model, spec, 0, CPU)
    for name, parameter in model.named_parameters():
        if ".sinks." in name:
            torch.nn.init.normal_(parameter)
    model.double()
    keep_buffers(model, CPU)
    return model.eval()


@dataclass(frozen=True)
class Noting(SamplingOptions):
    """Keeps the logits that tokens are chosen from."""

    seen: list[Tensor] = field(default_factory=list)

    def choose(self, logits: Tensor, draw: Tensor) -> Tensor:
        self.seen.append(logits.clone())
        return super().choose(logits, draw)


def worst(spec: ModelSpec, lengths: tuple[int, ...] = LENGTHS, count: int = 4) -> float:
    """The largest difference of any logit of a batch of prompts from that of a pass over its context alone, as a part
    of the largest logit."""
    model, generator = build(spec), torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, spec.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    sampling = Noting(temperature=1.0, seed=3)
    found = generate_tokens(ShardedModel(spec, {0: model}, CPU, torch.float64), prompts, count, sampling)
    assert [len(tokens) for tokens in found] == [count] * len(prompts) and len(sampling.seen) == count
    differences = []
    with torch.no_grad():
        for row, (prompt, more) in enumerate(zip(prompts, found)):
            for step in range(count):
                context = (prompt + more[:step])[-spec.max_length :]
                expected = model(torch.tensor([context]))[0, -1]
                difference = (sampling.seen[step][row] - expected).abs().max() / expected.abs().max()
                differences.append(difference.item())
    return max(differences)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_what_whole_passes_compute(family: str) -> None:
    latent = FAMILIES[family].fixed.get("attention.kind") == "latent"
    kinds = [(window, heads) for window in (0, 5) for heads in ((4,) if latent else (1, 2, 4))]
    for window, heads in kinds:
        spec = small(family, max_length=80, attention__kv_heads=heads, attention__window=window)
        assert worst(spec) < 1e-12, (window, heads)


ROPES = [
    {"scaling": "none", "fraction": 0.5},
    {"scaling": "linear", "factor": 4.0},
    {"scaling": "dynamic", "factor": 4.0},
    {"scaling": "llama3", "factor": 8.0, "original_length": 16},
    {"scaling": "yarn", "factor": 4.0, "original_length": 16},
    {"scaling": "longrope", "original_length": 19, "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1, 2, 3, 4.0]},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["scaling"])
def test_every_scaling_of_positions(rope: dict) -> None:
    """Prompts on both sides of the length from which frequencies differ, one that grows past it, and one whose context
    slides."""
    spec = small("llama", max_length=64, attention__kv_heads=2)
    assign_fields(spec.attention, {"rope": rope}, "model.attention")
    assert worst(spec, count=5) < 1e-12


@budget(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 4]),
    windows=st.sampled_from([(0,), (1,), (3, 0), (70, 0, 9)]),
    soft_cap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    qk_norm=st.sampled_from(["none", "head", "full"]),
    positions=st.sampled_from(["rope", "learned", "none"]),
    placement=st.sampled_from(["pre", "post", "both"]),
    norm=st.sampled_from(["rms", "layer"]),
    parallel=st.booleans(),
    tied=st.booleans(),
    cap=st.sampled_from([0.0, 3.0]),
    scale=st.sampled_from([1.0, 5.6]),
    length=st.integers(6, 80),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
)
def test_any_features_together(
    heads, windows, soft_cap, sinks, qk_norm, positions, placement, norm, parallel, tied, cap, scale, length, lengths
) -> None:
    """Contexts may be longer than the model from the start, or slide later."""
    spec = small("llama", max_length=length, tied=tied, parallel_residual=parallel, logit_soft_cap=cap)
    spec.embedding_scale, spec.learned_positions = scale, positions == "learned"
    attention, spec.depth = spec.attention, len(windows)
    attention.kv_heads, attention.soft_cap, attention.qk_norm = heads, soft_cap, qk_norm
    attention.positions, attention.sinks = "rope" if positions == "rope" else "none", sinks
    spec.norm.placement, spec.norm.kind = placement, norm
    spec.pattern = [{"attention": {"window": window}} for window in windows]
    assert worst(spec, tuple(lengths), 3) < 1e-12


def test_attention_that_keeps_no_keys_computes_whole_contexts(monkeypatch) -> None:
    monkeypatch.setattr(Attention, "caches", False)
    assert worst(small("llama", max_length=64)) < 1e-12


def test_a_token_costs_a_pass_over_itself() -> None:
    """Also where a sequence outgrows its frequencies, but for the one token with which it does."""
    spec = small("llama", max_length=200, attention__rope__scaling="longrope", attention__rope__original_length=30)
    spec.attention.rope.short_factor, spec.attention.rope.long_factor = [1.0] * 4, [2.0] * 4
    model, shapes = build(spec), []
    model.layers["0"].register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    generate_tokens(ShardedModel(spec, {0: model}, CPU, torch.float64), [[1] * 28, [2]], 6, SamplingOptions())
    assert [rows for rows, _ in shapes] == [64, 2, 2, 64, 2, 2]


@given(
    heads=st.sampled_from([1, 2, 4]), soft_cap=st.sampled_from([0.0, 1.5]), sunk=st.booleans(), seed=st.integers(0, 9)
)
@budget(max_examples=40, deadline=None)
def test_attention_to_kept_keys_is_that_of_its_formula(heads, soft_cap, sunk, seed) -> None:
    """With scores so large that their exponentials overflow."""
    generator = torch.Generator().manual_seed(seed)
    query = 60 * torch.randn(2, 4, 1, 8, dtype=torch.float64, generator=generator)
    keys, values = 60 * torch.randn(2, 2, heads, 15, 8, dtype=torch.float64, generator=generator)
    visible = torch.rand(2, 1, 1, 15, generator=generator) < 0.5
    visible[..., 0] = True
    sinks = 900 * torch.randn(4, dtype=torch.float64, generator=generator) if sunk else None
    found = attend_new_tokens(query, keys, values, visible, 0.5, soft_cap, sinks)
    repeated = [x.repeat_interleave(4 // heads, 1) for x in (keys, values)]
    scores = query @ repeated[0].transpose(2, 3) * 0.5
    scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(2, 4, 1, 1)], -1)
    expected = torch.softmax(scores, -1)[..., :15] @ repeated[1]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_model_is_left_as_it_was() -> None:
    model = build(small("llama")).train()
    layer = model.layers["0"]
    layer.recompute = recompute = lambda body, *inputs: body(*inputs)
    generation = TokenGenerator(ShardedModel(model.spec, {0: model}, CPU, torch.float64), [[1]], 2, SamplingOptions())
    with generation.model.inference():
        next(iter(generation))
        assert not model.training and layer.recompute is None and not torch.is_grad_enabled()
    assert model.training and layer.training and layer.recompute is recompute and torch.is_grad_enabled()
