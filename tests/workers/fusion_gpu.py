"""Products of tensor-parallel ranks beside their collectives on GPUs, at the shapes of a layer of an 8B model: every
method beside `off`, over many epochs, with memory that is poisoned first and ranks that are late at random.

    torchrun --nproc-per-node 2 tests/workers/fusion_gpu.py OUT.json [EPOCHS [TOKENS...]]

TOKENS: of all ranks together, in bf16 alone; else those below. Ranks that share a GPU take turns on it: few tokens and
epochs are for that."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import RunConfig
from trainer.distributed import symmetric_memory
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.copy_engine import CopyEngineGroup
from trainer.distributed.mesh import World, join_world, local_device
from trainer.distributed.overlap import wait_for_event
from trainer.distributed.symmetric_memory import SymmetricMemory, allocate_symmetric
from trainer.parallel.zero.copy_engine import CopyEngineShards
from trainer.planning.plan import Plan
from trainer.precision.products import Float8Multiply, GEMMRole, Multiply, matmul

WIDTH, QUERIES, KEYS, HIDDEN = 4096, 4096, 1024, 14336
TOKENS = {torch.bfloat16: (8192, 1000, 32), torch.float16: (1000,)}
"""Of all ranks together."""
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the norm of a difference: `off` rounds partial sums as often, at other places."""


def poisoned(size: int, device: torch.device, group: dist.ProcessGroup) -> SymmetricMemory:
    """Memory of NaN, and flags of -1."""
    shared = allocate_symmetric(size, device, group)
    shared.parts[dist.get_rank(group)].fill_(0xFF)
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return shared


def gathered(
    group: TensorGroup, x: Tensor, weights: list[Tensor], role: GEMMRole, keep: bool, multiply: Multiply
) -> list[Tensor]:
    products, whole = group.gather_matmul(x, weights, role, keep=keep, multiply=multiply)
    return [*products, *([whole] if keep else [])]


def reduced(
    group: TensorGroup, operands: list[Tensor], weights: list[Tensor], role: GEMMRole, multiply: Multiply
) -> list[Tensor]:
    return [group.wait(group.matmul_scatter_sum(operands, weights, role, multiply))]


def run(
    function: Callable[..., list[Tensor]], group: TensorGroup, arguments: list[Any], multiply: Multiply
) -> list[Tensor]:
    """Of a function above, or of the backend's method of that name."""
    return getattr(type(group), function.__name__, function)(group, *arguments, multiply=multiply)


