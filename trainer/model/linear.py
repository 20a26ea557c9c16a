"""Linear layers, on one rank or split over a tensor-parallel group, with weight gradients that can be deferred. The
GEMMs themselves are in `precision/products.py`.

Under tensor parallelism the input of a column-parallel product is all-gathered before it, and the output of a
row-parallel one is reduce-scattered after it. Backward gathers the input again instead of keeping it, so a layer keeps
1/t of all its activations (Korthikanti et al., arXiv 2205.05198, section 4.2.2). That gather overlaps with the input
gradient's product, and the reduce-scatter of the input gradient overlaps with the weight gradients' products.

Zero-bubble schedules compute weight gradients separately from the rest of backward (Qi et al., arXiv 2401.10241). Here
the linear layer itself defers them. That needs no walk of the autograd graph and no second recompute, and keeps no more
than the two factors of the product. Its backward is then a custom operator (`trainer::columns_backward`,
`trainer::rows_backward`). The compiler sees an operator that returns the input's gradient, and does not see the closure
that the operator leaves.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from trainer.distributed.collectives import GROUPS, TensorGroup, register_operator
from trainer.precision.products import (
    MULTIPLIERS,
    GEMMRole,
    Multiply,
    SummedMultiply,
    decode_rows,
    join_operands,
    matmul,
    matmul_all,
    matmul_sum,
    weight_gradients,
)


class DeferredGrads:
    """Weight gradients that backward has deferred. While `active`, linear layers leave theirs here; otherwise they
    compute them at once."""

    def __init__(self) -> None:
        self.active = False
        self.pending: deque[tuple[list[Tensor], Callable[[], Tensor], Callable[[Tensor], list[Tensor]]]] = deque()

    def put(self, weights: list[Tensor], start: Callable[[], Tensor], finish: Callable[[Tensor], list[Tensor]]) -> None:
        """Leaves one deferred product. `start` begins the collective that brings the missing factor. `finish` waits for
        it and multiplies; it returns one gradient for each of `weights`, which are parameters or differentiable views
        of them. Without `weights`, the product itself adds to where gradients are summed."""
        self.pending.append((weights, start, finish))

    def take(self) -> Callable[[], None]:
        """A closure that computes and accumulates everything deferred so far. Each collective runs while the product
        before it is computed."""
        # Each I takes its own list, so that several micro-batches can wait for their W.
        pending, self.pending = self.pending, deque()

        @torch.no_grad()
        def compute() -> None:
            ahead = pending[0][1]() if pending else None
            while pending:
                # `finish` holds the product's factors. The next pass of the loop drops it, and frees them.
                weights, _, finish = pending.popleft()
                started, ahead = ahead, pending[0][1]() if pending else None
                accumulate_gradients(weights, finish(started))

        return compute


def accumulate_gradients(weights: list[Tensor], gradients: list[Tensor]) -> None:
    """Adds gradients to the parameters that `weights` are views of, as backward does."""
    # The weights may be local views of DTensors; autograd leads from a view to its parameter.
    if weights:
        torch.autograd.backward(weights, gradients)


class DeferringLinear(Protocol):
    """A linear layer, as far as the custom operators below know it."""

    deferred: DeferredGrads
    group: TensorGroup | None
    multiply: Multiply

    def local(self, name: str) -> Tensor: ...


# Custom operators take tensors and plain values only, so they look up their layer here. The references are weak: a
# model that is rebuilt must not stay alive.
_layers: WeakValueDictionary[int, DeferringLinear] = WeakValueDictionary()
_numbers = itertools.count()


def number_layer(layer: DeferringLinear) -> Tensor:
    """Registers a layer and returns the number by which the operators find it, as a CPU tensor: the compiler would
    specialise its graph on a Python number, so each layer would get its own. Reading a CPU tensor does not wait for the
    device."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


def weight_views(numbers: list[Tensor]) -> tuple[list[Tensor], DeferringLinear]:
    """Differentiable views of the layers' weights, and the first of the layers."""
    layers = [_layers[number.item()] for number in numbers]
    # An operator's implementation runs below autograd, with gradients disabled; these views need a graph back to their
    # parameters.
    with torch.enable_grad():
        return [layer.local("weight") for layer in layers], layers[0]


