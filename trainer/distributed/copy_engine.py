"""Products of tensor-parallel ranks beside their collectives, by copies between the GPUs of a node.

Copy engines move tokens and partial sums while all multiprocessors multiply, in cuBLAS's own products: a gathered one
begins with this rank's tokens, a reduced one ends with them. Streams wait for flags in the ranks' boxes (`boxes.py`).
Tokens that are multiplied in fewer bits travel so, unless a weight's gradient reads them too.
To autograd, recompute and the compiler each call is an operator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer.distributed.c10d_internals import list_groups
from trainer.distributed.collectives import GROUPS, Started, TensorGroup
from trainer.distributed.symmetric_memory import SymmetricBuffers, buffers_of, other_ranks
from trainer.precision.products import (
    MULTIPLIERS,
    GEMMOperand,
    GEMMRole,
    Multiply,
    matmul,
    output_width,
    weight_gradients,
)

ALIGNED = 16
"""Bytes at a multiple of which a tensor begins in a box."""


class CopyStream:
    """The stream on which a device's copies to other ranks run, behind what its current stream has done so far."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, pairs: Sequence[tuple[Tensor, Tensor]], boxes: SymmetricBuffers, to: int) -> None:
        """Copies tensors to their places in the box of `to`, (place, tensor) each, and raises the flag there."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            with boxes.sends():
                for place, part in pairs:
                    place.copy_(part)
            boxes.signal(to)

    def end(self) -> None:
        """The current stream goes on when all has been sent, so that what was sent may be written over."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


@cache
def copy_stream(device: torch.device) -> CopyStream:
    return CopyStream(device)


class PendingGather:
    """What every rank sends to all others, tensors of the same shapes: on its way from here on, to the boxes of a
    kind."""

    def __init__(self, kind: str, tensors: Sequence[Tensor], group: CopyEngineGroup):
        self.mine, self.group, self.boxes = tensors, group, buffers_of(kind, list_groups()[group.name], torch.uint8)
        self.lengths = [-(-group.size * one.nbytes // ALIGNED) * ALIGNED for one in tensors]
        self.boxes.begin(sum(self.lengths), group.size, tensors[0].device)
        for to in other_ranks(group.rank, group.size):
            places = [everyone[group.rank] for everyone in self.of(to)]
            copy_stream(tensors[0].device).send(list(zip(places, tensors)), self.boxes, to)

    def of(self, rank: int) -> list[Tensor]:
        """Where all ranks' tensors stand in a rank's box, [ranks, ...] each. The rank's own place is empty."""
        parts = self.boxes.box(rank, (1, sum(self.lengths)))[0].split(self.lengths)
        return [
            part[: self.group.size * one.nbytes].view(one.dtype).view(self.group.size, *one.shape)
            for part, one in zip(parts, self.mine)
        ]

    def arriving(self) -> Iterator[tuple[int, list[Tensor]]]:
        """The tensors of each rank, this one's first and each other's as soon as it is there."""
        everyone = self.of(self.group.rank)
        for source in self.group.sources():
            if source == self.group.rank:
                yield source, list(self.mine)
            else:
                self.boxes.wait(source)
                yield source, [one[source] for one in everyone]


def largest_of_all(largest: Tensor | None, group: CopyEngineGroup) -> Tensor | None:
    """Of the ranks' operands. Without a collective: a rank that fails must not leave others in one."""
    if largest is None:
        return None
    parts = [part for _, (part,) in PendingGather("largest", [largest.view(1)], group).arriving()]
    copy_stream(largest.device).end()
    return torch.cat(parts).amax()


class PendingReduce:
    """Sums over operands of their products with the weights, of which each rank is sent its tokens: on their way from
    here on."""

    def __init__(
        self,
        operands: Sequence[Tensor],
        weights: Sequence[Tensor],
        role: GEMMRole,
        multiply: Multiply,
        group: CopyEngineGroup,
    ):
        first, self.group = operands[0], group
        tokens, width = len(first) // group.size, output_width(weights[0], role)
        self.boxes = buffers_of("scatter", list_groups()[group.name], first.dtype)
        self.boxes.begin(group.size * tokens * width, group.size, first.device)
        self.sums = first.new_empty(group.size, tokens, width)
        lefts = [multiply.left(operand, role) for operand in operands]
        rights = [multiply.right(weight, role) for weight in weights]
        for to in [*other_ranks(group.rank, group.size), group.rank]:
            for number, (left, right) in enumerate(zip(lefts, rights)):
                run = left.per_row(lambda part, to=to: part.unflatten(0, (group.size, -1))[to])
                multiply.into(self.sums[to], run, right, role, self.sums[to] if number else None)
            if to != group.rank:
                copy_stream(first.device).send([(self.of(to)[group.rank], self.sums[to])], self.boxes, to)

    def of(self, rank: int) -> Tensor:
        """Where all ranks' sums stand in a rank's box: [ranks, tokens, ...]."""
        size, tokens, width = self.sums.shape
        return self.boxes.box(rank, (size * tokens, width)).unflatten(0, (size, -1))

    def total(self) -> Tensor:
        """This rank's tokens of the sum over ranks."""
        rank, arrived = self.group.rank, self.of(self.group.rank)
        for source in self.group.sources()[1:]:
            self.boxes.wait(source)
        if self.group.size == 2:
            return arrived[1 - rank] + self.sums[rank]
        arrived[rank].copy_(self.sums[rank])
        return arrived.sum(0)  # in fp32, whatever the type


@torch.library.custom_op("trainer::copied_gather_matmul", mutates_args=())
def copied_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    role: str,
    multiply: str,
    group: str,
    keep: bool,
) -> list[Tensor]:
    """The products of all ranks' x with each weight; and with `keep` all ranks' x."""
    x, kind, how, ranks = x.contiguous(), GEMMRole[role], MULTIPLIERS[multiply], GROUPS[group]
    largest = largest_of_all(how.largest(x, kind), ranks)
    mine = GEMMOperand(x) if keep else how.left(x, kind, largest)  # what is kept travels as it is
    sent, rights = PendingGather("gather", mine.of_rows(), ranks), [how.right(weight, kind) for weight in weights]
    results = [x.new_empty(ranks.size, len(x), output_width(weight, kind)) for weight in weights]
    kept = [x.new_empty(ranks.size, *x.shape)] * keep
    for source, part in sent.arriving():
        left = how.left(part[0], kind, largest) if keep else mine.like(part)
        for result, right, bias in zip(results, rights, biases):
            how.into(result[source], left, right, kind, bias)
        for whole in kept:
            whole[source].copy_(part[0])
    copy_stream(x.device).end()
    return [result.flatten(0, 1) for result in results + kept]


@copied_gather_matmul.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    role: str,
    multiply: str,
    group: str,
    keep: bool,
) -> list[Tensor]:
    widths = [output_width(weight, GEMMRole[role]) for weight in weights] + [x.shape[1]] * keep
    return [x.new_empty(GROUPS[group].size * len(x), width) for width in widths]


