"""Tensor and sequence parallelism from logical axes (Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv
2205.05198).

A parameter one of whose axes is among `TENSOR_AXES` becomes a DTensor cut along it; column or row parallel follows from
whether that is the outputs' or the inputs' axis. Everything else is whole on each rank and sees only the rank's tokens,
so its gradients are partial sums, which `gradients.py` adds up once a step."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainer.distributed.collectives import TensorGroup
from trainer.distributed.copied import CopyEngineGroup
from trainer.distributed.fused import FusedKernelGroup
from trainer.model.axes import DeclaredModule
from trainer.model.layers import Linear
from trainer.model.stage import Stage

BACKENDS: dict[str, type[TensorGroup]] = {
    "off": TensorGroup,
    "copy_engine": CopyEngineGroup,
    "triton": FusedKernelGroup,
}
"""What tensor-parallel ranks communicate by, by the value of `parallel.fusion`."""


def shard_model(model: Stage, mesh: DeviceMesh, backend: type[TensorGroup] = TensorGroup) -> None:
    """Cuts a model on the meta device over the ranks of `mesh` (one dimension), which communicate by `backend`."""
    if mesh.size() == 1:
        return
    group = backend(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())
    model.group = group
    for module in model.modules():
        if isinstance(module, DeclaredModule):
            split_module(module, mesh, group)
    model.tie()


def split_module(module: DeclaredModule, mesh: DeviceMesh, group: TensorGroup) -> None:
    for name, info in module.declared.items():
        dimension = info.tensor_dimension(group.size)
        if dimension is not None:
            setattr(module, name, nn.Parameter(shard_parameter(getattr(module, name), dimension, mesh)))
        elif info.axes[0] == "kv_heads":  # each rank uses the one head that its queries look at
            rows = info.shape[0] // info.units
            first = group.rank * info.units // group.size * rows
            module.part = slice(first, first + rows)
        else:
            continue
        module.group = group
        if isinstance(module, Linear):
            module.by_rows = dimension == 1


def shard_parameter(parameter: torch.Tensor, dimension: int, mesh: DeviceMesh) -> DTensor:
    """This rank's part of a meta tensor as a DTensor: equal parts, the last ones smaller."""
    part = -(-parameter.shape[dimension] // mesh.size())
    first = min(parameter.shape[dimension], part * mesh.get_local_rank())
    rows = parameter.detach().narrow(dimension, first, min(part, parameter.shape[dimension] - first))
    return DTensor.from_local(
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        mesh,
        [Shard(dimension)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def is_split(parameter: torch.Tensor) -> bool:
    """Whether each tensor-parallel rank holds its own part of a (sharded) parameter."""
    return isinstance(parameter, DTensor) and "tp" in parameter.device_mesh.mesh_dim_names