def weight_targets(numbers: list[Tensor]) -> tuple[list[Tensor], DeferringLinear, Multiply]:
    """Views as of `weight_views`, the first of the layers, and what multiplies for them. Where all have a
    `gradient_sum`, that adds weight gradients to their sums, and there are no views."""
    layers = [_layers[number.item()] for number in numbers]
    sums = [getattr(layer, "gradient_sum", None) for layer in layers]
    if None not in sums:
        return [], layers[0], SummedMultiply(sums)
    return *weight_views(numbers), layers[0].multiply


@register_operator("columns_backward")
def columns_backward(gradients: list[Tensor], weights: list[Tensor], x: Tensor, numbers: list[Tensor]) -> Tensor:
    """The gradient of the input of `ColumnParallel`. Those of the weights are accumulated or deferred.

    gradients: of the products, [tokens, outputs / t] each; weights: [outputs / t, inputs] each, or their operands; x
    and result: [tokens / t, inputs]; numbers: of the layers, from `number_layer`.
    """
    targets, layer, multiply = weight_targets(numbers)
    group, deferred = layer.group, layer.deferred
    if not deferred.active:
        to_x, *to_weights = columns_gradients(group, gradients, weights, x, multiply)
        accumulate_gradients(targets, to_weights)
        return to_x
    deferred.put(
        targets,
        # Until W, only this rank's part of x is kept. W gathers it again.
        lambda: x if group is None else group.gather(x),
        lambda started: weight_gradients(gradients, started if group is None else group.wait(started), multiply),
    )
    if group is None:
        return matmul_sum(gradients, weights, GEMMRole.INPUT_GRADIENT, multiply)
    return group.wait(group.matmul_scatter_sum(gradients, weights, GEMMRole.INPUT_GRADIENT, multiply))


@torch.library.register_fake("trainer::columns_backward")
def _(gradients: list[Tensor], weights: list[Tensor], x: Tensor, numbers: list[Tensor]) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_operator("rows_backward")
def rows_backward(gradient: Tensor, weight: Tensor, x: Tensor, number: Tensor) -> Tensor:
    """The gradient of the input of `RowParallel`. That of the weight is accumulated or deferred.

    gradient: [tokens / t, outputs]; weight: [outputs, inputs / t]; x and result: [tokens, inputs / t]; number: of the
    layer.
    """
    targets, layer, multiply = weight_targets([number])
    group, deferred = layer.group, layer.deferred
    if not deferred.active:
        to_x, *to_weights = group.rows_gradients(gradient, weight, x, multiply)
        accumulate_gradients(targets, to_weights)
        return to_x
    (to_x,), _ = group.gather_matmul(gradient, [weight], GEMMRole.INPUT_GRADIENT, multiply=multiply)
    # W gathers the gradient a second time: kept until then, the gathered one would take t times the memory.
    deferred.put(
        targets, lambda: group.gather(gradient), lambda started: weight_gradients([group.wait(started)], x, multiply)
    )
    return to_x


