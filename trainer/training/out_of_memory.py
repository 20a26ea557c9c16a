"""Out of memory: what a run advises. Needs no torch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from trainer.config import ActivationConfig, Config
from trainer.planning.deepspeed import check_parallel, check_settings
from trainer.planning.estimate.sequence import TILE, choices

LONG = 16384
"""Tokens of a sequence that is worth sharing."""


def advice(config: Config) -> str:
    """What to override so that a run needs less memory, least costly first: only what it does not have already, and its
    engine takes."""
    mode, zero = config.activation.mode, config.parallel.zero
    stages = [stage for stage in range(zero.stage + 1, 4) if _takes(config, stage=stage)]
    ways = [
        *(["activation=auto (recomputes what the memory needs)"] if mode != "auto" and _takes_auto(config) else []),
        *(["activation.memory below the peak that was predicted"] if mode == "auto" else []),
        *(["activation=selective (keeps attention and every second product)"] if mode == "none" else []),
        *(["activation=full"] if mode != "full" else []),
        *_for_long_sequences(config),
        *(["a smaller batch.micro_size (the table at the start shows it)"] if config.batch.micro_size is None else []),
        *([f"batch.micro_size below {config.batch.micro_size}"] if (config.batch.micro_size or 1) > 1 else []),
    ]
    if stages:
        ways.append(f"parallel.zero.stage={stages[0]}" + " or more" * (len(stages) > 1))
    elif not zero.offload and zero.nvme is None and _takes(config, offload=True):
        ways.append("parallel.zero.offload=true")
    elif zero.nvme is None and _takes(config, nvme="FOLDER"):
        ways.append("parallel.zero.nvme=FOLDER on a local disk")
    if zero.engine == "torch" and zero.offload and zero.stage >= 2 and not zero.sum_on_host:
        ways.append("parallel.zero.sum_on_host=true (slow)")
    if config.batch.sequence_length >= LONG and _takes(config, cp=2 * config.parallel.cp):
        ways.append(f"parallel.cp={2 * config.parallel.cp}")
    if _takes(config, tp=2 * config.parallel.tp):
        ways.append(f"parallel.tp={2 * config.parallel.tp}")
    return (
        " or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))
        if ways
        else "a smaller model, or start more processes"
    )


def _for_long_sequences(config: Config) -> list[str]:
    """What `auto` would take for the tokens of a rank if nothing fitted, as far as it is not set already."""
    parallel, batch, given = config.parallel, config.batch, copy.copy(config)
    tokens = batch.sequence_length * (batch.micro_size or 1) / (parallel.cp * parallel.tp)
    if tokens <= TILE:
        return []
    given.loss = replace(config.loss, tile=config.loss.tile or None)
    given.activation = replace(
        config.activation, tile=config.activation.tile or None, offload=config.activation.offload or None
    )
    problems = {*check_settings(config)}
    legal = [one for one in choices(given, tokens) if {*check_settings(one)} <= problems]
    taken = {
        f"loss.tile={TILE}": (config.loss.tile, any(one.loss.tile for one in legal)),
        f"activation.tile={TILE}": (config.activation.tile, any(one.activation.tile for one in legal)),
        "activation.offload=true": (config.activation.offload, any(one.activation.offload for one in legal)),
    }
    ways = [(name, before) for name, (before, after) in taken.items() if after and not before]
    return [name + " (where auto has not taken it)" * (before is None) for name, before in ways]


def _takes(config: Config, **changes: Any) -> bool:
    """Whether the engine still runs the plan after `changes` of it or of its section `zero`."""
    changed = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(changed.parallel.zero if hasattr(changed.parallel.zero, name) else changed.parallel, name, value)
    before, after = (
        {*check_parallel(some.parallel, some.parallel.shard, 1), *check_settings(some)} for some in (config, changed)
    )
    return after <= before


def _takes_auto(config: Config) -> bool:
    """Whether `activation=auto` may choose less than the run has. It replaces what is said of operations and layers."""
    changed = copy.copy(config)
    changed.activation = ActivationConfig(mode="auto")
    return config.activation.mode != "full" and {*check_settings(changed)} <= {*check_settings(config)}
