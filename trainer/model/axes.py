"""Logical axes: what each dimension of a parameter means.

Every parameter is declared with a name for each of its dimensions (`embed`, `heads`, `kv_heads`, `mlp`, `vocab`, ...)
and a role. Layouts (tensor parallelism, sharding), optimizer groups and initial weights follow from these declarations;
no other part of the project knows architectures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.distributed.collectives import TensorGroup
from trainer.planning.cost.parameters import ParameterInfo


class DeclaredModule(nn.Module):
    """A module whose parameters are declared with their axes.

    Tensor parallelism sets `group`, where a parameter's axis is split over ranks, and `part`, the rows that this rank
    uses of parameters that it holds whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.declared: dict[str, ParameterInfo] = {}
        self.group: TensorGroup | None = None
        self.part: slice | None = None

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        role: str,
        residual: bool = False,
        units: int = 0,
    ) -> None:
        self.declared[name] = ParameterInfo(tuple(shape), axes, role, residual, units)
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def local(self, name: str) -> Tensor:
        """What this rank computes with of a parameter; gradients find their way back."""
        parameter = getattr(self, name)
        if isinstance(parameter, DTensor):
            return parameter.to_local()
        return parameter if self.part is None else ParameterPart.apply(parameter, self.part)


class ParameterPart(torch.autograd.Function):
    """Some rows of a parameter; unlike indexing, differentiable inside of an operator's own implementation too."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: slice) -> Tensor:
        ctx.rows, ctx.shape = rows, whole.shape
        return whole[rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        whole = gradient.new_zeros(ctx.shape)
        whole[ctx.rows] = gradient
        return whole, None


def parameter_infos(model: nn.Module) -> dict[str, ParameterInfo]:
    """Global name -> declaration, in the order of `model.named_parameters()`; a tied parameter appears once."""
    declared = {
        f"{prefix}.{name}": info
        for prefix, module in model.named_modules()
        if isinstance(module, DeclaredModule)
        for name, info in module.declared.items()
    }
    return {name: declared[name] for name, _ in model.named_parameters()}
