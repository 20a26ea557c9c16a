"""Tensor and sequence parallelism from logical axes (Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv
2205.05198).

A parameter one of whose axes is among `TENSOR_AXES` becomes a DTensor cut along it; column or row parallel follows from
whether that is the outputs' or the inputs' axis. Everything else is whole on each rank and sees only the rank's tokens,
so its gradients are partial sums, which `gradients.py` adds up once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainer.distributed.collectives import TensorGroup
from trainer.distributed.copy_engine import CopyEngineGroup
from trainer.distributed.fused_kernels import FusedKernelGroup
from trainer.distributed.mesh import World
from trainer.distributed.tensors import local_values
from trainer.model.axes import DeclaredModule
from trainer.model.layers import Linear
from trainer.model.stage import Stage

BACKENDS: dict[str, type[TensorGroup]] = {
    "off": TensorGroup,
    "copy_engine": CopyEngineGroup,
    "triton": FusedKernelGroup,
}
"""What tensor-parallel ranks communicate by, by the value of `parallel.tp_overlap`."""


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


# What gradients still need after the last backward pass: sums over ranks that hold the same parameter, and one norm.


CACHED = 2**18
"""Elements of a run that a CPU widens to fp64 and adds up at a time."""


class SharedParameters:
    """The parameters of this rank that others hold too, and whose gradients are parts of a sum.

    Under tensor parallelism: all that are not split, because each rank has seen its own tokens or heads. Under pipeline
    parallelism: a tied embedding, of which the first and the last stage have a copy.

    parameters: name -> parameter, all of this rank; copies: (name, name of its copy) where one rank holds both ends;
    tied: names of which another rank holds a copy too; ends: the communicator with that rank; counted: whether this one
    counts them in the gradient norm.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        copies: list[tuple[str, str]],
        tied: list[str],
        ends: dist.distributed_c10d.Backend | None,
        counted: bool,
        world: World,
    ):
        self.parameters, self.copies, self.tied, self.ends, self.world = parameters, copies, tied, ends, world
        elsewhere = {copy for _, copy in copies} | (set() if counted else set(tied))
        first = world.place("replicate") == 0
        self.counted_here = [
            first and name not in elsewhere and (is_split(parameter) or world.place("tp") == 0)
            for name, parameter in parameters.items()
        ]
        self.counted = torch.tensor(self.counted_here, device=world.device)

    @torch.no_grad()
    def sum(self) -> None:
        """Makes every gradient whole, in place."""
        tensor = self.world.dimensions["tp"]
        if tensor.size() > 1:
            sum_flat(
                [local_values(parameter.grad) for parameter in self.parameters.values() if not is_split(parameter)],
                self.world.device,
                lambda flat: dist.all_reduce(flat, group=tensor.get_group()),
            )
        for name, copy in self.copies:
            mine, other = local_values(self.parameters[name].grad), local_values(self.parameters[copy].grad)
            other.copy_(mine.add_(other))
        if self.ends is not None:
            sum_flat(
                [local_values(self.parameters[name].grad) for name in self.tied],
                self.world.device,
                lambda flat: self.ends.allreduce([flat]).wait(),
            )

    @torch.no_grad()
    def squares(self, gradients: list[Tensor]) -> Tensor:
        """Squared norms in fp64 of what this rank holds of each parameter's gradient, zero where another counts it, or
        not a number if the gradient is not finite: [parameters]."""
        return squared_norms(gradients).to(self.world.device) * self.counted


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """Squared norm of each tensor, summed in fp64, on the tensors' device: [tensors].

    On a CPU by runs that fit its cache: torch's own norm in fp64 of fp32 elements takes ten times as long there.
    """
    if tensors[0].is_cuda:
        from trainer.kernels import multi_tensor  # Triton, which is needed on a GPU only

        return multi_tensor.squared_norms(tensors)

    def squared(run: Tensor) -> Tensor:
        wide = run.double()
        return wide.dot(wide)

    return torch.stack(
        [torch.stack([squared(run) for run in tensor.flatten().split(CACHED)]).sum() for tensor in tensors]
    )


def sum_flat(tensors: Iterable[Tensor], device: torch.device, all_reduce: Callable[[Tensor], object]) -> None:
    """Sums tensors over ranks in place, in one collective on `device`, where offloaded ones are not."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if len(tensors) == 1 and tensors[0].device == device and tensors[0].is_contiguous():
        all_reduce(tensors[0])
    elif tensors:
        flat = torch.cat([tensor.flatten() for tensor in tensors]).to(device)
        all_reduce(flat)
        torch._foreach_copy_(
            tensors, [part.view_as(tensor) for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]))]
        )
