"""Plans beside the recipe's own: how they are written, and the configuration of each."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from trainer.config import BatchConfig, Config, ConfigError
from trainer.config.compose import gather_values, to_config
from trainer.config.fields import list_divisors
from trainer.config.typed import changed_settings
from trainer.planning.plan import Plan, resolve_batch

FREE = (
    "parallel.",
    "precision.compute",
    "precision.reduce",
    "precision.matmul",
    "precision.loss_scale",
    "precision.growth_interval",
    "precision.float8.",
    "precision.types.matrix.float8",
    "activation.",
    "batch.micro_size",
    "batch.accumulation",
    "loss.chunk",
    "loss.tile",
    "compile",
)
"""Settings that do not change the mathematics of training, which plans may therefore choose."""

NUMBERS = ("precision.", "parallel.grad_comm.")
"""Settings of `FREE` that change the numbers of training beyond rounding."""


def plan_list(text: str) -> list[str]:
    """The plans of `plans=[...]`, each a text. Raises `ConfigError`."""
    try:
        plans = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"plans={text} cannot be read as a list ({' '.join(str(error).split())}); quote plans that hold a comma "
            "or a bracket"
        ) from None
    return [str(plan) for plan in (plans if isinstance(plans, list) else [plans])]


def compose_variant(overrides: Sequence[str], config_dir: str | None, processes: int, corpus: bool = True) -> Config:
    """The typed configuration, before contradictions between settings are checked. Raises `ConfigError`.

    corpus: whether it is read; if not, what a recipe leaves open of it (`???`) need not be given."""
    values, problems = gather_values(overrides, config_dir)
    if not corpus:
        values["data"] = _any_given(values["data"])
    config = to_config(values, problems, processes)
    if problems:
        raise ConfigError(list(problems.values()))
    return config


def _any_given(value: Any) -> Any:
    """A part of the settings with some text in place of every value that is still to be given."""
    if isinstance(value, dict):
        return {name: _any_given(part) for name, part in value.items()}
    return "any" if value == "???" else value


def override_key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def build_variant(
    text: str, base: Config, overrides: Sequence[str], config_dir: str | None, processes: int, corpus: bool = True
) -> tuple[Config, set[str]]:
    """The configuration of a plan given as text, and the names of the settings in it. base: that of `overrides` alone;
    corpus: as for `compose_variant`.

    Raises `ConfigError` for what is no setting, or none of `FREE`.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:  # quotes that do not close
        raise ConfigError(f"'{text}' cannot be read as settings: {error}") from None
    chosen = [word if "=" in word else f"parallel={word}" for word in words]
    named = {override_key(word) for word in chosen}
    config = compose_variant(
        [*(word for word in overrides if override_key(word) not in named), *chosen], config_dir, processes, corpus
    )
    fixed = [name for name in changed_settings(config, base) if not name.startswith(FREE)]
    if fixed:
        raise ConfigError(
            f"a plan cannot set {', '.join(fixed)}: the reference has it too; set it outside of plans=[...]"
        )
    return config, named


def global_size(batch: BatchConfig, processes: int) -> int:
    """Sequences in an optimizer step, the same under every plan."""
    if batch.global_size or batch.global_tokens:
        return resolve_batch(dataclasses.replace(batch, micro_size=None, accumulation=None), 1).global_size
    return resolve_batch(batch, processes).global_size


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
        batch.accumulation = next((n for n in list_divisors(share) if n >= 2 * plan.pp), share or None)
