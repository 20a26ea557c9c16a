"""What tensor and sequence parallelism ask of a group of ranks, on torch.distributed.

Between the matrix products of a layer, rank r of t holds the r-th of t equal runs of the micro-batch's tokens
(Korthikanti et al., arXiv 2205.05198). The functions that start a collective return at once; `wait` makes their result
usable, so that what is called between the two overlaps. All of them are visible to the compiler.

Another backend is a class with these methods; `parallel/tensor.py` gives it to the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share the matrices of a layer. `name` is that of the process group."""

    name: str
    rank: int
    size: int

    def gather(self, x: Tensor) -> Tensor:
        """Starts: [tokens / t, ...] of each rank -> [tokens, ...] on every rank."""
        return c10d.all_gather_into_tensor(x.contiguous(), self.size, self.name)

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Starts: partial sums [tokens, ...] on each rank -> this rank's [tokens / t, ...] of the whole sums."""
        return c10d.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.name)

    def sum(self, x: Tensor) -> Tensor:
        """Starts: the sum of all ranks' `x`, on every rank."""
        return c10d.all_reduce(x.contiguous(), "sum", self.name)

    def wait(self, x: Tensor) -> Tensor:
        return c10d.wait_tensor(x)

    def own(self, x: Tensor) -> Tensor:
        """This rank's [tokens / t, ...] of `x`: [tokens, ...]."""
        return x.tensor_split(self.size)[self.rank]


class ScatterSum(torch.autograd.Function):
    """Partial sums [tokens, width] -> this rank's tokens of the whole sums [tokens / t, width]."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return group.wait(group.scatter_sum(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return None, ctx.group.wait(ctx.group.gather(gradient))


class Sum(torch.autograd.Function):
    """The sum over ranks, which all ranks use: their gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return group.wait(group.sum(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return None, ctx.group.wait(ctx.group.sum(gradient))
