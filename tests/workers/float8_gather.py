"""Training with parameters that ZeRO gathers in fp8, beside the same with parameters in bf16: the same bits, and fewer
bytes on their way. Under ZeRO-2 also with weights that a step casts once: the same bits.

    float8_gather.py OUT.json [cuda]
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from support.launch import fork, leave
from support.reference import random_batch, rows, settings, tiny_spec
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config import Float8Config, RunConfig
from trainer.distributed.mesh import World, join_world, local_device
from trainer.distributed.tensors import local_values
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.planning.features import resolve_plan
from trainer.planning.plan import BatchPlan
from trainer.training.state import TrainState
from trainer.training.step import train_step

LENGTH = 16


class Bytes(TorchDispatchMode):
    """Adds up what all-gathers bring."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace == "c10d" and "allgather" in function._opname:
            self.gathered += arguments[0].nbytes
        return function(*arguments, **(keywords or {}))


def train(
    stage: int, compiled: bool, gather: bool, world: World, once: bool = False
) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses of three steps, this rank's part of the parameters then, and bytes that were gathered. once: whether a
    step casts each weight once."""
    config = settings(parallel__zero__stage=stage, precision__compute="bf16", compile=compiled)
    config.precision.float8 = Float8Config("tensorwise", ends=0, gather=gather)
    spec = tiny_spec(depth=2, width=64, feed_forward={"width": 96}, vocab_size=64)
    plan = replace(resolve_plan(config.parallel, world.size), casts_once=once)
    batch = BatchPlan(LENGTH, 4 * world.size, 2, 2)
    state = TrainState.build(config, spec, plan, resolve_pipeline(config, spec, plan, batch), world)
    losses = []
    with Bytes() as bytes_:
        for step in range(3):
            whole = random_batch(step, 4 * world.size, LENGTH, spec.vocab_size, False, world.device)
            mine = [rows(whole, first, first + 2) for first in (4 * world.rank, 4 * world.rank + 2)]
            losses.append(train_step(state, mine, False)["loss"].item())
    parameters = [local_values(parameter).clone() for parameter in state.parameters.values()]
    state.free()
    return losses, parameters, bytes_.gathered


def main(out: str, kind: str = "cpu") -> None:
    device = torch.device("cpu") if kind == "cpu" else local_device(RunConfig())
    world = join_world(resolve_plan(settings(parallel__zero__stage=3).parallel, 2), device)
    found = {}
    for stage, compiled in ((2, False), (3, False), *(((3, True),) if kind == "cuda" else ())):
        runs = (train(stage, compiled, gather, world) for gather in (False, True))
        (losses, parameters, sent), (others, same, less) = runs
        equal = losses == others and all(map(torch.equal, parameters, same))
        for gather in (False, True)[: 2 * (stage == 2)]:
            once, held, _ = train(stage, compiled, gather, world, True)
            equal = equal and losses == once and all(map(torch.equal, parameters, held))
        name = f"{stage}, compiled" if compiled else stage
        found[name] = {"equal": equal, "losses": losses, "bytes": [sent, less]}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    assert all(one["equal"] for one in found.values()), found


if __name__ == "__main__":
    fork()
    main(*sys.argv[1:])
    leave()
