"""Gradients of keys and values that many ranks add up, in types of 16 bits. Ranks are threads of one process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.distributed.collectives import TensorGroup
from trainer.model.attention import causal_attention
from trainer.model.context_attention import ContextGroup, attend_gathered
from trainer.parallel.context.plan import ContextPlan

LENGTH, HEADS, KV_HEADS, SIZE = 1024, 2, 2, 32
CPU = torch.device("cpu")


class Meeting:
    """Where the threads of a group leave what they send."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.sent: list[Any] = [None] * size

    def share(self, rank: int, x: Tensor) -> list[Tensor]:
        """What all ranks send in the same collective."""
        self.sent[rank] = x
        self.barrier.wait()
        everyone = list(self.sent)
        self.barrier.wait()
        return everyone


@dataclass(frozen=True)
class Threads(TensorGroup):
    """A group whose ranks are threads, which start their collectives in the same order. Sums are rounded after each
    rank, as those of a ring in 16 bits."""

    meeting: Meeting = field(default=None, compare=False, repr=False)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.meeting.share(self.rank, x))

    def scatter_sum(self, x: Tensor) -> Tensor:
        return sum(self.own(part) for part in self.meeting.share(self.rank, x))

    def exchange(self, x: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        parts = self.meeting.share(self.rank, (x, sent or [len(x) // self.size] * self.size))
        return torch.cat([part.split(sizes)[self.rank] for part, sizes in parts])

    def wait(self, x: Tensor) -> Tensor:
        return x


def gradients(inputs: list[Tensor], gradient: Tensor, ranks: int, context: ContextPlan) -> list[Tensor]:
    """Of keys and values, over `ranks` threads: [batch, kv_heads, tokens, head_dim] each."""
    meeting = Meeting(ranks)

    def run(rank: int) -> list[Tensor]:
        group = ContextGroup(context, rank, None, Threads("threads", rank, ranks, meeting))
        own = group.own(LENGTH, CPU)
        query, key, value = (x[:, :, own].requires_grad_() for x in inputs)
        mask = group.build_mask(None, LENGTH, 0, False, CPU)
        attend_gathered(query, key, value, mask, SIZE**-0.5, 0.0).backward(gradient[:, :, own])
        return [key.grad, value.grad]

    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(run, range(ranks)))
    places = ContextGroup(context, 0, None, None).order(LENGTH, CPU).argsort()
    return [torch.cat(parts, 2)[:, :, places] for parts in zip(*found)]


def error(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, exact)]


def alone(inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    query, key, value = (x.clone().requires_grad_() for x in inputs)
    causal_attention(query, key, value, None, SIZE**-0.5).backward(gradient)
    return [key.grad, value.grad]


@pytest.mark.parametrize("order", ["zigzag", "blocks"])
def test_gradients_in_bf16_are_as_exact_over_many_ranks(order: str) -> None:
    """Gradients of gathered keys are added up in fp32: sums that are rounded after each rank have 1.4 times the error
    of one process at 8 ranks, 1.8 times at 16."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, LENGTH, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *inputs, gradient = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    exact = alone([x.double() for x in inputs], gradient.double())
    one = error(alone(inputs, gradient), exact)
    for ranks in (8, 16):
        many = error(gradients(inputs, gradient, ranks, ContextPlan(1, ranks, order)), exact)
        assert all(mine < 1.2 * plain for mine, plain in zip(many, one)), (ranks, many, one)
