"""Muon's part of a step: whole matrices dealt out over ranks, beside AdamW on the same shards.

    torchrun --standalone --nproc-per-node 2 bench/muon.py [OUT.jsonl] [depth=8]
    python bench/muon.py

On `depth` layers of Llama-3 8B in fp32, sharded over all ranks as ZeRO-3 has them. Each line says milliseconds of one
update (median of 8), those that the iterations alone would take at the rate of large bf16 products measured here,
GB that a rank sends, and the peak of memory that the update takes beside what is kept."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.config import OptimizerConfig, RunConfig
from trainer.config.model import ModelSpec
from trainer.config.schema import MuonConfig
from trainer.distributed.world import World, join, local_device
from trainer.optim.groups import Policy
from trainer.optim.optimizer import Optimizer
from trainer.planning.cost.flops import orthogonalisation
from trainer.planning.cost.parameters import declarations
from trainer.planning.plan import Plan

MODEL = Path(__file__).parents[1] / "configs" / "model" / "llama3_8b.yaml"
TIMES = 8


def main(arguments: list[str]) -> None:
    given = dict(argument.split("=") for argument in arguments if "=" in argument)
    out = next((argument for argument in arguments if "=" not in argument), None)
    spec = ModelSpec.from_dict(yaml.safe_load(MODEL.read_text()) | {"depth": int(given.get("depth", 8))})
    plan = Plan(pp=1, replicate=1, shard=int(os.environ.get("WORLD_SIZE", 1)), tp=1, stage=3, offload=False)
    world = join(plan.mesh, local_device(RunConfig()))
    shapes = {name: info.shape for name, info in declarations(spec).items() if info.role == "matrix"}
    for line in (look("adamw", shapes, world), look("muon", shapes, world) | ideal(shapes, world)):
        if world.rank == 0:
            print(json.dumps(line), flush=True)
            if out:
                with open(out, "a") as file:
                    file.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


def look(kind: str, shapes: dict[str, tuple[int, ...]], world: World) -> dict[str, Any]:
    """What an update takes."""
    optimizer = build(kind, shapes, world)
    scalars = [torch.tensor(value, device=world.device) for value in (1e-3, 1.0, 0.0)]
    before = torch.cuda.memory_allocated() if world.device.type == "cuda" else 0
    seconds = measure(lambda: optimizer.step(*scalars), world.device)
    line = {"optimizer": kind, "ranks": world.size, "matrices": len(shapes), "ms": round(1e3 * seconds, 2)}
    if world.device.type == "cuda":
        line["peak_GiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
    return line


def ideal(shapes: dict[str, tuple[int, ...]], world: World) -> dict[str, float]:
    """The time of Muon's products alone, and what a rank sends."""
    flops = sum(orthogonalisation(shape, MuonConfig().steps) for shape in shapes.values()) / world.size
    elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    sent = 2 * 2 * elements * (world.size - 1) / world.size**2
    return {"ideal_ms": round(1e3 * flops / product_rate(world.device), 2), "sent_GB": round(sent / 1e9, 3)}


def build(kind: str, shapes: dict[str, tuple[int, ...]], world: World) -> Optimizer:
    """The optimizer of random matrices, cut into rows over the ranks."""
    mesh, parameters = world.mesh["replicate", "shard"], {}
    for name, (rows, columns) in shapes.items():
        value, gradient = (torch.randn(rows // world.size, columns, device=world.device) for _ in range(2))
        whole = {"run_check": False, "shape": torch.Size((rows, columns)), "stride": (columns, 1)}
        part, grad = (
            DTensor.from_local(one, mesh, [Replicate(), Shard(0)], **whole) for one in (value.mul_(0.02), gradient)
        )
        parameters[name] = nn.Parameter(part)
        parameters[name].grad = grad
    policies = dict.fromkeys(parameters, Policy(kind, torch.float32, 0.1, 1.0))
    return Optimizer(parameters, policies, OptimizerConfig(), world)


def product_rate(device: torch.device, size: int = 4096) -> float:
    """FLOP/s of a large bf16 product."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / measure(lambda: a @ b, device)


def measure(action: Callable[[], object], device: torch.device) -> float:
    """Median seconds, after two that warm up; the peak of memory begins after those."""
    taken = []
    for number in range(TIMES + 2):
        if device.type == "cuda" and number == 2:
            torch.cuda.reset_peak_memory_stats()
        together(device)
        started = time.perf_counter()
        action()
        together(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])


def together(device: torch.device) -> None:
    """Waits for the device, and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
