"""The features of a plan in a fixed order, and what all of them say of it.

A new mesh axis is one folder in `parallel/` and one entry here."""

from __future__ import annotations

from trainer.config import Config, ConfigError, ParallelConfig
from trainer.config.model import ModelSpec
from trainer.parallel.compress import plan as compress
from trainer.parallel.context import plan as context
from trainer.parallel.experts import plan as experts
from trainer.parallel.pipeline import plan as pipeline
from trainer.parallel.tensor import plan as tensor
from trainer.parallel.zero import plan as zero
from trainer.planning import code, float8, recompute
from trainer.planning.plan import Feature, Plan, build_plan, can_divide, check_degrees, check_mesh

FEATURES: tuple[Feature, ...] = tuple(
    one.FEATURE for one in (recompute, float8, code, tensor, context, experts, pipeline, zero, compress)
)


def check_plan(
    parallel: ParallelConfig, world: int, spec: ModelSpec | None = None, node: int | None = None
) -> list[str]:
    """Everything that makes the plan impossible on `world` processes, one sentence each.

    spec: the model, where it is known; node: processes on this machine, all of them if None.
    """
    node = node or world
    problems = check_degrees(parallel, world)
    if not can_divide(parallel, world):
        return problems
    for feature in FEATURES:
        problems += feature.check_model(parallel, spec, world, node)
    if wrong := check_mesh(parallel, world, node):
        return problems + wrong
    ranks = world // (parallel.tp * parallel.pp)  # that hold the same part of the model
    for feature in FEATURES:
        problems += feature.check_ranks(parallel, ranks, world, node)
    return problems


def resolve_plan(parallel: ParallelConfig, world: int, spec: ModelSpec | None = None, node: int | None = None) -> Plan:
    """The plan on `world` processes. Raises `ConfigError` with all problems."""
    if problems := check_plan(parallel, world, spec, node):
        raise ConfigError(problems)
    return build_plan(parallel, world)


def check_whole_plan(config: Config, spec: ModelSpec | None, plan: Plan, node: int) -> list[str]:
    """What the rest of the configuration has against a plan that is possible, one sentence each."""
    return [problem for feature in FEATURES for problem in feature.check_plan(config, spec, plan, node)]


def communication_table(config: Config, spec: ModelSpec, plan: Plan) -> list[tuple[str, str]]:
    """Rows of a table: what tensor-parallel linear layers and shared states go by where a setting says it, and settings
    that a recipe has for more ranks than there are."""
    return [row for feature in FEATURES for row in feature.describe(config, spec, plan)]
