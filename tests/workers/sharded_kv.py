"""Attention to shared slots that the kernel of `kernels/decode.py` brings together, beside a gather: on two processes,
in Triton's interpreter.

    TRITON_INTERPRET=1 WORLD_SIZE=2 sharded_kv.py cpu
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.launch import fork, leave
from support.triton_ranks import compare, count_by_tensors, drawn
from tensor_parallel import settings

from trainer.distributed.mesh import World, join_world
from trainer.distributed.sharded_kv import OUT_OF_REACH, NodeShardedKVGroup, ShardedKVGroup
from trainer.parallel.context.apply import make_member
from trainer.planning.features import resolve_plan


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
    count_by_tensors()
    compare_slots(world)


if __name__ == "__main__":
    fork()
    main()
    leave()
