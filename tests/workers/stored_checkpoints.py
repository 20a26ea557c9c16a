"""Two ranks whose checkpoints are copied to a store. Arguments: the folder to work in, the URL.

Each rank uploads its own file. Then the folder is lost, and both ranks fetch what the store has. answers.json tells
what each rank has put and fetched."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.checkpoints import read_tensors
from support.launch import leave

from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.remote import CheckpointUploader, FetchNeeded
from trainer.config import CheckpointConfig
from trainer.distributed.mesh import join_world
from trainer.planning.plan import Plan
from trainer.training.saving import StartSearch
from trainer.util.objects import ObjectStore

folder, url = Path(sys.argv[1]) / "checkpoints", sys.argv[2]
world = join_world(Plan(replicate=2), torch.device("cpu"))
put, fetched = list[str](), list[str]()
for name, log in (("put", put), ("fetch", fetched)):
    action = getattr(ObjectStore, name)

    def record(self, *arguments, action=action, log=log):
        log.append(Path(getattr(arguments[0], "name", arguments[0])).name)
        return action(self, *arguments)

    setattr(ObjectStore, name, record)


def value(step: int, rank: int) -> torch.Tensor:
    return torch.full((50, 50), float(step * 10 + rank))


config = CheckpointConfig(upload=url, keep_last=1)
uploader = CheckpointUploader(folder, config)
checkpointer = Checkpointer(folder, config, uploader)
uploader.begin_run(-1)
for step in range(1, 6):
    checkpointer.save(step, {f"rank{world.rank}": value(step, world.rank)}, {"launchers": ["me"]})
checkpointer.wait()
uploader.finish(lambda: None, 60)
messages, failure = checkpointer.poll(), uploader.failure
checkpointer.close()
dist.barrier()
if world.rank == 0:
    shutil.rmtree(folder)
dist.barrier()
search = StartSearch(config, folder, ["other"], None, None)
while True:
    try:
        path, notes = world.agree(search.look)
        break
    except FetchNeeded as need:
        search.note(need, need.fetch_together(world))
tensors = read_tensors(path)
right = all(torch.equal(tensors[f"rank{rank}"], value(5, rank)) for rank in (0, 1))
everyone = world.gather([put, fetched, messages, failure, path.name, right])
if world.rank == 0:
    (folder.parent / "answers.json").write_text(json.dumps(everyone))
dist.barrier()
leave()
