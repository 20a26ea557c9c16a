"""Products by copies over shared memory beside the usual ones: ranks late in turn, memory full of NaN at first; and
with a part of the protocol left out, when numbers have to be others.

    copied.py OUT.json
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.launch import fork, leave
from support.shared import late, one_half, poisoned
from torch import Tensor

from trainer.config import RunConfig
from trainer.distributed import boxes, copied
from trainer.distributed.boxes import Boxes
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.copied import Copied
from trainer.distributed.world import join, local_device
from trainer.precision.products import Role

EPOCHS = 80


def call(group: TensorGroup, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """What a call gives, of any kind: with several weights, biases and what is kept."""
    generator = torch.Generator().manual_seed(seed * group.size + group.rank)
    alike = random.Random(seed)
    tokens = alike.randrange(1, 9)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weights, biases = [draw(6, 4), draw(3, 4)], [draw(6), None]
    kind = alike.randrange(4)
    if kind == 0:
        gradients = [draw(group.size * tokens, 6), draw(group.size * tokens, 3)]
        return group.columns_gradients(gradients, weights, draw(tokens, 4))
    if kind == 1:
        return group.rows_gradients(draw(tokens, 6), weights[0], draw(group.size * tokens, 4))
    if kind == 2:
        products, kept = group.gather_matmul(draw(tokens, 4), weights, Role.OUTPUT, biases, keep=alike.random() < 0.5)
        return products + ([] if kept is None else [kept])
    operands = [draw(group.size * tokens, 6), draw(group.size * tokens, 3)]
    return [group.wait(group.matmul_scatter_sum(operands, weights, Role.INPUT_GRADIENT))]


def worst(name: str, rank: int, size: int, dtype: torch.dtype) -> float:
    """The largest relative error of all calls, between which nothing waits."""
    place = name, rank, size
    expected = [one for seed in range(EPOCHS) for one in call(TensorGroup(*place), seed, dtype)]
    found = [one for seed in range(EPOCHS) for one in call(Copied(*place), seed, dtype)]
    errors = [
        ((one.double() - other.double()).norm() / other.double().norm()).item() for one, other in zip(found, expected)
    ]
    largest = torch.tensor(errors).nan_to_num(nan=1e9).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def main(out: str) -> None:
    size = int(os.environ["WORLD_SIZE"])
    world = join({"pp": 1, "replicate": 1, "shard": 1, "tp": size}, local_device(RunConfig(device="cpu")))
    name, rank = world.dimensions["tp"].get_group().group_name, world.place("tp")
    left_out = {
        "nothing": (),
        "waits": (patch.object(copied, "await_flag", lambda *_: None),),
        "halves": (patch.object(Boxes, "box", one_half(Boxes.box)),),
    }
    results = {}
    with patch.object(boxes, "share", poisoned), patch.object(copied, "matmul_into", late(copied.matmul_into, rank)):
        for what, changes in left_out.items():
            copied.boxes_of.cache_clear()
            for change in changes:
                change.start()
            for dtype in (torch.float32, torch.bfloat16):
                results[f"{what} {dtype}"] = worst(name, rank, size, dtype)
            for change in changes:
                change.stop()
    if rank == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    fork()
    main(*sys.argv[1:])
    leave()
