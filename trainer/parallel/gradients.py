"""What gradients still need after the last backward pass: sums over ranks that hold the same parameter, and one norm."""
from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.optim.optimizer import local
from trainer.parallel.mesh import World
from trainer.parallel.tensor import is_split


class SharedParameters:
    """The parameters of this rank that others hold too, and whose gradients are parts of a sum.

    Under tensor parallelism: all that are not split, because each rank has seen its own tokens or heads. Under pipeline
    parallelism: a tied embedding, of which the first and the last stage have a copy.

    parameters: name -> parameter, all of this rank; tied: name -> the ranks of the pipeline that hold a copy, first the
    one that counts it; copies: (name, name of the copy) where one rank holds both.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], tied: dict[str, list[int]], copies: list[tuple[str, str]], world: World):
        self.parameters, self.copies, self.world = parameters, copies, world
        self.tied = {name: ranks for name, ranks in tied.items() if len(ranks) > 1}
        self.groups = {name: dist.new_group(ranks, use_local_synchronization=True, group_desc="tied")
                       for name, ranks in self.tied.items() if world.rank in ranks}
        counted = {copy for _, copy in copies} | {name for name, ranks in self.tied.items() if ranks[0] != world.rank}
        first = world.place("replicate") == 0
        self.counted = [first and name not in counted and (is_split(parameter) or world.place("tp") == 0)
                        for name, parameter in parameters.items()]

    @torch.no_grad()
    def sum(self) -> None:
        """Makes every gradient whole, in place."""
        if self.world.mesh["tp"].size() > 1:
            sum_flat([local(parameter.grad) for parameter in self.parameters.values() if not is_split(parameter)],
                     self.world.mesh["tp"].get_group())
        for name, copy in self.copies:
            mine, other = local(self.parameters[name].grad), local(self.parameters[copy].grad)
            other.copy_(mine.add_(other))
        for name, group in self.groups.items():
            sum_flat([local(self.parameters[name].grad)], group)

    @torch.no_grad()
    def squares(self) -> Tensor:
        """Squared norm of each parameter's local gradient in fp64, zero where another rank counts it: [parameters]."""
        gradients = [local(parameter.grad) for parameter in self.parameters.values()]
        norms = iter(torch._foreach_norm([g for g in gradients if g.numel()], 2, torch.float64))
        zero = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
        norms = torch.stack([next(norms) if gradient.numel() else zero for gradient in gradients]).square().to(self.world.device)
        return norms * torch.tensor(self.counted, device=norms.device)


def sum_flat(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sums tensors in place over `group`, in one collective."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if tensors:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(tensors, [part.view_as(tensor) for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]))])
