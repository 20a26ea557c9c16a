"""Both engines of ZeRO side by side, on 1 and 2 GPUs: fp16 with an overflow, speed and memory of 8B, the largest model
on one GPU.

    python bench/engines.py OUT.jsonl [seconds=460] [only=fp16,8b,largest]

Appends one line of JSON a case to OUT.jsonl, also for one that failed or for which no time was left. The measurements
are bench/step.py, each in a process group of its own; `fp16` is this file under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent
LLAMA = [
    "model=configs/model/llama3_8b.yaml",
    "length=8192",
    "micro=1",
    "precision.compute=bf16",
    "activation.mode=selective",
]
OUTER, LAYER = 1_050_677_248, 218_112_000
"""Parameters of the 8B model's embedding, head and final norm, and of one of its layers."""

SPARE = 4 * 2**30
"""Bytes of host memory at which a measurement is ended: below it the machine would end something, perhaps not this."""

PAGEABLE = "parallel.zero.deepspeed={zero_optimization: {offload_optimizer: {pin_memory: false}}}"
"""One flat tensor holds all: page-locked, it would take as much memory as the next power of two."""


def side_by_side() -> list[tuple[str, int, list[str]]]:
    """Name, GPUs, arguments of bench/step.py, in the order of their weight."""
    return [
        (
            f"8b zero{stage} {engine}",
            2,
            [*LLAMA, "warm=2", "steps=4", f"parallel.zero.stage={stage}", f"parallel.zero.engine={engine}"],
        )
        for stage in (3, 1)
        for engine in ("torch", "deepspeed")
    ]


OFFLOADED = {
    "torch zero3": (16, ["parallel.zero.stage=3"]),
    "torch zero1": (16, ["parallel.zero.stage=1"]),
    "deepspeed zero3": (18, ["parallel.zero.stage=3", "parallel.zero.engine=deepspeed"]),
    "deepspeed zero1": (18, ["parallel.zero.stage=1", "parallel.zero.engine=deepspeed", PAGEABLE]),
}
"""Bytes a parameter in host memory, and the settings."""


def largest(trains: Callable[[int], bool], start: int) -> int:
    """The largest number of layers that trains, from a guess: doubling steps up to the first that does not or down to
    the first that does, then halving what lies between. 0 if one layer does not. `trains` may raise to end the
    search."""
    low, high, step = 0, None, 1
    depth = max(1, start)
    while high is None or high - low > 1:
        if trains(depth):
            low = depth
        else:
            high = depth
        if low and high:
            depth = (low + high) // 2
        else:
            depth = low + step if low else max(1, high - step)
            step *= 2
    return low


def main(out: Path, limit: float, only: list[str]) -> None:
    ends = time.monotonic() + limit

    def measure(name: str, gpus: int, arguments: list[str]) -> bool:
        """Whether it ran; TimeoutError where there is no time for it."""
        left = ends - time.monotonic()
        record = launch(name, gpus, arguments, min(left, 150)) if left > 20 else {"case": name, "error": "no time left"}
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record)[:400], flush=True)
        if left <= 20:
            raise TimeoutError
        return "error" not in record

    try:
        if "fp16" in only:
            measure("fp16", 2, [str(ROOT / "bench/engines.py"), "fp16"])
        for case in side_by_side() if "8b" in only else ():
            measure_step(measure, *case)
        for name, (bytes_each, settings) in OFFLOADED.items() if "largest" in only else ():
            guess = int((0.85 * available() / bytes_each - OUTER) // LAYER)
            depth = largest(
                lambda depth: measure_step(
                    measure,
                    f"largest {name} depth {depth}",
                    1,
                    [
                        *LLAMA,
                        f"depth={depth}",
                        "accumulation=4",
                        "warm=1",
                        "steps=2",
                        "parallel.zero.offload=true",
                        *settings,
                    ],
                ),
                guess,
            )
            print(f"{name}: {depth} layers, {(OUTER + depth * LAYER) / 1e9:.2f} billion parameters", flush=True)
    except TimeoutError:
        print("no time left", flush=True)


def measure_step(measure: Callable[[str, int, list[str]], bool], name: str, gpus: int, arguments: list[str]) -> bool:
    return measure(name, gpus, [str(ROOT / "bench/step.py"), f"case={name}", *arguments])


def available() -> int:
    """Bytes of host memory that can be had."""
    return next(
        1024 * int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )


def launch(name: str, gpus: int, arguments: list[str], seconds: float) -> dict[str, Any]:
    """The result of a case, or what its processes said last. Ended when its time, or the host's memory, is about to be
    over."""
    threads = max(
        1, (len(os.sched_getaffinity(0)) - 1) // gpus
    )  # they update what is offloaded; torchrun would give each process one
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": str(threads),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), *arguments]
    started, why = time.monotonic(), ""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        while process.poll() is None and not why:
            why = (
                f"Error: killed after {seconds:.0f} s"
                if time.monotonic() - started > seconds
                else "Error: killed, the host's memory was about to end"
                if available() < SPARE
                else ""
            )
            time.sleep(0.1)
        if why:
            for pid in [
                *map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()),
                process.pid,
            ]:
                os.killpg(pid, signal.SIGKILL)  # torchrun's processes lead groups of their own
            process.wait()
        log.seek(0)
        text = log.read() + "\n" + why
    wall = {"wall": round(time.monotonic() - started, 1), "threads": threads}
    lines = [line for line in text.splitlines() if line.startswith('{"case"')]
    if lines:
        result = json.loads(lines[-1])
        result.get("shares", {}).pop("longest_kernels", None)
        return result | wall
    errors = [line for line in text.splitlines() if "Error" in line or "exitcode" in line]
    return {"case": name, "error": [line[:300] for line in errors[:4]] or text[-600:]} | wall


