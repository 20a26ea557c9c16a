"""Functions of single tokens computed for some tokens at a time, and again in backward: what lives at once is one
tile's intermediate results instead of a whole sequence's (Bekman et al., arXiv 2506.13996, section 3.1).

The gradients of parameters are added up over tiles in fp32, or their rounding would grow with the number of tiles, and
reach autograd once: what waits for a parameter's gradient (FSDP, DeepSpeed) sees one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Parameters = Callable[[], list[nn.Parameter]]


class TiledFunction(torch.autograd.Function):
    """See `apply_tiled`. The parameters stand behind the inputs for the graph's sake alone."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], parameters: Parameters, tile: int, x: Tensor, *_: nn.Parameter
    ) -> Tensor:
        ctx.function, ctx.parameters, ctx.tile = function, parameters, tile
        ctx.save_for_backward(x)
        result = torch.empty_like(x)
        for rows in split_rows(len(x), tile):
            result[rows] = function(x[rows])
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        (x,), parameters = ctx.saved_tensors, ctx.parameters()
        to_x = torch.empty_like(x)
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        for rows in split_rows(len(x), ctx.tile):
            part = x[rows].detach().requires_grad_()
            with torch.enable_grad():
                result = ctx.function(part)
            to_x[rows], *terms = torch.autograd.grad(result, [part, *parameters], gradient[rows])
            del result
            for total, term in zip(sums, terms):
                total += term
        return None, None, None, to_x, *(total.to(p.dtype) for total, p in zip(sums, parameters))


def apply_tiled(function: Callable[[Tensor], Tensor], parameters: Parameters, tile: int, x: Tensor) -> Tensor:
    """`function(x)`, whose result is of x's shape and type, computed from `tile` rows of x at a time.

    parameters: those of the function that are trained, asked for again in backward, where ZeRO-3 has gathered them."""
    return TiledFunction.apply(function, parameters, tile, x, *parameters())


def split_rows(rows: int, tile: int) -> Iterator[slice]:
    """The rows of each tile."""
    return (slice(begin, min(begin + tile, rows)) for begin in range(0, rows, tile))
