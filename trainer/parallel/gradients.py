"""What gradients still need after the last backward pass: sums over ranks that hold the same parameter, and one
norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.distributed.tensors import local_values
from trainer.distributed.world import World
from trainer.parallel.tensor import is_split

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
