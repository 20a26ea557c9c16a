"""Checks that plans give the numbers of one process: `trainer parity --gpus 4 +config=NAME 'plans=[...]'`.

Every plan trains on the same global batches as a reference of one process. Losses, gradient norms, each parameter's
gradient and the updated weights are compared: the loss alone proves little."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from trainer.config import BatchConfig, Config, ConfigError, PrecisionConfig
from trainer.config.model import ModelSpec
from trainer.data.batches import BatchLoader, MicroBatch
from trainer.data.corpus import CorpusSide, open_corpus
from trainer.data.tokens import print_notice
from trainer.distributed.mesh import World, join_world, local_device
from trainer.model.initial import InitialWeights, Weights, initial_value
from trainer.optim.optimizer import parameter_policies
from trainer.parity.compare import (
    FP8,
    PlanResult,
    RunComparison,
    StartedAdapters,
    Trajectory,
    coarsest_tolerance,
    compare_runs,
    judge_plan,
    print_comparison,
    train_reference,
)
from trainer.parity.routing import known_choices
from trainer.parity.watch import generate_plans, make_case, train_plan
from trainer.planning.neighbours import global_size
from trainer.planning.parameters import declare_parameters
from trainer.planning.plan import BatchPlan, node_size, resolve_batch
from trainer.precision.products import DTYPES
from trainer.training.run import decide_together, starting_point
from trainer.training.session import numeric_mode


def first_steps(
    samples: CorpusSide, config: Config, batch: BatchPlan, rank: int, ranks: int, steps: int, device: torch.device
) -> Iterator[list[MicroBatch]]:
    """The first steps of a run's data, as a data-parallel rank sees them."""
    loader = BatchLoader(
        samples,
        batch,
        rank,
        ranks,
        seed=config.run.seed,
        mask_documents=config.data.mask_documents,
        prefetch=1,
        device=device,
    )
    try:
        for _ in range(steps):
            yield next(loader)
    finally:
        loader.close()


def check_reference(config: Config, spec: ModelSpec) -> None:
    """Raises `ConfigError` for settings that the reference does not have."""
    policies = parameter_policies(declare_parameters(spec), config.precision.types, config.optimizer).values()
    problems = [
        f"optimizer.name={name}: the reference is AdamW, or Muon; set optimizer=adamw or optimizer=muon"
        for name in dict.fromkeys(policy.optimizer for policy in policies)
        if name not in ("adamw", "muon")
    ]
    if config.optimizer.muon.compute != "fp32" and any(policy.optimizer == "muon" for policy in policies):
        problems.append(
            f"optimizer.muon.compute={config.optimizer.muon.compute}: the reference does not round, beside which it "
            "would hide faults; set optimizer.muon.compute=fp32"
        )
    if any(policy.state_dtype is not torch.float32 for policy in policies):
        problems.append("precision.types: the reference keeps its moments in fp32; set state_dtype=fp32")
    if problems:
        raise ConfigError(problems)


