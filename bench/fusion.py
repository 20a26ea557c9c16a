"""Products of tensor-parallel ranks and their collectives on GPUs: `parallel.fusion` beside torch's own operators.

    torchrun --nproc-per-node 2 bench/fusion.py OUT.jsonl [only=layers,sweep] [tokens=8192] [methods=off,copy_engine]

A line for each shape: milliseconds of the product and of the collective alone, of both by each method (the slowest
rank; median of 50 after 10; bf16, random numbers, the device's cache flushed), and how much faster than `off` anything
can be: (1 + r) / max(1, r), with r the collective's time over the product's. A method that fails has its error instead.

layers   the four products of a layer of Llama-3 8B and of 70B, forward, for `tokens` of all ranks together
sweep    gather and product for 1 to 16,384 tokens of a rank, 3,584 x 8,192
The whole step: bench/parallel_8b.sh OUT fusion_off fusion_copy_engine fusion_triton
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
from torch import Tensor

from trainer.config import RunConfig
from trainer.distributed.chunks import Chunks
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.copied import Copied
from trainer.distributed.fused import Fused
from trainer.distributed.world import World, join, local_device
from trainer.precision.products import Role, matmul

METHODS = ("off", "chunks1", "chunks2", "chunks4", "chunks8", "copy_engine", "triton", "torch")
LAYERS = {"8B": (4096, 6144, 28672, 14336), "70B": (8192, 10240, 57344, 28672)}
"""Width, outputs of queries, keys and values together, of gate and up, and inputs of down, over all ranks."""


class Case(NamedTuple):
    """gathers: whether the product follows a gather; else a reduce-scatter follows it. x, weight: this rank's."""

    name: str
    gathers: bool
    x: Tensor
    weight: Tensor


def layers(world: int, tokens: int, draw: Callable[..., Tensor]) -> Iterator[Case]:
    for model, (width, qkv, gate_up, down) in LAYERS.items():
        for name, outputs in (("qkv", qkv), ("gate_up", gate_up)):
            yield Case(f"{model} {name}", True, draw(tokens // world, width), draw(outputs // world, width))
        for name, inputs in (("o", width), ("down", down)):
            yield Case(f"{model} {name}", False, draw(tokens, inputs // world), draw(width, inputs // world))


def sweep(draw: Callable[..., Tensor]) -> Iterator[Case]:
    weight = draw(3584, 8192)
    for power in range(15):
        yield Case(f"sweep {2**power}", True, draw(2**power, 8192), weight)


def both(group: TensorGroup, case: Case) -> Tensor:
    if case.gathers:
        return group.gather_matmul(case.x, [case.weight], Role.OUTPUT)[0][0]
    return group.wait(group.matmul_scatter_sum([case.x], [case.weight], Role.OUTPUT))


def torchs(name: str, case: Case) -> Tensor:
    """torch's own operators over symmetric memory."""
    if case.gathers:
        return torch.ops.symm_mem.fused_all_gather_matmul(case.x, [case.weight.t()], 0, name)[1][0]
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(case.x, case.weight.t(), "sum", 0, name)


class Clock:
    """Medians over repeats of the time of the slowest rank."""

    def __init__(self, device: torch.device):
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)

    def milliseconds(self, work: Callable[[], object]) -> float:
        times = []
        for repeat in range(60):
            self.flush.zero_()
            dist.barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            if repeat >= 10:
                times.append(begin.elapsed_time(end))
        median = torch.tensor(statistics.median(times), device=self.flush.device)
        dist.all_reduce(median, op=dist.ReduceOp.MAX)
        return median.item()


def backends(world: World, wanted: list[str]) -> dict[str, Callable[[Case], Tensor]]:
    mesh = world.dimensions["tp"]
    place = mesh.get_group().group_name, mesh.get_local_rank(), mesh.size()
    made: dict[str, TensorGroup] = {"off": TensorGroup(*place), "copy_engine": Copied(*place), "triton": Fused(*place)}
    made |= {f"chunks{count}": Chunks(*place, chunks=count) for count in (1, 2, 4, 8)}
    found: dict[str, Callable[[Case], Tensor]] = {
        name: lambda case, group=group: both(group, case) for name, group in made.items()
    }
    found["torch"] = lambda case: torchs(place[0], case)
    return {name: found[name] for name in wanted}


def measure(case: Case, methods: dict[str, Callable[[Case], Tensor]], clock: Clock, group: TensorGroup) -> dict:
    whole = group.wait(group.gather(case.x)) if case.gathers else case.x
    partial = matmul(whole, case.weight, Role.OUTPUT)
    product = clock.milliseconds(lambda: matmul(whole, case.weight, Role.OUTPUT))
    move = (lambda: group.gather(case.x)) if case.gathers else (lambda: group.scatter_sum(partial))
    collective = clock.milliseconds(lambda: group.wait(move()))
    ratio, expected = collective / product, both(group, case).float()
    result: dict[str, Any] = {
        **{"case": case.name, "ranks": group.size, "rows": len(whole), "weight": list(case.weight.shape)},
        **{"product": product, "collective": collective, "bound": (1 + ratio) / max(1, ratio)},
        **{"milliseconds": {}, "errors": {}},
    }
    for name, method in methods.items():
        try:
            found = method(case).float()
            result["errors"][name] = ((found - expected).norm() / expected.norm()).item()
            result["milliseconds"][name] = clock.milliseconds(lambda method=method: method(case))
        except (RuntimeError, ValueError) as error:
            result["errors"][name] = str(error).splitlines()[0][:200]
    return result


def main(out: str, *chosen: str) -> None:
    settings = {"only": "layers,sweep", "tokens": "8192", "methods": ",".join(METHODS)}
    settings |= dict(one.split("=", 1) for one in chosen)
    device, count = local_device(RunConfig()), int(os.environ["WORLD_SIZE"])
    world = join({"pp": 1, "replicate": 1, "shard": 1, "tp": count}, device)
    generator, clock = torch.Generator(device).manual_seed(world.rank), Clock(device)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)

    methods, mesh = backends(world, settings["methods"].split(",")), world.dimensions["tp"]
    off = TensorGroup(mesh.get_group().group_name, mesh.get_local_rank(), count)
    kinds = {"layers": lambda: layers(count, int(settings["tokens"]), draw), "sweep": lambda: sweep(draw)}
    for kind in settings["only"].split(","):
        for case in kinds[kind]():
            line = json.dumps(measure(case, methods, clock, off))
            if world.rank == 0:
                print(line, flush=True)
                with open(out, "a") as file:
                    print(line, file=file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
