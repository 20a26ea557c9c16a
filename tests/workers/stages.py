"""What the ZeRO stages hold on each rank and which collectives they run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
from support.launch import fork, leave
from support.reference import random_batch, rows, settings, tiny_spec
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config.model import ModelSpec
from trainer.distributed.mesh import join_world
from trainer.distributed.tensors import local_values
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.parallel.zero.fsdp_internals import fsdp_units, parameter_group, pending_reductions
from trainer.planning.decide import persistent_bytes
from trainer.planning.features import resolve_plan
from trainer.planning.plan import BatchPlan, Plan
from trainer.planning.resolve import Layout
from trainer.planning.states import of_states, sent_parameters
from trainer.training.state import TrainState
from trainer.training.step import train_step

LENGTH = 16
ACCUMULATION = 3
CODEC = {"grad_comm__min_size": 0, "grad_comm__inner__codec": "int8", "grad_comm__inner__error_feedback": "classic"}
PLANS = [
    (0, -1, {}),
    (1, -1, {}),
    (2, -1, {}),
    (3, -1, {}),
    (1, 2, {}),
    (3, 2, {}),
    (2, 1, {}),
    (3, 1, {}),
    *((stage, -1, {"zero__offload": True}) for stage in (1, 2, 3)),
    (3, 2, {"zero__offload": True}),
    (2, -1, CODEC),
    (3, -1, CODEC),
]
"""Stage, ranks that share, and further settings of the plan."""


class Collectives(TorchDispatchMode):
    """Counts collectives on tensors of more than 64 elements, so not the scalars of a step, and bytes of these."""

    def __init__(self):
        super().__init__()
        self.counts: Counter = Counter()
        self.bytes: Counter = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function._opname
        if function.namespace == "c10d" and any(kind in name for kind in ("allgather", "reduce_scatter", "allreduce")):
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
            whole = max(tensors, key=torch.numel)
            if whole.numel() > 64:
                kind = "gather" if "gather" in name else "scatter" if "scatter" in name else "reduce"
                self.counts[kind] += 1
                self.bytes[kind] += whole.nbytes
        return function(*arguments, **(keywords or {}))


def main(out: str) -> None:
    results, world_size = [], int(os.environ["WORLD_SIZE"])
    spec = tiny_spec(depth=2)
    for stage, shard, more in PLANS:
        config = settings(
            parallel__zero__stage=stage,
            parallel__shard=shard,
            **{f"parallel__{name}": value for name, value in more.items()},
        )
        plan = resolve_plan(config.parallel, world_size)
        batch = BatchPlan(LENGTH, world_size * ACCUMULATION, 1, ACCUMULATION)
        pipeline = resolve_pipeline(config, spec, plan, batch)
        state = TrainState.build(config, spec, plan, pipeline, join_world(plan, torch.device("cpu")))
        model, gradients, update = state.stages[0], [], state.optimizer.step

        def noting(*arguments: torch.Tensor) -> torch.Tensor:
            gradients.append(sum(local_values(p.grad).nbytes for p in state.optimizer.parameters.values()))
            return update(*arguments)

        state.optimizer.step = noting
        for step in range(2):
            data, first = (
                random_batch(step, world_size * ACCUMULATION, LENGTH, spec.vocab_size, False),
                state.world.rank * ACCUMULATION,
            )
            # Gradients that are kept between micro-batches: looked at when the last micro-batch's forward starts.
            # What earlier reductions sent: looked at when the backward pass of the last layer starts.
            waiting, sent, deepest = [], [], list(model.layers.values())[-1]
            handles = [
                model.register_forward_pre_hook(lambda *_: waiting.append(accumulated_bytes(model))),
                deepest.register_full_backward_pre_hook(lambda *_: sent.append(sent_bytes(model))),
            ]
            collectives = Collectives()
            with collectives if step else contextlib.nullcontext():  # it looks at every operation: in one step alone
                train_step(state, [rows(data, row, row + 1) for row in range(first, first + ACCUMULATION)], False)
            for handle in handles:
                handle.remove()
        feedback = state.compression.feedback_bytes
        expected = persistent_bytes(config, Layout(spec, plan, batch, pipeline), world_size)
        results.append(
            {
                "stage": stage,
                "shard": plan.shard,
                "more": more,
                "expected": dataclasses.asdict(expected),
                "units": len(model.layers) + 1,
                "total": sum(p.numel() for p in model.parameters()) * 4,
                "parameters": sum(local_values(p).nbytes for p in model.parameters()),
                "inside": waiting[-1][0],
                "outside": waiting[-1][1],
                "sent": sent,
                "feedback": feedback,
                "gradients": gradients[-1],
                "optimizer": sum(t.nbytes for t in state.optimizer.state.values()),
                "collectives": collectives.counts,
                "moved": collectives.bytes,
                "planned": planned_collectives(spec, plan, state.compression.once),
            }
        )
    if state.world.rank == 0:
        Path(out).write_text(json.dumps(results))


def planned_collectives(spec: ModelSpec, plan: Plan, once: bool) -> dict[str, list[float]]:
    """By kind, how many there should be in a step, and their bytes; of those that there are."""
    found: dict[str, list[float]] = {}
    for place, size in enumerate(sent_parameters(spec, 1, plan.shard).units(range(spec.depth))):
        for kind, moved in of_states(plan, 4 * size, 4 * size, outer=place == 0, once=once).items():
            # Where no ranks share states, a unit's gather is a cast, and its reduce-scatter a copy.
            calls = 0 if kind != "reduce" and plan.shard == 1 else moved.calls(ACCUMULATION)
            if calls:
                before = found.get(kind, [0, 0])
                found[kind] = [before[0] + calls, before[1] + calls * moved.size]
    return found


def accumulated_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes of gradients that wait on this rank for the step's last micro-batch: where they are computed, whole or in
    shards, and in the parameters, wherever those are."""
    inside, outside = 0, 0
    for group in map(parameter_group, fsdp_units(model)):
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            inside += sum(
                gradient.nbytes
                for gradient in (parameter.unsharded_accumulated_grad, None if whole is None else whole.grad)
                if gradient is not None
            )
            outside += 0 if parameter.sharded_param.grad is None else local_values(parameter.sharded_param.grad).nbytes
        inside += 0 if group._partial_reduce_output is None else group._partial_reduce_output.nbytes
    return inside, outside


def sent_bytes(model: torch.nn.Module) -> int:
    """Bytes of messages of gradients, of earlier backward passes, that are still in memory."""
    return sum(state.reduce_scatter_input.nbytes for state in pending_reductions(parameter_group(model).comm_ctx))


if __name__ == "__main__":
    fork()
    main(sys.argv[1])
    leave()
