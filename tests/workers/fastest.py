"""What `parallel.fusion=auto` measures, keeps in a file and chooses, on two processes.

fastest.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.launch import fork, leave

from trainer.config import RunConfig
from trainer.distributed import fastest
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.copied import Copied
from trainer.distributed.fastest import Fastest
from trainer.distributed.world import join, local_device
from trainer.precision.products import Role


def decided(name: str, rank: int, file: Path, near: bool = True) -> list[str]:
    """What is said of a gathered and a reduced product and of their gradients, which have to be right."""
    fastest.table.cache_clear()
    group, usual = Fastest(name, rank, 2, near=near, file=str(file)), TensorGroup(name, rank, 2)
    x, weights = torch.randn(6, 8), [torch.randn(4, 8), torch.randn(2, 8)]
    for one in (group, group):  # measured once
        found, whole = one.gather_matmul(x, weights, Role.OUTPUT, keep=True)
        expected, kept = usual.gather_matmul(x, weights, Role.OUTPUT, keep=True)
        torch.testing.assert_close([*found, whole], [*expected, kept])
        total = one.wait(one.matmul_scatter_sum([found[0]], [torch.ones(8, 4)], Role.OUTPUT))
        torch.testing.assert_close(
            total, usual.wait(usual.matmul_scatter_sum([found[0]], [torch.ones(8, 4)], Role.OUTPUT))
        )
        y = [torch.randn(12, 4), torch.randn(12, 2)]
        torch.testing.assert_close(one.columns_gradients(y, weights, x), usual.columns_gradients(y, weights, x))
        wide = x[:, :4].contiguous(), weights[0], torch.randn(12, 8)
        torch.testing.assert_close(one.rows_gradients(*wide), usual.rows_gradients(*wide))
    texts: list = [None] * 2
    dist.all_gather_object(texts, group.decided())
    assert texts[0] == texts[1] and not group.decided()
    return texts[0]


def main(folder: str) -> None:
    world = join({"pp": 1, "replicate": 1, "shard": 1, "tp": 2}, local_device(RunConfig(device="cpu")))
    name, rank, file = world.dimensions["tp"].get_group().group_name, world.place("tp"), Path(folder) / "fusion.json"
    results = {"first": decided(name, rank, file)}
    with patch.object(fastest, "clocked", side_effect=AssertionError("measured again")):
        results["again"] = decided(name, rank, file)
    dist.barrier()
    if rank == 0:
        file.write_text('{"x": 3}')
    dist.barrier()
    results["damaged"] = decided(name, rank, file)
    results["far"] = decided(name, rank, Path(folder) / "far.json", near=False)
    with patch.object(Copied, "gather_matmul", side_effect=RuntimeError("no shared memory")):
        results["refused"] = decided(name, rank, Path(folder) / "other.json")
    if rank == 0:
        (Path(folder) / "out.json").write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    fork()
    main(*sys.argv[1:])
    leave()
