"""Products of tensor-parallel ranks beside their collectives, in pieces: while one piece of the tokens travels, another
is multiplied (Wang et al., ASPLOS 2023, doi 10.1145/3567955.3567959).

A gathered product begins with this rank's own tokens, which need no gather, while the first piece of the others' comes.
A reduced product reduces each piece behind the product of the next. The collectives are those of `TensorGroup`, so the
sums are its sums. They run on the stream of the group's communicator, in the order in which they were started, which is
program order and the same on all ranks. Waiting makes the stream of the products wait, never the host.

Results are written in place instead of being put together, which would cost as much as the overlap gains. To autograd,
recompute and the compiler a gathered product is therefore one operator (`trainer::multiply_gathered`), which recompute
counts as a product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from trainer.distributed.collectives import Started, TensorGroup, c10d
from trainer.precision.products import Multiply, Role, matmul, matmul_runs


@torch.library.custom_op("trainer::multiply_gathered", mutates_args=())
def multiply_gathered(
    x: Tensor, pieces: list[Tensor], weight: Tensor, bias: Tensor | None, role: str, rank: int, size: int
) -> Tensor:
    """The product of all ranks' x [tokens / t, n] with one matrix: [tokens, ...]. pieces: gathers of successive rows of
    x that were started, each [t x rows, n]; all have arrived afterwards."""
    kind, (tokens, inputs) = Role[role], x.shape
    product = x.new_empty(size * tokens, outputs(weight, kind))
    runs = product.view(size, tokens, -1)
    matmul_runs(x[None], weight, kind, bias, out=runs[rank : rank + 1])
    first = 0
    for piece in pieces:
        gathered = c10d.wait_tensor(piece).view(size, -1, inputs)
        rows = slice(first, first := first + gathered.shape[1])
        for others in (slice(0, rank), slice(rank + 1, size)):
            if len(gathered[others]):
                matmul_runs(gathered[others], weight, kind, bias, out=runs[others, rows])
    return product


@multiply_gathered.register_fake
def _(x: Tensor, pieces: list[Tensor], weight: Tensor, bias: Tensor | None, role: str, rank: int, size: int) -> Tensor:
    return x.new_empty(size * len(x), outputs(weight, Role[role]))


def outputs(weight: Tensor, role: Role) -> int:
    """The width of a product with a weight [outputs, inputs]."""
    return weight.shape[0 if role is Role.OUTPUT else 1]


@dataclass(frozen=True)
class Chunks(TensorGroup):
    """`TensorGroup` in pieces, of the usual products. chunks: into how many this rank's tokens are cut."""

    chunks: int = 4

    def gather_matmul(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        role: Role,
        biases: Sequence[Tensor | None] | None = None,
        keep: bool = False,
        multiply: Multiply = matmul,
    ) -> tuple[list[Tensor], Tensor | None]:
        if multiply is not matmul:
            return super().gather_matmul(x, weights, role, biases, keep, multiply)
        pieces = [self.gather(x[rows]) for rows in self.rows(len(x))]
        products = [
            multiply_gathered(x, pieces, weight, bias, role.name, self.rank, self.size)
            for weight, bias in zip(weights, biases or repeat(None))
        ]
        pieces = [self.wait(piece) for piece in pieces]
        if not keep:
            return products, None
        by_rank = [piece.view(self.size, -1, x.shape[1]) for piece in pieces]
        return products, torch.cat(by_rank, 1).flatten(0, 1) if len(pieces) > 1 else pieces[0]

    def matmul_scatter_sum(
        self, operands: Sequence[Tensor], weights: Sequence[Tensor], role: Role, multiply: Multiply = matmul
    ) -> Started:
        if multiply is not matmul:
            return super().matmul_scatter_sum(operands, weights, role, multiply)
        runs, started = [operand.unflatten(0, (self.size, -1)) for operand in operands], []
        for rows in self.rows(runs[0].shape[1]):
            total = None
            for run, weight in zip(runs, weights):
                total = matmul_runs(run[:, rows], weight, role, total)
            started.append(self.scatter_sum(total.flatten(0, 1)))
        return started

    def wait(self, x: Started) -> Tensor:
        return c10d.wait_tensor(x) if isinstance(x, Tensor) else torch.cat([c10d.wait_tensor(piece) for piece in x])

    def rows(self, tokens: int) -> list[slice]:
        """The pieces of a rank's `tokens`, as even as they can be."""
        pieces = min(self.chunks, tokens)
        ends = [tokens * (number + 1) // pieces for number in range(pieces)]
        return [slice(first, end) for first, end in zip([0, *ends], ends)]
