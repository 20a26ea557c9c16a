"""From what is asked to what is decided: a checked configuration, and the layout of its run.

`resolve_layout` is the one place where plan, batch and pipeline follow from settings, model and number of processes:
the command line checks by it, and runs and the parity tool train what it returns. Pure: needs neither torch nor a
process group, so that every refusal comes before either exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import Config, ConfigError, ModelSpec, typed
from trainer.config.compose import gather_values, to_config
from trainer.planning import checks
from trainer.planning.batch import BatchPlan, resolve_batch, training_steps
from trainer.planning.context import ContextPlan
from trainer.planning.context_choice import resolve_context
from trainer.planning.cost.parameters import declare_parameters
from trainer.planning.cost.updates import UpdateSettings
from trainer.planning.float8 import check_float8
from trainer.planning.gradient_comm import check_grad_comm
from trainer.planning.pipeline import PipelinePlan, resolve_pipeline
from trainer.planning.plan import Plan, check_plan, node_size, resolve_plan


@dataclass(frozen=True)
class Layout:
    """How a model is trained on a number of processes: who holds what of it, who reads what, who computes what when,
    and how sequences are shared, if they are."""

    spec: ModelSpec
    plan: Plan
    batch: BatchPlan
    pipeline: PipelinePlan
    context: ContextPlan | None = None


def resolve_layout(config: Config, world_size: int, spec: ModelSpec, node: int | None = None) -> Layout:
    """The layout that the configuration asks for on `world_size` processes.

    spec: the model that is trained; node: processes on this machine, as LOCAL_WORLD_SIZE has them if None. Raises
    `ConfigError` with everything that is wrong.
    """
    layout, problems = _decide(config, world_size, spec, node)
    if problems or layout is None:
        raise ConfigError(problems)
    return layout


def check_config(config: Config, world_size: int, node: int | None = None) -> list[str]:
    """Everything that is wrong with a typed configuration on `world_size` processes, one sentence each.

    node: as for `resolve_layout`. The model of `model.from_hf` is not known before it is read: what depends on it is
    left to `resolve_layout`.
    """
    spec = None if config.model.from_hf or config.model.check() else config.model
    found = [*checks.config_problems(config), *_decide(config, world_size, spec, node)[1]]
    return list(dict.fromkeys(found))  # plan and batch find by themselves what lies outside of their ranges


def _decide(
    config: Config, world_size: int, spec: ModelSpec | None, node: int | None = None
) -> tuple[Layout | None, list[str]]:
    """The layout, or None where the model is unknown or something is wrong; and what is wrong."""
    layout, node = None, node or node_size(world_size)
    problems = check_plan(config.parallel, world_size, spec, node)
    plan = None if problems else resolve_plan(config.parallel, world_size, spec, node)
    try:
        # Without a plan the number of ranks is unknown; what cannot be divided on one rank is wrong on any number.
        batch = resolve_batch(config.batch, *((plan.dp, plan.tp, plan.pp, plan.cp) if plan else (1,)))
        if plan and config.run.tokens:
            problems = problems + list(checks.check_length(config, training_steps(config.run, batch)))
        if plan and spec:
            context = resolve_context(config, spec, plan, node)
            layout = Layout(spec, plan, batch, resolve_pipeline(config, spec, plan, batch), context)
    except ConfigError as error:
        problems = problems + error.problems
    if spec:
        problems = problems + UpdateSettings.of(config).problems(declare_parameters(spec))
    if plan and spec:
        problems = problems + list(check_float8(config, spec, plan))
    if plan:
        problems = problems + checks.check_optimizers(config, plan) + checks.check_graphs(config, plan, world_size)
        problems = problems + check_grad_comm(config.parallel.grad_comm, config.precision.types, plan, node)
    return layout, problems


def compose(
    overrides: Sequence[str] = (), config_dir: str | os.PathLike | None = None, world_size: int | None = None
) -> Config:
    """The checked configuration of a run on `world_size` processes (default: WORLD_SIZE of the environment, else 1).

    `overrides` is what stands on the command line: `["+config=debug", "lr.peak=1e-3"]`. Leaves no Hydra state behind.
    Raises `ConfigError` with everything that is wrong.
    """
    values, problems = gather_values(overrides, config_dir)
    return check_values(values, problems, int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size)


def check_values(values: dict, problems: typed.Problems, world: int | None) -> Config:
    """The configuration of what `gather_values` returned, checked for `world` processes, or for any number of them if
    None.

    Raises `ConfigError` with everything that is wrong."""
    config = to_config(values, problems, world or 1)
    contradictions = checks.config_problems(config) if world is None else check_config(config, world)
    if problems:
        # A setting that was refused stands at its default: what contradicts only that default is no news.
        refused = re.compile(r"\b(" + "|".join(map(re.escape, problems)) + r")\b")
        recipe = "config" not in problems
        raise ConfigError(
            [*problems.values(), *(text for text in contradictions if recipe and not refused.search(text))]
        )
    if contradictions:
        raise ConfigError(contradictions)
    return config
