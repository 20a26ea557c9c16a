"""Shards gathered and gradients added up by copies over shared memory, beside what they have to be: ranks late in turn,
memory full of NaN at first; and with a part of the protocol left out, when numbers have to be others.

    shards.py OUT.json
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.launch import fork, leave
from support.shared import late, one_half, poisoned
from torch import Tensor

from trainer.config import RunConfig
from trainer.distributed import boxes, shards
from trainer.distributed.boxes import Boxes
from trainer.distributed.shards import Shards
from trainer.distributed.world import join, local_device

CALLS = 60


def results(mine: Shards, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """What calls give, between which nothing waits, and what they have to give: of shards and rows that are cut into
    pieces, and of gradients whose rows the ranks cannot have equally many of."""
    rank, size = mine.rank, mine.size
    for seed in range(CALLS):
        alike, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        counts = [alike.randrange(1, 40) for _ in range(3)]
        if alike.random() < 0.5:
            everyone = [torch.randn(size, count, generator=generator) for count in counts]
            wholes = [torch.empty(size, count, dtype=dtype) for count in counts]
            mine.gather([values[rank] for values in everyone], wholes)
            yield torch.cat([whole.flatten() for whole in wholes]), torch.cat([e.flatten() for e in everyone]).to(dtype)
            continue
        gradients = [torch.randn(size, count, 3, generator=generator).to(dtype) for count in counts]
        rows = [-(-count // size) for count in counts]
        total = torch.empty(3 * sum(rows), dtype=alike.choice((torch.float32, dtype)))
        mine.sum([gradient[rank] for gradient in gradients], total)
        there = [max(0, min(count - rank * own, own)) for count, own in zip(counts, rows)]
        yield (
            torch.cat([part.view(-1, 3)[:n].flatten() for n, part in zip(there, total.split([3 * n for n in rows]))]),
            torch.cat(
                [
                    gradient.float().sum(0)[rank * own : rank * own + n].flatten()
                    for gradient, own, n in zip(gradients, rows, there)
                ]
            ).to(total.dtype),
        )


def worst(mine: Shards, dtype: torch.dtype) -> float:
    errors = [
        (found.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-30)
        for found, wanted in results(mine, dtype)
    ]
    largest = torch.stack(errors).nan_to_num(nan=1e9).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def main(out: str) -> None:
    size = int(os.environ["WORLD_SIZE"])
    world = join({"pp": 1, "replicate": 1, "shard": size, "tp": 1}, local_device(RunConfig(device="cpu")))
    mine = Shards(world.dimensions["shard"].get_group())
    left_out = {
        "nothing": (),
        "waits": (patch.object(shards, "await_flag", lambda *_: None),),
        "halves": (patch.object(Boxes, "box", one_half(Boxes.box)),),
    }
    found = {}
    with (
        patch.object(boxes, "share", poisoned),
        patch.object(shards, "raise_flag", late(shards.raise_flag, mine.rank)),
        patch.object(shards, "BOX", 32),
    ):
        for what, changes in left_out.items():
            boxes.boxes_of.cache_clear()
            for change in changes:
                change.start()
            for dtype in (torch.float32, torch.bfloat16):
                found[f"{what} {dtype}"] = worst(mine, dtype)
            for change in changes:
                change.stop()
    if mine.rank == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    fork()
    main(*sys.argv[1:])
    leave()
