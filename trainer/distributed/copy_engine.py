"""Products of tensor-parallel ranks that overlap with their collectives, by copies between the GPUs of a node.

Copy engines move tokens and partial sums while all multiprocessors compute cuBLAS's own GEMMs. A gathered product
begins with this rank's tokens; a reduced one ends with them. Streams wait for flags in the ranks' symmetric buffers
(`symmetric_memory.py`). Tokens that are multiplied in fp8 travel in fp8, unless a weight's gradient reads them too. To
autograd, recompute and the compiler each call is a custom operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer.distributed.c10d_internals import list_groups
from trainer.distributed.collectives import GROUPS, Started, TensorGroup, register_operator
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
"""Alignment in bytes of each tensor in a buffer."""


class CopyStream:
    """The stream on which a device's copies to other ranks run, each after the work that its current stream had queued
    before."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, pairs: Sequence[tuple[Tensor, Tensor]], buffers: SymmetricBuffers, to: int) -> None:
        """Copies tensors to their places in the buffer of rank `to`, pairs (place, tensor), and raises this rank's flag
        there."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            with buffers.label_sends():
                for place, part in pairs:
                    place.copy_(part)
            # On the same stream as the copies, so the flag rises after they have arrived.
            buffers.signal(to)

    def end(self) -> None:
        """Makes the current stream wait until everything has been sent, so that what was sent may be overwritten."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


@cache
def copy_stream(device: torch.device) -> CopyStream:
    return CopyStream(device)


