"""Linear layers: on one rank or split over a tensor-parallel group, with weight gradients that can be put off. The
products themselves are those of `precision/products.py`.

Under tensor parallelism the input of a column-parallel product is gathered before it and the output of a row-parallel
one reduce-scattered after it. Backward gathers the input again instead of keeping it, so that a layer keeps 1/t of
everything (Korthikanti et al., arXiv 2205.05198, section 4.2.2); the gather runs behind the input gradient's product,
and the reduce-scatter of the input gradient behind the weight gradients'.

Zero-bubble schedules compute weight gradients apart from the rest of backward (Qi et al., arXiv 2401.10241). Here the
linear layer itself puts them off, which needs no walk of the autograd graph and no second recompute, and keeps no more
than the product's two factors. Its backward is then an operator of its own (`trainer::columns_backward`,
`rows_backward`): to the compiler it returns the input's gradient, and what it leaves aside is not the compiler's
business."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from trainer.distributed.collectives import GROUPS, TensorGroup
from trainer.precision.products import MULTIPLIERS, GEMMRole, Multiply, matmul, matmul_all, matmul_sum, weight_gradients


class DeferredGrads:
    """Weight gradients that backward has put off. While `active`, linear layers leave theirs here; else they compute
    them at once."""

    def __init__(self) -> None:
        self.active = False
        self.pending: deque[tuple[list[Tensor], Callable[[], Tensor], Callable[[Tensor], list[Tensor]]]] = deque()

    def put(self, weights: list[Tensor], start: Callable[[], Tensor], finish: Callable[[Tensor], list[Tensor]]) -> None:
        """`start` begins the collective that brings the missing factor, `finish` waits and multiplies: one gradient for
        each of `weights`, which are the parameters or differentiable views of them."""
        self.pending.append((weights, start, finish))

    def take(self) -> Callable[[], None]:
        """A closure that computes and accumulates what has been put off so far; the collectives run one product
        ahead."""
        pending, self.pending = self.pending, deque()

        @torch.no_grad()
        def compute() -> None:
            ahead = pending[0][1]() if pending else None
            while pending:
                weights, _, finish = pending.popleft()  # and its factors go when it is done
                started, ahead = ahead, pending[0][1]() if pending else None
                accumulate_gradients(weights, finish(started))

        return compute


def accumulate_gradients(weights: list[Tensor], gradients: list[Tensor]) -> None:
    """Adds gradients to the parameters that `weights` are views of."""
    torch.autograd.backward(weights, gradients)


class DeferringLinear(Protocol):
    """A linear layer as the operators below find it."""

    deferred: DeferredGrads
    group: TensorGroup | None
    multiply: Multiply

    def local(self, name: str) -> Tensor: ...


_layers: WeakValueDictionary[int, DeferringLinear] = WeakValueDictionary()
_numbers = itertools.count()


def number_layer(layer: DeferringLinear) -> Tensor:
    """A number by which the operators find a layer, as a tensor: a plain number would make the compiler treat every
    layer as another program."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


def weight_views(numbers: list[Tensor]) -> tuple[list[Tensor], DeferringLinear]:
    """Differentiable views of the layers' weights, and the first layer."""
    layers = [_layers[number.item()] for number in numbers]
    with torch.enable_grad():
        return [layer.local("weight") for layer in layers], layers[0]


@torch.library.custom_op("trainer::columns_backward", mutates_args=())
def columns_backward(gradients: list[Tensor], weights: list[Tensor], x: Tensor, numbers: list[Tensor]) -> Tensor:
    """The gradient of the input of `ColumnParallel`; those of the weights are accumulated or put off."""
    targets, layer = weight_views(numbers)
    group, deferred, multiply = layer.group, layer.deferred, layer.multiply
    if not deferred.active:
        to_x, *to_weights = columns_gradients(group, gradients, weights, x, multiply)
        accumulate_gradients(targets, to_weights)
        return to_x
    deferred.put(
        targets,
        lambda: x if group is None else group.gather(x),
        lambda started: weight_gradients(gradients, started if group is None else group.wait(started), multiply),
    )
    if group is None:
        return matmul_sum(gradients, weights, GEMMRole.INPUT_GRADIENT, multiply)
    return group.wait(group.matmul_scatter_sum(gradients, weights, GEMMRole.INPUT_GRADIENT, multiply))


