"""The communication of tensor and sequence parallelism, as methods of a group of ranks, on torch.distributed.

Between the products of a layer, rank r of t holds the r-th of t equal, contiguous parts of the micro-batch's tokens
(Korthikanti et al., arXiv 2205.05198). Functions that start a collective return at once. `wait` makes their result
usable, so that what is called in between overlaps with the collective. All of them are functional operators that the
compiler sees.

Products whose input is gathered or whose result is reduce-scattered are methods too (`gather_matmul`,
`matmul_scatter_sum`), and so are all products of a layer's backward pass (`columns_gradients`, `rows_gradients`). Here
a collective and a product run one after the other. A backend that fuses them is a subclass that overrides these
methods; `parallel/tensor/apply.py` selects it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer.precision.products import GEMMRole, Multiply, matmul, matmul_all, matmul_sum, weight_gradients

c10d = torch.ops._c10d_functional

Started = Tensor | list[Tensor]
"""What the start of a collective returns, for `wait`. Only fused backends return lists."""


@dataclass(frozen=True)
class TensorGroup:
    """The tensor-parallel ranks that share the matrices of a layer. name: that of the process group."""

    reductions: ClassVar[tuple[Any, ...]] = (c10d.reduce_scatter_tensor.default,)
    """The torch operators that return this rank's part of a sum over ranks in a layer's forward pass. Selective
    recompute saves that part, which is cheaper than communicating again."""

    fuses: ClassVar[bool] = False
    """Whether products and collectives are fused or overlapped instead of running one after the other."""

    name: str
    rank: int
    size: int
    key: str = field(init=False, compare=False, repr=False)
    """The name of the group in `GROUPS`."""

    def __post_init__(self) -> None:
        # The representation names class, process group and rank, so that two backends over the same ranks have
        # different keys.
        object.__setattr__(self, "key", repr(self))
        GROUPS[self.key] = self

    def gather_matmul(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        role: GEMMRole,
        biases: Sequence[Tensor | None] | None = None,
        keep: bool = False,
        multiply: Multiply = matmul,
    ) -> tuple[list[Tensor], Tensor | None]:
        """The products of the gathered `x` with each of `weights`, and with `keep` the gathered `x` for a later
        product, else None. x: [tokens / t, n]; `role` says which dimension of the weights n is (see `Multiply`). Each
        result: [tokens, ...]."""
        whole = self.wait(self.gather(x))
        return matmul_all(whole, weights, role, biases or repeat(None), multiply), whole if keep else None

    def matmul_scatter_sum(
        self, operands: Sequence[Tensor], weights: Sequence[Tensor], role: GEMMRole, multiply: Multiply = matmul
    ) -> Started:
        """Starts the sum of the products of each operand [tokens, n] with its weight, summed over ranks too. The result
        of `wait` is this rank's part, [tokens / t, ...]."""
        return self.scatter_sum(matmul_sum(operands, weights, role, multiply))

    def columns_gradients(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor, multiply: Multiply = matmul
    ) -> list[Tensor]:
        """The gradients of the input x [tokens / t, inputs] and of each weight [outputs / t, inputs] of column-parallel
        products. gradients: of the products, [tokens, outputs / t] each.

        Gathering x again overlaps with the product for its gradient; the reduce-scatter of that gradient overlaps with
        the weights' products.
        """
        # NCCL runs on a stream of its own. Only `wait` makes the compute stream depend on it, so the order of these
        # lines is what makes collectives and products overlap.
        started = self.gather(x)
        to_x = self.matmul_scatter_sum(gradients, weights, GEMMRole.INPUT_GRADIENT, multiply)
        whole = self.wait(started)
        to_weights = weight_gradients(gradients, whole, multiply)
        return [self.wait(to_x), *to_weights]

    def rows_gradients(self, gradient: Tensor, weight: Tensor, x: Tensor, multiply: Multiply = matmul) -> list[Tensor]:
        """The gradients of the input x [tokens, inputs / t] and of the weight [outputs, inputs / t] of a row-parallel
        product. gradient: of this rank's part of the product, [tokens / t, outputs]."""
        # Both products need the gathered gradient, and it arrives once.
        (to_x,), whole = self.gather_matmul(gradient, [weight], GEMMRole.INPUT_GRADIENT, keep=True, multiply=multiply)
        return [to_x, multiply(whole, x, GEMMRole.WEIGHT_GRADIENT)]

    def gather(self, x: Tensor) -> Tensor:
        """Starts an all-gather: [tokens / t, ...] of each rank -> [tokens, ...] on every rank."""
        # Functional collectives return a tensor that is not valid before `wait_tensor`, and are traceable, unlike
        # `dist.all_gather_into_tensor`.
        return c10d.all_gather_into_tensor(x.contiguous(), self.size, self.name)

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Starts a reduce-scatter: partial sums [tokens, ...] on each rank -> this rank's part [tokens / t, ...] of the
        sums."""
        return c10d.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.name)

    def sum(self, x: Tensor) -> Tensor:
        """Starts an all-reduce: the sum of all ranks' `x`, on every rank."""
        return c10d.all_reduce(x.contiguous(), "sum", self.name)

    def exchange(self, x: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        """Starts an all-to-all along the first dimension. received, sent: number of elements of that dimension that
        come from and go to each rank; equal parts if None."""
        even = [len(x) // self.size] * self.size
        return c10d.all_to_all_single(x.contiguous(), received or even, sent or even, self.name)

    def wait(self, x: Started) -> Tensor:
        """The result of a collective that was started, usable by whatever the current stream runs from now on."""
        return c10d.wait_tensor(x)

    def own(self, x: Tensor) -> Tensor:
        """This rank's part [tokens / t, ...] of `x` [tokens, ...]."""
        # Contiguous parts in the order of ranks, as `gather` concatenates them.
        return x.tensor_split(self.size)[self.rank]


GROUPS: dict[str, TensorGroup] = {}
"""Key -> group. Custom operators take no objects, so they look up their group here."""

LIBRARY = torch.library.Library("trainer", "FRAGMENT")


def register_operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function on tensors the operator `trainer::name`, which the compiler does not look into and whose result
    recompute can save. It changes none of its arguments, and it is called where no gradients are recorded.

    As `torch.library.custom_op`, without what that does in Python at each call: 4 microseconds instead of 15.
    """

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=(), op_name=name)
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.trainer, name).default

    return register


class ReduceScatterSum(torch.autograd.Function):
    """Partial sums [tokens, width] -> this rank's part of the sums [tokens / t, width]. The gradient of a
    reduce-scatter is an all-gather."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return group.wait(group.scatter_sum(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return None, ctx.group.wait(ctx.group.gather(gradient))


class GatherTokens(torch.autograd.Function):
    """This rank's tokens [tokens / t, ...] -> all tokens [tokens, ...]. Each rank uses the result for its own heads or
    experts, so in backward the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return group.wait(group.gather(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return None, ctx.group.wait(ctx.group.scatter_sum(gradient))


class AllReduceSum(torch.autograd.Function):
    """The sum over ranks. Every rank uses the result, so in backward the gradients of all ranks are summed too."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return group.wait(group.sum(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return None, ctx.group.wait(ctx.group.sum(gradient))
