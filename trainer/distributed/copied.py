"""Products of tensor-parallel ranks beside their collectives, by copies between the GPUs of a node.

Copy engines move tokens and partial sums while all multiprocessors multiply, in cuBLAS's own products: a gathered one
begins with this rank's tokens, a reduced one ends with them. Streams wait for flags in the ranks' boxes (`boxes.py`).
To autograd, recompute and the compiler each call is an operator."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer.distributed.boxes import Boxes, boxes_of, others
from trainer.distributed.c10d_internals import groups
from trainer.distributed.chunks import outputs
from trainer.distributed.collectives import Started, TensorGroup
from trainer.distributed.flags import await_flag, raise_flag
from trainer.precision.products import Multiply, Role, matmul, matmul_into


class Copies:
    """The stream on which a device's copies to other ranks run, behind what its current stream has done so far."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, part: Tensor, boxes: Boxes, rank: int, to: int, size: int) -> None:
        """Copies a part of this rank, [tokens, n], to its place in the box of `to`, and raises the flag there."""
        place = boxes.box(to, (size * len(part), part.shape[1])).unflatten(0, (size, -1))[rank]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(part.device))
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            place.copy_(part)
            raise_flag(boxes.flag(to, rank), boxes.epoch)

    def end(self) -> None:
        """The current stream goes on when all has been sent, so that what was sent may be written over."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


@cache
def copies(device: torch.device) -> Copies:
    return Copies(device)


def send(x: Tensor, name: str, rank: int, size: int) -> tuple[Tensor, Boxes]:
    """Sends this rank's x [tokens, n] to all others. Returns where those of all will be, [ranks, tokens, n], and the
    boxes whose flags say when; this rank's place is empty."""
    boxes = boxes_of("gather", groups()[name], x.dtype)
    boxes.begin(size * x.numel(), size, x.device)
    for to in others(rank, size):
        copies(x.device).send(x, boxes, rank, to, size)
    return boxes.box(rank, (size * len(x), x.shape[1])).unflatten(0, (size, -1)), boxes


def send_sums(
    operands: Sequence[Tensor], weights: Sequence[Tensor], kind: Role, name: str, rank: int, size: int
) -> tuple[Tensor, Boxes]:
    """Sends each rank its tokens of the sum over operands of their products with the weights. Returns these sums,
    [ranks, tokens, ...], and the boxes in which those of others arrive."""
    first = operands[0]
    tokens, width = len(first) // size, outputs(weights[0], kind)
    boxes = boxes_of("scatter", groups()[name], first.dtype)
    boxes.begin(size * tokens * width, size, first.device)
    sums = first.new_empty(size, tokens, width)
    for to in [*others(rank, size), rank]:
        for number, (operand, weight) in enumerate(zip(operands, weights)):
            run = operand.unflatten(0, (size, -1))[to]
            matmul_into(sums[to], run, weight, kind, sums[to] if number else None)
        if to != rank:
            copies(first.device).send(sums[to], boxes, rank, to, size)
    return sums, boxes


def sum_received(sums: Tensor, boxes: Boxes, rank: int, size: int) -> Tensor:
    """This rank's tokens of the sum over ranks of what `send_sums` has sent."""
    arrived = boxes.box(rank, (size * sums.shape[1], sums.shape[2])).unflatten(0, (size, -1))
    for source in reversed(others(rank, size)):
        await_flag(boxes.flag(rank, source), boxes.epoch)
    if size == 2:
        return arrived[1 - rank] + sums[rank]
    arrived[rank].copy_(sums[rank])
    return arrived.sum(0)  # in fp32, whatever the type


@torch.library.custom_op("trainer::copied_gather_matmul", mutates_args=())
def copied_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    role: str,
    name: str,
    rank: int,
    size: int,
    keep: bool,
) -> list[Tensor]:
    """The products of all ranks' x with each weight; and with `keep` all ranks' x."""
    x, kind = x.contiguous(), Role[role]
    (tokens, inputs), (whole, boxes) = x.shape, send(x, name, rank, size)
    results = [x.new_empty(size, tokens, outputs(weight, kind)) for weight in weights]
    kept = x.new_empty(size, tokens, inputs) if keep else None
    for source in [rank, *reversed(others(rank, size))]:
        part = x if source == rank else whole[source]
        if source != rank:
            await_flag(boxes.flag(rank, source), boxes.epoch)
        for result, weight, bias in zip(results, weights, biases):
            matmul_into(result[source], part, weight, kind, bias)
        if kept is not None:
            kept[source].copy_(part)
    copies(x.device).end()
    return [result.flatten(0, 1) for result in results + ([] if kept is None else [kept])]


