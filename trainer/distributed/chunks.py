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
from typing import ClassVar

import torch
from torch import Tensor

from trainer.distributed.collectives import GROUPS, Started, TensorGroup, c10d
from trainer.precision.products import MULTIPLIERS, Multiply, Operand, Role, matmul


@torch.library.custom_op("trainer::multiply_gathered", mutates_args=())
def multiply_gathered(
    mine: Sequence[Tensor],
    pieces: Sequence[Tensor],
    scales: Tensor | None,
    largest: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    role: str,
    multiply: str,
    group: str,
) -> Tensor:
    """The product of all ranks' tokens with one matrix: [tokens, ...].

    mine: this rank's x [tokens / t, n], or the operand made of it and what scales that back; pieces: gathers of its
    successive rows that were started, [t x rows, ...] each; scales: the same of what scales all rows back; largest: of
    all ranks' x. All have arrived afterwards."""
    kind, how, (x, *back) = Role[role], MULTIPLIERS[multiply], mine
    (tokens, inputs), right, rank, size = x.shape, how.right(weight, kind), GROUPS[group].rank, GROUPS[group].size

    def operand(runs: Tensor, *back: Tensor) -> Operand:
        if back:
            return Operand(runs, *back)
        return how.left(runs.flatten(0, 1), kind, largest).per_row(lambda rows: rows.unflatten(0, (len(runs), -1)))

    product = weight.new_empty(size * tokens, outputs(weight, kind))
    runs = product.view(size, tokens, -1)
    own = [one[None] if one.dim() else one for one in back]
    how.runs_into(runs[rank : rank + 1], operand(x[None], *own), right, kind, bias)
    everyone = None if scales is None else c10d.wait_tensor(scales).view(size, tokens, 1)
    first = 0
    for piece in pieces:
        gathered = c10d.wait_tensor(piece).view(x.dtype).view(size, -1, inputs)
        rows = slice(first, first := first + gathered.shape[1])
        for some in (slice(0, rank), slice(rank + 1, size)):
            if len(gathered[some]):
                theirs = back if everyone is None else [everyone[some, rows]]
                how.runs_into(runs[some, rows], operand(gathered[some], *theirs), right, kind, bias)
    return product


@multiply_gathered.register_fake
def _(
    mine: Sequence[Tensor],
    pieces: Sequence[Tensor],
    scales: Tensor | None,
    largest: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    role: str,
    multiply: str,
    group: str,
) -> Tensor:
    return weight.new_empty(GROUPS[group].size * len(mine[0]), outputs(weight, Role[role]))


def outputs(weight: Tensor, role: Role) -> int:
    """The width of a product with a weight [outputs, inputs]."""
    return weight.shape[0 if role is Role.OUTPUT else 1]


@dataclass(frozen=True)
class Chunks(TensorGroup):
    """`TensorGroup` in pieces. chunks: into how many this rank's tokens are cut.

    Tokens that are multiplied in fewer bits are rounded before they travel, unless they are kept."""

    fuses: ClassVar[bool] = True

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
        largest = self.largest_of_all(multiply.largest(x, role))
        left = Operand(x) if keep else multiply.left(x, role, largest)  # what is kept travels as it is
        mine = [left.values, *([] if left.back is None else [left.back])]
        scales = self.gather(left.back) if len(left.of_rows()) > 1 else None
        sent = mine[0].view(torch.uint8) if len(mine) > 1 else x  # not every backend sends fp8
        pieces = [self.gather(sent[rows]) for rows in self.rows(len(x))]
        products = [
            multiply_gathered(mine, pieces, scales, largest, weight, bias, role.name, multiply.key, self.key)
            for weight, bias in zip(weights, biases or repeat(None))
        ]
        pieces = [self.wait(piece) for piece in pieces]
        if not keep:
            return products, None
        by_rank = [piece.view(self.size, -1, x.shape[1]) for piece in pieces]
        return products, torch.cat(by_rank, 1).flatten(0, 1) if len(pieces) > 1 else pieces[0]

    def largest_of_all(self, largest: Tensor | None) -> Tensor | None:
        """Of the ranks' operands."""
        return None if largest is None else self.wait(self.gather(largest.view(1))).amax()

    def matmul_scatter_sum(
        self, operands: Sequence[Tensor], weights: Sequence[Tensor], role: Role, multiply: Multiply = matmul
    ) -> Started:
        lefts = [
            multiply.left(operand, role).per_row(lambda part: part.unflatten(0, (self.size, -1)))
            for operand in operands
        ]
        rights, started = [multiply.right(weight, role) for weight in weights], []
        for rows in self.rows(len(operands[0]) // self.size):
            total = None
            for left, right in zip(lefts, rights):
                run = left.per_row(lambda part, rows=rows: part[:, rows])
                total = multiply.runs(run, right, role, operands[0].dtype, total)
            started.append(self.scatter_sum(total.flatten(0, 1)))
        return started

    def wait(self, x: Started) -> Tensor:
        return c10d.wait_tensor(x) if isinstance(x, Tensor) else torch.cat([c10d.wait_tensor(piece) for piece in x])

    def rows(self, tokens: int) -> list[slice]:
        """The pieces of a rank's `tokens`, as even as they can be."""
        pieces = min(self.chunks, tokens)
        ends = [tokens * (number + 1) // pieces for number in range(pieces)]
        return [slice(first, end) for first, end in zip([0, *ends], ends)]
