"""The plans that are compared: each a text, resolved to a configuration whose micro-batches fit, or refused."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer.config import Config, ConfigError, ParallelConfig
from trainer.config.compose import gather, to_config
from trainer.config.fields import divisors
from trainer.config.model import ModelSpec
from trainer.config.typed import flat
from trainer.parallel.engine import check_engine
from trainer.parallel.parallelize import check_compiler, check_model
from trainer.planning.gradient_comm import asked, describe
from trainer.planning.plan import Plan, check_plan, node_size, resolve_plan
from trainer.planning.resolve import Layout, check, resolve

FREE = (
    "parallel.",
    "precision.compute",
    "precision.reduce",
    "precision.matmul",
    "precision.loss_scale",
    "precision.scale_",
    "precision.growth_interval",
    "activation.",
    "batch.micro_size",
    "batch.accumulation",
    "loss.chunk",
    "compile",
)
"""Settings that do not change the mathematics of training, which plans may therefore choose."""

SCHEDULES = ("1f1b", "zb_h1", "interleaved", "zb_v")
"""The schedules that `generated` runs on each pipeline, where the model has enough layers."""


@dataclass
class Case:
    """A requested plan, with its configuration and layout, or with the reasons why it is refused."""

    text: str
    reasons: list[str] = field(default_factory=list)
    config: Config | None = None
    layout: Layout | None = None

    def describe(self) -> list[str]:
        """The resolved plan, in short lines."""
        precision, activation = self.config.precision, self.config.activation
        plan, batch = self.layout.plan, self.layout.batch
        types = precision.compute + (f", {precision.reduce} reduction" if precision.reduce != "fp32" else "")
        extras = [f"{activation.mode} recompute"] * (activation.mode != "none") + ["compiled"] * self.config.compile
        gradients = describe(self.config.parallel.grad_comm, plan, node_size(plan.world))
        extras += [f"gradients {gradients}"] * bool(gradients)
        pipe = self.layout.pipeline.describe() if plan.pp > 1 else f"{batch.accumulation} micro-batches"
        return [
            f"{plan.describe()}, {', '.join([types, *extras])}",
            f"{pipe} of {batch.micro_size} x {batch.sequence_length} tokens",
        ]


def compose(overrides: Sequence[str], config_dir: str | None, processes: int) -> Config:
    """The typed configuration, before contradictions between settings are checked. Raises `ConfigError`."""
    values, problems = gather(overrides, config_dir)
    config = to_config(values, problems, processes)
    if problems:
        raise ConfigError(list(problems.values()))
    return config


def key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def make_case(
    text: str,
    base: Config,
    spec: ModelSpec,
    overrides: Sequence[str],
    config_dir: str | None,
    global_size: int,
    processes: int,
    device: torch.device,
) -> Case:
    """A plan's text as a case, refused or not."""
    try:
        chosen = [word if "=" in word else f"parallel={word}" for word in shlex.split(text)]
        named = {key(word) for word in chosen}
        config = compose([*(word for word in overrides if key(word) not in named), *chosen], config_dir, processes)
        common = flat(dataclasses.asdict(base))
        fixed = [
            name
            for name, value in flat(dataclasses.asdict(config)).items()
            if value != common.get(name) and not name.startswith(FREE)
        ]
        if fixed:
            raise ConfigError(
                f"a plan cannot set {', '.join(fixed)}: the reference has it too; set it outside of plans=[...]"
            )
        if config.parallel.pipeline.schedule == "auto" and config.parallel.pp > 1:
            raise ConfigError(
                "parallel.pipeline.schedule=auto is chosen while a run trains; name the CSV file that the run saved, "
                "or interleaved"
            )
        if any(hop.codec == "auto" for hop in asked(config.parallel.grad_comm).values()):
            raise ConfigError("parallel.grad_comm: codec=auto is chosen while a run trains; name a codec, such as int8")
        fit_batch(config, resolve_plan(config.parallel, processes, spec, node_size(processes)), global_size, named)
        problems = check(config, processes)
        if problems:
            raise ConfigError(problems)
        check_compiler(config, device)
        check_engine(config, device)
        check_model(config, spec, device)
        return Case(text, [], config, resolve(config, processes, spec))
    except ConfigError as error:
        return Case(text, error.problems)
    except ValueError as error:  # shlex: quotes that do not close
        return Case(text, [f"'{text}' cannot be read as settings: {error}"])


def fit_batch(config: Config, plan: Plan, global_size: int, named: set[str]) -> None:
    """Sets the global batch, and the micro-batches where the plan names neither their size nor their number.

    Their size is the recipe's, where it divides the batch. Otherwise a pipeline gets at least two micro-batches a
    rank."""
    batch, share = config.batch, global_size // plan.dp
    batch.global_size, batch.global_tokens = global_size, None
    if "batch.micro_size" in named or "batch.accumulation" in named:
        batch.micro_size = batch.micro_size if "batch.micro_size" in named else None
        batch.accumulation = batch.accumulation if "batch.accumulation" in named else None
        return
    batch.accumulation = None
    if batch.micro_size and share % batch.micro_size:
        batch.micro_size = None
    if batch.micro_size is None and plan.pp > 1:
        batch.accumulation = next((n for n in divisors(share) if n >= 2 * plan.pp), share or None)


def generated(spec: ModelSpec, processes: int) -> list[str]:
    """Every (dp, tp, pp) that the model can be laid out in, each with ZeRO stages and schedules."""
    node = node_size(processes)
    plans = []
    for tp in divisors(processes):
        for pp in divisors(processes // tp):
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
                f"parallel.dp=-1 parallel.shard=-1 parallel.zero.offload=false parallel.tp={tp} parallel.pp={pp} "
                f"parallel.zero.stage={stage}"
                + f" parallel.pipeline.schedule={name} parallel.pipeline.chunks=null parallel.pipeline.split=balanced"
                * bool(name)
                for stage, name in chosen
            ]
    return plans
