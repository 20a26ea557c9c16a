"""What `parallel.fusion=auto` measures, keeps in a file and chooses, on two processes.

fastest.py FOLDER
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.launch import fork, leave

from trainer.config import RunConfig
from trainer.distributed import copied, fastest
from trainer.distributed.boxes import BOXES, Boxes, held
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.fastest import Fastest, chosen
from trainer.distributed.world import join, local_device
from trainer.precision.products import Multiply, Role


def decided(name: str, rank: int, file: Path, near: bool = True) -> list[str]:
    """What is said of a gathered and a reduced product and of their gradients, which have to be right."""
    fastest.table.cache_clear()
    BOXES.clear()
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
        usual_sum = usual.wait(usual.matmul_scatter_sum(y, weights, Role.INPUT_GRADIENT))
        torch.testing.assert_close(one.wait(one.matmul_scatter_sum(y, weights, Role.INPUT_GRADIENT)), usual_sum)
        wide = x[:, :4].contiguous(), weights[0], torch.randn(12, 8)
        torch.testing.assert_close(one.rows_gradients(*wide), usual.rows_gradients(*wide))
    taken = {chosen(times) for times in group.table.times.values()}
    assert bool(held(Boxes, group.table.group)) == ("copy_engine" in taken)
    texts: list = [None] * 2
    dist.all_gather_object(texts, group.decided())
    assert texts[0] == texts[1] and not group.decided()
    return texts[0]


def failures(rank: int) -> dict[str, AbstractContextManager]:
    """What fails on the second rank alone: where memory is set up, while the other waits for more of it, in the first
    call, and later on."""
    products = Multiply.into

    def fails_in(call: int) -> AbstractContextManager:
        numbers = itertools.count()

        def into(self: Multiply, *arguments: object) -> None:
            if rank == 1 and next(numbers) == call:
                raise torch.OutOfMemoryError("out of memory")
            products(self, *arguments)

        return patch.object(Multiply, "into", into)

    def from_file(*arguments: object, **options: object) -> torch.Tensor:
        if rank == 1:
            raise RuntimeError("no space is left")
        return FROM_FILE(*arguments, **options)

    def outputs(*arguments: object) -> int:
        if rank == 1:
            raise torch.OutOfMemoryError("out of memory")
        return OUTPUTS(*arguments)

    return {
        "no memory": patch.object(torch, "from_file", from_file),
        "growing": patch.object(copied, "outputs", outputs),
        "at once": fails_in(0),
        "later": fails_in(29),
    }


FROM_FILE, OUTPUTS = torch.from_file, copied.outputs


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
    for what, change in failures(rank).items():
        with change:
            results[what] = decided(name, rank, Path(folder) / f"{what}.json")
    if rank == 0:
        (Path(folder) / "out.json").write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    fork()
    main(*sys.argv[1:])
    leave()
