"""Bytes that the kernels of an eager layer move, as `planning/layer.py` has them, beside those of the operators that
run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.estimates import shipped
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.model.layers import gate_hidden
from trainer.model.loss import loss_statistics, to_loss_gradient
from trainer.model.rotary import rotate_heads, rotate_pairs
from trainer.planning.layer import head_program, layer_program
from trainer.planning.parameters import layer_specs

TOKENS = 64
VIEWS = {"view", "_unsafe_view", "transpose", "expand", "slice", "select", "unsqueeze", "detach", "alias", "split"}
LOG_SUM = 24
"""Bytes of an element that `logsumexp` moves, which is one operator and several kernels: the maximum, the difference
to it, its exponential in place, and the sum."""


class Traffic(TorchDispatchMode):
    """Adds up the bytes of tensors that operators read and write. What is broadcast counts once."""

    moved = 0

    def __torch_dispatch__(self, operator: Any, types: Any, given: tuple = (), named: dict | None = None) -> Any:
        result = operator(*given, **(named or {}))
        name = operator.__name__.split(".")[0]
        if name == "logsumexp":
            self.moved += LOG_SUM * given[0].numel()
        elif name == "copy_":
            self.moved += sum(one.numel() * one.element_size() for one in given[:2])
        elif name not in VIEWS:
            read = [] if name in ("zeros", "new_zeros") else tree_leaves((given, named))
            tensors = [one for one in [*read, *tree_leaves(result)] if isinstance(one, Tensor)]
            self.moved += sum(one.numel() * one.element_size() for one in tensors)
        return result


def moved_by(function: Any, *inputs: Tensor) -> tuple[float, float]:
    """Bytes of a token in the forward and in the backward pass."""
    with Traffic() as forward:
        result = function(*inputs)
    gradient = torch.empty_like(result)
    with Traffic() as backward:
        torch.autograd.grad(result, [one for one in inputs if one.requires_grad], gradient)
    return forward.moved / TOKENS, backward.moved / TOKENS


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, trained: bool = True) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=trained)


def program_of(name: str) -> Any:
    spec = shipped(name)
    return layer_program(layer_specs(spec)[0], spec.width, False, 4096, 1, 2, "off", True, 0.0)


@pytest.mark.parametrize("name", ["llama3_8b", "gpt_oss_20b", "deepseek_v2_lite"])
def test_operations_between_gemms(name):
    spec, program = layer_specs(shipped(name))[0], program_of(name)
    ops = {op.name: op for op in program.ops}
    a = spec.attention
    latent = a.kind == "latent"
    size = a.latent.rope_dim if latent else a.head_dim
    angles = [tensor(1, TOKENS, 1, size // 2, dtype=torch.float32, trained=False) for _ in range(2)]
    rotate = rotate_pairs if latent else rotate_heads
    heads = tensor(1, TOKENS, a.heads + (1 if latent else a.kv_heads), size)
    told = ops["attention.rotary"]
    assert moved_by(lambda x: rotate(x, *angles), heads) == pytest.approx((told.traffic, told.back_traffic), rel=0.06)


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_gates(activation):
    spec = shipped("llama3_8b")
    layer = layer_specs(spec)[0]
    layer.feed_forward.activation = activation
    program = layer_program(layer, spec.width, False, 4096, 1, 2, "off", True, 0.0)
    told = next(op for op in program.ops if op.name == "feed_forward.activation")
    size = layer.feed_forward.width
    found = moved_by(lambda gate, up: gate_hidden(activation, gate, up), tensor(TOKENS, size), tensor(TOKENS, size))
    assert found == pytest.approx((told.traffic, told.back_traffic), rel=0.06)


def test_loss():
    spec = shipped("llama3_8b")
    logits, index = tensor(TOKENS, spec.vocab_size, trained=False), torch.empty(TOKENS, dtype=torch.long, device="meta")
    valid, normaliser = index.bool(), index.float()
    with Traffic() as traffic:
        loss_statistics(logits, spec.vocab_size, index, 0.0)
        to_loss_gradient(logits, spec.vocab_size, index, valid, normaliser, 0.0, 0.0)
    told = head_program(spec, 1, 2).total("traffic", "loss")
    assert traffic.moved / TOKENS == pytest.approx(told, rel=0.02)
