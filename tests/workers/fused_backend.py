"""A whole model whose tensor-parallel products are the kernels of `kernels/experimental/tensor_parallel.py`, beside the
usual ones; and attention to shared slots that the kernel of `kernels/decode.py` brings together, beside a gather: on
two processes, in Triton's interpreter.

    TRITON_INTERPRET=1 WORLD_SIZE=2 fused_backend.py cpu
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from support.launch import fork, leave
from support.triton_ranks import compare, count_by_tensors, drawn
from tensor_parallel import BATCH, LENGTH, LLAMA, model_of, settings, spec_of

from trainer.config import ActivationConfig
from trainer.distributed import fused_kernels, symmetric_memory
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.fused_kernels import OUT_OF_REACH, NodeShardedKVGroup, ShardedKVGroup
from trainer.distributed.mesh import World, join_world
from trainer.distributed.symmetric_memory import SymmetricMemory, allocate_symmetric
from trainer.distributed.tensors import local_values
from trainer.kernels.experimental import tensor_parallel as kernels
from trainer.model.linear import DeferredGrads
from trainer.parallel.context.apply import make_member
from trainer.parallel.recompute import apply_recompute
from trainer.planning.features import resolve_plan

TAKEN: Counter[str] = Counter()
"""Of this process: the calls of each kind, and how often memory was shared."""


def share(size: int, device: torch.device, group: dist.ProcessGroup) -> SymmetricMemory:
    """Counts how often memory is shared."""
    TAKEN["shared"] += 1
    return allocate_symmetric(size, device, group)


def shape_of(
    device: torch.device, dtype: torch.dtype, tokens: int, widths: list[int], size: int, waits: bool
) -> kernels.TileShape:
    return kernels.TileShape(rows=16, columns=32, step=32, group=2, programs=1, copiers=1, limit=10**7)


def counted(name: str) -> None:
    """Counts the calls of a kernel."""
    call = getattr(kernels, name)

    def counting(*arguments: object) -> object:
        TAKEN[name] += 1
        return call(*arguments)

    setattr(kernels, name, counting)


def gradients(world: World, backend: object, length: int) -> list[torch.Tensor]:
    """Objective and gradients of two passes, the first with weight gradients put off, both with recompute."""
    spec = spec_of(**LLAMA, depth=1)
    model, deferred = model_of(spec, world, backend=backend), DeferredGrads()
    model.defer(deferred)
    kept = fused_kernels.FusedKernelGroup if backend is not TensorGroup else TensorGroup
    apply_recompute(model, ActivationConfig(mode="selective", save=["matmul/2"]), kept)
    generator, objectives = torch.Generator().manual_seed(3), []
    for size in (length // 2, length):  # the second needs more memory
        tokens, targets = (torch.randint(0, spec.vocab_size, (BATCH, size), generator=generator) for _ in range(2))
        objective, _ = model(tokens, targets)
        deferred.active = size < length
        objective.backward()
        deferred.active = False
        deferred.take()()
        objectives.append(objective.detach())
    return [*objectives, *(local_values(parameter.grad) for parameter in model.parameters())]


def compare_slots(world: World) -> None:
    """Parts of a rank, of which the first of rank 0 sees nothing."""
    attended, logsum = drawn(world.rank, 2, 3, 4, 16), drawn(7 + world.rank, 2, 3, 4)
    if world.rank == 0:
        attended[:, :, 0], logsum[:, :, 0] = 0.0, -torch.inf
    gathered, sent = (make_member(dist.group.WORLD, kind) for kind in (ShardedKVGroup, NodeShardedKVGroup))
    for _ in range(3):
        compare(*(one.combine(attended, logsum, torch.float32) for one in (sent, gathered)), "slots")
    assert not OUT_OF_REACH


def main() -> None:
    torch.set_num_threads(1)
    world = join_world(resolve_plan(settings(2).parallel, 2), torch.device("cpu"))
    symmetric_memory.allocate_symmetric, fused_kernels.shape_of = share, shape_of
    count_by_tensors()
    for name in ("gather_matmul", "matmul_scatter", "sum_received"):
        counted(name)
    usual = gradients(world, TensorGroup, LENGTH)
    found = gradients(world, fused_kernels.FusedKernelGroup, LENGTH)
    worst = max(((one - other).norm() / one.norm()).item() for one, other in zip(usual, found))
    assert worst < 1e-5, worst
    # Two passes: forward gathers and reduces twice; backward gathers twice and reduces twice, and gathers
    # again what recompute did not keep.
    assert TAKEN["matmul_scatter"] == TAKEN["sum_received"] == 2 * (2 + 2), TAKEN
    assert TAKEN["gather_matmul"] == 2 * (2 + 2 + 1), TAKEN
    assert TAKEN["shared"] == 2 * 2, TAKEN
    compare_slots(world)
    assert TAKEN["shared"] == 2 * 2 + 1, TAKEN


if __name__ == "__main__":
    fork()
    main()
    leave()
