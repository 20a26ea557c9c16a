"""The matrix products of linear layers: the one place where they multiply.

A layer y = x W^T + b has three: its output, and in backward the gradients of its input and of its weight. The role of a
product says what its operands are. Numbers that are narrower than the compute type are another implementation of
`matmul` (`float8.py`): it knows by the role which range an operand needs and along which dimension it is summed over.
A layer hands its own to whatever multiplies for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor


class GEMMRole(Enum):
    """Which of a layer's products, as the kinds of its two operands."""

    OUTPUT = ("activation", "weight")
    INPUT_GRADIENT = ("gradient", "weight")
    WEIGHT_GRADIENT = ("gradient", "activation")


@dataclass(frozen=True)
class GEMMOperand:
    """One side of a product, as it is multiplied. values: as `Multiply` takes them, or [rows, n] in fewer bits; back:
    what these are scaled back with, fp32 [rows, 1] or a scalar."""

    values: Tensor
    back: Tensor | None = None

    def per_row(self, change: Callable[[Tensor], Tensor]) -> GEMMOperand:
        """The same of some rows, or in another shape of them."""
        return self.like([change(one) for one in self.of_rows()])

    def of_rows(self) -> list[Tensor]:
        """What has a row for each row of the operand."""
        return [self.values, *([] if self.back is None or not self.back.dim() else [self.back])]

    def like(self, of_rows: Sequence[Tensor]) -> GEMMOperand:
        """The same with others in the place of these."""
        return GEMMOperand(of_rows[0], of_rows[1] if len(of_rows) > 1 else self.back)


class Multiply:
    """One product, of operands as they lie in memory; `add` is added to it.

    | role | a | b | result | add |
    |---|---|---|---|---|
    | OUTPUT | x [tokens, inputs] | W [outputs, inputs] | x W^T [tokens, outputs] | the bias [outputs] |
    | INPUT_GRADIENT | dy [tokens, outputs] | W [outputs, inputs] | dy W [tokens, inputs] | other terms of it |
    | WEIGHT_GRADIENT | dy [tokens, outputs] | x [tokens, inputs] | dy^T x [outputs, inputs] | none |

    Differentiable here, in the type of the operands. Whoever uses an operand twice, or sends it, makes it himself
    (`left`, `right`)."""

    key = "matmul"
    """By which `MULTIPLIERS` knows it."""

    def __call__(self, a: Tensor, b: Tensor, role: GEMMRole, add: Tensor | None = None) -> Tensor:
        if role is GEMMRole.OUTPUT:
            return F.linear(a, b, add)
        if role is GEMMRole.INPUT_GRADIENT:
            return a @ b if add is None else torch.addmm(add, a, b)
        return a.t() @ b

    def largest(self, a: Tensor, role: GEMMRole) -> Tensor | None:
        """What of a whole left operand has to be known before a part of it is made: a scalar, of which that of the
        whole is the largest of its parts'; or None."""
        return None

    def left(self, a: Tensor, role: GEMMRole, largest: Tensor | None = None) -> GEMMOperand:
        """largest: of the whole, if `a` is a part; a row of the operand is a row of `a`, but for weight gradients."""
        return GEMMOperand(a)

    def right(self, b: Tensor, role: GEMMRole) -> GEMMOperand:
        return GEMMOperand(b)

    def product(
        self, left: GEMMOperand, right: GEMMOperand, role: GEMMRole, dtype: torch.dtype, add: Tensor | None = None
    ) -> Tensor:
        """In `dtype`, which is that of what the operands were made of."""
        return matmul(left.values, right.values, role, add)

    def into(
        self, out: Tensor, left: GEMMOperand, right: GEMMOperand, role: GEMMRole, add: Tensor | None = None
    ) -> None:
        """`product`, but of a weight's gradient, into `out`, which may be what is added. Not differentiable."""
        matmul_into(out, left.values, right.values, role, add)


matmul = Multiply()

MULTIPLIERS: dict[str, Multiply] = {matmul.key: matmul}
"""The implementations that there are, for operators, which take no objects."""


def output_width(weight: Tensor, role: GEMMRole) -> int:
    """The width of a product with a weight [outputs, inputs]."""
    return weight.shape[0 if role is GEMMRole.OUTPUT else 1]


def matmul_into(out: Tensor, a: Tensor, b: Tensor, role: GEMMRole, add: Tensor | None = None) -> None:
    """For `Multiply.into`."""
    b = b.t() if role is GEMMRole.OUTPUT else b
    if add is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(add, a, b, out=out)


def matmul_sum(
    operands: Sequence[Tensor], weights: Sequence[Tensor], role: GEMMRole, multiply: Multiply = matmul
) -> Tensor:
    """The sum of the products of each operand with its weight."""
    total = multiply(operands[0], weights[0], role)
    for operand, weight in zip(operands[1:], weights[1:]):
        total = multiply(operand, weight, role, total)
    return total


def matmul_all(
    a: Tensor, weights: Sequence[Tensor], role: GEMMRole, biases: Iterable[Tensor | None], multiply: Multiply = matmul
) -> list[Tensor]:
    """The products of one operand with each weight."""
    if multiply is matmul:  # there is nothing to make once
        return [matmul(a, weight, role, bias) for weight, bias in zip(weights, biases)]
    left = multiply.left(a, role)
    return [
        multiply.product(left, multiply.right(weight, role), role, a.dtype, bias)
        for weight, bias in zip(weights, biases)
    ]


def weight_gradients(gradients: Sequence[Tensor], x: Tensor, multiply: Multiply = matmul) -> list[Tensor]:
    """Of the matrices that share the input x."""
    role = GEMMRole.WEIGHT_GRADIENT
    if multiply is matmul:
        return [matmul(gradient, x, role) for gradient in gradients]
    right = multiply.right(x, role)
    return [multiply.product(multiply.left(gradient, role), right, role, x.dtype) for gradient in gradients]
