"""The plans that a search chooses from: the ones of `trainer.planning.estimate.plans` that are predicted to be fastest,
for each combination of the values that the command line tries besides."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.config import Config, ConfigError
from trainer.config.hardware import HardwareConfig
from trainer.config.typed import changed_settings, flatten_values
from trainer.planning.decide import describe_measures
from trainer.planning.estimate.plans import DEGREES, PIPELINE, rank_plans
from trainer.planning.estimate.step import GIB, StepEstimate
from trainer.planning.plan_overrides import FREE, NUMBERS, global_size
from trainer.tuning.engines import PlanOption


@dataclass(frozen=True)
class SearchPlan:
    """A plan of the search. changes: its settings beside the recipe's; scale: tokens of the recipe's step over those of
    its own, by which times of steps are compared."""

    option: PlanOption
    found: StepEstimate
    changes: dict[str, Any]
    scale: float


def frozen_differences(base: Config, tried: Sequence[Config], allowed: Collection[str]) -> list[str]:
    """Settings that combinations of values differ in, that change the numbers of training, and are not allowed to."""
    names = {
        name
        for config in tried
        for name in changed_settings(config, base)
        if not name.startswith(FREE) or name.startswith(NUMBERS)
    }
    return sorted(name for name in names if not any(f"{name}.".startswith(f"{one}.") for one in allowed))


def list_plans(
    base: Config, tried: Sequence[Config], hardware: HardwareConfig, world: int, most: int, kept: Collection[str]
) -> list[SearchPlan]:
    """At most `most` plans, those that are predicted to be fastest, in this order.

    base: the recipe's own configuration; tried: those of all combinations of values; kept: see `rank_plans`. Raises
    `ConfigError` where nothing can be run."""
    tokens = global_size(base.batch, world) * base.batch.sequence_length
    own = {"compile", *DEGREES, *PIPELINE}
    besides = sorted({name for config in tried for name in changed_settings(config, tried[0])} - own)
    found: dict[tuple, SearchPlan] = {}
    problems: list[str] = []
    for config in tried:
        try:
            ranking = rank_plans(config, hardware, world, global_size(config.batch, world), most, kept)
        except ConfigError as error:
            problems += error.problems
            continue
        for one in ranking.best:
            scale = tokens / one.layout.batch.tokens
            axes, values = axes_of(one), flatten_values(asdict(one.config))
            share = one.memory / (hardware.memory * GIB)
            same = one.seconds, one.memory, *axes.items()  # but for a value that this plan has no use for
            axes |= {name: str(values[name]) for name in besides}
            option = PlanOption(name_of(axes), axes, scale * one.seconds, share)
            found.setdefault(same, SearchPlan(option, one, changed_settings(one.config, base), scale))
    if not found:
        raise ConfigError(list(dict.fromkeys(problems)))
    return sorted(found.values(), key=lambda plan: plan.option.seconds)[:most]


def axes_of(found: StepEstimate) -> dict[str, float | str]:
    """Degrees and modes of a plan by name."""
    plan, pipeline = found.layout.plan, found.layout.pipeline.schedule
    return {
        "dp": plan.dp,
        "cp": plan.cp,
        "tp": plan.tp,
        "pp": plan.pp,
        "zero": str(plan.stage),
        "shard": plan.shard,
        "micro": found.layout.batch.micro_size,
        "tp_overlap": found.config.parallel.tp_overlap if plan.tp > 1 else "",
        "collectives": found.config.parallel.zero.collectives if plan.shard > 1 else "",
        "recompute": found.config.activation.mode,
        "schedule": pipeline.name if plan.pp > 1 else "",
        "chunks": pipeline.chunks,
        "blocks": "compiled" if found.config.compile else "eager",
        "long": "-".join(describe_measures(found.config).split()),
    }


def name_of(axes: Mapping[str, float | str]) -> str:
    """A name for the folder of a plan's trial, from its axes alone. What goes without saying is left out."""
    said = dict(axes)
    for name in ("cp", "tp", "pp", "chunks"):
        if said[name] == 1:
            del said[name]
    if said["zero"] == "0" or said["shard"] == axes["dp"]:
        del said["shard"]
    for name, usual in {"tp_overlap": ("", "off"), "collectives": ("", "nccl")}.items():
        if said[name] in usual:
            del said[name]
    words = ("recompute", "schedule", "blocks", "long")
    parts = (str(value) if name in words else f"{name.rpartition('.')[-1]}{value}" for name, value in said.items())
    return re.sub(r"[^\w.+-]+", "-", "_".join(filter(None, parts)))