class PendingGather:
    """A gather in progress: every rank sends its `tensors`, which have the same shapes on all ranks, to all others. The
    constructor starts the copies into the buffers of `kind`."""

    def __init__(self, kind: str, tensors: Sequence[Tensor], group: CopyEngineGroup):
        self.mine, self.group, self.buffers = tensors, group, buffers_of(kind, list_groups()[group.name], torch.uint8)
        # In bytes: an fp8 operand and its fp32 scales share one buffer of uint8.
        self.lengths = [-(-group.size * one.nbytes // ALIGNED) * ALIGNED for one in tensors]
        self.buffers.begin(sum(self.lengths), group.size, tensors[0].device)
        # This rank writes into the others' buffers (push), so all that they wait for is its flag.
        for to in other_ranks(group.rank, group.size):
            places = [parts_by_rank[group.rank] for parts_by_rank in self.of(to)]
            copy_stream(tensors[0].device).send(list(zip(places, tensors)), self.buffers, to)

    def of(self, rank: int) -> list[Tensor]:
        """Where the tensors of all ranks stand in the buffer of `rank`, [ranks, ...] each. Its own place there is not
        filled."""
        parts = self.buffers.buffer(rank, (1, sum(self.lengths)))[0].split(self.lengths)
        return [
            part[: self.group.size * one.nbytes].view(one.dtype).view(self.group.size, *one.shape)
            for part, one in zip(parts, self.mine)
        ]

    def receive_parts(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yields (rank, its tensors): this rank's first, each other's as soon as the current stream may use them."""
        parts_by_rank = self.of(self.group.rank)
        for source in self.group.sources():
            if source == self.group.rank:
                yield source, list(self.mine)
            else:
                self.buffers.wait(source)
                yield source, [one[source] for one in parts_by_rank]


def largest_of_all(largest: Tensor | None, group: CopyEngineGroup) -> Tensor | None:
    """The largest element of all ranks' operands, a scalar tensor, or None. By copies, too, and not by a collective: a
    rank that fails must not leave others waiting in one."""
    if largest is None:
        return None
    parts = [part for _, (part,) in PendingGather("largest", [largest.view(1)], group).receive_parts()]
    copy_stream(largest.device).end()
    return torch.cat(parts).amax()


class PendingReduce:
    """A reduction in progress: the products of operands and weights, summed over operands here, of which each rank is
    sent its tokens. The constructor computes and starts the copies; `total` sums over ranks."""

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
        self.buffers = buffers_of("scatter", list_groups()[group.name], first.dtype)
        self.buffers.begin(group.size * tokens * width, group.size, first.device)
        self.sums = first.new_empty(group.size, tokens, width)
        # Converted once (fp8 casts), although each is multiplied once for each rank.
        lefts = [multiply.left(operand, role) for operand in operands]
        rights = [multiply.right(weight, role) for weight in weights]
        # This rank's own tokens come last: while they are computed, the copies to the others are under way.
        for to in [*other_ranks(group.rank, group.size), group.rank]:
            for number, (left, right) in enumerate(zip(lefts, rights)):
                run = left.per_row(lambda part, to=to: part.unflatten(0, (group.size, -1))[to])
                multiply.into(self.sums[to], run, right, role, self.sums[to] if number else None)
            if to != group.rank:
                copy_stream(first.device).send([(self.of(to)[group.rank], self.sums[to])], self.buffers, to)

    def of(self, rank: int) -> Tensor:
        """Where the sums of all ranks stand in the buffer of `rank`: [ranks, tokens, ...]."""
        size, tokens, width = self.sums.shape
        return self.buffers.buffer(rank, (size * tokens, width)).unflatten(0, (size, -1))

    def total(self) -> Tensor:
        """This rank's tokens of the sum over ranks: [tokens, ...]."""
        rank, arrived = self.group.rank, self.of(self.group.rank)
        for source in self.group.sources()[1:]:
            self.buffers.wait(source)
        # One addition, rounded once, needs no copy of this rank's part.
        if self.group.size == 2:
            return arrived[1 - rank] + self.sums[rank]
        arrived[rank].copy_(self.sums[rank])
        return arrived.sum(0)  # torch accumulates in fp32, also for bf16


@register_operator("copied_gather_matmul")
def copied_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    role: str,
    multiply: str,
    group: str,
    keep: bool,
) -> list[Tensor]:
    """The products of all ranks' x [tokens / t, n] with each weight, and with `keep` all ranks' x: [tokens, ...]
    each."""
    x, kind, how, ranks = x.contiguous(), GEMMRole[role], MULTIPLIERS[multiply], GROUPS[group]
    largest = largest_of_all(how.largest(x, kind), ranks)
    mine = GEMMOperand(x) if keep else how.left(x, kind, largest)  # a kept x is needed unquantised
    sent, rights = PendingGather("gather", mine.of_rows(), ranks), [how.right(weight, kind) for weight in weights]
    results = [x.new_empty(ranks.size, len(x), output_width(weight, kind)) for weight in weights]
    gathered = [x.new_empty(ranks.size, *x.shape)] * keep
    # The products of this rank's tokens run while the others' tokens are still on their way.
    for source, part in sent.receive_parts():
        left = how.left(part[0], kind, largest) if keep else mine.like(part)
        for result, right, bias in zip(results, rights, biases):
            how.into(result[source], left, right, kind, bias)
        for whole in gathered:
            whole[source].copy_(part[0])
    copy_stream(x.device).end()
    return [result.flatten(0, 1) for result in results + gathered]


@torch.library.register_fake("trainer::copied_gather_matmul")
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


@register_operator("copied_matmul_scatter")
def copied_matmul_scatter(
    operands: Sequence[Tensor], weights: Sequence[Tensor], role: str, multiply: str, group: str
) -> Tensor:
    """This rank's tokens of the sum over ranks and operands of their products with the weights: [tokens / t, ...]."""
    sums = PendingReduce(operands, weights, GEMMRole[role], MULTIPLIERS[multiply], GROUPS[group])
    total = sums.total()
    copy_stream(total.device).end()
    return total


@torch.library.register_fake("trainer::copied_matmul_scatter")
def _(operands: Sequence[Tensor], weights: Sequence[Tensor], role: str, multiply: str, group: str) -> Tensor:
    return operands[0].new_empty(len(operands[0]) // GROUPS[group].size, output_width(weights[0], GEMMRole[role]))


class CopyEngineGroup(TensorGroup):
    """`TensorGroup` by copies over memory that the ranks of a node share."""

    reductions: ClassVar[tuple[Any, ...]] = (*TensorGroup.reductions, torch.ops.trainer.copied_matmul_scatter.default)
    fuses: ClassVar[bool] = True

    def sources(self) -> list[int]:
        """The ranks in the order in which their parts arrive, this one first."""
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
        # The input gradient's products run while x is gathered; the weight gradients' products while the partial sums
        # travel.
        sums = PendingReduce(gradients, weights, GEMMRole.INPUT_GRADIENT, multiply, self)
        (whole,) = sent.of(self.rank)
        whole[self.rank].copy_(x)
        # Only waits. The weight gradient is one product over all tokens, so it needs all parts at once.
        for _ in sent.receive_parts():
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
        for source, (part,) in sent.receive_parts():
            multiply.into(to_x[source], multiply.left(part, role, largest), right, role)
        (to_weight,) = weight_gradients([whole.flatten(0, 1)], x, multiply)
        copy_stream(x.device).end()
        return [to_x.flatten(0, 1), to_weight]

    def wait(self, x: Started) -> Tensor:
        return super().wait(x) if isinstance(x, Tensor) else x[0]
