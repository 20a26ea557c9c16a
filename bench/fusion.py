"""Products of tensor-parallel ranks and their collectives on GPUs: `parallel.tp_overlap` beside torch's own operators.

    torchrun --nproc-per-node 2 bench/fusion.py OUT.jsonl [only=layers,sweep] [tokens=8192] [methods=off,copy_engine]

A line for each shape: milliseconds of the product and of the collective alone, of both by each method (the slowest
rank; median of 50 after 10; bf16, random numbers, the device's cache flushed), and how much faster than `off` anything
can be: (1 + r) / max(1, r), with r the collective's time over the product's. A method that fails has its error instead.

layers     the four products of a layer of Llama-3 8B and of 70B, forward, for `tokens` of all ranks together
sweep      gather and product for 1 to 16,384 tokens of a rank, 3,584 x 8,192
sweep_k    the published sweep (arXiv 2511.02168): the same sizes, with 1 to 16,384 tokens whose 8,192 inputs are shared
           by the ranks, and all of the weight on each. Only `off`, `copy_engine`, which adds up as parts come, `torch`
The whole step: bench/parallel_8b.sh OUT fusion_off fusion_copy_engine

On CPUs, where processes share memory, it runs to be tried: with `scale=64 repeats=3 most=16`, which divides widths by
64 and takes at most 16 tokens of sweeps.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # torch's own operators
from torch import Tensor

from trainer.config import ConfigError, RunConfig
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.copy_engine import CopyEngineGroup, PendingGather, copy_stream
from trainer.distributed.mesh import World, join_world, local_device
from trainer.planning.plan import Plan
from trainer.precision.products import GEMMRole, matmul, matmul_into

OUTPUT = GEMMRole.OUTPUT
METHODS = ("off", "copy_engine", "torch")
LAYERS = {"8B": (4096, 6144, 28672, 14336), "70B": (8192, 10240, 57344, 28672)}
"""Width, outputs of queries, keys and values together, of gate and up, and inputs of down, over all ranks."""

AHEAD = 4_000_000
"""Clocks, about 2 ms, in which the host launches a call, while the device does nothing."""


def elapsed(work: Callable[[], object], gpu: bool = True, calls: int = 1) -> float:
    """Milliseconds of a call of several one after the other: on the current GPU, without what it takes the host to
    launch them, which in a training step is ahead; or on a CPU."""
    if not gpu:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return 1e3 / calls * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(calls * AHEAD)
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


class Case(NamedTuple):
    """gathers: what the product follows, "tokens" of all ranks or their "inputs"; "" if a reduce-scatter follows it. x,
    weight: this rank's."""

    name: str
    gathers: str
    x: Tensor
    weight: Tensor


