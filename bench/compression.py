"""Kernels and collectives of quantised gradients on GPUs: `torchrun --nproc-per-node N bench/compression.py OUT.jsonl`.

A line for each codec: milliseconds and effective GB/s (of the fp32 gradient) of pack and unpack alone, then of the
reduce-scatter over all GPUs beside NCCL's own in fp32 and bf16, for messages of several sizes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from elapsed import elapsed

from trainer.parallel.compress.codec import Blocks, Codec, pack, unpack
from trainer.parallel.compress.links import Link

CODECS = [
    Codec("bf16", 256),
    Codec("int8", 256),
    Codec("fp8", 256),
    Codec("int4", 128),
    Codec("int4", 128, hadamard=32),
    Codec("int8", 256, stochastic=True),
]
SIZES = [4 << 20, 64 << 20, 512 << 20]
"""Elements of a message."""


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median time on the device."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        times.append(elapsed(work))
    return sorted(times)[len(times) // 2]


def main(path: str) -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    file = open(path, "a") if rank == 0 else None

    def say(**values: object) -> None:
        if file is not None:
            print(json.dumps(values), file=file, flush=True)
            print(json.dumps(values), flush=True)

    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            flat = torch.randn(size, device=device).to(dtype)
            part = torch.empty(size // world, dtype=dtype, device=device)
            plain = Link("inner", dist.group.WORLD, None)
            time = milliseconds(lambda: plain.scatter_plain(flat, part))
            say(
                what="reduce-scatter",
                codec=f"none, {dtype}".replace("torch.", ""),
                ranks=world,
                elements=size,
                ms=time,
                gb_per_s=4 * size / time / 1e6,
            )
        flat = torch.randn(size, device=device)
        part = torch.empty(size // world, device=device)
        for codec in CODECS:
            link = Link("inner", dist.group.WORLD, codec)
            blocks = Blocks([(0, size)], codec.block, world, device)
            places = Blocks.dense(1, blocks.length, codec.block, device)
            name = (
                codec.kind + f", hadamard {codec.hadamard}" * bool(codec.hadamard) + ", stochastic" * codec.stochastic
            )
            payload = pack(codec, flat, blocks)
            received = payload.view(world, 1, -1)
            for what, work in (
                ("pack", lambda: pack(codec, flat, blocks)),
                ("unpack", lambda: unpack(codec, received, places, part)),
                ("reduce-scatter", lambda: link.scatter(flat, blocks, part, places)),
            ):
                time = milliseconds(work)
                say(
                    what=what,
                    codec=name,
                    ranks=world,
                    elements=size,
                    ms=time,
                    gb_per_s=4 * size / time / 1e6,
                    bytes_per_element=payload.numel() / size,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
