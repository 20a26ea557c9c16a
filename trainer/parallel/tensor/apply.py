"""Tensor and sequence parallelism from logical axes (Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv
2205.05198).

A parameter with an axis in `TENSOR_AXES` becomes a DTensor that is split along it. Whether that is the axis of the
outputs or of the inputs makes the layer column-parallel or row-parallel. All other parameters are whole on each rank
and see only the rank's tokens, so their gradients are partial sums, which `SharedParameters` adds up once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainer.distributed.collectives import TensorGroup
from trainer.distributed.copy_engine import CopyEngineGroup
from trainer.distributed.mesh import World
from trainer.distributed.tensors import local_values
from trainer.model.initial import DeclaredModule
from trainer.model.layers import Linear
from trainer.model.stage import Stage

BACKENDS: dict[str, type[TensorGroup]] = {"off": TensorGroup, "copy_engine": CopyEngineGroup}
"""`parallel.tp_overlap` -> the implementation of the tensor-parallel ranks' communication."""


def shard_model(model: Stage, mesh: DeviceMesh, backend: type[TensorGroup] = TensorGroup) -> None:
    """Splits a model on the meta device over the ranks of `mesh` (one dimension), which communicate by `backend`. All
    ranks of the mesh call it together."""
    if mesh.size() == 1:
        return
    group = backend(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())
    model.group = group
    for module in model.modules():
        if isinstance(module, DeclaredModule):
            split_module(module, mesh, group)
    # New parameters have replaced the old ones, so a tied head and the embedding are two until they are tied again.
    model.tie()


def split_module(module: DeclaredModule, mesh: DeviceMesh, group: TensorGroup) -> None:
    """Splits the parameters of one module, and gives the module its group."""
    for name, info in module.declared.items():
        dimension = info.tensor_dimension(group.size)
        if dimension is not None:
            setattr(module, name, shard_parameter(getattr(module, name), dimension, mesh))
        elif info.axes[0] == "kv_heads":
            # There are fewer key-value heads than ranks. k and v stay whole, and each rank computes only the one head
            # that its query heads share.
            rows = info.shape[0] // info.units
            first = group.rank * info.units // group.size * rows
            module.part = slice(first, first + rows)
        else:
            continue
        module.group = group
        if isinstance(module, Linear) and name == "weight":
            module.by_rows = dimension == 1


