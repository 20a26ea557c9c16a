"""How far the schedule that `auto` chooses is from the best one measured, on models whose layers cost unequally.

    torchrun --nproc-per-node 4 bench/auto.py OUT.jsonl [small] [heavy|wide|growing ...]

For each model every template is measured with the balanced and the even split, then what auto chooses after its probe.
Same global batch, same number of micro-batches, random tokens. `small` shrinks the models, to try the script on CPUs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from step import rebuilt

from trainer.config import Config, ConfigError
from trainer.config.model import ModelSpec, assign
from trainer.distributed.world import join, local_device
from trainer.model.attention import kernel_priority
from trainer.planning.batch import BatchPlan
from trainer.planning.pipeline import Pipeline, resolve_pipeline
from trainer.planning.plan import resolve_plan
from trainer.training.auto_schedule import Auto
from trainer.training.state import TrainState
from trainer.training.step import train_step

TEMPLATES = ("1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "v_half", "dualpipe_v", "greedy")
STEPS = 5


def models(small: bool) -> dict[str, ModelSpec]:
    """A head that costs as much as several layers; a few layers four times as wide as the others; layers that grow."""
    width, depth, vocab = (64, 8, 2000) if small else (2048, 12, 128256)
    base = {
        "width": width,
        "depth": depth,
        "vocab_size": 512 if small else 8192,
        "attention": {"heads": width // 32, "kv_heads": width // 64},
        "feed_forward": {"width": 3 * width},
    }
    wide = {str(layer): {"feed_forward": {"width": 12 * width}} for layer in range(3)}
    growing = {str(layer): {"feed_forward": {"width": width * (2 + layer) // 2}} for layer in range(depth)}
    specs = {}
    for name, changes in (
        ("heavy head", {"vocab_size": vocab}),
        ("wide first layers", {"overrides": wide}),
        ("growing layers", {"overrides": growing}),
    ):
        specs[name] = ModelSpec()
        assign(specs[name], base | changes, "model")
    return specs


def main(out: str, small: bool, wanted: list[str]) -> None:
    config = Config()
    world_size, device = int(os.environ["WORLD_SIZE"]), local_device(config.run)
    length, accumulation = (64, 8) if small else (8192, 8)
    config.parallel.pp, config.batch.micro_size, config.batch.accumulation = world_size, 1, accumulation
    config.precision.compute = "fp32" if small else "bf16"
    plan, batch = resolve_plan(config.parallel, world_size), BatchPlan(length, accumulation, 1, accumulation)
    world = join(plan.mesh, device)
    for name, spec in models(small).items():
        if wanted and name.split()[0] not in wanted:
            continue
        generator = torch.Generator(device).manual_seed(0)
        batches = [
            SimpleNamespace(
                tokens=torch.randint(spec.vocab_size, (1, length), device=device, generator=generator), documents=None
            )
            for _ in range(accumulation)
        ]
        for micro in batches:
            micro.targets = micro.tokens.roll(-1, 1)
        state, rows = None, []
        for template in TEMPLATES:
            for split in ("balanced", "even"):
                config.parallel.pipeline.schedule, config.parallel.pipeline.split = template, split
                try:
                    pipeline = resolve_pipeline(config, spec, plan, batch)
                except ConfigError:
                    continue
                state = (
                    TrainState.build(config, spec, plan, pipeline, world) if state is None else rebuilt(state, pipeline)
                )
                rows.append({"schedule": template, "split": split, **measure(state, batches)})
        config.parallel.pipeline.schedule, config.parallel.pipeline.split = "auto", "balanced"
        state = rebuilt(state, resolve_pipeline(config, spec, plan, batch))
        auto = Auto(state, batch)
        run(state, batches)
        while not auto.ready():
            run(state, batches)
        choice = auto.choose()
        state = rebuilt(state, Pipeline(choice.schedule, choice.split))
        chosen = measure(state, batches)
        best = min(rows, key=lambda row: row["seconds"])
        result = {
            "model": name,
            "ranks": world_size,
            "auto": {"schedule": choice.name, "split": [len(part) for part in choice.split], **chosen},
            "predicted": round(choice.predicted.makespan, 5),
            "predicted_bubble": round(choice.predicted.bubble, 4),
            "best": best,
            "auto_over_best": round(chosen["seconds"] / best["seconds"], 4),
            "plain_over_best": round(
                next(row["seconds"] for row in rows if row["split"] == "even") / best["seconds"], 4
            ),
            "all": rows,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
        }
        state.close()
        if world.rank == 0:
            print(json.dumps({key: value for key, value in result.items() if key != "all"}), flush=True)
            with open(out, "a") as file:
                file.write(json.dumps(result) + "\n")


def run(state: TrainState, batches: list) -> float:
    begun = time.perf_counter()
    assert train_step(state, batches, False)["found_inf"].item() == 0
    return time.perf_counter() - begun


def measure(state: TrainState, batches: list) -> dict:
    """Median seconds of a step, and the bubble of the last one."""
    with kernel_priority(False):
        for _ in range(2):
            run(state, batches)
        seconds = statistics.median(run(state, batches) for _ in range(STEPS))
    everyone = [None] * state.world.size
    dist.all_gather_object(everyone, (state.runtime.busy(), state.runtime.finish(), seconds))
    makespan = max(finish for _, finish, _ in everyone)
    return {
        "seconds": round(max(s for *_, s in everyone), 5),
        "makespan": round(makespan, 5),
        "bubble": round(1 - sum(busy for busy, *_ in everyone) / len(everyone) / makespan, 4),
    }


if __name__ == "__main__":
    main(sys.argv[1], "small" in sys.argv[2:], [name for name in sys.argv[2:] if name != "small"])
    sys.stdout.flush()
    os._exit(0)
