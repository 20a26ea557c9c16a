"""Causal attention without a mask: what kernels are given, and that it changes no value."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model.attention import (
    KernelFit,
    attend_causal,
    attend_fitted,
    attend_last_by_flash,
    attend_plain,
    causal_attention,
    device_capability,
    fit_kernel,
    last_queries,
)

TURING, AMPERE, RTX_3090, HOPPER, BLACKWELL, RTX_5090 = 75, 80, 86, 90, 100, 120
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    "capability, dtype, head_dim, given",
    [  # flash attention
        *(
            (gpu, dtype, 128, KernelFit(dtype, 128, True))
            for gpu in (AMPERE, RTX_3090, HOPPER, BLACKWELL)
            for dtype in (BF16, FP16)
        ),
        (HOPPER, BF16, 100, KernelFit(BF16, 104, True)),
        (HOPPER, BF16, 256, KernelFit(BF16, 256, True)),
        (RTX_3090, BF16, 256, KernelFit(BF16, 256, True)),
        # the memory-efficient kernel: flash attention has no such type, head or backward pass
        (HOPPER, FP32, 128, KernelFit(FP32, 128, False)),
        (HOPPER, FP32, 6, KernelFit(FP32, 8, False)),
        (TURING, FP32, 6, KernelFit(FP32, 6, False)),
        (HOPPER, BF16, 257, KernelFit(BF16, 264, False)),
        (AMPERE, FP16, 512, KernelFit(FP16, 512, False)),
        (RTX_3090, BF16, 200, KernelFit(BF16, 200, False)),
        (RTX_5090, FP16, 224, KernelFit(FP16, 224, False)),
        (TURING, FP16, 128, KernelFit(FP16, 128, False)),
        (TURING, FP16, 100, KernelFit(FP16, 104, False)),
        (TURING, BF16, 128, KernelFit(FP32, 128, False)),  # which has no bf16 there
    ],
)
def test_a_kernel_that_holds_no_scores_is_given_what_it_takes(capability, dtype, head_dim, given) -> None:
    assert fit_kernel(capability, dtype, head_dim) == given


@pytest.mark.parametrize("queries", [9, 3])
@pytest.mark.parametrize(
    "given", [KernelFit(torch.float64, 6, True), KernelFit(torch.float64, 8, False), KernelFit(torch.float64, 6, False)]
)
@pytest.mark.parametrize("value_dim", [6, 5])
def test_what_is_given_changes_no_value(queries: int, given: KernelFit, value_dim: int) -> None:
    """Forward and backward: repeated keys, and heads filled up with zeros."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, queries, 6), (2, 2, 9, 6), (2, 2, 9, value_dim), (2, 4, queries, value_dim)
    *inputs, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    inputs = [x.requires_grad_() for x in inputs]
    plain, fitted = attend_causal(*inputs, 0.5), attend_fitted(*inputs, 0.5, given)
    torch.testing.assert_close(fitted, plain, rtol=1e-13, atol=1e-13)
    for one, other in zip(*(torch.autograd.grad(out, inputs, gradient) for out in (plain, fitted))):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_a_compiled_layer_asks_for_the_device_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    def run(x: torch.Tensor) -> torch.Tensor:
        return x.to(fit_kernel(device_capability(x.device), BF16, 64).dtype)

    whole = torch.compile(run, backend="eager", fullgraph=True)
    assert whole(torch.zeros(2, dtype=BF16)).dtype == FP32


def test_last_queries_need_no_mask() -> None:
    """Nothing is held for each pair, compiled or where operators are recorded as well."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    scores = (query @ key.repeat_interleave(2, 1).mT * 0.5).masked_fill(~torch.ones(3, 9).tril(6).bool(), -torch.inf)
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            return operator(*args, **(kwargs or {}))

    for run in (causal_attention, torch.compile(causal_attention)):
        with Recorded() if run is causal_attention else contextlib.nullcontext():
            torch.testing.assert_close(run(query, key, value, None, 0.5), expected, rtol=1e-5, atol=1e-6)
    million = last_queries(2**20, 2**20)
    assert million.untyped_storage().nbytes() == 0 and million.seq_len_kv == 2**20


def late(head_dim: int, device: str) -> list[torch.Tensor]:
    """Queries, keys and values with shared key-value heads, and the gradient of what comes of them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, head_dim) for heads, length in ((4, 80), (2, 200), (2, 200), (4, 80))]
    *inputs, gradient = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)
    return [*(x.requires_grad_() for x in inputs), gradient]


def test_flash_attention_of_last_queries_is_compiled_whole() -> None:
    """Forward and backward, where selective recompute goes by its operators too."""
    *inputs, gradient = late(64, "meta")
    whole = torch.compile(attend_last_by_flash, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(whole(*inputs, 0.5), inputs, gradient)
    assert [x.shape for x in found] == [x.shape for x in inputs]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 100])
@pytest.mark.parametrize("compile", [False, True])
def test_last_queries_on_a_gpu(head_dim: int, compile: bool) -> None:
    """Forward and backward, beside fp64."""
    *inputs, gradient = late(head_dim, "cuda")
    run = torch.compile(attend_plain, fullgraph=True) if compile else attend_plain
    found = run(*inputs, 0.1)
    found = [found, *torch.autograd.grad(found, inputs, gradient)]
    query, key, value = (x.detach().double().cpu().requires_grad_() for x in inputs)
    expected = attend_causal(query, key, value, 0.1)
    expected = [expected, *torch.autograd.grad(expected, (query, key, value), gradient.double().cpu())]
    for one, other in zip(found, expected):
        assert (one.cpu().double() - other).norm() < 1e-2 * other.norm()
