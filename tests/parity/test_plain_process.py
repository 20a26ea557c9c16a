"""The plain process in 16 bits beside fp32: sums over many tokens, and the limits that parity holds it to."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import Config
from trainer.config.model import AttentionSpec, FeedForwardSpec, LatentSpec, ModelSpec
from trainer.data.batches import MicroBatch
from trainer.distributed.collectives import TensorGroup
from trainer.hf.config import assign_field
from trainer.hf.families import FAMILIES
from trainer.model import transformer
from trainer.parity.compare import (
    PLAIN,
    SLACK,
    TOLERANCES,
    RunComparison,
    StepErrors,
    Trajectory,
    compare_runs,
    error_limits,
    judge_plan,
    plain_problems,
    train_reference,
)

TOKENS, LENGTH, VOCABULARY = 8192, 64, 256
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def spec_of(family: str) -> ModelSpec:
    """A model with one small layer and everything that its architecture implies."""
    spec = ModelSpec(family=family, vocab_size=VOCABULARY, width=32, depth=1, max_length=LENGTH)
    spec.attention, spec.feed_forward = AttentionSpec(heads=2, kv_heads=1), FeedForwardSpec(width=64)
    if FAMILIES[family].fixed.get("attention.kind") == "latent":
        sizes = LatentSpec(q_rank=24, kv_rank=24, nope_dim=8, rope_dim=8, value_dim=8)
        spec.attention.kv_heads, spec.attention.latent = 2, sizes
    for path, value in FAMILIES[family].fixed.items():
        assign_field(spec, path, value(spec) if callable(value) else value)
    for path in FAMILIES[family].fields.get("attention_bias", ()):
        assign_field(spec, path, True)
    spec.parallel_residual, spec.tied = family == "gpt_neox", family in ("gemma2", "gpt2")
    return spec


DISTINCT = [*{json.dumps(spec_of(family).to_dict() | {"family": ""}): family for family in FAMILIES}.values()]
"""A family for each model that `spec_of` gives: some families differ in nothing that is computed here."""


def batches(micro_batches: int, skew: float) -> list[MicroBatch]:
    """8,192 tokens in some micro-batches. The frequency of the token at rank r is proportional to r**-skew."""
    frequencies = torch.arange(1, VOCABULARY + 1).double() ** -skew
    rows = TOKENS // LENGTH
    drawn = torch.multinomial(
        frequencies.expand(rows, -1), LENGTH + 1, True, generator=torch.Generator().manual_seed(1)
    )
    parts = torch.arange(rows).chunk(micro_batches)
    return [MicroBatch(drawn[part, :-1], drawn[part, 1:], None, [str(row) for row in part.tolist()]) for part in parts]


def trained(
    family: str, kind: str | None, micro_batches: int, skew: float = 1.5, expected: Trajectory | None = None
) -> Trajectory:
    """One step of a plain process: in fp32, or in 16 bits of a kind, with the experts that were chosen in fp32."""
    compute = torch.float32 if kind is None else DTYPES[kind]
    choices = expected.choices if expected is not None else None
    data = [batches(micro_batches, skew)]
    return train_reference(Config(), spec_of(family), data, torch.device("cpu"), compute=compute, choices=choices)


@cache
def trained_in_fp32(family: str) -> Trajectory:
    return trained(family, None, 1)


@pytest.mark.parametrize("kind", list(PLAIN))
@pytest.mark.parametrize("family", DISTINCT)
def test_gradients_of_many_tokens_are_right_in_16_bits_whatever_the_micro_batch(family: str, kind: str) -> None:
    expected = trained_in_fp32(family)
    whole, parts = (trained(family, kind, count, expected=expected) for count in (1, 16))
    assert all(value.isfinite().all() for value in whole.gradients[0].values())
    # Half of what parity allows. Every gradient is compared, and none is missing.
    for seen in (whole, parts):
        errors = compare_runs(seen, expected).steps[0]
        assert seen.gradients[0].keys() == expected.gradients[0].keys()
        assert all(error <= limit / 2 for error, limit in zip(errors[:3], PLAIN[kind])), errors
    assert compare_runs(whole, parts).steps[0].gradient <= PLAIN[kind][2] / 2


# In fp16, a tied head's gradient is so much larger than the embedding's that the error stays below the limit.
@pytest.mark.parametrize(
    "family, kind", [*((family, "bf16") for family in ("llama", "gemma2", "gpt2")), ("llama", "fp16"), ("phi3", "fp16")]
)
def test_parity_fails_a_plain_process_that_adds_up_in_16_bits(family: str, kind: str, monkeypatch) -> None:
    expected = trained_in_fp32(family)
    assert not plain_problems(kind, compare_runs(trained(family, kind, 1), expected))
    monkeypatch.setattr(transformer, "look_up", F.embedding)
    wrong = trained(family, kind, 1)
    plain = compare_runs(wrong, expected)
    assert plain.steps[0].where == "embedding.weight"
    # The plan has the same fault, and agrees with the plain process.
    result = judge_plan("plan", [], kind, wrong, expected, plain)
    assert result.verdict == "FAIL"
    assert any(f"one plain process in {kind} is wrong by itself" in reason for reason in result.reasons)
    assert any("embedding.weight" in reason for reason in result.reasons)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(list(DTYPES.values())),
    st.integers(1, 40),
    st.integers(1, 6000),
    st.floats(0, 3),
    st.integers(0, 2**31),
)
def test_rows_of_a_table_get_the_sum_of_their_gradients(dtype, rows: int, tokens: int, skew: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    frequencies = torch.arange(1, rows + 1).double() ** -skew
    index = torch.multinomial(frequencies, tokens, True, generator=generator)
    gradient = (torch.rand(tokens, 3, generator=generator) + 0.5).to(dtype)
    table = torch.nn.Parameter(torch.randn(rows, 3, generator=generator).to(dtype))
    looked_up = transformer.look_up(index, table)
    assert torch.equal(looked_up, table[index])
    looked_up.backward(gradient)
    expected = torch.zeros(rows, 3, dtype=torch.float64).index_add_(0, index, gradient.double())
    assert table.grad is not None and table.grad.dtype == dtype
    torch.testing.assert_close(table.grad.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)


class Alone(TensorGroup):
    """A rank of a group whose other ranks have no tokens of their own: nothing travels."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    scatter_sum = wait = gather


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_of_a_table_get_the_sums_of_their_rows(ranks: int, dtype: torch.dtype) -> None:
    (batch,) = batches(1, 1.5)
    index = batch.tokens.flatten()
    gradient = (torch.rand(TOKENS, 3, generator=torch.Generator().manual_seed(2)) + 0.5).to(dtype)
    expected = torch.zeros(VOCABULARY, 3, dtype=torch.float64).index_add_(0, index, gradient.double())
    found = []
    for rank in range(ranks):
        table = transformer.Embedding(VOCABULARY, 3, "vocab")
        table.group = Alone(f"alone {ranks}", rank, ranks) if ranks > 1 else None
        start = rank * -(-VOCABULARY // ranks)
        part = torch.randn(VOCABULARY, 3)[start : start - (-VOCABULARY // ranks)]
        table.weight = torch.nn.Parameter(part.to(dtype))
        table(index).backward(gradient)
        assert table.weight.grad is not None
        found.append(table.weight.grad)
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=torch.finfo(dtype).eps, atol=0)


ERRORS = st.lists(st.tuples(*[st.floats(0, 0.1)] * 3), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(TOLERANCES)), ERRORS)
def test_a_step_may_be_off_by_what_the_plain_process_was_in_any_step_before(kind: str, errors: list) -> None:
    """The plan's errors are those of the plain process, one step later or at once."""
    plain = RunComparison([StepErrors(*step, "a") for step in errors], 0.0, "a")
    allowed = error_limits(kind, plain)
    assert len(allowed) == len(errors)
    for number, limit in enumerate(allowed):
        for place in range(3):
            largest = max(step[place] for step in errors[: number + 1])
            later = PLAIN[kind][0] if number and not place and kind in PLAIN else 0.0
            assert limit[place] == max(TOLERANCES[kind][place], SLACK[kind] * largest, later)


def test_a_loss_whose_error_changes_its_sign_is_no_false_alarm() -> None:
    """The error of the plain process passes through zero in the second step; that of the plan does not."""

    def of(*losses: float) -> Trajectory:
        weights = {"a": torch.ones(2)}
        return Trajectory(weights, list(losses), [1.0] * 3, [weights] * 3, weights)

    expected = of(4.0, 4.0, 4.0)
    plain = compare_runs(of(4.0008, 4.00001, 3.9992), expected)
    assert judge_plan("plan", [], "bf16", of(4.0008, 4.00096, 3.9992), expected, plain).verdict == "PASS"
    assert judge_plan("plan", [], "bf16", of(4.0008, 4.004, 3.9992), expected, plain).verdict == "FAIL"
