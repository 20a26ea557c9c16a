"""Predicted step time, bubble and throughput of Llama-3 70B and 405B from 8 to 4,096 GPUs, beside published figures.

    python bench/cost_growth.py [gpus=8,64,512] > table.md

Prints markdown. Simulates the schedules themselves (`trainer.planning.schedules.simulate`) on costs from operations;
one number, the rate that a device sustains on a layer, is taken from a measurement. docs/cost_growth.md states what is
assumed."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from trainer.config import ActivationConfig
from trainer.config.model import ModelSpec, assign_fields
from trainer.planning.cost.flops import flops_per_token, parameter_counts
from trainer.planning.cost.layers import layer_costs
from trainer.planning.schedules.costs import LayerCosts, StageCosts
from trainer.planning.schedules.partition import partition_layers
from trainer.planning.schedules.simulate import Simulation, simulate_schedule
from trainer.planning.schedules.templates import build_schedule

MODELS = Path(__file__).parents[1] / "configs" / "model"
LENGTH = 8192
NODE = 8
NVLINK, NETWORK = 370e9, 45e9  # bytes per second into one device
LATENCY = 5e-6  # seconds of one step of a ring, and of one point-to-point transfer
HOST = 20e-6  # seconds of one action of the schedule that are not hidden
MEMORY_BANDWIDTH, OPTIMIZER_BYTES = 3e12, 28  # per second; moved per parameter by AdamW on fp32 state with bf16 copies
PEAK, DEVICE_MEMORY = 989e12, 141e9  # of an H200: dense bf16 FLOP/s, bytes
GIB = 2**30
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb_v": 2}  # and stages a rank
COUNTS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
SELECTIVE, FULL = ActivationConfig(mode="selective"), ActivationConfig(mode="full")


@dataclass(frozen=True)
class Prediction:
    """seconds: of a step. memory: bytes on the fullest device, states and activations."""

    seconds: float
    bubble: float
    memory: float


@dataclass(frozen=True)
class Layout:
    """Parallel degrees, and the micro-batches of one sequence (or `micro`) that each pipeline takes a step."""

    tp: int
    pp: int
    dp: int
    microbatches: int
    micro: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def tokens(self) -> int:
        return self.dp * self.microbatches * self.micro * LENGTH


def load(name: str) -> ModelSpec:
    """A model of the configuration folder, with the files it builds on."""
    values = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    bases = [entry for entry in values.pop("defaults", []) if entry != "_self_"]
    spec = load(bases[0]) if bases else ModelSpec()
    assign_fields(spec, values, "model")
    return spec


def llama_405b() -> ModelSpec:
    """Llama 3 405B (arXiv 2407.21783, table 3)."""
    spec = copy.deepcopy(load("llama3_70b"))
    spec.name, spec.width, spec.depth = "llama3_405b", 16384, 126
    spec.attention.heads, spec.attention.kv_heads, spec.feed_forward.width = 128, 8, 53248
    return spec


def sustained(spec: ModelSpec, tokens_per_second: float, recompute: ActivationConfig) -> float:
    """FLOP/s on layers, recomputation counted, that a measured throughput of data parallelism in one node comes from.
    Whatever else takes time there (element-wise work, the optimizer, exposed gathers) is in the rate."""
    work = sum(layer_costs(spec, LENGTH, 1, 1, 1.0, recompute=recompute).total)
    return work * tokens_per_second / LENGTH


def predict(
    spec: ModelSpec,
    layout: Layout,
    schedule: str,
    rate: float,
    recompute: ActivationConfig = SELECTIVE,
    chunks: int | None = None,
    parameter_shards: bool = False,
) -> Prediction:
    """One step. parameter_shards: ZeRO-3 without pipeline, parameters gathered anew in backward; else they stay
    gathered for the step (ZeRO-1)."""
    network = NVLINK if layout.gpus <= NODE else NETWORK
    layers = layer_costs(
        spec,
        LENGTH,
        layout.micro,
        layout.tp,
        rate,
        recompute=recompute,
        tp_bandwidth=NVLINK,
        bandwidth=network,
        latency=LATENCY,
        host=HOST,
        shard=layout.dp,
    )
    chunks = 1 if layout.pp == 1 else chunks or SCHEDULES[schedule]
    order = build_schedule("1f1b" if layout.pp == 1 else schedule, layout.pp, layout.microbatches, chunks)
    split = partition_layers(layers, order.stages, order.placement)
    costs = overlapped(layers, layers.stage(split), split)
    if parameter_shards:  # the second gather hides behind the backward pass of the micro-batch
        gathers, backward = sum(layers.unshard), sum(layers.b)
        costs = replace(costs, b=tuple(b + max(0.0, gathers - backward) for b in costs.b))
    result = simulate_schedule(order, costs)
    total = parameter_counts(spec)["total"]
    seconds = result.makespan + OPTIMIZER_BYTES * total / layout.gpus / MEMORY_BANDWIDTH
    return Prediction(seconds, result.bubble, memory(spec, layout, result, parameter_shards))


def overlapped(layers: LayerCosts, costs: StageCosts, split: tuple[range, ...]) -> StageCosts:
    """FSDP gathers a layer while the one before computes, and reduces likewise: what shows of a stage is one layer, and
    what is longer than the computation of one micro-batch."""
    first, last = max(layers.unshard[1:-1]), max(layers.reduce[1:-1])
    return replace(
        costs,
        unshard=tuple(min(total, max(first, total - f)) for total, f in zip(costs.unshard, costs.f)),
        reduce=tuple(min(total, max(last, total - b)) for total, b in zip(costs.reduce, costs.b)),
    )


def memory(spec: ModelSpec, layout: Layout, result: Simulation, parameter_shards: bool) -> float:
    """Bytes on the fullest device: fp32 parameters and two moments sharded over data-parallel ranks; the bf16 copy and
    fp32 gradients whole within the tensor and pipeline shard, or (ZeRO-3) sharded."""
    held = parameter_counts(spec)["total"] / layout.tp / layout.pp
    return 12 * held / layout.dp + (6 * held / layout.dp if parameter_shards else 6 * held) + max(result.memory)


def layout_for(gpus: int, stages: int) -> Layout:
    """Tensor parallelism within a node, pipeline over up to `stages` nodes, data parallelism over the rest; two
    sequences a device, between 256 and 2,048 a step (2.1 to 16.8 million tokens)."""
    pp = min(gpus // NODE, stages)
    dp = gpus // NODE // pp
    return Layout(NODE, pp, dp, max(256, min(2048, 2 * gpus)) // dp)


def growth(spec: ModelSpec, stages: int, rate: float, counts: list[int]) -> list[str]:
    """The table of one model. stages: most pipeline ranks."""
    per_token = flops_per_token(spec, LENGTH, causal=True)
    lines = [
        "| GPUs | tp x pp x dp | million tokens a step | micro-batches | schedule | step, s | bubble | tokens/s per "
        "GPU | MFU, causal | GiB |",
        "|---:|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for gpus in counts:
        layout = layout_for(gpus, stages)
        for name in SCHEDULES if layout.pp > 1 else ["1f1b"]:
            found = predict(spec, layout, name, rate)
            speed = layout.tokens / found.seconds / gpus
            label = f"{name}, v={SCHEDULES[name]}" if layout.pp > 1 else "no pipeline"
            lines.append(
                f"| {gpus:,} | {layout.tp} x {layout.pp} x {layout.dp} | {layout.tokens / 1e6:.1f} | "
                f"{layout.microbatches} | {label} | {found.seconds:,.2f} | {100 * found.bubble:.1f}% | {speed:,.0f} | "
                f"{100 * speed * per_token / PEAK:.1f}% | "
                f"{found.memory / GIB:,.0f}{' (does not fit)' if found.memory > DEVICE_MEMORY else ''} |"
            )
    return lines


def published() -> list[str]:
    """torchtitan's figures on H100 (2.4 TB/s, 500 W, 400 Gb/s a GPU) and what the model says with rates from its 8B
    run."""
    small, middle, large = load("llama3_8b"), load("llama3_70b"), llama_405b()
    rates = {"bf16": sustained(small, 6667, SELECTIVE), "fp8": sustained(small, 8532, SELECTIVE)}
    cases = [
        ("8B, 128", "FSDP128, 2 sequences", "bf16", 6514, small, Layout(1, 1, 128, 1, 2), SELECTIVE, "1f1b", None),
        ("8B, 128", "FSDP128, 2 sequences", "fp8", 8380, small, Layout(1, 1, 128, 1, 2), SELECTIVE, "1f1b", None),
        ("70B, 256", "FSDP32 x TP8, 16 sequences", "bf16", 597, middle, Layout(8, 1, 32, 1, 16), FULL, "1f1b", None),
        ("70B, 256", "FSDP32 x TP8, 16 sequences", "fp8", 829, middle, Layout(8, 1, 32, 1, 16), FULL, "1f1b", None),
    ]
    for schedule, figure, settings in (("1f1b", 100, ((8, 4), (32, 1))), ("interleaved", 128, ((16, 2), (32, 1)))):
        cases += [
            (
                "405B, 512",
                f"FSDP8 x TP8 x PP8, {schedule}, {count} micro-batches of {micro}",
                "fp8",
                figure,
                large,
                Layout(8, 8, 8, count, micro),
                FULL,
                schedule,
                None if schedule == "1f1b" else 2,
            )
            for count, micro in settings
        ]
    lines = [
        "| model, GPUs | plan | type | published | predicted | ratio | bubble |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for title, plan, kind, figure, spec, layout, recompute, schedule, chunks in cases:
        found = predict(spec, layout, schedule, rates[kind], recompute, chunks, parameter_shards=layout.pp == 1)
        speed = layout.tokens / found.seconds / layout.gpus
        lines.append(
            f"| {title} | {plan} | {kind} | {figure:,} | {speed:,.0f} | {speed / figure:.2f} | "
            f"{100 * found.bubble:.1f}% |"
        )
    rate = ", ".join(f"{kind} {value / 1e12:.0f}" for kind, value in rates.items())
    return [f"Rates from the 8B run on 8 GPUs, TFLOP/s: {rate}.", "", *lines]


def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    counts = [int(part) for part in options.pop("gpus", ",".join(map(str, COUNTS))).split(",")]
    if options or any(count < NODE or count % NODE for count in counts):
        sys.exit(f"usage: cost_growth.py [gpus=LIST], multiples of {NODE}")
    rate = sustained(load("llama3_8b"), 9576, SELECTIVE)
    print(f"Sustained rate of an H200: {rate / 1e12:.0f} TFLOP/s.\n")
    for title, spec, stages in (("Llama-3 70B", load("llama3_70b"), 4), ("Llama-3 405B", llama_405b(), 16)):
        print(f"### {title}\n")
        print("\n".join(growth(spec, stages, rate, counts)), "\n")
    print("### Published figures\n")
    print("\n".join(published()))


if __name__ == "__main__":
    main()
