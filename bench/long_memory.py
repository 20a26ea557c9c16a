"""The longest sequence of Llama-3.1 8B's layers that trains on one and on two GPUs with everything that saves memory.

    python bench/long_memory.py OUT [SECONDS] [WAY...] [from=TOKENS]

WAY: one GPU; two, with a sequence each; two that share one, with the states on them or in host memory (`one`, `two`,
`shared`, `offloaded`; those that the machine has). TOKENS: of a rank, where lengths begin.

Two layers and the head are trained, one step a length, with tiled loss, tiled feed-forward, full recompute and inputs
in host memory: what a length needs on the device does not depend on the depth then. Memory that the states of all 32
layers would take is held beside: on two GPUs those of ZeRO-3; on one none, as under parallel.zero.offload=true, which
`offloaded` does. Lengths grow until one does not fit or the time (SECONDS, 280 for all) is over. The gradients of a
short sequence are compared with and without these measures. OUT/long_memory.json has the numbers, beside what was
predicted.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import yaml

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.distributed.mesh import World, join_world, local_device
from trainer.distributed.tensors import local_values
from trainer.model.attention import kernel_priority
from trainer.planning.cost.flops import flops_per_token
from trainer.planning.cost.memory import state_bytes
from trainer.planning.estimate.memory import find_peaks
from trainer.planning.plan import resolve_plan
from trainer.planning.resolve import Layout, resolve_layout
from trainer.training.state import TrainState
from trainer.training.step import train_step

ROOT = Path(__file__).parents[1]
DEPTH, TILE = 2, 8192
WAYS = {"one": (1, 1, False), "two": (2, 1, False), "shared": (2, 2, False), "offloaded": (2, 2, True)}
"""Processes, how many of them share a sequence, and whether states are in host memory."""
LENGTHS = [16384, 131072, 262144, 524288, 655360, 786432, 1048576, 1572864, 2097152]
"""Tokens of a rank: of the comparison, then of the steps."""
RATE = 4e14
"""Operations a second, for a guess of how long the next length takes."""


def llama() -> ModelSpec:
    """Llama 3.1 8B, which has the sizes of Llama 3 8B."""
    values: dict[str, Any] = {}
    for name in ("llama3_8b", "llama31_8b"):
        found = yaml.safe_load((ROOT / f"configs/model/{name}.yaml").read_text())
        rope = {**values.get("attention", {}).get("rope", {}), **found["attention"]["rope"]}
        attention = {**values.get("attention", {}), **found["attention"], "rope": rope}
        values = {**values, **found, "attention": attention}
    values.pop("defaults")
    return ModelSpec.from_dict(values)


def settings(way: str, length: int, saving: bool) -> Config:
    config = Config()
    processes, config.parallel.cp, config.parallel.zero.offload = WAYS[way]
    config.parallel.zero.stage = 3 if processes > 1 else 0
    config.precision.compute, config.compile = "bf16", True
    config.batch.sequence_length, config.batch.micro_size, config.batch.accumulation = length, 1, 1
    config.activation.mode = "full"
    if saving:
        config.loss.tile = config.activation.tile = TILE
        config.activation.offload = True
    return config


def build(spec: ModelSpec, config: Config, world: World) -> tuple[TrainState, Layout]:
    layout = resolve_layout(config, world.size, spec)
    return TrainState.build(config, spec, layout.plan, layout.pipeline, world), layout


def tokens(length: int, vocabulary: int, world: World) -> list[Any]:
    generator = torch.Generator(world.device).manual_seed(world.data.get_local_rank())
    ids = torch.randint(vocabulary, (2, 1, length), device=world.device, generator=generator)
    return [SimpleNamespace(tokens=ids[0], targets=ids[1], documents=None)]


def gradients(spec: ModelSpec, config: Config, world: World) -> list[torch.Tensor]:
    """Of one micro-batch, on this rank."""
    (state, _), length = build(spec, config, world), config.batch.sequence_length
    state.runtime.train(tokens(length, spec.vocab_size, world), torch.tensor(1 / length, device=world.device))
    found = [local_values(parameter.grad).float().cpu() for parameter in state.parameters.values()]
    state.free()
    return found


def compare(spec: ModelSpec, way: str, world: World) -> float:
    """The largest relative difference of a parameter's gradient, with and without what saves memory; both in bf16."""
    one, other = (gradients(spec, settings(way, LENGTHS[0], saving), world) for saving in (True, False))
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(one, other))