@torch.library.custom_op("trainer::copied_matmul_scatter", mutates_args=())
def copied_matmul_scatter(
    operands: Sequence[Tensor], weights: Sequence[Tensor], role: str, multiply: str, group: str
) -> Tensor:
    """This rank's tokens of the sum over ranks and operands of their products with the weights."""
    sums = PendingReduce(operands, weights, GEMMRole[role], MULTIPLIERS[multiply], GROUPS[group])
    total = sums.total()
    copy_stream(total.device).end()
    return total


@copied_matmul_scatter.register_fake
def _(operands: Sequence[Tensor], weights: Sequence[Tensor], role: str, multiply: str, group: str) -> Tensor:
    return operands[0].new_empty(len(operands[0]) // GROUPS[group].size, output_width(weights[0], GEMMRole[role]))


class CopyEngineGroup(TensorGroup):
    """`TensorGroup` by copies over memory that the ranks of a node share."""

    reductions: ClassVar[tuple[Any, ...]] = (*TensorGroup.reductions, torch.ops.trainer.copied_matmul_scatter.default)
    fuses: ClassVar[bool] = True

    def sources(self) -> list[int]:
        """The ranks in the order in which what they send arrives, this one first."""
        return [self.rank, *reversed(other_ranks(self.rank, self.size))]

    def gather_matmul(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        role: GEMMRole,
        biases: Sequence[Tensor | None] | None = None,
        keep: bool = False,
        multiply: Multiply = matmul,
    ) -> tuple[list[Tensor], Tensor | None]:
        added = list(biases or [None] * len(weights))
        results = copied_gather_matmul(x, list(weights), added, role.name, multiply.key, self.key, keep)
        return results[: len(weights)], results[-1] if keep else None

    def matmul_scatter_sum(
        self, operands: Sequence[Tensor], weights: Sequence[Tensor], role: GEMMRole, multiply: Multiply = matmul
    ) -> Started:
        return [copied_matmul_scatter(list(operands), list(weights), role.name, multiply.key, self.key)]

    def columns_gradients(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor, multiply: Multiply = matmul
    ) -> list[Tensor]:
        x = x.contiguous()
        sent = PendingGather("gather", [x], self)
        sums = PendingReduce(gradients, weights, GEMMRole.INPUT_GRADIENT, multiply, self)
        (whole,) = sent.of(self.rank)
        whole[self.rank].copy_(x)
        for _ in sent.arriving():
            pass
        to_weights = weight_gradients(gradients, whole.flatten(0, 1), multiply)
        to_x = sums.total()
        copy_stream(x.device).end()
        return [to_x, *to_weights]

    def rows_gradients(self, gradient: Tensor, weight: Tensor, x: Tensor, multiply: Multiply = matmul) -> list[Tensor]:
        gradient, role = gradient.contiguous(), GEMMRole.INPUT_GRADIENT
        largest = largest_of_all(multiply.largest(gradient, role), self)
        sent, right = PendingGather("gather", [gradient], self), multiply.right(weight, role)
        (whole,) = sent.of(self.rank)
        whole[self.rank].copy_(gradient)
        to_x = x.new_empty(self.size, len(gradient), x.shape[1])
        for source, (part,) in sent.arriving():
            multiply.into(to_x[source], multiply.left(part, role, largest), right, role)
        (to_weight,) = weight_gradients([whole.flatten(0, 1)], x, multiply)
        copy_stream(x.device).end()
        return [to_x.flatten(0, 1), to_weight]

    def wait(self, x: Started) -> Tensor:
        return super().wait(x) if isinstance(x, Tensor) else x[0]