class Shapes:
    """Operands of the products of a layer, forward and backward; equal on ranks where they have to be."""

    def __init__(self, rank: int, size: int, device: torch.device, dtype: torch.dtype):
        self.generator = torch.Generator(device).manual_seed(1 + rank)
        self.rank, self.size, self.device, self.dtype = rank, size, device, dtype
        self.columns = [self.draw(rows // size, WIDTH) for rows in (QUERIES, KEYS, KEYS, HIDDEN, HIDDEN)]
        self.rows = [self.draw(WIDTH, columns // size) for columns in (QUERIES, HIDDEN)]

    def draw(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, device=self.device)
        return (values / shape[-1] ** 0.5).to(self.dtype)

    def calls(self, tokens: int) -> dict[str, tuple[Any, ...]]:
        """Name -> function and its arguments behind the group."""
        qkv, gate_up, (o, down) = self.columns[:3], self.columns[3:], self.rows
        mine, whole = self.draw(tokens // self.size, WIDTH), [self.draw(tokens, w.shape[0]) for w in self.columns]
        inner = [self.draw(tokens, w.shape[1]) for w in self.rows]
        return {
            "qkv": (gathered, mine, qkv, GEMMRole.OUTPUT, False),
            "gate_up": (gathered, mine, gate_up, GEMMRole.OUTPUT, False),
            "o": (reduced, inner[:1], [o], GEMMRole.OUTPUT),
            "down": (reduced, inner[1:], [down], GEMMRole.OUTPUT),
            "qkv backward": (reduced, whole[:3], qkv, GEMMRole.INPUT_GRADIENT),
            "gate_up gradients": (TensorGroup.columns_gradients, whole[3:], gate_up, mine),
            "o gradients": (TensorGroup.rows_gradients, mine, o, inner[0]),
            "down backward": (gathered, mine, [down], GEMMRole.INPUT_GRADIENT, True),
        }


def share_states(world: World, epochs: int, late: random.Random) -> None:
    """Gathers of shards and sums of gradients, of tensors that kernels and copy engines take and small ones, have the
    bits of casts and sums by torch."""
    shards, device = CopyEngineShards(world.dimensions["tp"].get_group()), world.device
    for epoch in range(epochs):
        draw = torch.Generator(device).manual_seed(epoch)
        if late.random() < 0.3:
            torch.cuda._sleep(late.randrange(5_000_000))
        everyone = [
            torch.randn(shards.size, length, device=device, generator=draw) for length in (3_000_001, 48, 2**20)
        ]
        wholes = [torch.empty_like(one, dtype=torch.bfloat16) for one in everyone]
        wait_for_event(shards.gather([one[shards.rank] for one in everyone], wholes))
        for whole, one in zip(wholes, everyone):
            assert torch.equal(whole, one.bfloat16()), f"epoch {epoch}: gathered {len(one[0])}"
        rows = (2047, 3, 1024)  # of which the last rank has fewer
        everyone = [torch.randn(shards.size, n, 1032, device=device, generator=draw).bfloat16() for n in rows]
        owns = [-(-count // shards.size) for count in rows]
        total = torch.empty(1032 * sum(owns), dtype=(torch.float32, torch.bfloat16)[epoch % 2], device=device)
        wait_for_event(shards.sum([one[shards.rank] for one in everyone], total))
        for one, own, part in zip(everyone, owns, total.split([1032 * own for own in owns])):
            expected = one[0].float()
            for other in one[1:]:
                expected += other
            mine = expected[shards.rank * own :][:own].flatten().to(total.dtype)
            assert torch.equal(part[: len(mine)], mine), f"epoch {epoch}: sums of {len(expected)} rows"


def main(out: str, epochs: int = 40, *some: int) -> None:
    size, device = int(os.environ["WORLD_SIZE"]), local_device(RunConfig())
    world = join_world(Plan(tp=size), device)
    name, rank = world.dimensions["tp"].get_group().group_name, world.place("tp")
    symmetric_memory.allocate_symmetric = poisoned
    late, worst = random.Random(rank), {}
    methods = {
        "copy_engine": CopyEngineGroup(name, rank, size),
        "copy_engine, looking": CopyEngineGroup(name, rank, size),
    }
    looks = {"copy_engine, looking": 10**6}
    off, narrow = TensorGroup(name, rank, size), [Float8Multiply(recipe) for recipe in ("tensorwise", "rowwise")]
    for dtype, counts in ({torch.bfloat16: some} if some else TOKENS).items():
        shapes, tolerance = Shapes(rank, size, device, dtype), TOLERANCE[dtype]
        for epoch in range(epochs):
            tokens = counts[epoch % len(counts)]
            in_fp8 = dtype is torch.bfloat16 and tokens % (16 * size) == 0
            for (call, (function, *arguments)), multiply in itertools.product(
                shapes.calls(tokens).items(), [matmul, *(narrow if in_fp8 else [])]
            ):
                expected = run(function, off, arguments, multiply)
                for method, group in methods.items():
                    if late.random() < 0.3:
                        torch.cuda._sleep(late.randrange(5_000_000))
                    with patch.object(symmetric_memory, "MAX_POLLS", looks.get(method, 0)):
                        found = [run(function, group, arguments, multiply) for _ in range(2)]
                    key = f"{method} {call} {dtype} {multiply.key}"
                    assert all(map(torch.equal, *found)), f"{key}: other bits the second time"
                    for one, other in zip(found[0], expected):
                        one, other = one.float().to(other.device), other.float()
                        error = ((one - other).norm() / other.norm()).item()
                        worst[key] = max(worst.get(key, 0.0), error)
                        assert error < tolerance, f"{key}, epoch {epoch}: {error}"
        if rank == 0:
            print(f"{dtype}: {epochs} epochs", flush=True)
    share_states(world, epochs, late)
    if rank == 0:
        calls = {
            f"{one.kind} by {type(one).__name__}, {one.dtype}": one.epoch
            for one in symmetric_memory.ALL_BUFFERS.values()
        }
        Path(out).write_text(json.dumps({"worst": worst, "calls": calls}, indent=1))
        print(f"epochs of each kind of call: {calls}", flush=True)


if __name__ == "__main__":
    _, out, *words = sys.argv
    main(out, *map(int, words))
    dist.destroy_process_group()