def shard_parameter(parameter: nn.Parameter, dimension: int, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's part of a parameter on the meta device, a DTensor: equal parts, the last ones smaller, as DTensor's
    `Shard` defines them. It is trained if the parameter is."""
    size = -(-parameter.shape[dimension] // mesh.size())
    first = min(parameter.shape[dimension], size * mesh.get_local_rank())
    rows = parameter.detach().narrow(dimension, first, min(size, parameter.shape[dimension] - first))
    # `from_local` with the whole shape communicates nothing; `distribute_tensor` would broadcast values, which do not
    # exist yet.
    part = DTensor.from_local(
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        mesh,
        [Shard(dimension)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def is_split(parameter: torch.Tensor) -> bool:
    """Whether the tensor-parallel ranks need not sum a parameter's gradient: each holds its own part, so that the
    parameter's mesh has the dimension `tp`, or they are ranks like all others for experts that ranks share."""
    return is_expert(parameter) or isinstance(parameter, DTensor) and "tp" in parameter.device_mesh.mesh_dim_names


def is_expert(parameter: torch.Tensor) -> bool:
    """Whether a parameter is dealt out to expert-parallel ranks. Its mesh is that of experts (`Plan.expert_mesh`)."""
    return isinstance(parameter, DTensor) and "ep" in parameter.device_mesh.mesh_dim_names


# Work on gradients after the last backward pass: sums over ranks that hold the same parameter, and one norm.


CHUNK = 2**18
"""Elements that a CPU converts to fp64 and sums at a time, so that they stay in its cache."""


class SharedParameters:
    """The parameters of this rank that other ranks hold too, whose gradients are therefore partial sums.

    Under tensor parallelism these are all that are not split, because each rank has seen its own tokens or heads only.
    Under pipeline parallelism it is a tied embedding, of which the first and the last stage have a copy each.

    parameters: name -> parameter, all of this rank. copies: (name, name of its copy) where one rank holds both ends.
    tied: names of parameters of which another rank holds a copy. ends: the communicator with that rank. counted:
    whether this rank counts the tied ones in the gradient norm.
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
        # Each gradient must enter the norm once: replicas, whole tensor-parallel parameters and copies are counted by
        # one of the ranks that hold them.
        self.counted_here = [
            name not in elsewhere
            and world.place("expert_replicate" if is_expert(parameter) else "replicate") == 0
            and (is_split(parameter) or world.place("tp") == 0)
            for name, parameter in parameters.items()
        ]
        self.counted = torch.tensor(self.counted_here, device=world.device)

    @torch.no_grad()
    def sum(self) -> None:
        """Completes every gradient, in place. All ranks call it together, after FSDP has reduced over the data-parallel
        ranks."""
        tensor = self.world.dimensions["tp"]
        if tensor.size() > 1:
            # Once a step and in one flat all-reduce, instead of once for each layer and micro-batch.
            sum_flat(
                [local_values(parameter.grad) for parameter in self.parameters.values() if not is_split(parameter)],
                self.world.device,
                lambda flat: dist.all_reduce(flat, group=tensor.get_group()),
            )
        for name, copy in self.copies:
            original, duplicate = local_values(self.parameters[name].grad), local_values(self.parameters[copy].grad)
            # Both get the sum and then the same update, so the copies stay equal.
            duplicate.copy_(original.add_(duplicate))
        # After the sum over `tp`, in the same order on both ends: two collectives in different orders would wait for
        # each other.
        if self.ends is not None:
            sum_flat(
                [local_values(self.parameters[name].grad) for name in self.tied],
                self.world.device,
                lambda flat: self.ends.allreduce([flat]).wait(),
            )

    @torch.no_grad()
    def squares(self, gradients: list[Tensor]) -> Tensor:
        """Squared norms in fp64 of what this rank holds of each parameter's gradient: [parameters]. Zero where another
        rank counts it, NaN if the gradient is not finite."""
        # A product with zero instead of a selection: it keeps a NaN visible on whatever rank it occurs.
        return squared_norms(gradients).to(self.world.device) * self.counted


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """Squared norm of each tensor, summed in fp64, on the tensors' device: [tensors].

    On a CPU the sum goes over chunks that fit its cache. torch's own norm in fp64 of fp32 elements takes ten times as
    long.
    """
    if not tensors:  # a rank may have nothing to train
        return torch.zeros(0, dtype=torch.float64)
    if tensors[0].is_cuda:
        from trainer.kernels import multi_tensor  # Triton, which is needed on a GPU only

        return multi_tensor.squared_norms(tensors)

    def squared(chunk: Tensor) -> Tensor:
        wide = chunk.double()
        return wide.dot(wide)

    return torch.stack(
        [torch.stack([squared(chunk) for chunk in tensor.flatten().split(CHUNK)]).sum() for tensor in tensors]
    )


def sum_flat(tensors: Iterable[Tensor], device: torch.device, all_reduce: Callable[[Tensor], object]) -> None:
    """Sums tensors over ranks in place by one collective on `device`. Offloaded tensors are copied there and back."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    # A single tensor needs no flat copy.
    if len(tensors) == 1 and tensors[0].device == device and tensors[0].is_contiguous():
        all_reduce(tensors[0])
    elif tensors:
        flat = torch.cat([tensor.flatten() for tensor in tensors]).to(device)
        all_reduce(flat)
        torch._foreach_copy_(
            tensors, [part.view_as(tensor) for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]))]
        )