@copied_gather_matmul.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    role: str,
    name: str,
    rank: int,
    size: int,
    keep: bool,
) -> list[Tensor]:
    widths = [outputs(weight, Role[role]) for weight in weights] + [x.shape[1]] * keep
    return [x.new_empty(size * len(x), width) for width in widths]


@torch.library.custom_op("trainer::copied_matmul_scatter", mutates_args=())
def copied_matmul_scatter(
    operands: Sequence[Tensor], weights: Sequence[Tensor], role: str, name: str, rank: int, size: int
) -> Tensor:
    """This rank's tokens of the sum over ranks and operands of their products with the weights."""
    sums, boxes = send_sums(operands, weights, Role[role], name, rank, size)
    total = sum_received(sums, boxes, rank, size)
    copies(total.device).end()
    return total


@copied_matmul_scatter.register_fake
def _(operands: Sequence[Tensor], weights: Sequence[Tensor], role: str, name: str, rank: int, size: int) -> Tensor:
    return operands[0].new_empty(len(operands[0]) // size, outputs(weights[0], Role[role]))


@dataclass(frozen=True)
class Copied(TensorGroup):
    """`TensorGroup` by copies over memory that the ranks of a node share, of the usual products."""

    reductions: ClassVar[tuple[Any, ...]] = (*TensorGroup.reductions, torch.ops.trainer.copied_matmul_scatter.default)

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
        place = role.name, self.name, self.rank, self.size
        results = copied_gather_matmul(x, list(weights), list(biases or [None] * len(weights)), *place, keep)
        return results[: len(weights)], results[-1] if keep else None

    def matmul_scatter_sum(
        self, operands: Sequence[Tensor], weights: Sequence[Tensor], role: Role, multiply: Multiply = matmul
    ) -> Started:
        if multiply is not matmul:
            return super().matmul_scatter_sum(operands, weights, role, multiply)
        place = role.name, self.name, self.rank, self.size
        return [copied_matmul_scatter(list(operands), list(weights), *place)]

    def columns_gradients(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor, multiply: Multiply = matmul
    ) -> list[Tensor]:
        if multiply is not matmul:
            return super().columns_gradients(gradients, weights, x, multiply)
        x, place = x.contiguous(), (self.name, self.rank, self.size)
        whole, boxes = send(x, *place)
        sums, received = send_sums(gradients, weights, Role.INPUT_GRADIENT, *place)
        whole[self.rank].copy_(x)
        for source in reversed(others(self.rank, self.size)):
            await_flag(boxes.flag(self.rank, source), boxes.epoch)
        to_weights = [matmul(gradient, whole.flatten(0, 1), Role.WEIGHT_GRADIENT) for gradient in gradients]
        to_x = sum_received(sums, received, self.rank, self.size)
        copies(x.device).end()
        return [to_x, *to_weights]

    def rows_gradients(self, gradient: Tensor, weight: Tensor, x: Tensor, multiply: Multiply = matmul) -> list[Tensor]:
        if multiply is not matmul:
            return super().rows_gradients(gradient, weight, x, multiply)
        gradient = gradient.contiguous()
        whole, boxes = send(gradient, self.name, self.rank, self.size)
        whole[self.rank].copy_(gradient)
        to_x = x.new_empty(self.size, len(gradient), x.shape[1])
        for source in [self.rank, *reversed(others(self.rank, self.size))]:
            if source != self.rank:
                await_flag(boxes.flag(self.rank, source), boxes.epoch)
            matmul_into(to_x[source], whole[source], weight, Role.INPUT_GRADIENT)
        to_weight = matmul(whole.flatten(0, 1), x, Role.WEIGHT_GRADIENT)
        copies(x.device).end()
        return [to_x.flatten(0, 1), to_weight]

    def wait(self, x: Started) -> Tensor:
        return super().wait(x) if isinstance(x, Tensor) else x[0]
