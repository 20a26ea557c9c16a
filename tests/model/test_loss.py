"""The fused projection and cross-entropy against plain autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from trainer.model import loss
from trainer.model.loss import IGNORE, LossSettings, linear_cross_entropy


def problem(tokens: int, vocab: int, dtype: torch.dtype = torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 8, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[::3] = IGNORE
    return hidden, weight, targets


@budget(deadline=None, max_examples=40)
@given(
    st.integers(2, 17),
    st.integers(2, 30),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from([0.0, 1e-2]),
    st.integers(0, 20),
)
def test_value_and_gradients_equal_autograd(tokens, vocab, soft_cap, z_loss, chunk):
    compare(problem(tokens, vocab), LossSettings(soft_cap, z_loss, chunk))


@pytest.mark.parametrize("vocab", [1024, 1025, 1087, 1088, 2051])
@pytest.mark.parametrize("settings", [LossSettings(3.0, 1e-2, 5), LossSettings(z_loss=1e-2, tile=5)])
def test_products_take_rows_of_zeros_behind_a_large_vocabulary(vocab, settings, monkeypatch):
    taken = []
    plain = loss.matmul

    def noted(a, b, role):
        taken.append((a.shape, b.shape))
        return plain(a, b, role)

    monkeypatch.setattr(loss, "matmul", noted)
    compare(problem(11, vocab), settings)
    rows = vocab if vocab <= 1024 else -(-vocab // 64) * 64
    assert {size for shapes in taken for shape in shapes for size in shape} - {11, 5, 1, 8} == {rows}


def compare(given: tuple[torch.Tensor, ...], settings: LossSettings) -> None:
    """Value and gradients beside those of autograd."""
    (hidden, weight, targets), soft_cap, z_loss = given, settings.soft_cap, settings.z_loss
    logits = hidden @ weight.t()
    logits = soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
    entropy = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    objective = entropy.sum() + z_loss * logits.logsumexp(-1).square()[targets != IGNORE].sum()
    expected = torch.autograd.grad(objective / 7, (hidden, weight))
    ours, reported, _ = linear_cross_entropy(hidden, weight, targets, settings, None, 0)
    torch.testing.assert_close((ours, reported), (objective, entropy))
    torch.testing.assert_close(torch.autograd.grad(ours / 7, (hidden, weight)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_have_no_common_factor(dtype):
    """1 / valid tokens is no number of the compute type: rounding it would scale every gradient alike."""
    hidden, weight, targets = problem(3000, 40, dtype)
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    for valid in (190_001, 777):
        ours, _, _ = linear_cross_entropy(hidden, weight, targets, LossSettings(chunk=512), None, 0)
        exact, _, _ = linear_cross_entropy(exact_hidden, exact_weight, targets, LossSettings(), None, 0)
        scale = 4096.0 if dtype is torch.float16 else 1.0  # as the loss scaler does
        for mine, reference in zip(
            torch.autograd.grad(ours * scale / valid, (hidden, weight)),
            torch.autograd.grad(exact * scale / valid, (exact_hidden, exact_weight)),
        ):
            factor = (mine.double() * reference).sum() / reference.square().sum()
            assert factor == pytest.approx(1, abs=4e-4)


def test_without_targets_there_is_neither_loss_nor_gradient():
    hidden, weight, targets = problem(5, 4)
    ours, reported, _ = linear_cross_entropy(
        hidden, weight, torch.full_like(targets, IGNORE), LossSettings(0.0, 1e-4, 2), None, 0
    )
    assert ours == 0 and not reported.any()
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(ours, (hidden, weight)))
