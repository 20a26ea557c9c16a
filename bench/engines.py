"""Both engines of ZeRO side by side, on 1 and 2 GPUs: fp16 with an overflow, speed and memory of 8B, the largest model on one GPU.

    python bench/engines.py OUT.jsonl [seconds=460] [only=fp16,8b,largest]

Appends one line of JSON a case to OUT.jsonl, also for one that failed or for which no time was left. The measurements are
bench/step.py, each in a process group of its own; `fp16` is this file under torchrun.
"""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent
LLAMA = ["model=configs/model/llama3_8b.yaml", "length=8192", "micro=1", "precision.compute=bf16", "activation.mode=selective"]
DEPTHS = (15, 23, 27)
"""Layers of the 8B model's width: 4.3, 6.1 and 6.9 billion parameters, at 16 to 18 bytes each in host memory."""

PAGEABLE = "parallel.zero.deepspeed={zero_optimization: {offload_optimizer: {pin_memory: false}}}"
"""One flat tensor holds all: page-locked, it would take as much memory as the next power of two."""


def cases() -> list[tuple[str, int, list[str]]]:
    """Name, GPUs, arguments of bench/step.py, in the order of their weight."""
    found = []
    for stage in (3, 1):
        for engine in ("torch", "deepspeed"):
            found.append((f"8b zero{stage} {engine}", 2, [*LLAMA, "warm=2", "steps=4", f"parallel.zero.stage={stage}", f"parallel.zero.engine={engine}"]))
    for depth in DEPTHS:
        for name, settings in (("torch zero3", ["parallel.zero.stage=3"]),
                               ("deepspeed zero3", ["parallel.zero.stage=3", "parallel.zero.engine=deepspeed"]),
                               ("deepspeed zero1", ["parallel.zero.stage=1", "parallel.zero.engine=deepspeed", PAGEABLE])):
            found.append((f"largest {name} depth {depth}", 1, [*LLAMA, f"depth={depth}", "accumulation=4", "warm=1", "steps=2",
                                                              "parallel.zero.offload=true", *settings]))
    return found


def main(out: Path, limit: float, only: list[str]) -> None:
    ends, dead = time.monotonic() + limit, set()
    launches = [("fp16", 2, [str(ROOT / "bench/engines.py"), "fp16"])]
    launches += [(name, gpus, [str(ROOT / "bench/step.py"), f"case={name}", *arguments]) for name, gpus, arguments in cases()]
    for name, gpus, arguments in launches:
        family = name.partition(" depth")[0]
        if name.split()[0] not in only or family in dead:  # what did not fit will not fit with more layers
            continue
        left = ends - time.monotonic()
        record = launch(name, gpus, arguments, min(left, 150)) if left > 20 else {"case": name, "error": "no time left"}
        if "error" in record:
            dead.add(family)
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record)[:400], flush=True)


def launch(name: str, gpus: int, arguments: list[str], seconds: float) -> dict[str, Any]:
    """The result of a case, or what its processes said last."""
    threads = max(1, (len(os.sched_getaffinity(0)) - 1) // gpus)  # they update what is offloaded; torchrun would give each process one
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": str(threads), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), *arguments]
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text = process.communicate()[0] + f"\nError: killed after {seconds:.0f} s"
    wall = {"wall": round(time.monotonic() - started, 1), "threads": threads}
    lines = [line for line in text.splitlines() if line.startswith('{"case"')]
    if lines:
        result = json.loads(lines[-1])
        result.get("shares", {}).pop("longest_kernels", None)
        return result | wall
    errors = [line for line in text.splitlines() if "Error" in line or "exitcode" in line]
    return {"case": name, "error": [line[:300] for line in errors[:4]] or text[-600:]} | wall


def fp16() -> None:
    """Every plan of two ranks under both engines in fp16: ten steps, in three of which one rank's gradient is infinite."""
    import torch
    import torch.distributed as dist

    from trainer.batch import BatchPlan
    from trainer.config import Config
    from trainer.model.spec import ModelSpec
    from trainer.parallel.mesh import join, local_device
    from trainer.parallel.pipeline.layout import resolve_pipeline
    from trainer.parallel.plan import resolve_plan
    from trainer.state import TrainState
    from trainer.step import train_step

    def run(engine: str, tp: int = 1, pp: int = 1, stage: int = 1, offload: bool = False) -> list[dict[str, float]]:
        config, spec = Config(), ModelSpec(vocab_size=512, width=256, depth=4)
        spec.attention.heads, spec.attention.kv_heads, spec.feed_forward.width = 4, 4, 512
        config.parallel.tp, config.parallel.pp = tp, pp
        config.parallel.zero.stage, config.parallel.zero.engine, config.parallel.zero.offload = stage, engine, offload
        config.precision.compute, config.precision.loss_scale, config.precision.growth_interval = "fp16", 1024.0, 2
        config.run.steps, config.lr.warmup, config.optimizer.clip_norm = 10, 2, 0.5
        plan, device = resolve_plan(config.parallel, dist.get_world_size(), spec), local_device(config.run)
        world = join(plan, device)
        state = TrainState.build(config, spec, plan, resolve_pipeline(config, spec, plan, BatchPlan(64, 8, 4 // plan.dp, 2)), world)
        found = []
        for number, victim in enumerate((None, 0, 1, None, None, 1, None, None, None, None)):
            generator, first = torch.Generator().manual_seed(number), world.data.get_local_rank()
            tokens = torch.randint(512, (8, 65), generator=generator).to(device).tensor_split(plan.dp)[first]
            batches = [SimpleNamespace(tokens=part[:, :-1].contiguous(), targets=part[:, 1:].contiguous(), documents=None)
                       for part in tokens.split(4 // plan.dp)]
            layer = next(iter(next(iter(state.stages.values())).layers.values()))
            handle = layer.feed_forward.down.register_full_backward_hook(
                lambda module, inputs, outputs: (torch.full_like(inputs[0], torch.inf),)) if victim == world.rank else None
            scalars = train_step(state, batches, False)
            if handle is not None:
                handle.remove()
            found.append({name: scalars[name].item() for name in ("loss", "grad_norm", "found_inf", "loss_scale")})
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, json.dumps(found))
        state.close()
        assert len(set(everyone)) == 1, f"ranks differ: {everyone}"
        return found

    join(resolve_plan(Config().parallel, int(os.environ["WORLD_SIZE"])), local_device(Config().run))
    plans: dict[str, dict[str, Any]] = {"dp2 zero1": {}, "dp2 zero1 offload": {"offload": True}, "tp2 zero1": {"tp": 2}, "pp2 zero1": {"pp": 2},
                                        "pp2 zero1 offload": {"pp": 2, "offload": True}, "dp2 zero2": {"stage": 2},
                                        "dp2 zero2 offload": {"stage": 2, "offload": True}, "dp2 zero3": {"stage": 3},
                                        "dp2 zero3 offload": {"stage": 3, "offload": True}}
    result: dict[str, Any] = {"case": "fp16", "device": str(local_device(Config().run))}
    for name, plan in plans.items():
        try:
            mine, theirs = (run(engine, **plan) for engine in ("torch", "deepspeed"))
            off = max(abs(a[key] - b[key]) / abs(a[key]) for a, b in zip(mine, theirs) if not a["found_inf"] for key in ("loss", "grad_norm"))
            result[name] = {"worst_relative_difference": off, "skipped": [step["found_inf"] for step in theirs], "scales": [s["loss_scale"] for s in theirs],
                            "alike": all(a[key] == b[key] for a, b in zip(mine, theirs) for key in ("found_inf", "loss_scale"))}
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