def fp16() -> None:
    """Every plan of two ranks under both engines in fp16: ten steps, in three of which one rank's gradient is
    infinite."""
    import torch
    import torch.distributed as dist

    from trainer.config import Config
    from trainer.config.model import ModelSpec
    from trainer.distributed.world import join, local_device
    from trainer.planning.batch import BatchPlan
    from trainer.planning.pipeline import resolve_pipeline
    from trainer.planning.plan import resolve_plan
    from trainer.training.state import TrainState
    from trainer.training.step import train_step

    def run(engine: str, tp: int = 1, pp: int = 1, stage: int = 1, offload: bool = False) -> list[dict[str, float]]:
        config, spec = Config(), ModelSpec(vocab_size=512, width=256, depth=4)
        spec.attention.heads, spec.attention.kv_heads, spec.feed_forward.width = 4, 4, 512
        config.parallel.tp, config.parallel.pp = tp, pp
        config.parallel.zero.stage, config.parallel.zero.engine, config.parallel.zero.offload = stage, engine, offload
        config.precision.compute, config.precision.loss_scale, config.precision.growth_interval = "fp16", 1024.0, 2
        config.run.steps, config.lr.warmup, config.optimizer.clip_norm = 10, 2, 0.5
        plan, device = resolve_plan(config.parallel, dist.get_world_size(), spec), local_device(config.run)
        world = join(plan.mesh, device)
        state = TrainState.build(
            config, spec, plan, resolve_pipeline(config, spec, plan, BatchPlan(64, 8, 4 // plan.dp, 2)), world
        )
        found = []
        for number, victim in enumerate((None, 0, 1, None, None, 1, None, None, None, None)):
            generator, first = torch.Generator().manual_seed(number), world.data.get_local_rank()
            tokens = torch.randint(512, (8, 65), generator=generator).to(device).tensor_split(plan.dp)[first]
            batches = [
                SimpleNamespace(tokens=part[:, :-1].contiguous(), targets=part[:, 1:].contiguous(), documents=None)
                for part in tokens.split(4 // plan.dp)
            ]
            layer = next(iter(next(iter(state.stages.values())).layers.values()))
            handle = (
                layer.feed_forward.down.register_full_backward_hook(
                    lambda module, inputs, outputs: (torch.full_like(inputs[0], torch.inf),)
                )
                if victim == world.rank
                else None
            )
            scalars = train_step(state, batches, False)
            if handle is not None:
                handle.remove()
            found.append({name: scalars[name].item() for name in ("loss", "grad_norm", "found_inf", "loss_scale")})
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, json.dumps(found))
        state.close()
        assert len(set(everyone)) == 1, f"ranks differ: {everyone}"
        return found

    join(resolve_plan(Config().parallel, int(os.environ["WORLD_SIZE"])).mesh, local_device(Config().run))
    plans: dict[str, dict[str, Any]] = {
        "dp2 zero1": {},
        "dp2 zero1 offload": {"offload": True},
        "tp2 zero1": {"tp": 2},
        "pp2 zero1": {"pp": 2},
        "pp2 zero1 offload": {"pp": 2, "offload": True},
        "dp2 zero2": {"stage": 2},
        "dp2 zero2 offload": {"stage": 2, "offload": True},
        "dp2 zero3": {"stage": 3},
        "dp2 zero3 offload": {"stage": 3, "offload": True},
    }
    result: dict[str, Any] = {"case": "fp16", "device": str(local_device(Config().run))}
    for name, plan in plans.items():
        try:
            mine, theirs = (run(engine, **plan) for engine in ("torch", "deepspeed"))
            off = max(
                abs(a[key] - b[key]) / abs(a[key])
                for a, b in zip(mine, theirs)
                if not a["found_inf"]
                for key in ("loss", "grad_norm")
            )
            result[name] = {
                "worst_relative_difference": off,
                "skipped": [step["found_inf"] for step in theirs],
                "scales": [s["loss_scale"] for s in theirs],
                "alike": all(a[key] == b[key] for a, b in zip(mine, theirs) for key in ("found_inf", "loss_scale")),
            }
        except (RuntimeError, ValueError, AttributeError, AssertionError) as error:
            result[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "fp16":
        fp16()
    options = dict(argument.split("=", 1) for argument in sys.argv[2:])
    main(Path(sys.argv[1]), float(options.get("seconds", 460)), options.get("only", "fp16,8b,largest").split(","))