@torch.library.register_fake("trainer::rows_backward")
def _(gradient: Tensor, weight: Tensor, x: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_operator("columns_gradients")
def group_columns_gradients(
    gradients: list[Tensor], weights: list[Tensor], x: Tensor, group: str, multiply: str
) -> list[Tensor]:
    """`TensorGroup.columns_gradients` as one custom operator, see `keeps_order`."""
    return GROUPS[group].columns_gradients(gradients, weights, x, MULTIPLIERS[multiply])


@torch.library.register_fake("trainer::columns_gradients")
def _(gradients: list[Tensor], weights: list[Tensor], x: Tensor, group: str, multiply: str) -> list[Tensor]:
    return [x.new_empty(x.shape), *(weight.new_empty(weight.shape) for weight in weights)]


@register_operator("rows_gradients")
def group_rows_gradients(gradient: Tensor, weight: Tensor, x: Tensor, group: str, multiply: str) -> list[Tensor]:
    """`TensorGroup.rows_gradients` as one custom operator."""
    return GROUPS[group].rows_gradients(gradient, weight, x, MULTIPLIERS[multiply])


@torch.library.register_fake("trainer::rows_gradients")
def _(gradient: Tensor, weight: Tensor, x: Tensor, group: str, multiply: str) -> list[Tensor]:
    return [x.new_empty(x.shape), weight.new_empty(weight.shape)]


def keeps_order(group: TensorGroup, multiply: Multiply) -> bool:
    """Whether a compiled backward pass calls one custom operator, inside of which the order of operations is fixed. The
    compiler would otherwise reduce memory by moving the start of a gather right before its wait, so that nothing
    overlaps (torch 2.11 to 2.13). fp8 products of unfused groups are left to the compiler: it merges their casts with
    neighbouring kernels."""
    return (multiply is matmul or group.fuses) and torch.compiler.is_compiling()


def columns_gradients(
    group: TensorGroup | None, gradients: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor, multiply: Multiply
) -> list[Tensor]:
    """The gradients of the input and of each weight of `ColumnParallel`, in this order."""
    if group is not None:
        return group.columns_gradients(gradients, weights, x, multiply)
    to_x = matmul_sum(gradients, weights, GEMMRole.INPUT_GRADIENT, multiply)
    return [to_x, *weight_gradients(gradients, x, multiply)]


class ColumnParallel(torch.autograd.Function):
    """y_i = x W_i^T + b_i for several matrices that share the input, which is gathered once (q, k, v; gate, up).

    x: [tokens / t, inputs]. operands: weights [outputs / t, inputs]; then a bias or None for each; then, where a step
    casts weights once, the operands of each (`cast_weight`); then, where weight gradients may be deferred, the number
    of each layer. Each result: [tokens, outputs / t].
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        """given: the arguments of `apply`. They have one name here on purpose: without gradients, the compiler decides
        by the number of parameters of this function whether a ctx is passed, and with several names decides wrongly for
        one matrix."""
        group, multiply, x, count, *operands = given
        weights, biases, more = split_sizes(operands, count, count)
        held, numbers = split_sizes(more, 4 * count * (len(more) > count))
        ctx.group, ctx.multiply, ctx.count, ctx.biased = group, multiply, count, [b is not None for b in biases]
        ctx.held, weights = len(held), held or weights
        # Saved is this rank's part of x, not the gathered input. Backward gathers it again.
        ctx.save_for_backward(x, *weights, *numbers)
        if group is None:
            read = join_operands(weights, count, GEMMRole.OUTPUT)
            return tuple(matmul_all(x, read, GEMMRole.OUTPUT, biases, multiply))
        return tuple(group.gather_matmul(x, weights, GEMMRole.OUTPUT, biases, multiply=multiply)[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        x, *operands = ctx.saved_tensors
        group, multiply, (weights, numbers) = ctx.group, ctx.multiply, split_sizes(operands, ctx.held or ctx.count)
        # A bias belongs to this rank's outputs, and the output gradient has all tokens, so its gradient needs no
        # reduction.
        to_biases = [gradient.sum(0) if biased else None for gradient, biased in zip(gradients, ctx.biased)]
        if numbers:
            # The weights got their gradients inside of the operator, so autograd receives None for them.
            to_x, to_weights = columns_backward(list(gradients), weights, x, numbers), [None] * ctx.count
        elif group is not None and keeps_order(group, multiply):
            to_x, *to_weights = group_columns_gradients(list(gradients), weights, x, group.key, multiply.key)
        else:
            to_x, *to_weights = columns_gradients(group, gradients, weights, x, multiply)
        return None, None, to_x, None, *to_weights, *to_biases, *[None] * (ctx.held + len(numbers))


class RowParallel(torch.autograd.Function):
    """y = x W^T summed over the group. x: [tokens, inputs / t]; weight: [outputs, inputs / t]; result: [tokens / t,
    outputs].

    number: of the layer, where its weight gradient may be deferred, else None.
    """

    @staticmethod
    def forward(
        ctx: Any, group: TensorGroup, multiply: Multiply, x: Tensor, weight: Tensor, number: Tensor | None
    ) -> Tensor:
        ctx.group, ctx.multiply = group, multiply
        # x is this rank's part of the inputs for all tokens: it needs no gather in backward, the output's gradient
        # does.
        ctx.save_for_backward(x, weight, *([] if number is None else [number]))
        return group.wait(group.matmul_scatter_sum([x], [weight], GEMMRole.OUTPUT, multiply))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        to_weight, (x, weight, *numbers) = None, ctx.saved_tensors
        if numbers:
            to_x = rows_backward(gradient, weight, x, *numbers)
        elif keeps_order(ctx.group, ctx.multiply):
            to_x, to_weight = group_rows_gradients(gradient, weight, x, ctx.group.key, ctx.multiply.key)
        else:
            to_x, to_weight = ctx.group.rows_gradients(gradient, weight, x, ctx.multiply)
        return None, None, to_x, to_weight, None


class Adapter(NamedTuple):
    """What this rank computes with of the adapter of a linear layer: A [rank, inputs], B [outputs, rank], of which
    tensor parallelism cuts the dimension that it cuts of the matrix, and the factor on its output."""

    down: Tensor
    up: Tensor
    scale: float


# The products of adapters are operators of their own, because the calls of torch's are counted: `activation.save` names
# products by their number.


@register_operator("project_down")
def project_down(x: Tensor, down: Tensor, scale: float) -> Tensor:
    """scale x A^T: [tokens, inputs], [rank, inputs] -> [tokens, rank]."""
    return (x @ down.t()).mul_(scale)


@torch.library.register_fake("trainer::project_down")
def _(x: Tensor, down: Tensor, scale: float) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[0])


def add_low_rank(y: Tensor, low: Tensor, up: Tensor) -> Tensor:
    """y + u B^T. y may be overwritten, and must not be used again.

    torch's own sum of a matrix and a product copies the matrix first. Compiled code adds in place, and copies only
    where y is needed elsewhere. Without the compiler, selective recompute keeps y itself, which must stay as it is."""
    if not torch.compiler.is_compiling():
        return add_projection(y, low, up)
    add_projection_in_place(y, low, up)
    return y


@torch.library.custom_op("trainer::add_projection_in_place", mutates_args=("y",))
def add_projection_in_place(y: Tensor, low: Tensor, up: Tensor) -> None:
    """See `add_projection`."""
    y.addmm_(low, up.t())


@add_projection_in_place.register_fake
def _(y: Tensor, low: Tensor, up: Tensor) -> None:
    return None


@register_operator("add_projection")
def add_projection(y: Tensor, low: Tensor, up: Tensor) -> Tensor:
    """y + u B^T: [tokens, outputs], [tokens, rank], [outputs, rank] -> [tokens, outputs]."""
    return torch.addmm(y, low, up.t())


@torch.library.register_fake("trainer::add_projection")
def _(y: Tensor, low: Tensor, up: Tensor) -> Tensor:
    return y.new_empty(y.shape)


class AdaptedColumns(torch.autograd.Function):
    """`ColumnParallel` for matrices of which some are frozen or have adapters. Every matrix A is whole on each rank and
    joins the input that is gathered for the matrices.

    operands: weights, then a bias or None for each, then the row scales of each weight that is in fp8 and None for the
    others, then A and B of each adapter. scales: factor of each adapter, None for a matrix without one.

    Weights in fp8 are decoded in forward and again in backward. Between them nothing is kept but what the parameters
    are.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        """given: see `ColumnParallel.forward`."""
        group, multiply, x, scales, *operands = given
        count = len(scales)
        held, biases, row_scales, pairs = split_sizes(operands, count, count, count)
        downs, ups = pairs[::2], pairs[1::2]
        weights = [decode_rows(weight, scale, x.dtype) for weight, scale in zip(held, row_scales)]
        ctx.group, ctx.multiply, ctx.scales = group, multiply, scales
        if group is None:
            results, whole = matmul_all(x, weights, GEMMRole.OUTPUT, biases, multiply), x
        else:
            results, whole = group.gather_matmul(
                x, weights, GEMMRole.OUTPUT, biases, keep=len(downs) > 0, multiply=multiply
            )
        places = find_adapted(scales)
        low: list[Tensor] = []
        added: dict[int, Tensor] = {}
        if downs:
            # The matrices A share the input, which one product reads once. All adapters of a model have one factor.
            low = [project_down(whole, join_rows(downs), scales[places[0]])]
            lows = low[0].split([len(down) for down in downs], 1)
            added = {place: add_low_rank(results[place], part, up) for place, part, up in zip(places, lows, ups)}
        # A frozen matrix without an adapter needs its input no more.
        kept = [x] if downs or any(ctx.needs_input_grad[4 : 4 + count]) else []
        ctx.save_for_backward(*held, *row_scales, *downs, *ups, *low, *kept)
        return tuple(added.get(place, result) for place, result in enumerate(results))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        group, multiply, scales, count = ctx.group, ctx.multiply, ctx.scales, len(ctx.scales)
        places = find_adapted(scales)
        sizes = count, count, len(places), len(places), len(places) > 0
        held, row_scales, downs, ups, low, kept = split_sizes(ctx.saved_tensors, *sizes)
        wanted = ctx.needs_input_grad[4 : 4 + 2 * count]
        to_biases = [gradient.sum(0) if bias else None for gradient, bias in zip(gradients, wanted[count:])]
        trained = [place for place in range(count) if wanted[place]]
        # A rank has the gradients of its part of the outputs. Their sum over ranks is as narrow as the rank.
        started = again = to_x = to_low = None
        to_ups, to_downs = [], []
        if downs:
            ranks = [len(down) for down in downs]
            to_low = torch.cat([gradients[place] @ up for place, up in zip(places, ups)], 1).mul_(scales[places[0]])
            to_ups = [gradients[place].t() @ part for place, part in zip(places, low[0].split(ranks, 1))]
        if group is not None:
            started = None if to_low is None else group.scatter_sum(to_low)
            again = group.gather(kept[0]) if trained else None
        if ctx.needs_input_grad[2]:
            role, dtype = GEMMRole.INPUT_GRADIENT, gradients[0].dtype
            weights = [decode_rows(weight, scale, dtype, True) for weight, scale in zip(held, row_scales)]
            if group is None:
                to_x = matmul_sum(gradients, weights, role, multiply)
            else:
                to_x = group.matmul_scatter_sum(gradients, weights, role, multiply)
        if started is not None:
            to_low = group.wait(started)
        if to_low is not None:
            # Each rank adds up over its own tokens: the gradient of A is a partial sum, as that of every whole
            # parameter.
            to_downs = (to_low.t() @ kept[0]).split(ranks)
        to_weights: list[Tensor | None] = [None] * count
        if trained:
            whole = kept[0] if group is None else group.wait(again)
            for place, found in zip(trained, weight_gradients([gradients[i] for i in trained], whole, multiply)):
                to_weights[place] = found
        if to_x is not None:
            to_x = to_x if group is None else group.wait(to_x)
            if to_low is not None:
                to_x = add_low_rank(to_x, to_low, join_rows(downs).t())
        pairs = [part for pair in zip(to_downs, to_ups) for part in pair]
        return None, None, to_x, None, *to_weights, *to_biases, *[None] * count, *pairs


class AdaptedRows(torch.autograd.Function):
    """`RowParallel` for a matrix that is frozen or has an adapter. A is cut as the matrix is, B is whole on each rank
    and sees partial sums, which are added to those of the matrix before these are summed over ranks.

    row_scale: of a weight in fp8, else None. pair: A and B, or nothing.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """given: see `ColumnParallel.forward`."""
        group, multiply, scale, x, held, row_scale, *pair = given
        ctx.group, ctx.multiply, ctx.scale = group, multiply, scale
        low = [project_down(x, pair[0], scale)] if pair else []
        # A frozen matrix without an adapter needs its input no more.
        kept = [x] if pair or ctx.needs_input_grad[4] else []
        ctx.save_for_backward(held, row_scale, *pair, *low, *kept)
        weight = decode_rows(held, row_scale, x.dtype)
        if not pair:
            return group.wait(group.matmul_scatter_sum([x], [weight], GEMMRole.OUTPUT, multiply))
        if not group.fuses:
            return group.wait(group.scatter_sum(add_low_rank(multiply(x, weight, GEMMRole.OUTPUT), low[0], pair[1])))
        # A product that is fused with its sum leaves nothing to add to: the sum of the partial sums is a message of its
        # own, as narrow as the rank.
        started = group.scatter_sum(low[0])
        result = group.wait(group.matmul_scatter_sum([x], [weight], GEMMRole.OUTPUT, multiply))
        return add_low_rank(result, group.wait(started), pair[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        group, multiply = ctx.group, ctx.multiply
        adapted = len(ctx.needs_input_grad) > 6
        (held, row_scale), pair, low, kept = split_sizes(ctx.saved_tensors, 2, *((2, 1) if adapted else (0, 0)))
        needs_x, needs_weight = ctx.needs_input_grad[3:5]
        to_x, to_weight, to_pair = None, None, []
        if needs_x:
            weight = decode_rows(held, row_scale, gradient.dtype, True)
            (to_x,), whole = group.gather_matmul(
                gradient, [weight], GEMMRole.INPUT_GRADIENT, keep=adapted or needs_weight, multiply=multiply
            )
        else:
            whole = group.wait(group.gather(gradient))
        if adapted:
            (down, up), (low,) = pair, low
            to_low = (whole @ up).mul_(ctx.scale)
            to_pair = [to_low.t() @ kept[0], whole.t() @ low]
            if to_x is not None:
                to_x = add_low_rank(to_x, to_low, down.t())
        if needs_weight:
            to_weight = multiply(whole, kept[0], GEMMRole.WEIGHT_GRADIENT)
        return None, None, None, to_x, to_weight, None, *to_pair


def join_rows(matrices: Sequence[Tensor]) -> Tensor:
    """One matrix with the rows of all."""
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))


def find_adapted(scales: Sequence[float | None]) -> list[int]:
    """The numbers of the matrices that have adapters."""
    return [place for place, scale in enumerate(scales) if scale is not None]


def split_sizes(parts: Sequence[Tensor], *sizes: int) -> list[Sequence[Tensor]]:
    """Runs of so many of the parts, and the rest."""
    found = []
    for size in sizes:
        found.append(parts[:size])
        parts = parts[size:]
    return [*found, parts]


def column_parallel(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: TensorGroup | None,
    numbers: Sequence[Tensor] = (),
    multiply: Multiply = matmul,
    adapters: Sequence[Adapter | None] = (),
    row_scales: Sequence[Tensor | None] = (),
    held: Sequence[Tensor] = (),
) -> Sequence[Tensor]:
    """Products of one input with several matrices, column-parallel over `group` if there is one. Shapes:
    `ColumnParallel`. adapters: of each matrix, or nothing. row_scales: of each matrix, None for those that are not in
    fp8, or nothing. held: the operands of each (`cast_weight`), or nothing.

    Weights marked `dropped_after_use` lose their memory after forward and get it back for backward. torch's own product
    would save a view of the freed memory, so such weights always go through `ColumnParallel`. So do products that are
    not `matmul`, which autograd cannot differentiate.
    """
    frozen = False
    for weight in weights:
        frozen = frozen or not weight.requires_grad
    if adapters or row_scales or frozen and (multiply is not matmul or group is not None):
        adapters = adapters or [None] * len(weights)
        row_scales = row_scales or [None] * len(weights)
        pairs = [part for adapter in adapters if adapter is not None for part in adapter[:2]]
        scales = tuple(None if adapter is None else adapter.scale for adapter in adapters)
        return AdaptedColumns.apply(group, multiply, x, scales, *weights, *biases, *row_scales, *pairs)
    dropped = getattr(weights[0], "dropped_after_use", False)
    if group is None and not numbers and not dropped and multiply is matmul:
        return [matmul(x, weight, GEMMRole.OUTPUT, bias) for weight, bias in zip(weights, biases)]
    weights = detach_weights(weights, numbers)
    return ColumnParallel.apply(group, multiply, x, len(weights), *weights, *biases, *held, *numbers)


def row_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: TensorGroup,
    number: Tensor | None,
    multiply: Multiply = matmul,
    adapter: Adapter | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """A row-parallel product, see `RowParallel`. The bias is added after the sum over ranks, so it counts once.
    row_scale: of a weight in fp8."""
    if adapter is not None or not weight.requires_grad:
        *pair, scale = (0.0,) if adapter is None else adapter
        y = AdaptedRows.apply(group, multiply, scale, x, weight, row_scale, *pair)
    else:
        (weight,) = detach_weights([weight], [] if number is None else [number])
        y = RowParallel.apply(group, multiply, x, weight, number)
    return y if bias is None else y + bias


def detach_weights(weights: Sequence[Tensor], numbers: Sequence[Tensor]) -> Sequence[Tensor]:
    """The weights to multiply with. Layers with a number accumulate their weight gradients themselves. An edge from the
    product to the parameter would make backward send zeros along it."""
    return [weight.detach() for weight in weights] if numbers else weights
