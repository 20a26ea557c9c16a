"""Many gathers at once over gloo, in a process of its own: what goes wrong there ends the process."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from support.launch import fork

from trainer.distributed.collectives import TensorGroup
from trainer.distributed.mesh import join_world
from trainer.planning.plan import Plan

ROUNDS, AT_ONCE = 150, 64


def threads() -> set[int]:
    return {int(one.name) for one in Path("/proc/self/task").iterdir()}


fork()
before = threads()
world = join_world(Plan(), torch.device("cpu"))
group = world.dimensions["tp"].get_group()
for made in (group, dist.group.WORLD, dist.new_group(backend="gloo")):
    print("threads", made._get_backend(torch.device("cpu")).options._threads)
started = threads() - before  # of which gloo's own has a name from torch 2.12 on
print("interrupt nobody", len(started) > 1 and {os.sched_getscheduler(one) for one in started} == {os.SCHED_BATCH})
tensor, x = TensorGroup(group.group_name, rank=0, size=1), torch.arange(512.0)
for _ in range(ROUNDS):
    started = [tensor.gather(x) for _ in range(AT_ONCE)]
    gathered = [tensor.wait(each) for each in started]
assert all(torch.equal(each, x) for each in gathered)
print("gathered", flush=True)