@columns_backward.register_fake
def _(gradients: list[Tensor], weights: list[Tensor], x: Tensor, numbers: list[Tensor]) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("trainer::rows_backward", mutates_args=())
def rows_backward(gradient: Tensor, weight: Tensor, x: Tensor, number: Tensor) -> Tensor:
    """The gradient of the input of `RowParallel`; that of the weight is accumulated or put off."""
    targets, layer = weight_views([number])
    group, deferred, multiply = layer.group, layer.deferred, layer.multiply
    if not deferred.active:
        to_x, *to_weights = group.rows_gradients(gradient, weight, x, multiply)
        accumulate_gradients(targets, to_weights)
        return to_x
    (to_x,), _ = group.gather_matmul(gradient, [weight], GEMMRole.INPUT_GRADIENT, multiply=multiply)
    deferred.put(  # the gathered gradient is not kept until then
        targets, lambda: group.gather(gradient), lambda started: weight_gradients([group.wait(started)], x, multiply)
    )
    return to_x


@rows_backward.register_fake
def _(gradient: Tensor, weight: Tensor, x: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("trainer::columns_gradients", mutates_args=())
def group_columns_gradients(
    gradients: list[Tensor], weights: list[Tensor], x: Tensor, group: str, multiply: str
) -> list[Tensor]:
    """`TensorGroup.columns_gradients`, as one operator."""
    return GROUPS[group].columns_gradients(gradients, weights, x, MULTIPLIERS[multiply])


@group_columns_gradients.register_fake
def _(gradients: list[Tensor], weights: list[Tensor], x: Tensor, group: str, multiply: str) -> list[Tensor]:
    return [x.new_empty(x.shape), *(weight.new_empty(weight.shape) for weight in weights)]


@torch.library.custom_op("trainer::rows_gradients", mutates_args=())
def group_rows_gradients(gradient: Tensor, weight: Tensor, x: Tensor, group: str, multiply: str) -> list[Tensor]:
    """`TensorGroup.rows_gradients`, likewise."""
    return GROUPS[group].rows_gradients(gradient, weight, x, MULTIPLIERS[multiply])


@group_rows_gradients.register_fake
def _(gradient: Tensor, weight: Tensor, x: Tensor, group: str, multiply: str) -> list[Tensor]:
    return [x.new_empty(x.shape), weight.new_empty(weight.shape)]


def keeps_order(group: TensorGroup, multiply: Multiply) -> bool:
    """Whether backward is an operator, in which everything is in its order: the compiler saves memory by putting the
    start of a gather right before its end, so that nothing overlaps (torch 2.11 to 2.13). Casts to fp8 that no other
    way needs are left to the compiler, which makes one kernel of them and their neighbours."""
    return (multiply is matmul or group.fuses) and torch.compiler.is_compiling()


def columns_gradients(
    group: TensorGroup | None, gradients: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor, multiply: Multiply
) -> list[Tensor]:
    """The gradients of the input and of each weight of `ColumnParallel`."""
    if group is not None:
        return group.columns_gradients(gradients, weights, x, multiply)
    to_x = matmul_sum(gradients, weights, GEMMRole.INPUT_GRADIENT, multiply)
    return [to_x, *weight_gradients(gradients, x, multiply)]


class ColumnParallel(torch.autograd.Function):
    """x W^T + b for several matrices that share the input, gathered once.

    x: [tokens / t, inputs]; operands: weights [outputs / t, inputs], then a bias or None for each, then, where weight
    gradients may be put off, the numbers of the layers. Each result: [tokens, outputs / t].
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        """given: of `apply`. By the number of names here the compiler decides, without gradients, whether there is a
        ctx, and among several names would be wrong for one matrix."""
        group, multiply, x, count, *operands = given
        weights, biases, numbers = operands[:count], operands[count : 2 * count], operands[2 * count :]
        ctx.group, ctx.multiply, ctx.count, ctx.biased = group, multiply, count, [b is not None for b in biases]
        ctx.save_for_backward(x, *weights, *numbers)
        if group is None:
            return tuple(matmul_all(x, weights, GEMMRole.OUTPUT, biases, multiply))
        return tuple(group.gather_matmul(x, weights, GEMMRole.OUTPUT, biases, multiply=multiply)[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        x, *operands = ctx.saved_tensors
        group, multiply, weights, numbers = ctx.group, ctx.multiply, operands[: ctx.count], operands[ctx.count :]
        to_biases = [gradient.sum(0) if biased else None for gradient, biased in zip(gradients, ctx.biased)]
        if numbers:
            to_x = columns_backward(list(gradients), weights, x, numbers)
            return None, None, to_x, None, *[None] * ctx.count, *to_biases, *[None] * ctx.count
        if group is not None and keeps_order(group, multiply):
            to_x, *to_weights = group_columns_gradients(list(gradients), weights, x, group.key, multiply.key)
        else:
            to_x, *to_weights = columns_gradients(group, gradients, weights, x, multiply)
        return None, None, to_x, None, *to_weights, *to_biases


class RowParallel(torch.autograd.Function):
    """x W^T summed over the group. x: [tokens, inputs / t]; weight: [outputs, inputs / t]; result: [tokens / t,
    outputs].

    number: of the layer, where its weight gradient may be put off."""

    @staticmethod
    def forward(
        ctx: Any, group: TensorGroup, multiply: Multiply, x: Tensor, weight: Tensor, number: Tensor | None
    ) -> Tensor:
        ctx.group, ctx.multiply, ctx.numbered = group, multiply, number is not None
        ctx.save_for_backward(x, weight, *([number] if ctx.numbered else []))
        return group.wait(group.matmul_scatter_sum([x], [weight], GEMMRole.OUTPUT, multiply))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        x, weight, *numbers = ctx.saved_tensors
        if ctx.numbered:
            return None, None, rows_backward(gradient, weight, x, numbers[0]), None, None
        if keeps_order(ctx.group, ctx.multiply):
            to_x, to_weight = group_rows_gradients(gradient, weight, x, ctx.group.key, ctx.multiply.key)
        else:
            to_x, to_weight = ctx.group.rows_gradients(gradient, weight, x, ctx.multiply)
        return None, None, to_x, to_weight, None


def column_parallel(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: TensorGroup | None,
    numbers: Sequence[Tensor] = (),
    multiply: Multiply = matmul,
) -> Sequence[Tensor]:
    """Products of one input with several matrices, column-parallel over `group` if one is given; see `ColumnParallel`.

    The memory of weights marked `dropped_after_use` is freed after forward and allocated anew for backward. torch's own
    product would save a view of the freed memory, so such weights always go through `ColumnParallel`; and so do
    products that are not `matmul`, which are not differentiable.
    """
    dropped = getattr(weights[0], "dropped_after_use", False)
    if group is None and not numbers and not dropped and multiply is matmul:
        return [matmul(x, weight, GEMMRole.OUTPUT, bias) for weight, bias in zip(weights, biases)]
    return ColumnParallel.apply(group, multiply, x, len(weights), *detach_weights(weights, numbers), *biases, *numbers)


def row_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: TensorGroup,
    number: Tensor | None,
    multiply: Multiply = matmul,
) -> Tensor:
    """A row-parallel product; the bias is added to the sum. See `RowParallel`."""
    (weight,) = detach_weights([weight], [] if number is None else [number])
    y = RowParallel.apply(group, multiply, x, weight, number)
    return y if bias is None else y + bias


def detach_weights(weights: Sequence[Tensor], numbers: Sequence[Tensor]) -> Sequence[Tensor]:
    """The weights to multiply with. Where their gradients come by another way, the autograd graph has no edge to them,
    or backward would send zeros along it."""
    return [weight.detach() for weight in weights] if numbers else weights
