"""transformers' own code under plans, beside one process of transformers: the gradient of every parameter.

    code_plans.py OUT CASES

CASES: a file with a JSON list of cases, {"model", "dp", "tp", "pp", "stage", ...}. OUT: a JSON list with the errors of
each case, or with the message of the error that it ended in.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.code_models import small_values, train_batches
from support.launch import fork, leave
from support.reference import random_batch, rows, settings
from torch._dynamo.utils import counters

from trainer.config import Config, Float8Config
from trainer.config.model import AdapterSpec
from trainer.data.batches import MicroBatch
from trainer.distributed.mesh import World, join_world, local_device
from trainer.hf.accepted import CodeFacts, code_spec, plain_values
from trainer.hf.proof import drawn_weight
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.parity import watch
from trainer.parity.compare import train_reference
from trainer.parity.watch import train_plan
from trainer.planning.features import check_whole_plan, resolve_plan
from trainer.planning.float8 import can_cast_once
from trainer.planning.parameters import declare_parameters
from trainer.planning.plan import BatchPlan
from trainer.training.step import train_step

LENGTH, SEQUENCES = 16, 8
MOST = 3_000_000
"""Parameters of a model: a type whose sizes have other names than usual may be large."""
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"mode": "full"},
    "selective": {"mode": "selective"},
    "offload": {"mode": "full", "offload": True},
    "budget": {"mode": "budget", "budget": 0.3},
}


def config_of(case: dict[str, Any]) -> Config:
    config = settings(
        batch__sequence_length=LENGTH,
        data__mask_documents=True,
        parallel__tp=case.get("tp", 1),
        parallel__pp=case.get("pp", 1),
        parallel__cp=case.get("cp", 1),
        parallel__ep=case.get("ep", 1),
        parallel__zero__stage=case.get("stage", 0),
        parallel__shard=case.get("shard", -1),
        precision__compute=case.get("precision", "fp32"),
        optimizer__name=case.get("optimizer", "adamw"),
        parallel__zero__engine=case.get("engine", "torch"),
        parallel__zero__collectives=case.get("collectives", "nccl"),
        parallel__grad_comm__inner__codec=case.get("codec", "none"),
        parallel__grad_comm__min_size=0,
        **{f"activation__{name}": value for name, value in RECOMPUTE[case.get("recompute", "none")].items()},
        **case.get("settings", {}),
    )
    config.compile = "compile" in case
    config.precision.float8 = Float8Config(case.get("float8", "none"), ends=0, gather=case.get("gather", False))
    if "schedule" in case:
        config.parallel.pipeline.schedule = case["schedule"]
    return config


def data(vocabulary: int) -> MicroBatch:
    """One batch of packed documents. Its tokens are none that is padding."""
    batch = random_batch(0, SEQUENCES, LENGTH, vocabulary - 3, True)
    documents = batch.documents + (torch.arange(LENGTH) >= torch.arange(SEQUENCES)[:, None] + 2).int()
    return replace(batch, tokens=batch.tokens + 3, documents=documents)


def errors_of(case: dict[str, Any], worlds: dict[tuple, World], references: dict[str, Any]) -> dict[str, Any]:
    """The relative errors of loss and gradients; on rank 0."""
    facts = CodeFacts(**case["facts"]) if "facts" in case else None
    values = case.get("values") or small_values(case["model"], **case.get("changes", {}))
    spec = code_spec(plain_values(values), facts)
    if "adapter" in case:
        spec.adapter = AdapterSpec(**case["adapter"])
    if (size := sum(info.size for info in declare_parameters(spec).values())) > MOST:
        raise ValueError(f"{size} parameters are no small copy")
    config, processes = config_of(case), dist.get_world_size()
    config.data.mask_documents = spec.transformers["outer"]["packed"]
    plan = resolve_plan(config.parallel, processes, spec)
    plan = replace(plan, casts_once=can_cast_once(config, spec, plan, case.get("micro_batches", 2)))
    if not case.get("force") and (problems := check_whole_plan(config, spec, plan, processes)):
        raise ValueError(problems)
    micro = SEQUENCES // plan.dp // case.get("micro_batches", 2)
    batch = BatchPlan(LENGTH, SEQUENCES, micro, case.get("micro_batches", 2))
    shape = plan.pp, plan.replicate, plan.shard, plan.cp, plan.tp, *plan.expert_mesh.values()
    world = worlds[shape] = worlds.get(shape) or join_world(plan, local_device(config.run))
    whole, rank = data(spec.vocab_size), world.data.get_local_rank()
    whole = whole if config.data.mask_documents else replace(whole, documents=None)
    size = SEQUENCES // plan.dp
    steps = [[rows(whole, start, start + micro) for start in range(rank * size, (rank + 1) * size, micro)]]
    pipeline = resolve_pipeline(config, spec, plan, batch)
    # Graphs are captured, cut and recomputed as by the default backend, and what is left runs eagerly.
    graphs = patch.object(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    torch._dynamo.reset()
    counters.clear()
    with graphs if config.compile else nullcontext(), warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        loads: list[list[float]] = []

        def train(*arguments: Any) -> dict[str, Any]:
            scalars = train_step(*arguments)
            loads.append(scalars["statistics"].tolist())
            return scalars

        with patch.object(watch, "train_step", train):
            seen = train_plan(config, spec, plan, pipeline, world, steps, drawn_weight)
    if world.rank:
        return {}
    key = json.dumps(spec.to_dict())
    if "float8" in case:  # the code in one process, with the same micro-batches, which scales follow
        parts = [rows(whole, start, start + micro) for start in range(0, SEQUENCES, micro)]
        alone = train_reference(config, spec, [parts], world.device, drawn_weight, float8=config.precision)
        references[key] = alone.losses[0], alone.gradients[0]
    elif key not in references:
        references[key] = train_batches(spec, [whole])
    loss, expected = references[key] if "float8" not in case else references.pop(key)
    norm = torch.stack([one.norm() for one in expected.values() if one is not None]).norm()
    gradients = {
        name: ((seen.gradients[0][name] - one).norm() / max(one.norm(), 1e-3 * norm)).item()
        for name, one in expected.items()
        if one is not None
    }
    worst = max(gradients, key=lambda name: gradients[name] if gradients[name] == gradients[name] else 1e9)
    return {
        "loss": abs(seen.losses[0] - loss) / loss,
        "gradient": gradients[worst],
        "worst": worst,
        "problems": seen.problems,
        "parameters": len(gradients),
        "loads": loads[-1],
        "graphs": counters["stats"].get("unique_graphs", 0),
        "uncompiled": [str(one.message) for one in noted if "without compilation" in str(one.message)],
    }


def main(out: str, cases: str) -> None:
    os.environ.setdefault("WORLD_SIZE", "1")
    device = local_device(Config().run)
    worlds: dict[tuple, World] = {}
    references: dict[str, Any] = {}
    plain = resolve_plan(Config().parallel, int(os.environ["WORLD_SIZE"]))
    worlds[plain.pp, plain.replicate, plain.shard, plain.cp, plain.tp, *plain.expert_mesh.values()] = join_world(
        plain, device
    )
    results = []
    for case in json.loads(Path(cases).read_text()):
        try:
            found = errors_of(case, worlds, references)
        except Exception as error:  # a sweep goes on with the next case; all ranks fail alike
            found = {"error": f"{type(error).__name__}: {str(error)[:300]}", "trace": traceback.format_exc()[-1500:]}
        results.append({"case": {k: v for k, v in case.items() if k != "values"}, **found})
        if dist.get_rank() == 0:
            print(json.dumps({k: v for k, v in results[-1].items() if k != "trace"}), flush=True)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    asked = Path(sys.argv[2]).read_text()
    fork(compiles='"compile"' in asked, deepspeed='"deepspeed"' in asked)
    main(*sys.argv[1:])
    leave()
