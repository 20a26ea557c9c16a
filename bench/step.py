"""Speed of the training step alone, on random tokens: tokens/s, MFU, memory, and where a step's time goes.

    torchrun --nproc-per-node N bench/step.py case=NAME model=configs/model/llama3_8b.yaml length=8192 micro=1 \
        [out=FILE] [balanced=true] [code=transformers] [parallel.zero.stage=3 compile=true ...]

Everything after the first few keys is a setting of the configuration schema. Needs no corpus and no Hydra. With
balanced=true every expert of a mixture gets the same number of tokens, whatever the router says. With
code=transformers the model runs by transformers' own code. With sums=kernel, kernels of their own add weight gradients
to those of earlier micro-batches, and not GEMMs. With casts=each, each product casts its weight to fp8, and not each
step. The line also says what `trainer estimate` predicts of the step.
"""

from __future__ import annotations

import json
import os
import re
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import yaml
from specs import read_spec, run_by_transformers
from torch._dynamo.utils import counters

from trainer.config import Config
from trainer.data.batches import MicroBatch
from trainer.distributed.mesh import join_world, local_device
from trainer.model import experts
from trainer.model.attention import kernel_priority
from trainer.observe.report import device_name
from trainer.parallel.pipeline.plan import PipelinePlan, resolve_pipeline
from trainer.planning import decide, states
from trainer.planning import layer as cost
from trainer.planning.estimate.step import estimate_step
from trainer.planning.features import resolve_plan
from trainer.planning.hardware import load_hardware, peak_flops, shipped_for
from trainer.planning.plan import BatchPlan, node_size
from trainer.planning.resolve import Layout
from trainer.training import state as training_state
from trainer.training.auto import AutoSchedule
from trainer.training.metrics_tracker import load_metrics
from trainer.training.run import decide_together
from trainer.training.session import find_hardware
from trainer.training.state import TrainState
from trainer.training.step import train_step
from trainer.training.trainer import CUDAGraphStep

KERNELS = {
    "attention": "flash|fmha|cudnn.*sdpa|cudnn_generated|flex",
    "communication": "nccl",
    "matmul": "gemm|nvjet|cutlass|sm90_xmma|cublas",
    "optimizer": "adam|multi_tensor(?!.*copy)|^_(squares|fold|updates)",
    "copy": "memcpy|memset|copy|chunk_cat|split_with_sizes",
}


