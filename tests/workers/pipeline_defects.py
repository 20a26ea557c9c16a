"""What torch's own pipelining gets wrong (its defects are described in test_pipeline_defects.py), on real stages over
FSDP."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.launch import fork, leave
from support.reference import random_batch, rows, settings, tiny_spec
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.distributed.mesh import join_world
from trainer.model.layers import Layer
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.parity.compare import compare_runs, train_reference
from trainer.parity.watch import StateRecorder
from trainer.planning.features import resolve_plan
from trainer.planning.plan import BatchPlan
from trainer.training.state import TrainState
from trainer.training.step import evaluate, train_step

SEQUENCES, LENGTH, STEPS = 8, 16, 2
SEPARATE: dict[str, dict[str, Any]] = {
    "resharded": {"parallel__zero__stage": 3},
    "replicated": {"parallel__zero__stage": 0},
    "recomputed": {"activation__mode": "full"},
    "selective": {"activation__mode": "selective"},
}
TOGETHER = {
    "resharded, recomputed": SEPARATE["resharded"] | SEPARATE["recomputed"],
    "replicated, selective": SEPARATE["replicated"] | SEPARATE["selective"],
}


class Gathers(TorchDispatchMode):
    """Counts all-gathers of FSDP."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        Gathers.count += "allgather" in str(function)
        return function(*arguments, **(keywords or {}))


class Case:
    """A state under a plan of 4 processes, and its data."""

    def __init__(self, micro_batches: int, tied: bool = False, **changes: Any):
        self.config, self.spec = settings(**changes), tiny_spec(depth=4, tied=tied)
        plan = resolve_plan(self.config.parallel, dist.get_world_size(), self.spec)
        self.micro = SEQUENCES // plan.dp // micro_batches
        batch = BatchPlan(LENGTH, SEQUENCES, self.micro, micro_batches)
        world = join_world(plan, torch.device("cpu"))
        pipeline = resolve_pipeline(self.config, self.spec, plan, batch)
        self.state = TrainState.build(self.config, self.spec, plan, pipeline, world)
        self.micro_batches, self.dp = micro_batches, plan.dp

    def batches(self, step: int) -> list[Any]:
        whole, first = (
            random_batch(step, SEQUENCES, LENGTH, self.spec.vocab_size, False),
            self.state.world.data.get_local_rank() * SEQUENCES // self.dp,
        )
        return [rows(whole, first + i * self.micro, first + (i + 1) * self.micro) for i in range(self.micro_batches)]

    def errors(self, evaluations: bool = False) -> dict[str, Any]:
        """Trains, and compares with one process."""
        watch = StateRecorder(self.state)
        for step in range(STEPS):
            watch.train(self.batches(step))
            if evaluations:
                self.evaluated = evaluate(self.state, self.batches(9)).item()
        seen = watch.trajectory()
        if dist.get_rank():
            return {}
        steps = [[random_batch(step, SEQUENCES, LENGTH, self.spec.vocab_size, False)] for step in range(STEPS)]
        expected = train_reference(self.config, self.spec, steps, torch.device("cpu"))
        found = compare_runs(seen, expected)
        return {
            "gradient": max(step.gradient for step in found.steps),
            "norm": max(step.norm for step in found.steps),
            "problems": seen.problems,
        }


def split_backward(results: dict[str, Any]) -> None:
    for schedule in ("zb_h1", "zb_v", "dualpipe_v"):
        for name, changes in (SEPARATE if schedule == "zb_v" else TOGETHER).items():
            case = Case(4, parallel__pp=2, parallel__pipeline__schedule=schedule, **changes)
            bodies = Counter()
            body = Layer.body
            Layer.body = lambda self, *arguments: (bodies.update([id(self)]), body(self, *arguments))[1]
            results[f"{schedule} {name}"] = case.errors()
            Layer.body = body
            own = [id(layer) for model in case.state.stages.values() for layer in model.layers.values()]
            results[f"{schedule} {name}"]["forwards"] = sorted({bodies[layer] / 4 / STEPS for layer in own})
            case.state.close()


def tied_ends(results: dict[str, Any]) -> None:
    for schedule in ("1f1b", "zb_v"):
        for stage in (0, 3):
            case = Case(
                4, tied=True, parallel__pp=2, parallel__pipeline__schedule=schedule, parallel__zero__stage=stage
            )
            results[f"tied {schedule} {stage}"] = case.errors()
            case.state.close()


def evaluation(results: dict[str, Any]) -> None:
    values = {}
    for schedule in ("gpipe", "zb_v", "dualpipe_v"):
        case = Case(4, parallel__pp=2, parallel__pipeline__schedule=schedule, parallel__zero__stage=1)
        results[f"evaluated {schedule}"] = case.errors(evaluations=True)
        values[schedule] = case.evaluated
        case.state.close()
    results["evaluation"] = values
    # In the middle of accumulation: two passes over the schedule before one update.
    for between in (False, True):
        case = Case(2, parallel__pp=2, parallel__pipeline__schedule="zb_v", parallel__zero__stage=1)
        batches, scale = case.batches(0), torch.tensor(1.0)
        case.state.runtime.train(batches, scale)
        once = {name: parameter.grad.full_tensor().clone() for name, parameter in case.state.parameters.items()}
        if between:
            case.state.runtime.evaluate(case.batches(1))
        case.state.runtime.train(batches, scale)
        results[f"accumulated, evaluated between: {between}"] = max(
            ((parameter.grad.full_tensor() - 2 * once[name]).norm() / once[name].norm().clamp(min=1e-3)).item()
            for name, parameter in case.state.parameters.items()
        )
        case.state.close()


def gathers(results: dict[str, Any]) -> None:
    for stage in (1, 2):
        counts = []
        for micro_batches in (2, 4):
            case = Case(micro_batches, parallel__pp=2, parallel__pipeline__schedule="1f1b", parallel__zero__stage=stage)
            train_step(case.state, case.batches(0), False)
            Gathers.count = 0
            with Gathers():
                train_step(case.state, case.batches(1), False)
            counts.append(Gathers.count)
            case.state.close()
        results[f"gathers at stage {stage}"] = counts


def main(out: str) -> None:
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for part in (split_backward, tied_ends, evaluation, gathers):
        part(results)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    fork()
    main(sys.argv[1])
    leave()
