"""Training with parameters that ZeRO gathers in fp8, beside the same with parameters in bf16: the same bits, and fewer
bytes on their way. And with weights that a step casts to fp8 once, beside those that each product casts: the same bits.

    float8_gather.py OUT.json [cuda]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.gpus import shared_device
from support.launch import fork, leave
from support.reference import random_batch, rows, settings, tiny_spec
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config import Float8Config
from trainer.distributed.mesh import World, join_world
from trainer.distributed.tensors import local_values
from trainer.parallel import parallelize
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.planning.features import resolve_plan
from trainer.planning.plan import BatchPlan
from trainer.training.state import TrainState
from trainer.training.step import train_step

LENGTH = 16
ONCE: dict[str, dict[str, Any]] = {
    "shards": {"parallel__zero__stage": 1},
    "tensors": {"parallel__tp": 2, "activation__mode": "full"},
    "copies": {"parallel__tp": 2, "parallel__tp_overlap": "copy_engine", "activation__mode": "selective"},
    "pipeline": {"parallel__pp": 2, "parallel__pipeline__schedule": "zb_v"},
}
"""Plans of two processes in which a step casts each weight once."""


class Bytes(TorchDispatchMode):
    """Adds up what all-gathers bring."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace == "c10d" and "allgather" in function._opname:
            self.gathered += arguments[0].nbytes
        return function(*arguments, **(keywords or {}))


def train(stage: int, compiled: bool, gather: bool, world: World) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses of three steps, this rank's part of the parameters then, and bytes that were gathered."""
    config = settings(parallel__zero__stage=stage, precision__compute="bf16", compile=compiled)
    config.precision.float8 = Float8Config("tensorwise", ends=0, gather=gather)
    spec = tiny_spec(depth=2, width=64, feed_forward={"width": 96}, vocab_size=64)
    plan, batch = resolve_plan(config.parallel, world.size), BatchPlan(LENGTH, 2 * world.size, 2, 1)
    state = TrainState.build(config, spec, plan, resolve_pipeline(config, spec, plan, batch), world)
    losses = []
    with Bytes() as bytes_:
        for step in range(3):
            whole = random_batch(step, 2 * world.size, LENGTH, spec.vocab_size, False, world.device)
            mine = rows(whole, 2 * world.rank, 2 * world.rank + 2)
            losses.append(train_step(state, [mine], False)["loss"].item())
    parameters = [local_values(parameter).clone() for parameter in state.parameters.values()]
    state.free()
    return losses, parameters, bytes_.gathered


def train_once(world: World, recipe: str, once: bool, changes: dict[str, Any]) -> list[torch.Tensor]:
    """Losses and gradient norms of two steps of two micro-batches under a plan, and this rank's parameters then."""
    config = settings(precision__compute="bf16", **changes)
    config.precision.float8 = Float8Config(recipe, ends=0)
    spec = tiny_spec(depth=2, width=64, feed_forward={"width": 96}, vocab_size=64)
    spec.attention.kv_heads = 1  # of which tensor-parallel ranks have a copy each
    plan = resolve_plan(config.parallel, world.size)
    batch, world = BatchPlan(LENGTH, 4 * plan.dp, 2, 2), join_world(plan, world.device)
    with patch.object(parallelize, "casts_once", lambda *_: once):
        state = TrainState.build(config, spec, plan, resolve_pipeline(config, spec, plan, batch), world)
    first, seen = 4 * world.data.get_local_rank(), []
    for step in range(2):
        whole = random_batch(step, 4 * plan.dp, LENGTH, spec.vocab_size, False, world.device)
        mine = [rows(whole, first + place, first + place + 2) for place in (0, 2)]
        scalars = train_step(state, mine, False)
        seen += [scalars["loss"], scalars["grad_norm"]]
    seen += [local_values(parameter).clone() for parameter in state.parameters.values()]
    state.free()
    return seen


def main(out: str, kind: str = "cpu") -> None:
    device = torch.device("cpu") if kind == "cpu" else shared_device()
    world = join_world(resolve_plan(settings(parallel__zero__stage=3).parallel, 2), device)
    found = {}
    for stage, compiled in ((2, False), (3, False), *(((3, True),) if kind == "cuda" else ())):
        runs = (train(stage, compiled, gather, world) for gather in (False, True))
        (losses, parameters, sent), (others, same, less) = runs
        equal = losses == others and all(map(torch.equal, parameters, same))
        name = f"{stage}, compiled" if compiled else stage
        found[name] = {"equal": equal, "losses": losses, "bytes": [sent, less]}
    once = {}
    # Two ranks on one GPU have no channels between them.
    chosen = ["shards"] if kind == "cuda" and torch.cuda.device_count() < 2 else ONCE
    for name, changes in ((name, ONCE[name]) for name in chosen):
        for recipe in ("tensorwise", "rowwise"):
            for compiled in (False, True)[: 1 + (kind == "cuda")]:
                runs = (train_once(world, recipe, held, changes | {"compile": compiled}) for held in (True, False))
                once[f"{name} {recipe}" + ", compiled" * compiled] = all(map(torch.equal, *runs))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"gathered": found, "once": once}))
    assert all(one["equal"] for one in found.values()), found
    assert all(once.values()), once


if __name__ == "__main__":
    fork()
    main(*sys.argv[1:])
    leave()
