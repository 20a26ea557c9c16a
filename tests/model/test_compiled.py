"""What is compiled stays compiled, or says that it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from support.launch import CAN_COMPILE

from trainer.distributed.collectives import TensorGroup
from trainer.model import stage
from trainer.model.attention import block_mask, causal_attention, compiled_flex, first_seen, mask_of
from trainer.model.linear import column_parallel
from trainer.parallel.recompute import policy_of
from trainer.planning.recompute import saved_in
from trainer.precision.products import Float8Multiply


@pytest.mark.skipif(not CAN_COMPILE, reason="needs a compiler")
def test_out_of_graphs_is_an_error(monkeypatch):
    """By itself torch goes on uncompiled, which FlexAttention does not survive under selective recompute."""
    monkeypatch.setattr(stage, "GRAPHS", 2)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=False):
        double = stage.compile_function(lambda x: 2 * x)
        for size in (2, 3):
            assert torch.equal(double(torch.ones(size)), torch.full((size,), 2.0))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            double(torch.ones(4))


def test_attention_has_graphs_for_many_shapes():
    """Also where nothing else is compiled: kinds of layers, micro-batches and evaluation each need one."""
    compiled_flex.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        compiled_flex()
        assert torch._dynamo.config.recompile_limit == stage.GRAPHS
        assert torch._dynamo.config.fail_on_recompile_limit_hit


def test_block_masks_are_in_the_graph_of_what_is_around():
    """As of a layer that GPUs recompute in part: a graph of its own would cut that of the layer, which then runs
    uncompiled."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 32, 16, generator=generator) for _ in range(3))
    factor = torch.ones((), requires_grad=True)  # torch has no backward pass of FlexAttention on CPUs
    documents = torch.repeat_interleave(torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]]), 8, 1)
    places = torch.arange(32)
    first = first_seen(documents, 32, 0, places.device)
    run = policy_of(saved_in(["attention"], 0), [], TensorGroup)

    def layer(mask: object) -> torch.Tensor:
        return run(lambda: factor * causal_attention(query, key, value, mask, 0.25))

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(block_mask(first, places, 32)), layer(mask_of(first, places, 32)))


def test_a_single_matrix_in_fp8_stays_in_the_graph_without_gradients():
    """As in evaluation, where the compiler itself calls what autograd calls otherwise."""
    multiply, x = Float8Multiply("rowwise"), torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(48, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return column_parallel(x, [weight], [None], None, multiply=multiply)[0]

    whole = torch.compile(product, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(whole(x, weight), product(x, weight), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("matrices", [1, 2])
def test_compiled_products_in_fp8_have_the_gradients_of_eager_ones(matrices, dtype):
    """They were zeros in fp32 under torch 2.11."""
    multiply, draw = Float8Multiply("rowwise"), torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(n, 16, generator=draw, dtype=dtype) for n in (32, 48, 24)[: 1 + matrices])

    def gradients(run: Callable[..., Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        leaves = [one.clone().requires_grad_() for one in (x, *weights)]
        results = run(leaves[0], leaves[1:], [None] * matrices, None, multiply=multiply)
        return list(torch.autograd.grad(sum(result.float().square().sum() for result in results), leaves))

    compiled = torch.compile(column_parallel, backend="aot_eager", fullgraph=True)
    for found, expected in zip(gradients(compiled), gradients(column_parallel), strict=True):
        assert expected.count_nonzero() and torch.equal(found, expected)