def compare_plans(
    base: Config, overrides: Sequence[str], plans: list[str], steps: int, json_path: str, config_dir: str | None
) -> int:
    """Runs all plans, or without any every way to lay the model over the processes, and prints the table. Returns the
    exit code; raises `ConfigError`, also where all plans are refused. base: the configuration of `overrides`."""
    processes, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    spec, weights, notes = starting_point(base)
    check_reference(base, spec)
    if spec.adapter.rank:
        seed = base.run.seed
        weights = StartedAdapters(weights or InitialWeights(spec, seed, local_device(base.run)), seed)
    device, size = local_device(base.run), global_size(base.batch, processes)
    cases = [
        make_case(text, base, spec, overrides, config_dir, size, processes, device)
        for text in plans or generate_plans(spec, processes)
    ]
    legal = [(index, case) for index, case in enumerate(cases) if not case.reasons]
    if not legal:
        common = [reason for reason in cases[0].reasons if all(reason in case.reasons for case in cases)]
        raise ConfigError(
            common
            + [f"plan '{case.text}': {reason}" for case in cases for reason in case.reasons if reason not in common]
        )
    samples, expected, plain = open_corpus(base).train, Trajectory(), {}
    if rank == 0:
        for note in notes:
            print_notice(note)
        print_notice(f"reference: one process, fp32, {steps} steps")
        whole = resolve_batch(BatchConfig(base.batch.sequence_length, size), 1)
        with numeric_mode(dataclasses.replace(base, precision=PrecisionConfig())):
            expected = train_reference(
                base, spec, first_steps(samples, base, whole, 0, 1, steps, device), device, weights
            )
        kinds = {
            coarsest_tolerance(case.config.precision, case.config.parallel.grad_comm): case.config.precision
            for _, case in legal
        }
        for kind, precision in kinds.items():
            with numeric_mode(
                dataclasses.replace(base, precision=PrecisionConfig(matmul="high" if kind == "tf32" else "highest"))
            ):
                again = train_reference(
                    base,
                    spec,
                    halve_microbatches(first_steps(samples, base, whole, 0, 1, steps, device)),
                    device,
                    perturb_weights(weights or partial(initial_value, spec, base.run.seed, device=device)),
                    torch.bfloat16 if kind == FP8 else DTYPES.get(kind, torch.float32),
                    precision if kind == FP8 else None,
                    known_choices(kind, expected.choices),
                )
            plain[kind] = compare_runs(again, expected, kind)
    worlds: dict[tuple[int, ...], World] = {}
    results = [PlanResult(case.text, "REFUSED", case.reasons) for case in cases]
    for number, (index, case) in enumerate(legal, start=1):
        plan, batch = case.layout.plan, case.layout.batch
        mesh = *plan.degrees.values(), plan.shard, *plan.expert_mesh.values()
        if mesh not in worlds:
            worlds[mesh] = join_world(plan, device)
        world = worlds[mesh]
        if rank == 0:
            print_notice(f"plan {number} of {len(legal)}: {'; '.join(case.describe())}")
        data = first_steps(samples, case.config, batch, world.data.get_local_rank(), plan.dp, steps, device)
        kind = coarsest_tolerance(case.config.precision, case.config.parallel.grad_comm)
        choices = world.agree(partial(known_choices, kind, expected.choices))
        config, layout, *_ = decide_together(case.config, case.layout, world, node_size(processes), None)
        seen = train_plan(config, spec, layout.plan, layout.pipeline, world, data, weights, choices)
        results[index] = world.agree(lambda: judge_plan(case.text, case.describe(), kind, seen, expected, plain[kind]))
    world.agree(
        lambda: report_results(expected, results, plain, json_path)
    )  # all ranks wait for the report: when one ends, torchrun ends the others
    return int(any(result.verdict == "FAIL" for result in results))


def halve_microbatches(steps: Iterable[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
    """The same sequences in micro-batches of half the size, last first, so that sums are taken in another order."""
    for batches in steps:
        yield [
            MicroBatch(
                *(
                    None if part is None else part[rows]
                    for part in (batch.tokens, batch.targets, batch.documents, batch.ids)
                )
            )
            for batch in reversed(batches)
            for half in [len(batch.ids) // 2]
            for rows in (slice(half, None), slice(half))
            if batch.ids[rows]
        ]


def perturb_weights(weights: Weights) -> Weights:
    """The same weights, each rounded up to the next number of its type."""
    return lambda name, info: torch.nextafter(value := weights(name, info), torch.full_like(value, math.inf))


def report_results(
    expected: Trajectory, results: list[PlanResult], plain: dict[str, RunComparison], json_path: str
) -> None:
    """Prints the table, and writes the results to `json_path` if it is given."""
    print_comparison(expected, results, plain)
    if json_path:
        Path(json_path).write_text(
            json.dumps(
                {
                    "reference": {"losses": expected.losses, "norms": expected.norms},
                    "plain": {kind: dataclasses.asdict(errors) for kind, errors in plain.items()},
                    "plans": [dataclasses.asdict(result) for result in results],
                },
                indent=1,
            )
        )
