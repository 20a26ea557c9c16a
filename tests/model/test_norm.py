"""Norms in narrow types, beside the same in fp64."""

from __future__ import annotations

import pytest
import torch

from trainer.config.model import NormSpec
from trainer.model.layers import Norm

TOKENS, WIDTH = 16384, 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradients_of_many_tokens_are_added_up_in_fp32(kind: str, offset: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, to_y = (torch.randn(TOKENS, WIDTH).to(dtype) for _ in range(2))
    narrow, wide = Norm(WIDTH, NormSpec(kind, offset=offset)), Norm(WIDTH, NormSpec(kind, offset=offset))
    gradients = []
    for norm, to in ((narrow, dtype), (wide, torch.float64)):
        for name, parameter in norm.named_parameters():
            torch.nn.init.constant_(parameter, {"weight": 0.75, "bias": 0.25}[name])
        inputs = x.to(to).requires_grad_()
        y = norm.to(to)(inputs)
        assert y.dtype == to
        gradients.append(torch.autograd.grad(y, [inputs, *norm.parameters()], to_y.to(to)))
    for ours, expected in zip(*gradients, strict=True):
        assert ours.dtype == dtype and (ours - expected).norm() < 0.01 * expected.norm()