def main() -> None:
    own = {
        "case": "step",
        "model": "configs/model/tiny.yaml",
        "length": "256",
        "micro": "1",
        "accumulation": "1",
        "warm": "4",
        "steps": "12",
        "depth": "",
        "trace": "",
        "out": "",
        "balanced": "false",
        "code": "spec",
        "sums": "gemm",
        "casts": "once",
    }
    config, changes = Config(), dict(argument.split("=", 1) for argument in sys.argv[1:])
    for name, value in changes.items():
        if name in own:
            own[name] = value
            continue
        *blocks, last = name.split(".")
        target = attrgetter(".".join(blocks))(config) if blocks else config
        assert hasattr(target, last), name
        setattr(target, last, value if value == "off" else yaml.safe_load(value))  # for YAML false
    if own["sums"] == "kernel":
        states.sums_in_gemms = training_state.sums_in_gemms = lambda *_: False
    if own["casts"] == "each":
        decide.can_cast_once = lambda *_: False
    if own["balanced"] == "true":
        experts.choose_experts = choose_in_turn
    spec = read_spec(own["model"])
    spec.depth = int(own["depth"] or spec.depth)
    if own["code"] == "transformers":
        spec = run_by_transformers(spec)
    length, micro, accumulation, warm_up, steps = (
        int(own[name]) for name in ("length", "micro", "accumulation", "warm", "steps")
    )
    config.batch.sequence_length = length  # by which `parallel.context.method=auto` chooses
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    plan, device = resolve_plan(config.parallel, world_size, spec), local_device(config.run)
    batch = BatchPlan(length, micro * accumulation * plan.dp, micro, accumulation)
    pipeline = resolve_pipeline(config, spec, plan, batch)
    torch.set_float32_matmul_precision(config.precision.matmul)
    world, started = join_world(plan, device), time.perf_counter()
    decision = decide_together(
        config, Layout(spec, plan, batch, pipeline), world, node_size(world_size), find_hardware(config, device)
    )
    config, layout, chosen = decision.config, decision.layout, decision.notes
    plan, pipeline = layout.plan, layout.pipeline
    state = TrainState.build(config, spec, plan, pipeline, world)
    recorded = CUDAGraphStep(state) if config.run.cuda_graphs else None
    built = time.perf_counter() - started
    config.batch.micro_size, config.batch.accumulation = micro, accumulation  # given: auto keeps them
    generator = torch.Generator(device).manual_seed(world.data.get_local_rank())
    batches = [
        MicroBatch(
            torch.randint(spec.vocab_size, (micro, length), device=device, generator=generator),
            torch.randint(spec.vocab_size, (micro, length), device=device, generator=generator),
            documents=None,
            ids=[],
        )
        for _ in range(accumulation)
    ]

    def train() -> dict[str, torch.Tensor]:
        return recorded(batches, 0) if recorded else train_step(state, batches, 0)

    repeats = 0

    def step() -> float:
        nonlocal repeats
        begun = time.perf_counter()
        scalars = train()
        if config.parallel.ep_capacity and scalars["found_inf"].item():  # without room for all rows of experts
            repeats += 1
            with state.exact_dispatch(True):
                scalars = train()
        loss = scalars["loss"].item()
        assert loss == loss and scalars["found_inf"].item() == 0, scalars
        return time.perf_counter() - begun

    with kernel_priority(config.run.deterministic):
        if config.parallel.pipeline.schedule == "auto" and plan.pp > 1:
            auto = AutoSchedule(state, batch)
            step()
            while not auto.ready():
                step()
            choice = auto.choose()
            pipeline, predicted = PipelinePlan(choice.schedule, choice.split), choice.predicted
            state = rebuilt(state, pipeline)
        warm = [step() for _ in range(warm_up)]
        seconds = [step() for _ in range(steps)]
        begun = time.perf_counter()
        for _ in range(steps):
            scalars = train()
        scalars["loss"].item()
        unread = (time.perf_counter() - begun) / steps
        profiled = max(1, PROFILED // accumulation)
        shares = profile(train, profiled, own["trace"] if world.rank == 0 else "") if device.type == "cuda" else {}
        # Two bounds from above: the profiler slows down the host, and a GPU that has more to do has a lower clock.
        without = min(1 - shares.pop("busy_seconds") / unread, shares["idle"]) if shares else 0.0
    read = statistics.median(seconds)
    # A run reads the numbers of a step when it has queued the next one, except a step that may have to run again.
    took = read if config.parallel.ep_capacity else unread
    speed = micro * accumulation * length * plan.dp / world_size / took
    causal, full = (cost.flops_per_token(spec, length, causal) for causal in (True, False))
    result: dict[str, Any] = {
        "case": own["case"],
        "ranks": world_size,
        "plan": plan.describe(),
        "tokens_per_second_per_gpu": round(speed, 1),
        "seconds": round(took, 4),
        "seconds_read": round(read, 4),  # of a step whose loss the host waits for
        "spread": [round(min(seconds), 4), round(max(seconds), 4)],
        "first_step": round(warm[0], 1),
        "parameters": cost.parameter_counts(spec)["total"],
        "host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        "built": round(built, 1),
        "chosen": chosen,
        "graph_breaks": sum(counters["graph_break"].values()),
        "settings": changes,
        "experts": expert_loads(state, scalars["statistics"]),
        "run_again": repeats,  # steps
        "predicted": predict(config, layout, shipped_for(device_name(device))),
    }
    if plan.pp > 1:
        finish = [None] * world_size
        dist.all_gather_object(finish, (state.runtime.busy(), state.runtime.finish()))
        makespan = max(end for _, end in finish)
        result |= {
            "pipeline": pipeline.describe(),
            "bubble": round(1 - sum(busy for busy, _ in finish) / world_size / makespan, 4),
            "bubbles": [round(1 - busy / makespan, 4) for busy, _ in finish],
        }
        if config.parallel.pipeline.schedule == "auto":
            result |= {
                "predicted_makespan": round(predicted.makespan, 4),
                "measured_makespan": round(makespan, 4),
                "predicted_bubble": round(predicted.bubble, 4),
            }
    if device.type == "cuda":
        memory = (
            torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()], device=device) / 2**30
        )
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        peak = peak_flops(torch.cuda.get_device_name(), config.precision.compute)
        result |= {
            "mfu": round(causal * speed / peak, 4),
            "mfu_full": round(full * speed / peak, 4),
            "peak_gib": round(memory[0].item(), 2),
            "reserved_gib": round(memory[1].item(), 2),
            "retries": torch.cuda.memory_stats()["num_alloc_retries"],
            "without_work": round(without, 4),
            "shares": shares,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
    if world.rank == 0:
        print(json.dumps(result), flush=True)
        if own["out"]:
            with open(own["out"], "a") as file:
                file.write(json.dumps(result) + "\n")


def choose_in_turn(scores: torch.Tensor, top_k: int, *_: int) -> torch.Tensor:
    """Choices of experts in place of the router's: one expert after the other, so that all get the same number of
    tokens. torchtitan chooses the same under `--debug.moe_force_load_balance`. scores: [tokens, experts]; result: int64
    [tokens, top_k]."""
    tokens, count = scores.shape
    return (torch.arange(tokens * top_k, device=scores.device) % count).view(tokens, top_k)


def expert_loads(state: TrainState, statistics: torch.Tensor) -> dict[str, float]:
    """The metrics of how evenly the last step's tokens were spread over experts: see `trainer help experts`."""
    parts = statistics.cpu().split([*state.reports.values()])
    by_name = {name: part.numpy() for name, part in zip(state.reports, parts)}
    mixtures = [name.removesuffix(".load") for name in by_name if name.endswith("feed_forward.load")]
    return {name: round(value, 3) for name, value in load_metrics(by_name, mixtures, 1.0).items()}


def predict(config: Config, layout: Layout, hardware: str) -> dict[str, Any]:
    """What `trainer estimate` says of this step on a kind of machine. hardware: a name of configs/hardware; gib: what
    torch's allocator reserves, without the memory that it does not see (`hardware.fixed`)."""
    try:
        found = estimate_step(config, layout, load_hardware(hardware))
    except Exception as error:  # whatever it is, the measurement is not lost
        return {"error": f"{type(error).__name__}: {error}"}
    return {"seconds": round(found.seconds, 4), "gib": round(found.fullest.reserved / 2**30, 2)}


def rebuilt(state: TrainState, pipeline: PipelinePlan) -> TrainState:
    """The same run, freshly initialised, with another pipeline."""
    config, spec, plan, world = state.config, state.spec, state.plan, state.world
    state.free()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return TrainState.build(config, spec, plan, pipeline, world)


PROFILED = 3
"""Micro-batches, at least. The profiler takes minutes to read a hundred passes of a deep model."""


def profile(train: Callable[[], dict[str, torch.Tensor]], steps: int, trace: str) -> dict[str, Any]:
    """Share of the wall time of some steps: kernels by kind, communication that nothing overlaps, and idle; and the
    seconds of a step in which a kernel runs. The host reads the loss of the last step alone."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profiler:
        begun = time.perf_counter()
        for _ in range(steps):
            scalars = train()
        scalars["loss"].item()
        wall = time.perf_counter() - begun
    if trace:
        profiler.export_chrome_trace(trace)
    spans: dict[str, list[tuple[float, float]]] = {}
    kernels: Counter = Counter()
    for event in profiler.events():
        if (
            event.device_type == torch.autograd.DeviceType.CUDA
            and event.device_time_total > 0
            and not event.is_user_annotation
        ):
            kind = next((k for k, pattern in KERNELS.items() if re.search(pattern, event.name, re.I)), "pointwise")
            spans.setdefault(kind, []).append((event.time_range.start, event.time_range.end))
            kernels[event.name[:90]] += event.time_range.elapsed_us() / wall / 1e6
    covered = {kind: union(values) for kind, values in spans.items()}
    compute = union([s for kind, values in spans.items() if kind != "communication" for s in values])
    everything = union([s for values in spans.values() for s in values])
    return {kind: round(total / wall / 1e6, 4) for kind, total in covered.items()} | {
        "busy_seconds": everything / 1e6 / steps,
        "exposed_communication": round((everything - compute) / wall / 1e6, 4),
        "idle": round(1 - everything / wall / 1e6, 4),
        "longest_kernels": {name: round(share, 4) for name, share in kernels.most_common(24)},
    }


def union(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
