"""How many measured trials the search of `trainer tune` needs to find the fastest of all plans of a grid, on GPUs.

    torchrun --standalone --nproc-per-node 2 bench/tune.py OUT.jsonl [model=configs/model/tinyllama_1b.yaml] \
        [length=2048] [size=32] [steps=6] [seconds=420] [hardware=h200] [compile=false] [device=auto]

First every plan of the grid is measured, in a random order, until the time is over: all in one process group, because
starting processes takes longer than measuring a plan. Plans that are predicted to come near the memory are left out,
since one that fails in a shared process group would take the others with it; that trials fail alone is for the tests.
The first plan is measured once more at the end: what differs is the noise.

Then each engine searches the measured grid: `model` is what `trainer tune` does, `random` and `tpe` are baselines. An
engine is told a plan's time only when it asks for that plan, and knows nothing of the others but the predictions. The
published constants of the hardware file are used as they are. A JSON line a plan and one for the search go to
OUT.jsonl.

Trials by themselves, each in processes of its own, find the same plan or not:

    trainer tune +config=pretrain_tinyllama_1b data=stdlib data.tokenizer=bytes batch.global_tokens=null \
        batch.global_size=32 compile=false budget=4 hardware=h200 sweep.dir=OUT
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from math import ceil, log2
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from specs import read_spec

from trainer.config import Config
from trainer.distributed.mesh import World, join_world, local_device
from trainer.model.attention import kernel_priority
from trainer.planning.hardware import load_hardware
from trainer.training.state import TrainState
from trainer.training.step import train_step
from trainer.tuning.study import (
    PlanOption,
    SearchPlan,
    TrialOutcome,
    choose_next,
    fastest_outcome,
    list_plans,
    untried_plans,
)

GRID = {
    "schedule": ("", "1f1b", "interleaved", "zb_v"),
    "chunks": (1, 2),
    "micro": (1, 2, 4, 8, 16),
    "recompute": ("none", "selective", "full"),
}
"""Beside these values: all ZeRO stages, tp and pp that the ranks allow."""

FULL = 0.9
"""Plans that are predicted to take more of a device's memory are left out."""

WARM = 2
"""Steps that do not count."""

SEEDS = 20

GOOD = 0.25
"""Share of the measured plans that the Parzen estimator takes for good ones."""

DRAWN = 2
"""Plans that the Parzen estimator draws at random before it has a model."""


def main(out: Path, options: dict[str, str]) -> None:
    config = Config()
    config.run.device = options["device"]
    ranks, device = int(os.environ["WORLD_SIZE"]), local_device(config.run)
    config.precision.compute = "bf16" if device.type == "cuda" else "fp32"
    config.compile = options["compile"] == "true"
    config.model = read_spec(options["model"])
    config.batch.sequence_length, config.batch.global_size = int(options["length"]), int(options["size"])
    torch.set_float32_matmul_precision(config.precision.matmul)
    hardware = load_hardware(options["hardware"], [f"devices={ranks}"])
    found = [plan for plan in list_plans(config, [config], hardware, ranks, 10**4, ()) if in_grid(plan)]
    random.Random(0).shuffle(found)
    end, measured = time.monotonic() + float(options["seconds"]), dict[str, float]()
    worlds: dict[tuple, World] = {}
    for number, plan in enumerate([*found, *found[:1]]):
        late = torch.tensor([time.monotonic() > end], device=device, dtype=torch.float32)
        if dist.is_initialized():  # all ranks stop after the same plan
            dist.all_reduce(late, dist.ReduceOp.MAX)
        if late.item() and number < len(found):
            continue
        line = {"plan": plan.option.name, **measure(plan, worlds, device, int(options["steps"]))}
        line |= {"predicted": plan.found.seconds, "again": number == len(found)}
        measured.setdefault(plan.option.name, line["seconds"])
        write(out, line)
    problem = [plan for plan in found if plan.option.name in measured]
    write(out, {"plans": len(found), "measured": len(problem), **searched(problem, measured, hardware.band)})


def in_grid(plan: SearchPlan) -> bool:
    axes = plan.option.axes
    return plan.option.memory < FULL and all(axes[name] in legal for name, legal in GRID.items())


