"""Shards gathered and gradients added up by copies over shared memory, beside what they have to be: ranks late in turn,
memory full of NaN at first; and with a part of the protocol left out, when numbers have to be others, or an error has
to say which part. With TRITON_INTERPRET=1 the numbers alone, of casts and sums by the kernels of GPUs.

    shards.py OUT.json
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.launch import fork, leave
from support.shared import Without, error_of, error_of_late_ranks, late, late_first, one_half, poisoned
from torch import Tensor

from trainer.config import RunConfig
from trainer.distributed import symmetric_memory
from trainer.distributed.mesh import join_world, local_device
from trainer.distributed.symmetric_memory import SymmetricBuffers
from trainer.parallel.zero import copy_engine
from trainer.parallel.zero.copy_engine import CopyEngineShards
from trainer.planning.plan import Plan

CALLS = 40
LOOKS = 1000
"""Of 0.1 ms or so each."""


def results(mine: CopyEngineShards, dtype: torch.dtype, calls: int = CALLS) -> Iterator[tuple[Tensor, Tensor]]:
    """What calls give, between which nothing waits, and what they have to give: of shards and rows that are cut into
    pieces, and of gradients whose rows the ranks cannot have equally many of."""
    rank, size = mine.rank, mine.size
    for seed in range(calls):
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
        adds = alike.random() < 0.5
        total = torch.full((3 * sum(rows),), float(adds), dtype=alike.choice((torch.float32, dtype)))
        mine.sum([gradient[rank] for gradient in gradients], total, adds)
        there = [max(0, min(count - rank * own, own)) for count, own in zip(counts, rows)]
        yield (
            torch.cat([part.view(-1, 3)[:n].flatten() for n, part in zip(there, total.split([3 * n for n in rows]))]),
            torch.cat(
                [
                    (gradient.float().sum(0) + adds)[rank * own : rank * own + n].flatten()
                    for gradient, own, n in zip(gradients, rows, there)
                ]
            ).to(total.dtype),
        )


def worst(mine: CopyEngineShards, dtype: torch.dtype, calls: int = CALLS) -> float:
    errors = [
        (found.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-30)
        for found, wanted in results(mine, dtype, calls)
    ]
    largest = torch.stack(errors).nan_to_num(nan=1e9).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def all_large(*lists: list[Tensor]) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]:
    """In the place of `by_size`."""
    return [some for some in zip(*lists) if some[0].numel()], []


def by_kernels(mine: CopyEngineShards) -> None:
    """Triton's interpreter rounds conversions to bf16 toward zero: fp16 stands for it."""
    with patch.object(symmetric_memory, "allocate_symmetric", poisoned), patch.object(copy_engine, "MAX_IN_FLIGHT", 32):
        with patch.object(copy_engine, "by_size", all_large):
            for dtype in (torch.float32, torch.float16):
                assert worst(mine, dtype) < 1e-6, dtype


def main(out: str) -> None:
    size = int(os.environ["WORLD_SIZE"])
    world = join_world(Plan(shard=size), local_device(RunConfig(device="cpu")))
    group = world.dimensions["shard"].get_group()
    mine, wait, signal = CopyEngineShards(group), Without(SymmetricBuffers.wait), Without(SymmetricBuffers.signal)
    if "TRITON_INTERPRET" in os.environ:
        by_kernels(mine)
        return
    found: dict = {"right": {}, "without": {}, "errors": {}}
    device = torch.device("cpu")
    assert symmetric_memory.can_share_memory(device, group)
    with patch.object(torch, "from_file", side_effect=OSError) if mine.rank else nullcontext():
        assert not symmetric_memory.can_share_memory(device, group)
    with patch.object(symmetric_memory, "allocate_symmetric", poisoned), patch.object(copy_engine, "MAX_IN_FLIGHT", 32):
        with patch.object(copy_engine, "copy_together", late(copy_engine.copy_together, mine.rank)):
            with patch.object(SymmetricBuffers, "wait", wait), patch.object(SymmetricBuffers, "signal", signal):
                for dtype in (torch.float32, torch.bfloat16):
                    found["right"][str(dtype)] = worst(mine, dtype)
            symmetric_memory.ALL_BUFFERS.clear()
            with patch.object(SymmetricBuffers, "buffer", one_half(SymmetricBuffers.buffer)):
                found["without"]["halves"] = worst(mine, torch.float32)
        copies = copy_engine.copy_together
        for left_out in wait.seen:
            without = Without(SymmetricBuffers.wait, left_out)

            def measure(seconds: float) -> float:
                symmetric_memory.ALL_BUFFERS.clear()
                late_copies = patch.object(copy_engine, "copy_together", late_first(copies, mine.rank, seconds))
                with late_copies, patch.object(SymmetricBuffers, "wait", without):  # noqa: B023
                    return worst(mine, torch.float32, CALLS // 4)

            found["without"][left_out] = error_of_late_ranks(measure)
        for left_out in signal.seen:
            symmetric_memory.ALL_BUFFERS.clear()
            with (
                patch.object(SymmetricBuffers, "signal", Without(SymmetricBuffers.signal, left_out)),
                patch.object(symmetric_memory, "MAX_POLLS", LOOKS),
            ):
                found["errors"][left_out] = error_of(lambda: list(results(mine, torch.float32)))
            dist.barrier()
    if mine.rank == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    fork()
    main(*sys.argv[1:])
    leave()
