"""The kernels that the compiler makes of what stands between a layer's products: what each fuses, and how near it comes
to a copy.

    python bench/pointwise.py OUT.jsonl [model=configs/model/tinyllama_1b.yaml] [length=2048] [micro=16] [depth=2]

Trains a few layers for some steps, compiled, in bf16, without recompute, and profiles three steps. A line for each of
the compiler's kernels: launches a step, microseconds of one, megabytes that it reads and writes once (as the compiler
counts them), and the share of a copy's rate at which it moves them. The names of the kernels say which operators are in
one: RMSNorm with the residual before it has `add`, `pow`, `mean` and `rsqrt`. The last line has all of these kernels as
a share of the steps, and what of that is above a copy's time for the same bytes. On CPUs it prints the names alone."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from specs import read_spec
from torch._inductor import config as inductor
from torch._inductor.codecache import PyCodeCache

from trainer.cluster.stopwatch import Stopwatch
from trainer.config import Config
from trainer.data.batches import Batch
from trainer.distributed.world import join, local_device
from trainer.model.attention import kernel_priority
from trainer.planning.batch import BatchPlan
from trainer.planning.pipeline import resolve_pipeline
from trainer.planning.plan import resolve_plan
from trainer.training.state import TrainState
from trainer.training.step import train_step

STEPS = 3
COPY = {"cuda": 2**31, "cpu": 2**24}
"""Bytes of the copy."""


def build(settings: dict[str, str]) -> tuple[TrainState, Callable[[], Any]]:
    """A model on one device, and a step of it."""
    config, spec = Config(), read_spec(settings["model"])
    config.precision.compute, config.compile, spec.depth = "bf16", True, int(settings["depth"])
    length, micro = int(settings["length"]), int(settings["micro"])
    plan, device = resolve_plan(config.parallel, 1, spec), local_device(config.run)
    batch = BatchPlan(length, micro, micro, 1)
    state = TrainState.build(config, spec, plan, resolve_pipeline(config, spec, plan, batch), join(plan.mesh, device))
    tokens, targets = torch.randint(spec.vocab_size, (2, micro, length), device=device)
    batches = [Batch(tokens, targets, documents=None, ids=[])]
    return state, lambda: train_step(state, batches, 0)


def kernels() -> dict[str, list[float | None]]:
    """Names of the compiler's kernels -> bytes that each of that name moves, None where it does not say."""
    found: dict[str, list[float | None]] = {}
    for module in PyCodeCache.modules:
        for name, one in vars(module).items():
            if re.match(r"(triton|cpp)_\w*fused", name):
                billions = getattr(one, "inductor_meta", {}).get("kernel_num_gb")
                found.setdefault(name, []).append(None if billions is None else 1e9 * billions)
    return found


def profiled(step: Callable[[], Any]) -> tuple[Counter[str], Counter[str], float]:
    """Of all steps: seconds and launches by kernel, and the wall time."""
    seconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        begun = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begun
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name.startswith("triton_"):
            seconds[event.name] += event.time_range.elapsed_us() / 1e6
            launches[event.name] += 1
    return seconds, launches, wall


def table(state: TrainState, step: Callable[[], Any], moved: dict[str, list[float | None]]) -> list[dict[str, Any]]:
    """Of each kernel, the longest first, and of all together."""
    source = torch.empty(COPY["cuda"] // 2, dtype=torch.uint8, device=state.world.device)
    target = torch.empty_like(source)
    rate = COPY["cuda"] / Stopwatch(state.world).seconds(lambda: target.copy_(source), 0.2)
    seconds, launches, wall = profiled(step)
    lines, least = [], 0.0
    for name, total in seconds.most_common():
        sizes = set(moved.get(name, [None]))
        bytes_ = sizes.pop() if len(sizes) == 1 else None  # of kernels of one name it is not known which has run
        one = total / launches[name]
        lines.append({"kernel": name, "launches": launches[name] / STEPS, "microseconds": round(1e6 * one, 1)})
        if bytes_:
            lines[-1] |= {"megabytes": round(bytes_ / 1e6, 1), "of_copy": round(bytes_ / one / rate, 3)}
            least += total - launches[name] * bytes_ / rate
    lines.append(
        {"kernel": "all", "share": round(seconds.total() / wall, 4), "above_copy": round(least / wall, 4)}
        | {"copy_gb_s": round(rate / 1e9), "step_ms": round(1e3 * wall / STEPS, 1)}
    )
    return lines


def main(out: str, *chosen: str) -> None:
    settings = {"model": "configs/model/tinyllama_1b.yaml", "length": "2048", "micro": "16", "depth": "2"}
    settings |= dict(one.split("=", 1) for one in chosen)
    inductor.benchmark_kernel = True  # has the compiler note what a kernel moves
    torch.manual_seed(0)
    state, step = build(settings)
    with kernel_priority(False):
        for _ in range(3):
            step()
        found = kernels()
        gpu = state.world.device.type == "cuda"
        lines = table(state, step, found) if gpu else [{"kernel": name} for name in found]
    for line in lines:
        print(" ".join(f"{value}" for value in line.values()) if "share" not in line else line)
    Path(out).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
