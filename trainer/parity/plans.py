"""The plans that are compared: each a text, resolved to a configuration whose micro-batches fit, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer.config import Config, ConfigError, ParallelConfig
from trainer.config.fields import list_divisors
from trainer.config.model import ModelSpec
from trainer.parallel.compress.plan import describe_codecs
from trainer.parallel.parallelize import check_compiler, check_model
from trainer.parallel.zero.fsdp import check_engine
from trainer.planning.features import check_plan, resolve_plan
from trainer.planning.float8 import numeric_types
from trainer.planning.plan import node_size
from trainer.planning.plan_overrides import build_variant, fit_batch
from trainer.planning.resolve import Layout, check_config, resolve_layout

SCHEDULES = ("1f1b", "zb_h1", "interleaved", "zb_v")
"""The schedules that `generate_plans` runs on each pipeline, where the model has enough layers."""


@dataclass
class PlanCase:
    """A requested plan, with its configuration and layout, or with the reasons why it is refused."""

    text: str
    reasons: list[str] = field(default_factory=list)
    config: Config | None = None
    layout: Layout | None = None

    def describe(self) -> list[str]:
        """The resolved plan, in short lines."""
        precision, activation = self.config.precision, self.config.activation
        plan, batch = self.layout.plan, self.layout.batch
        extras = [f"{activation.mode} recompute"] * (activation.mode != "none") + ["compiled"] * self.config.compile
        gradients = describe_codecs(self.config.parallel.grad_comm)
        extras += [f"gradients {gradients}"] * bool(gradients)
        pipe = self.layout.pipeline.describe() if plan.pp > 1 else f"{batch.accumulation} micro-batches"
        return [
            f"{plan.describe()}, {', '.join([numeric_types(precision), *extras])}",
            f"{pipe} of {batch.micro_size} x {batch.sequence_length} tokens",
        ]


def make_case(
    text: str,
    base: Config,
    spec: ModelSpec,
    overrides: Sequence[str],
    config_dir: str | None,
    global_size: int,
    processes: int,
    device: torch.device,
) -> PlanCase:
    """A plan's text as a case, refused or not."""
    try:
        config, named = build_variant(text, base, overrides, config_dir, processes)
        if config.parallel.pipeline.schedule == "auto" and config.parallel.pp > 1:
            raise ConfigError(
                "parallel.pipeline.schedule=auto is chosen while a run trains; name the CSV file that the run saved, "
                "or interleaved"
            )
        if config.activation.mode == "auto":
            raise ConfigError(
                "activation.mode=auto is chosen by a run's free memory; set activation.mode and activation.save as "
                "config.yaml of the run's folder has them"
            )
        fit_batch(config, resolve_plan(config.parallel, processes, spec, node_size(processes)), global_size, named)
        problems = check_config(config, processes)
        if problems:
            raise ConfigError(problems)
        check_compiler(config, device)
        check_engine(config, device)
        check_model(config, spec, device)
        return PlanCase(text, [], config, resolve_layout(config, processes, spec))
    except ConfigError as error:
        return PlanCase(text, error.problems)


def generate_plans(spec: ModelSpec, processes: int) -> list[str]:
    """Every (dp, tp, pp) that the model can be laid out in, each with ZeRO stages and schedules; and sequences shared
    by any number of ranks."""
    node, plain = node_size(processes), "parallel.dp=-1 parallel.shard=-1 parallel.zero.offload=false"
    plans = [
        f"{plain} parallel.cp={cp} parallel.tp=1 parallel.pp=1 parallel.zero.stage=3"
        for cp in list_divisors(processes)[1:]
    ]
    for tp in list_divisors(processes):
        for pp in list_divisors(processes // tp):
            if check_plan(ParallelConfig(tp=tp, pp=pp), processes, spec, node):
                continue
            stages = [0] if processes == tp * pp else [0, 1, 2, 3] if tp * pp == 1 else [0, 3]
            schedules = (
                [name for name in SCHEDULES if spec.depth >= pp * (1 + (name in ("interleaved", "zb_v")))]
                if pp > 1
                else [""]
            )
            chosen = [(stage, schedules[0]) for stage in stages] + [(stages[-1], name) for name in schedules[1:]]
            plans += [
                f"{plain} parallel.cp=1 parallel.tp={tp} parallel.pp={pp} parallel.zero.stage={stage}"
                + f" parallel.pipeline.schedule={name} parallel.pipeline.chunks=null parallel.pipeline.split=balanced"
                * bool(name)
                for stage, name in chosen
            ]
    return plans
