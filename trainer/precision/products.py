"""The matrix products of linear layers: the one place where they multiply.

A layer y = x W^T + b has three: its output, and in backward the gradients of its input and of its weight. The role of a
product says what its operands are. Numbers that are narrower than the compute type are another implementation of
`matmul` (`float8.py`): it knows by the role which range an operand needs and along which dimension it is summed over.
A layer hands its own to whatever multiplies for it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Role(Enum):
    """Which of a layer's products, as the kinds of its two operands."""

    OUTPUT = ("activation", "weight")
    INPUT_GRADIENT = ("gradient", "weight")
    WEIGHT_GRADIENT = ("gradient", "activation")


class Multiply(Protocol):
    """`matmul`, or an implementation of it."""

    def __call__(self, a: Tensor, b: Tensor, role: Role, add: Tensor | None = None) -> Tensor: ...


def matmul(a: Tensor, b: Tensor, role: Role, add: Tensor | None = None) -> Tensor:
    """One product, of operands as they lie in memory; `add` is added to it.

    | role | a | b | result | add |
    |---|---|---|---|---|
    | OUTPUT | x [tokens, inputs] | W [outputs, inputs] | x W^T [tokens, outputs] | the bias [outputs] |
    | INPUT_GRADIENT | dy [tokens, outputs] | W [outputs, inputs] | dy W [tokens, inputs] | other terms of it |
    | WEIGHT_GRADIENT | dy [tokens, outputs] | x [tokens, inputs] | dy^T x [outputs, inputs] | none |

    Differentiable."""
    if role is Role.OUTPUT:
        return F.linear(a, b, add)
    if role is Role.INPUT_GRADIENT:
        return a @ b if add is None else torch.addmm(add, a, b)
    return a.t() @ b


def matmul_runs(a: Tensor, b: Tensor, role: Role, add: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`matmul`, but of a weight's gradient, for runs of tokens that lie apart: a [runs, tokens, n] and the result have
    any strides. With `out`, where the result goes, it is not differentiable."""
    b = (b.t() if role is Role.OUTPUT else b).expand(len(a), -1, -1)
    return torch.bmm(a, b, out=out) if add is None else torch.baddbmm(add, a, b, out=out)


def matmul_into(out: Tensor, a: Tensor, b: Tensor, role: Role, add: Tensor | None = None) -> None:
    """`matmul`, but of a weight's gradient, into `out`, which may be what is added. Not differentiable."""
    b = b.t() if role is Role.OUTPUT else b
    if add is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(add, a, b, out=out)


def matmul_sum(
    operands: Sequence[Tensor], weights: Sequence[Tensor], role: Role, multiply: Multiply = matmul
) -> Tensor:
    """The sum of the products of each operand with its weight."""
    total = multiply(operands[0], weights[0], role)
    for operand, weight in zip(operands[1:], weights[1:]):
        total = multiply(operand, weight, role, total)
    return total
