"""What can be changed about a plan: the values that are tried of each setting, and the settings next to a run's own."""

from __future__ import annotations

import copy
import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from trainer.config import ActivationConfig, BatchConfig, Config, ConfigError
from trainer.config.compose import gather_values, to_config
from trainer.config.fields import list_divisors
from trainer.config.typed import changed_settings
from trainer.planning.plan import OVERLAPPED, Plan, resolve_batch
from trainer.planning.resolve import Layout

Changes = dict[str, Any]
"""Values by setting."""

TILE = 8192
"""Tokens: enough for GEMMs at full speed, and for adding up a gradient in fp32 to be some percent of them."""

LONG = 16384
"""Tokens of a sequence that is worth sharing."""

RECOMPUTE = ("none", "selective", "full")
"""Modes of activation checkpointing that are tried, from the fastest to the one that needs least memory."""

SCHEDULES = (
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
    ("v_half", 2),
    ("v_min", 2),
    ("dualpipe_v", 2),
)
"""Schedules that are tried under a pipeline, with stages a rank. GPipe is 1F1B with more memory."""


def generate_neighbours(config: Config, layout: Layout, moves: Iterable[str], factor: int = 2) -> Iterator[Changes]:
    """Changes of one decision: of one setting and of those that follow from it. They may be illegal or change nothing.

    moves: kinds of decisions, in the order in which their changes are wanted. factor: how many times as many ranks may
    share a model."""
    plan, batch, activation, precision = layout.plan, layout.batch, config.activation, config.precision
    zero, pipeline, hops = config.parallel.zero, config.parallel.pipeline, config.parallel.grad_comm
    level = RECOMPUTE.index(activation.mode) if activation.mode in RECOMPUTE else None
    tokens = config.batch.sequence_length * batch.micro_size / plan.token_ranks
    hop = "outer" if plan.replicate > 1 and hops.outer.codec == "none" else "inner"

    def values(name: str, *tried: Any, where: object = True) -> list[Changes]:
        return [{name: value} for value in tried if where]

    larger = [
        {"batch.micro_size": times * batch.micro_size}
        for times in (2, 4)
        if batch.accumulation % times == 0 and batch.accumulation // times >= plan.pp
    ]
    axes = ("pp", "tp", "cp") if config.batch.sequence_length >= LONG else ("pp", "tp")
    known: dict[str, list[Changes]] = {
        "prefetch": values("data.prefetch", max(4, 2 * config.data.prefetch), where=config.data.prefetch < 8),
        "fewer saves": [{"checkpoint.asynchronous": True}, {"checkpoint.every": 4 * config.checkpoint.every}],
        "fewer evaluations": values("eval.every", 4 * config.eval.every),
        "compile": values("compile", True),
        "cuda graphs": [{"run.cuda_graphs": True, "logging.profile": 0, "logging.trace": []}],
        "16 bits": values("precision.compute", "bf16", where=precision.compute == "fp32"),
        "tf32": values("precision.matmul", "high", where=(precision.compute, precision.matmul) == ("fp32", "highest")),
        "larger micro-batches": larger,
        "smaller micro-batches": values("batch.micro_size", *divisors_below(batch.micro_size)),
        "automatic recompute": [{"activation.mode": "auto", "activation.save": ActivationConfig().save}],
        "less recompute": values("activation.mode", *RECOMPUTE[:level], where=level is not None),
        "more recompute": values("activation.mode", *RECOMPUTE[(level or 0) + 1 :], where=level is not None),
        "tiles": [
            *values("loss.tile", TILE, where=tokens > TILE and not config.loss.tile),
            *values("activation.tile", TILE, where=tokens > TILE and not activation.tile),
        ],
        "overlap by copies": values("parallel.tp_overlap", "copy_engine"),
        "overlapped passes": values("parallel.ep_dispatch", OVERLAPPED, where=plan.ep > 1 and batch.accumulation > 1),
        "shards by copies": values("parallel.zero.collectives", "copy_engine", where=plan.shard > 1),
        "fewer reductions": larger if plan.reduces_each_micro_batch else [],  # and in stage 3 fewer gathers
        "reductions in 16 bits": values("precision.reduce", "bf16", where=precision.compute != "fp32"),
        "quantised gradients": values(
            f"parallel.grad_comm.{hop}.codec", "int8", where=hop == "outer" or plan.shard > 1
        ),
        "sharded optimizer": values("parallel.zero.stage", 1, where=plan.stage == 0),
        "more sharding": values("parallel.zero.stage", *range(zero.stage + 1, 4), where=plan.dp > 1),
        "less sharding": values("parallel.zero.stage", *range(zero.stage - 1, 0, -1)),
        "smaller shards": values(
            "parallel.shard", *divisors_below(plan.shard)[:-1], where=plan.stage and plan.replicate == 1
        ),
        "less tp": [
            {"parallel.tp": tp} | ({"parallel.tp_overlap": "off"} if tp == 1 else {}) for tp in divisors_below(plan.tp)
        ],
        # How tokens travel was decided for the ranks of this plan.
        "less ep": [{"parallel.ep": ep, "parallel.ep_dispatch": "auto"} for ep in divisors_below(plan.ep)],
        "less cp": values("parallel.cp", *divisors_below(plan.cp)),
        "less pp": values("parallel.pp", *divisors_below(plan.pp)),
        "more ranks a model": [
            {f"parallel.{axis}": getattr(plan, axis) * 2**power}
            for axis in axes
            for power in range(1, factor.bit_length())
        ],
        "plain schedule": [{"parallel.pipeline.schedule": "1f1b", "parallel.pipeline.chunks": None}]
        * (pipeline.schedule not in ("1f1b", "gpipe")),
        "other schedules": [
            {
                "parallel.pipeline.schedule": name,
                "parallel.pipeline.chunks": chunks if name == "interleaved" else None,
                **({"parallel.pipeline.split": "balanced"} if chunks > 1 else {}),
            }
            for name, chunks in SCHEDULES
        ],
        "measured schedule": [{"parallel.pipeline.schedule": "auto", "parallel.pipeline.split": "balanced"}]
        * (pipeline.schedule != "auto"),
        "balanced split": values("parallel.pipeline.split", "balanced"),
        "inputs in host memory": values("activation.offload", True),
        "states in host memory": [({} if zero.stage else {"parallel.zero.stage": 1}) | {"parallel.zero.offload": True}]
        * (zero.nvme is None),
        "states on a disk": values(
            "parallel.zero.nvme", "FOLDER", where=zero.nvme is None and zero.engine == "deepspeed"
        ),
    }
    return (changes for move in moves for changes in known[move])


def divisors_below(degree: int) -> list[int]:
    """Degrees that divide one, from the next smaller."""
    return sorted(list_divisors(degree), reverse=True)[1:]


def change_settings(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with other values of settings, by their paths."""
    changed = copy.deepcopy(config)
    for name, value in changes.items():
        target: Any = changed
        *sections, leaf = name.split(".")
        for section in sections:
            target = getattr(target, section)
        setattr(target, leaf, value)
    return changed


# Plans beside the recipe's own: how they are written, and the configuration of each.


FREE = (
    "parallel.",
    "precision.compute",
    "precision.reduce",
    "precision.matmul",
    "precision.loss_scale",
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
        plans = yaml.load(text, yaml.BaseLoader)  # which keeps `no` and `1e3` as they are written
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
        return resolve_batch(dataclasses.replace(batch, micro_size=None, accumulation=1), 1).global_size
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