def measure(plan: SearchPlan, worlds: dict[tuple, World], device: torch.device, steps: int) -> dict[str, Any]:
    """Median seconds of a step on random tokens, and the memory that it takes."""
    config, layout = plan.found.config, plan.found.layout
    shape = tuple(layout.plan.mesh.items())
    if shape not in worlds:
        worlds[shape] = join_world(layout.plan, device)
    world, began = worlds[shape], time.monotonic()
    torch._dynamo.reset()
    state = TrainState.build(config, layout.spec, layout.plan, layout.pipeline, world)
    generator = torch.Generator(device).manual_seed(world.data.get_local_rank())
    size = layout.batch.micro_size, layout.batch.sequence_length

    def tokens() -> torch.Tensor:
        return torch.randint(layout.spec.vocab_size, size, device=device, generator=generator)

    batches = [
        SimpleNamespace(tokens=tokens(), targets=tokens(), documents=None) for _ in range(layout.batch.accumulation)
    ]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    with kernel_priority(config.run.deterministic):
        for _ in range(WARM + steps):
            begun = time.perf_counter()
            assert train_step(state, batches, False)["found_inf"].item() == 0
            times.append(time.perf_counter() - begun)
    seconds = torch.tensor([statistics.median(times[WARM:])], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    state.free()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    spread = [round(one, 5) for one in (min(times[WARM:]), max(times[WARM:]))]
    return {"seconds": seconds.item(), "spread": spread, "gib": memory, "took": round(time.monotonic() - began, 1)}


def searched(problem: list[SearchPlan], measured: dict[str, float], band: float) -> dict[str, Any]:
    """Of each engine: trials until it has measured the fastest plan, and how much slower than that its best is after
    1 to 4 trials; of those that draw at random, the mean over seeds."""
    options, best = [plan.option for plan in problem], min(measured.values())
    found: dict[str, Any] = {"best": min(measured, key=lambda name: measured[name])}
    for engine, choose in ENGINES.items():
        trials, regrets = [], []
        for seed in range(1 if engine == "model" else SEEDS):
            outcomes: list[TrialOutcome] = []
            slower = []
            while len(outcomes) < 4 or fastest_outcome(outcomes).seconds > best:
                chosen = choose(options, outcomes, band, seed)
                if chosen is None:  # the search has ended by itself, without the fastest
                    break
                outcomes.append(TrialOutcome(chosen, measured[chosen.name]))
                slower.append(fastest_outcome(outcomes).seconds / best - 1)
            order = [outcome.seconds for outcome in outcomes]
            trials.append(order.index(best) + 1 if best in order else len(options))
            regrets.append([*slower[:4], *slower[-1:] * (4 - len(slower))])
        mean = [round(statistics.mean(column), 4) for column in zip(*regrets)]
        found[engine] = {"trials": statistics.mean(trials), "slower": mean}
    return found


def at_random(
    options: Sequence[PlanOption], outcomes: Sequence[TrialOutcome], band: float, seed: int
) -> PlanOption | None:
    """Any plan that has not been tried: a baseline."""
    left = untried_plans(options, outcomes)
    return random.Random(f"{seed} {len(outcomes)}").choice(left) if left else None


def by_parzen(
    options: Sequence[PlanOption], outcomes: Sequence[TrialOutcome], band: float, seed: int
) -> PlanOption | None:
    """The plan whose values are frequent among the fastest measured ones and rare among the others, axis by axis: the
    tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011) on a finite set. A baseline: it predicts nothing.
    """
    left = untried_plans(options, outcomes)
    if len(outcomes) < DRAWN or not left:
        return at_random(options, outcomes, band, seed)
    ordered = sorted(outcomes, key=lambda one: (one.seconds is None, one.seconds or 0.0))
    count = ceil(GOOD * len(ordered))
    score = dict.fromkeys((one.name for one in left), 0.0)
    for axis in {name: None for one in options for name in one.axes}:
        values = list({one.axes[axis]: None for one in options if axis in one.axes})
        good, bad = (
            _density(values, [one.option.axes[axis] for one in some if axis in one.option.axes])
            for some in (ordered[:count], ordered[count:])
        )
        for one in left:
            if axis in one.axes:
                score[one.name] += log2(good[one.axes[axis]] / bad[one.axes[axis]])
    most = max(score.values())
    return random.Random(f"{seed} {len(outcomes)}").choice([one for one in left if score[one.name] == most])


def _density(values: Sequence[float | str], seen: Sequence[float | str]) -> dict[float | str, float]:
    """How probable each value of an axis is, where `seen` were seen: neighbours of those too, and each a little."""
    weights = {value: 1 / len(values) + sum(_near(value, other) for other in seen) for value in values}
    return {value: weight / sum(weights.values()) for value, weight in weights.items()}


def _near(one: float | str, other: float | str) -> float:
    if isinstance(one, str) or isinstance(other, str):
        return float(one == other)
    return 4.0 ** -abs(log2(one) - log2(other))


Engine = Callable[[Sequence[PlanOption], Sequence[TrialOutcome], float, int], PlanOption | None]
"""Of all plans, outcomes so far, the band of the predictions (their relative error) and a seed."""

ENGINES: dict[str, Engine] = {
    "model": lambda options, outcomes, band, seed: choose_next(options, outcomes, band),
    "random": at_random,
    "tpe": by_parzen,
}
"""The choice of `trainer tune` and the baselines that it is compared with."""


def write(out: Path, line: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)
        with open(out, "a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[2:])
    defaults = {
        "model": "configs/model/tinyllama_1b.yaml",
        "length": "2048",
        "size": "32",
        "steps": "6",
        "seconds": "420",
        "hardware": "h200",
        "compile": "false",
        "device": "auto",
    }
    if unknown := given.keys() - defaults.keys():
        sys.exit(f"{', '.join(unknown)}: no such option; there are {', '.join(defaults)}")
    main(Path(sys.argv[1]), defaults | given)
    sys.stdout.flush()
    os._exit(0)