def measure(spec: ModelSpec, whole: ModelSpec, way: str, own: int, world: World, ballast: int) -> dict[str, Any]:
    """One step of sequences of which each rank has `own` tokens, after it has compiled where there is time; sizes in
    GiB."""
    gc.collect()
    torch.cuda.empty_cache()  # or what is reserved would have the pools of what ran before
    length = own * WAYS[way][1]
    config = settings(way, length, True)
    state, layout = build(spec, config, world)
    held = torch.empty(ballast, dtype=torch.uint8, device=world.device)
    torch.cuda.reset_peak_memory_stats()
    batches, seconds = tokens(length, spec.vocab_size, world), []
    for _ in range(2 if own <= LENGTHS[1] else 1):
        started = time.perf_counter()
        loss = train_step(state, batches, False)["loss"].item()
        seconds.append(time.perf_counter() - started)
    work, all_work = (flops_per_token(some, length, causal=True) for some in (spec, whole))
    (peak,) = find_peaks(config, layout)
    result = {
        "length": length,
        "loss": loss,
        "seconds": seconds,
        "allocated": torch.cuda.max_memory_allocated() / 2**30,
        "reserved": torch.cuda.max_memory_reserved() / 2**30,
        "ballast": ballast / 2**30,
        "predicted allocated": (peak.allocated + ballast) / 2**30,
        "predicted reserved": (peak.reserved + ballast) / 2**30,
        "TFLOP/s": work * own / seconds[-1] / 1e12,
        "tokens/s a GPU with 32 layers": own / (seconds[-1] * all_work / work),
        "host GiB a GPU with 32 layers": 2 * whole.depth * own * whole.width * 2 / 2**30,
    }
    del held
    state.free()
    return result


def worker(out: Path, seconds: float, way: str, first: int) -> None:
    started, device, (size, cp, offloaded) = time.perf_counter(), local_device(Config().run), WAYS[way]
    plan = resolve_plan(settings(way, LENGTHS[0], True).parallel, size)
    world, whole, spec = join_world(plan.mesh, device, cp=cp), llama(), llama()
    spec.depth = DEPTH
    ballast = 0
    if size > 1 and not offloaded:
        ballast = sum(sign * state_bytes(some, plan, 2).total for some, sign in ((whole, 1), (spec, -1)))
    results: dict[str, Any] = {"way": way, "device": torch.cuda.get_device_name(), "lengths": []}
    with kernel_priority(False):
        results["gradient difference"] = compare(spec, way, world)
        for own in (length for length in LENGTHS[1:] if length >= first):
            length = own * cp
            guess = 4 / 3 * flops_per_token(spec, length, causal=True) * own / RATE + 30
            left = seconds - (time.perf_counter() - started)
            if world.agree(lambda: left < guess):
                results["ended"] = f"{length} tokens would take {guess:.0f} s of {left:.0f} s that are left"
                break
            try:
                results["lengths"].append(measure(spec, whole, way, own, world, ballast))
            except torch.OutOfMemoryError as error:
                results["ended"] = f"{length} tokens: {str(error).splitlines()[0]}"
                break
            if world.rank == 0:
                print(json.dumps(results["lengths"][-1]), flush=True)
                (out / f"{way}.json").write_text(json.dumps(results, indent=1))
    if world.rank == 0:
        print(json.dumps(results), flush=True)
        (out / f"{way}.json").write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


def main(out: Path, seconds: float = 280, *words: str) -> int:
    out.mkdir(parents=True, exist_ok=True)
    first = next((word.removeprefix("from=") for word in words if word.startswith("from=")), "0")
    ways = tuple(word for word in words if not word.startswith("from="))
    if unknown := set(ways) - set(WAYS):
        raise SystemExit(f"{', '.join(sorted(unknown))}: no such way; there are {', '.join(WAYS)}")
    ways = ways or tuple(way for way, (processes, *_) in WAYS.items() if processes <= torch.cuda.device_count())
    codes, ended = [], time.time() + seconds
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for place, way in enumerate(ways):
        share = (ended - time.time()) / (len(ways) - place)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WAYS[way][0]}"]
        command = [*torchrun, __file__, "worker", str(out), str(share - 15), way, first]
        try:
            codes.append(subprocess.run(command, env=environment, timeout=share).returncode)
        except subprocess.TimeoutExpired:
            codes.append(124)
    found = [json.loads(file.read_text()) for way in WAYS if (file := out / f"{way}.json").exists()]
    (out / "long_memory.json").write_text(json.dumps(found, indent=1))
    return max(codes, default=2)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    else:
        sys.exit(main(Path(sys.argv[1]), *map(float, sys.argv[2:3]), *sys.argv[3:]))
