"""Attention of a new token to kept keys that ranks share: the kernel that sends and waits, beside a gather, and beside
one GPU that has all keys.

    torchrun --standalone --nproc-per-node 2 bench/decode_shared.py OUT.jsonl [tokens=8192,65536,524288] [batch=1,16] \
        [heads=96] [kv_heads=12] [dim=128] [dtype=fp16] [device=cuda] [repeat=1000]

tokens: that each rank holds. A line for each number of them and each batch, in microseconds (the slowest rank; median
of `repeat` after a tenth of them; cold cache; the host is ahead of the device):

alone    attention of a rank to its own keys, and nothing sent
gather   that, then all parts gathered (NCCL; gloo on CPUs) and brought together: the baseline
fused    that, then the one kernel that sends, waits and adds up (`kernels/decode.py`); on GPUs
whole    one rank with the keys of all, where its memory holds them

bound: this rank's keys and values over the bandwidth at which a copy moves as many bytes, measured in the same run.
ratios: of `gather` to the others. errors: of results, against `whole` where there is one, else against `gather`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from elapsed import elapsed
from torch import Tensor

from trainer.config import RunConfig
from trainer.distributed.slots import OUT_OF_REACH, SlotGroup, SlotsInReach, merged
from trainer.distributed.world import World, join, local_device
from trainer.model import cache
from trainer.parallel.context import member
from trainer.precision.dtypes import DTYPES

OWN = {
    "tokens": "8192,65536,524288",
    "batch": "1,16",
    "heads": "96",
    "kv_heads": "12",
    "dim": "128",
    "dtype": "fp16",
    "device": "auto",
    "repeat": "1000",
}
COPIED = {"cuda": 1 << 30, "cpu": 1 << 20}
"""Bytes whose copy measures the bandwidth, and as many that push all else out of the caches."""


class Keys(NamedTuple):
    """A query [batch, heads, 1, dim], and the keys and values before it [batch, kv_heads, slots, dim], of which slot s
    of rank r of `size` has place s x size + r."""

    query: Tensor
    key: Tensor
    value: Tensor
    rank: int
    size: int

    def parts(self) -> tuple[Tensor, Tensor]:
        """Attention to these, in parts of which each has the log-sum-exp of its scores."""
        scale, slots = self.query.shape[-1] ** -0.5, self.key.shape[2]
        if self.query.device.type == "cuda":
            from trainer.kernels import decode

            places = self.query.new_full((len(self.query),), slots * self.size - 1, dtype=torch.int64)
            return decode.attend_slots(self.query, self.key, self.value, places, scale, rank=self.rank, size=self.size)
        seen = torch.ones(len(self.query), 1, 1, slots, dtype=torch.bool)
        return cache.attend_slots(self.query, self.key, self.value, seen, scale)

    def attend(self) -> Tensor:
        if self.query.device.type == "cuda":
            from trainer.kernels import decode

            return decode.combine(*self.parts(), self.query.dtype)
        return merged(*self.parts())[0].to(self.query.dtype)


class Clock:
    """Microseconds of the slowest rank."""

    def __init__(self, device: torch.device, repeat: int):
        self.device, self.repeat = device, repeat
        self.source, self.target = torch.ones(2, COPIED[device.type], dtype=torch.uint8, device=device)

    def microseconds(self, work: Callable[[], object]) -> float:
        times = [self.once(work) for _ in range(self.repeat + self.repeat // 10 + 1)][-self.repeat :]
        median = torch.tensor(statistics.median(times), device=self.device)
        dist.all_reduce(median, op=dist.ReduceOp.MAX)
        return median.item()

    def once(self, work: Callable[[], object]) -> float:
        self.target.zero_()
        dist.barrier()
        return 1e3 * elapsed(work, self.device.type == "cuda")

    def bandwidth(self) -> float:
        """Bytes per microsecond that a copy reads and writes."""
        return 2 * len(self.source) / self.microseconds(lambda: self.target.copy_(self.source))


def drawn(world: World, batch: int, tokens: int, given: dict[str, str]) -> tuple[Keys, Keys | None]:
    """This rank's keys, and those of all; None where the memory does not hold them."""
    context, device, dtype = world.context, world.device, DTYPES[given["dtype"]]
    rank, size = context.get_local_rank(), context.size()
    heads, kv_heads, dim = (int(given[name]) for name in ("heads", "kv_heads", "dim"))

    def draw(seed: int, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(seed))

    query, pairs = draw(0, batch, heads, 1, dim), None
    try:
        pairs = [draw(seed, batch, kv_heads, size * tokens, dim) for seed in (1, 2)]
        own = [one[:, :, rank::size].contiguous() for one in pairs]
    except torch.OutOfMemoryError:
        pairs = own = None
    if not all(world.gather(pairs is not None)):  # nor do others then go on with theirs
        pairs = own = None
        own = [draw(2 * rank + seed, batch, kv_heads, tokens, dim) for seed in (3, 4)]
    return Keys(query, *own, rank, size), None if pairs is None else Keys(query, *pairs, 0, 1)


def measure(world: World, given: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A record for each case. All ranks call it together."""
    clock = Clock(world.device, int(given["repeat"]))
    bandwidth = clock.bandwidth()
    for batch in map(int, given["batch"].split(",")):
        for tokens in map(int, given["tokens"].split(",")):
            yield {
                **{"ranks": world.context.size(), "device": world.device.type, "tokens": tokens, "batch": batch},
                **{name: given[name] for name in ("heads", "kv_heads", "dim", "dtype", "repeat")},
                **compare(world, clock, bandwidth, *drawn(world, batch, tokens, given)),
            }


def compare(world: World, clock: Clock, bandwidth: float, own: Keys, whole: Keys | None) -> dict[str, Any]:
    group, dtype = world.context.get_group(), own.query.dtype
    gathers, sends = member(group, SlotGroup), member(group, SlotsInReach)
    ways = {"alone": own.attend, "gather": lambda: gathers.combine(*own.parts(), dtype)}
    if world.device.type == "cuda":
        ways["fused"] = lambda: sends.combine(*own.parts(), dtype)
    if whole is not None:
        ways["whole"] = whole.attend
    found = {name: way().float() for name, way in ways.items()}
    assert not OUT_OF_REACH, "these GPUs cannot share memory, so `fused` would gather"
    expected = found["gather" if whole is None else "whole"]
    took = {name: clock.microseconds(way) for name, way in ways.items()}
    errors = {
        name: ((one - expected).norm() / expected.norm()).item() for name, one in found.items() if name != "alone"
    }
    return {
        "bandwidth": 1e-3 * bandwidth,  # GB/s
        "bound": (own.key.nbytes + own.value.nbytes) / bandwidth,
        "microseconds": took,
        "ratios": {name: took["gather"] / time for name, time in took.items() if name != "gather"},
        "errors": errors,
    }


def main(out: str, *chosen: str) -> None:
    given, count = OWN | dict(one.split("=", 1) for one in chosen), int(os.environ["WORLD_SIZE"])
    device = local_device(RunConfig(device=given["device"]))
    world = join({"pp": 1, "replicate": count, "shard": 1, "tp": 1}, device, cp=count)
    for record in measure(world, given):
        if world.rank == 0:
            print(json.dumps(record), flush=True)
            with open(out, "a") as file:
                file.write(json.dumps(record) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
