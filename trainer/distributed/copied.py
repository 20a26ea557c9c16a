"""Products of tensor-parallel ranks beside their collectives, by copies between the GPUs of a node.

Copy engines move tokens and partial sums while all multiprocessors multiply, in cuBLAS's own products: a gathered one
begins with this rank's tokens, a reduced one ends with them. Streams wait for flags in the ranks' boxes (`boxes.py`).
To autograd, recompute and the compiler each call is an operator."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.boxes import Boxes, boxes_of, others
from trainer.distributed.c10d_internals import groups
from trainer.distributed.chunks import outputs
from trainer.distributed.collectives import Started, TensorGroup
from trainer.distributed.flags import await_flag, raise_flag
from trainer.distributed.shards import Shards, go_on
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
    x, kind, sender = x.contiguous(), Role[role], copies(x.device)
    tokens, inputs = x.shape
    boxes = boxes_of("gather", groups()[name], x.dtype)
    boxes.begin(size * tokens * inputs, size, x.device)
    for to in others(rank, size):
        sender.send(x, boxes, rank, to, size)
    whole = boxes.box(rank, (size * tokens, inputs)).unflatten(0, (size, -1))
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
    sender.end()
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
    kind, first = Role[role], operands[0]
    tokens, width, sender = len(first) // size, outputs(weights[0], kind), copies(first.device)
    boxes = boxes_of("scatter", groups()[name], first.dtype)
    boxes.begin(size * tokens * width, size, first.device)
    sums = first.new_empty(size, tokens, width)
    for to in [*others(rank, size), rank]:
        for number, (operand, weight) in enumerate(zip(operands, weights)):
            run = operand.unflatten(0, (size, -1))[to]
            matmul_into(sums[to], run, weight, kind, sums[to] if number else None)
        if to != rank:
            sender.send(sums[to], boxes, rank, to, size)
    arrived = boxes.box(rank, (size * tokens, width)).unflatten(0, (size, -1))
    for source in reversed(others(rank, size)):
        await_flag(boxes.flag(rank, source), boxes.epoch)
    if size == 2:
        total = arrived[1 - rank] + sums[rank]
    else:  # added up in fp32, whatever the type
        arrived[rank].copy_(sums[rank])
        total = arrived.sum(0)
    sender.end()
    return total


@copied_matmul_scatter.register_fake
def _(operands: Sequence[Tensor], weights: Sequence[Tensor], role: str, name: str, rank: int, size: int) -> Tensor:
    return operands[0].new_empty(len(operands[0]) // size, outputs(weights[0], Role[role]))


GATHERS: dict[int, tuple[Tensor, Tensor, torch.Event | None]] = {}
"""By the address of what `copied_gather` returned: a whole that is being filled, what is sent meanwhile, and the event
behind both."""


@cache
def tokens_of(group: dist.ProcessGroup) -> Shards:
    return Shards(group, "tokens")


@torch.library.custom_op("trainer::copied_gather", mutates_args=())
def copied_gather(x: Tensor, name: str, size: int) -> Tensor:
    """Starts to gather all ranks' x. Returns what `copied_gathered` takes: no memory, but the shape of the result.

    What is sent is a copy: to the compiler this operator has done all that it does with x, whose memory it uses anew.
    """
    whole, sent = x.new_empty(size * len(x), *x.shape[1:]), x.clone(memory_format=torch.contiguous_format)
    ended = tokens_of(groups()[name]).gather([sent.view(-1)], [whole.view(size, -1)])
    started = x.new_empty(1)
    GATHERS[started.data_ptr()] = whole, sent, ended
    return started.expand(whole.shape)


@copied_gather.register_fake
def _(x: Tensor, name: str, size: int) -> Tensor:
    return x.new_empty(1).expand(size * len(x), *x.shape[1:])


@torch.library.custom_op("trainer::copied_gathered", mutates_args=())
def copied_gathered(started: Tensor) -> Tensor:
    """What `copied_gather` has started, when the current stream may use it."""
    whole, _, ended = GATHERS.pop(started.data_ptr())
    go_on(ended)
    return whole


@copied_gathered.register_fake
def _(started: Tensor) -> Tensor:
    return started.new_empty(started.shape)


class Gather(NamedTuple):
    """One that was started."""

    started: Tensor


@dataclass(frozen=True)
class Copied(TensorGroup):
    """`TensorGroup` by copies over memory that the ranks of a node share, of the usual products and of gathers."""

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

    def gather(self, x: Tensor) -> Started:
        return Gather(copied_gather(x, self.name, self.size))

    def wait(self, x: Started) -> Tensor:
        if isinstance(x, Gather):
            return copied_gathered(x.started)
        return super().wait(x) if isinstance(x, Tensor) else x[0]
