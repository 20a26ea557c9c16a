"""The matrix products of linear layers: on one rank or split over a tensor-parallel group, with weight gradients that can
be put off.

Under tensor parallelism the input of a column-parallel product is gathered before it and the output of a row-parallel one
reduce-scattered after it. Backward gathers the input again instead of keeping it, so that a layer keeps 1/t of everything
(Korthikanti et al., arXiv 2205.05198, section 4.2.2); the gather runs behind the input gradient's product, and the
reduce-scatter of the input gradient behind the weight gradients'.

Zero-bubble schedules compute weight gradients apart from the rest of backward (Qi et al., arXiv 2401.10241). Here the
linear layer itself puts them off, which needs no walk of the autograd graph and no second recompute, and keeps no more than
the product's two factors.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.collectives import TensorGroup


class DeferredGrads:
    """Weight gradients that backward has put off. While `active`, linear layers leave theirs here; else they compute them
    at once."""

    def __init__(self) -> None:
        self.active = False
        self.pending: list[tuple[list[Tensor], Callable[[], Tensor], Callable[[Tensor], list[Tensor]]]] = []

    def put(self, weights: list[Tensor], start: Callable[[], Tensor], finish: Callable[[Tensor], list[Tensor]]) -> None:
        """`start` begins the collective that brings the missing factor, `finish` waits and multiplies: one gradient for
        each of `weights`, which are the parameters or differentiable views of them."""
        self.pending.append((weights, start, finish))

    def take(self) -> Callable[[], None]:
        """A closure that computes and accumulates what has been put off so far; the collectives run one product ahead."""
        pending, self.pending = self.pending, []

        @torch.no_grad()
        def compute() -> None:
            ahead = pending[0][1]() if pending else None
            for index, (weights, _, finish) in enumerate(pending):
                started, ahead = ahead, pending[index + 1][1]() if index + 1 < len(pending) else None
                accumulate(weights, finish(started))
            pending.clear()

        return compute


def accumulate(weights: list[Tensor], gradients: list[Tensor]) -> None:
    """Adds gradients to the parameters that `weights` are views of."""
    torch.autograd.backward(weights, gradients)


class Columns(torch.autograd.Function):
    """x W^T + b for several matrices that share the input, gathered once.

    x: [tokens / t, inputs]; each weight: [outputs / t, inputs]; each result: [tokens, outputs / t].
    Where `deferred` is given, `leaves` are the differentiable weights, and `operands` holds them detached.
    """

    @staticmethod
    def forward(ctx: Any, group: TensorGroup | None, deferred: DeferredGrads | None, leaves: list[Tensor], x: Tensor, count: int,
                *operands: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = operands[:count], operands[count:]
        whole = x if group is None else group.wait(group.gather(x))
        ctx.group, ctx.deferred, ctx.leaves, ctx.biased = group, deferred, leaves, [b is not None for b in biases]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        group = ctx.group

        def start() -> Tensor:
            return x if group is None else group.gather(x)

        def finish(started: Tensor) -> list[Tensor]:
            whole = started if group is None else group.wait(started)
            return [gradient.t() @ whole for gradient in gradients]

        at_once = ctx.deferred is None or not ctx.deferred.active
        started = start() if at_once else None
        to_x = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:]):
            to_x = torch.addmm(to_x, gradient, weight)
        if group is not None:
            to_x = group.scatter_sum(to_x)
        to_biases = [gradient.sum(0) if biased else None for gradient, biased in zip(gradients, ctx.biased)]
        to_weights: list[Tensor | None] = [None] * len(weights)
        if ctx.deferred is None:
            to_weights = finish(started)
        elif at_once:
            accumulate(ctx.leaves, finish(started))
        else:
            ctx.deferred.put(ctx.leaves, start, finish)
        return None, None, None, to_x if group is None else group.wait(to_x), None, *to_weights, *to_biases


class Rows(torch.autograd.Function):
    """x W^T summed over the group. x: [tokens, inputs / t]; weight: [outputs, inputs / t]; result: [tokens / t, outputs]."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, deferred: DeferredGrads | None, leaves: list[Tensor], x: Tensor, weight: Tensor) -> Tensor:
        ctx.group, ctx.deferred, ctx.leaves = group, deferred, leaves
        ctx.save_for_backward(x, weight)
        return group.wait(group.scatter_sum(F.linear(x, weight)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        group = ctx.group
        whole = group.wait(group.gather(gradient))
        to_weight = None
        if ctx.deferred is None:
            to_weight = whole.t() @ x
        elif ctx.deferred.active:  # the gathered gradient is not kept until then
            ctx.deferred.put(ctx.leaves, lambda: group.gather(gradient), lambda started: [group.wait(started).t() @ x])
        else:
            accumulate(ctx.leaves, [whole.t() @ x])
        return None, None, None, whole @ weight, to_weight


def columns(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: TensorGroup | None,
            deferred: DeferredGrads | None) -> Sequence[Tensor]:
    """Products of one input with several matrices, column-parallel over `group` if one is given; see `Columns`."""
    if group is None and deferred is None:
        return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases)]
    leaves, operands = leave(weights, deferred)
    return Columns.apply(group, deferred, leaves, x, len(weights), *operands, *biases)


def rows(x: Tensor, weight: Tensor, bias: Tensor | None, group: TensorGroup, deferred: DeferredGrads | None) -> Tensor:
    """A row-parallel product; the bias is added to the sum. See `Rows`."""
    leaves, (operand,) = leave([weight], deferred)
    y = Rows.apply(group, deferred, leaves, x, operand)
    return y if bias is None else y + bias


def leave(weights: Sequence[Tensor], deferred: DeferredGrads | None) -> tuple[list[Tensor], list[Tensor]]:
    """The weights to accumulate to and those to multiply with. Without an edge between them in the autograd graph, backward
    has no zeros to send along it when the gradient comes later."""
    return ([], list(weights)) if deferred is None else (list(weights), [weight.detach() for weight in weights])