def layers(world: int, tokens: int, scale: int, draw: Callable[..., Tensor]) -> Iterator[Case]:
    for model, sizes in LAYERS.items():
        width, qkv, gate_up, down = (size // scale for size in sizes)
        for name, outputs in (("qkv", qkv), ("gate_up", gate_up)):
            yield Case(f"{model} {name}", "tokens", draw(tokens // world, width), draw(outputs // world, width))
        for name, inputs in (("o", width), ("down", down)):
            yield Case(f"{model} {name}", "", draw(tokens, inputs // world), draw(width, inputs // world))


def sweep(most: int, outputs: int, inputs: int, draw: Callable[..., Tensor]) -> Iterator[Case]:
    weight = draw(outputs, inputs)
    for power in range(most.bit_length()):
        yield Case(f"sweep {2**power}", "tokens", draw(2**power, inputs), weight)


def sweep_k(world: int, most: int, outputs: int, inputs: int, draw: Callable[..., Tensor]) -> Iterator[Case]:
    weight = draw(outputs, inputs)
    for power in range(most.bit_length()):
        yield Case(f"sweep_k {2**power}", "inputs", draw(2**power, inputs // world), weight)


def whole_of(group: TensorGroup, case: Case) -> Tensor:
    """What is multiplied."""
    if not case.gathers:
        return case.x
    gathered = group.wait(group.gather(case.x))
    if case.gathers == "tokens":
        return gathered
    return gathered.view(group.size, *case.x.shape).transpose(0, 1).flatten(1)


def both(group: TensorGroup, case: Case) -> Tensor:
    if case.gathers == "inputs":
        return (
            added_up(group, case)
            if isinstance(group, CopyEngineGroup)
            else matmul(whole_of(group, case), case.weight, OUTPUT)
        )
    if case.gathers:
        return group.gather_matmul(case.x, [case.weight], OUTPUT)[0][0]
    return group.wait(group.matmul_scatter_sum([case.x], [case.weight], OUTPUT))


def added_up(group: CopyEngineGroup, case: Case) -> Tensor:
    """The product of inputs that come by copies, part by part."""
    out, columns = case.x.new_empty(len(case.x), len(case.weight)), case.weight.chunk(group.size, 1)
    for number, (source, (part,)) in enumerate(PendingGather("inputs", [case.x], group).receive_parts()):
        matmul_into(out, part, columns[source], OUTPUT, out if number else None)
    copy_stream(out.device).end()
    return out


def torchs(name: str, case: Case) -> Tensor:
    """torch's own operators over symmetric memory."""
    if case.gathers:
        dimension = 0 if case.gathers == "tokens" else 1
        return torch.ops.symm_mem.fused_all_gather_matmul(case.x, [case.weight.t()], dimension, name)[1][0]
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(case.x, case.weight.t(), "sum", 0, name)


class Clock:
    """Medians over repeats of the time of the slowest rank."""

    def __init__(self, device: torch.device, repeats: int):
        self.device, self.repeats = device, repeats
        self.flush = torch.empty(256 << 20 if device.type == "cuda" else 1, dtype=torch.uint8, device=device)

    def milliseconds(self, work: Callable[[], object]) -> float:
        times = [self.once(work) for _ in range(self.repeats + 10)][10:]
        median = torch.tensor(statistics.median(times), device=self.device)
        dist.all_reduce(median, op=dist.ReduceOp.MAX)
        return median.item()

    def once(self, work: Callable[[], object]) -> float:
        self.flush.zero_()
        dist.barrier()
        return elapsed(work, self.device.type == "cuda")


def backends(world: World, wanted: list[str]) -> dict[str, Callable[[Case], Tensor]]:
    mesh = world.dimensions["tp"]
    place = mesh.get_group().group_name, mesh.get_local_rank(), mesh.size()
    made: dict[str, TensorGroup] = {"off": TensorGroup(*place), "copy_engine": CopyEngineGroup(*place)}
    found: dict[str, Callable[[Case], Tensor]] = {
        name: lambda case, group=group: both(group, case) for name, group in made.items()
    }
    found["torch"] = lambda case: torchs(place[0], case)
    return {name: found[name] for name in wanted}


def measure(case: Case, methods: dict[str, Callable[[Case], Tensor]], clock: Clock, group: TensorGroup) -> dict:
    whole = whole_of(group, case)
    partial = matmul(whole, case.weight, OUTPUT)
    product = clock.milliseconds(lambda: matmul(whole, case.weight, OUTPUT))
    move = (lambda: group.gather(case.x)) if case.gathers else (lambda: group.scatter_sum(partial))
    collective = clock.milliseconds(lambda: group.wait(move()))
    ratio, expected = collective / product, both(group, case).float()
    result: dict[str, Any] = {
        **{"case": case.name, "ranks": group.size, "rows": len(whole), "weight": list(case.weight.shape)},
        **{"product": product, "collective": collective, "bound": (1 + ratio) / max(1, ratio)},
        **{"milliseconds": {}, "errors": {}},
    }
    for name, method in methods.items():
        if case.gathers == "inputs" and name not in ("off", "copy_engine", "torch"):
            continue
        try:
            found = method(case).float()
            result["errors"][name] = ((found - expected).norm() / expected.norm()).item()
            result["milliseconds"][name] = clock.milliseconds(lambda method=method: method(case))
        except (ConfigError, RuntimeError, ValueError) as error:
            result["errors"][name] = str(error).splitlines()[0][:200]
    return result


def main(out: str, *chosen: str) -> None:
    settings = {"only": "layers,sweep,sweep_k", "tokens": "8192", "methods": ",".join(METHODS)}
    settings |= {"scale": "1", "repeats": "50", "most": "16384"} | dict(one.split("=", 1) for one in chosen)
    tokens, scale, repeats, most = (int(settings[name]) for name in ("tokens", "scale", "repeats", "most"))
    device, count = local_device(RunConfig()), int(os.environ["WORLD_SIZE"])
    world = join_world(Plan(tp=count), device)
    generator, clock = torch.Generator(device).manual_seed(world.rank), Clock(device, repeats)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)

    methods, mesh = backends(world, settings["methods"].split(",")), world.dimensions["tp"]
    off = TensorGroup(mesh.get_group().group_name, mesh.get_local_rank(), count)
    sizes = most, 3584 // scale, 8192 // scale
    kinds = {
        "layers": lambda: layers(count, tokens, scale, draw),
        "sweep": lambda: sweep(*sizes, draw),
        "sweep_k": lambda: sweep_k(count, *sizes, draw),
    }
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
