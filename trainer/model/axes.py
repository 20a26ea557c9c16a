"""Logical axes: what each dimension of a parameter means.

Every parameter is declared with a name for each of its dimensions (`embed`, `heads`, `kv_heads`, `mlp`, `vocab`, ...) and
a role. Layouts (tensor parallelism, sharding), optimizer groups and initial weights follow from these declarations; no
other part of the project knows architectures.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

ROLES = ("embedding", "norm", "bias", "head", "matrix")


@dataclass(frozen=True)
class ParameterInfo:
    """Facts of one parameter that hold under every plan: its global shape, the axis of each dimension, its role, and
    whether it writes to the residual stream (which initialisation scales with depth)."""
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    role: str
    residual: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(torch.Size(self.shape).numel())


class Declared(nn.Module):
    """A module whose parameters are declared with their axes."""

    def __init__(self) -> None:
        super().__init__()
        self.declared: dict[str, ParameterInfo] = {}

    def declare(self, name: str, shape: tuple[int, ...], axes: tuple[str, ...], role: str, residual: bool = False) -> None:
        assert len(shape) == len(axes) and role in ROLES, (name, shape, axes, role)
        self.declared[name] = ParameterInfo(tuple(shape), axes, role, residual)
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))


def parameter_infos(model: nn.Module) -> dict[str, ParameterInfo]:
    """Global name -> declaration, in the order of `model.named_parameters()`; a tied parameter appears once."""
    declared = {f"{prefix}.{name}": info for prefix, module in model.named_modules() if isinstance(module, Declared)
                for name, info in module.declared.items()}
    return {name: declared[name] for name, _ in model.named_parameters()}
