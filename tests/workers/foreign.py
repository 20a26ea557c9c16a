"""A block that reports an objective and statistics, and a model that is not ours, under plans of four processes, each
against one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plans import LENGTH, Worlds, batches, config_of, describe, spec_of
from support.foreign import ForeignModel, register
from support.launch import fork, leave
from support.matrix import PLAIN, SEQUENCES, Case
from support.reference import settings
from torch import Tensor

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.model.initial import initialize_model, parameter_infos
from trainer.model.stage import Make, split_report
from trainer.model.transformer import Transformer
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.parity.compare import train_reference
from trainer.parity.watch import StateRecorder, assemble_tensors
from trainer.planning.features import resolve_plan
from trainer.planning.plan import BatchPlan
from trainer.training.session import numeric_mode
from trainer.training.state import TrainState
from trainer.training.step import evaluate, train_step

CPU = torch.device("cpu")
WATCHED = [
    {"dp": 4, "stage": 3, "recompute": "full"},
    {"dp": 2, "tp": 2, "stage": 0, "attention": "documents"},
    {"tp": 4, "recompute": "selective", "micro_batches": 1},
    {"tp": 2, "pp": 2, "schedule": "zb_h1", "recompute": "selective", "micro_batches": 3},
    {"dp": 2, "pp": 2, "schedule": "zb_v", "stage": 2, "recompute": "full", "micro_batches": 3},
    {"pp": 4, "schedule": "1f1b", "precision": "fp16", "micro_batches": 6},
]
FOREIGN = [
    {"dp": 4, "stage": 3, "recompute": "full"},
    {"dp": 4, "stage": 0, "loss": "z_loss"},
    {"dp": 2, "pp": 2, "schedule": "1f1b", "stage": 2, "recompute": "selective"},
    {"dp": 2, "pp": 2, "schedule": "zb_h1", "stage": 3},
]


def watched_spec(case: Case) -> ModelSpec:
    spec = spec_of(case, CPU)
    spec.feed_forward.kind, spec.feed_forward.activation = "watched", "gelu"
    return spec


def run(case: Case, spec: ModelSpec, make: Make, worlds: Worlds, folder: Path) -> dict[str, Any]:
    """One step: scalars, whole gradients (on rank 0), and the loss of the same batches in an evaluation before it."""
    config = config_of(case, folder)
    config.precision.loss_scale = 1024.0
    plan = resolve_plan(config.parallel, dist.get_world_size(), spec)
    batch = BatchPlan(LENGTH, SEQUENCES, SEQUENCES // plan.dp // case["micro_batches"], case["micro_batches"])
    world = worlds.of(plan, CPU)
    data = next(batches(case, spec, CPU, world.data.get_local_rank(), plan.dp, case["micro_batches"]))
    with numeric_mode(config):
        state = TrainState.build(config, spec, plan, resolve_pipeline(config, spec, plan, batch), world, make=make)
        watch = StateRecorder(state)
        evaluated = evaluate(state, data).item()
        scalars = train_step(state, data, False)
        statistics = state.runtime.statistics
        evaluate(state, data)
    with torch.device("meta"):
        shapes = {name: info.shape for name, info in parameter_infos(make(spec, None)).items()}
    gradients = [(box, value) for box, value in watch.boxes_held if box.kind == "gradient 0"]
    whole, differing = assemble_tensors(gradients, shapes)
    state.close()
    return {
        "case": describe(case),
        "precision": case["precision"],
        "differing": [box.name for box in differing],
        "evaluated": evaluated,
        "loss": scalars["loss"].item(),
        "gradients": whole.get("gradient 0", {}),
        "names": list(state.reports),
        "statistics": scalars["statistics"].tolist(),
        "told again": state.runtime.statistics is not statistics,
    }


def worst(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of any parameter's gradient, over the norm of what is expected."""
    assert gradients.keys() == expected.keys()
    return max(((gradients[name] - value).norm() / value.norm()).item() for name, value in expected.items())


def expect_watched(case: Case, spec: ModelSpec) -> tuple[dict[str, Tensor], dict[str, list[float]], float]:
    """Gradients and statistics of one process, and by how much the block's objective changes the gradients at least."""
    base, data = settings(), next(batches(case, spec, CPU))
    gradients = train_reference(base, spec, [data], CPU).gradients[0]
    model = Transformer(spec)
    initialize_model(model, spec, base.run.seed, CPU)
    _, report = split_report(model(data[0].tokens, documents=data[0].documents))
    statistics = {name: values.tolist() for name, values in report.statistics.items()}
    spec = ModelSpec.from_dict(spec.to_dict() | {"feed_forward": spec.to_dict()["feed_forward"] | {"kind": "plain"}})
    without = train_reference(base, spec, [data], CPU).gradients[0]
    moved = [
        ((without[name] - value).norm() / value.norm()).item()
        for name, value in gradients.items()
        if name.startswith("layers.") and not name.startswith(f"layers.{spec.depth - 1}.feed_forward.down")
    ]
    return gradients, statistics, min(moved)


def expect_foreign(case: Case, spec: ModelSpec, config: Config) -> dict[str, Tensor]:
    model = ForeignModel(spec)
    model.set_loss(config.loss.z_loss, 0, False)
    initialize_model(model, spec, config.run.seed, CPU)
    (batch,) = next(batches(case, spec, CPU))
    objective, _ = model(batch.tokens, batch.targets)
    (objective / (batch.targets != -100).sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def main(out: str) -> None:
    register()
    worlds, folder = Worlds(), Path(out).parent
    worlds.of(resolve_plan(Config().parallel, int(os.environ["WORLD_SIZE"])), CPU)
    results: dict[str, list[dict[str, Any]]] = {"watched": [], "foreign": []}
    for changes in WATCHED:
        case = PLAIN | changes
        spec = watched_spec(case)
        found = run(case, spec, Transformer, worlds, folder)
        gradients = found.pop("gradients")
        if dist.get_rank() == 0:
            expected, statistics, moved = expect_watched(case, spec)
            whole = [value for name in found["names"] for value in statistics[name]]
            results["watched"].append(found | {"worst": worst(gradients, expected), "expected": whole, "moved": moved})
    for changes in FOREIGN:
        case = PLAIN | changes
        spec = ModelSpec(vocab_size=61, width=24, depth=2)
        found = run(case, spec, ForeignModel, worlds, folder)
        gradients = found.pop("gradients")
        if dist.get_rank() == 0:
            found["worst"] = worst(gradients, expect_foreign(case, spec, config_of(case, folder)))
            results["foreign"].append(found)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    fork()
    main(sys.argv[1])
    leave()
