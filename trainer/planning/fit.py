"""Whether what a plan keeps fits into memory, and what would fit. Pure: the caller says how much memory there is."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from trainer.config import Config, ConfigError
from trainer.parallel.compress.plan import reduces_at_step_end
from trainer.planning.cost.feedback import feedback_bytes
from trainer.planning.cost.memory import StateBytes, fullest_rank
from trainer.planning.neighbours import Changes, change_settings, generate_neighbours
from trainer.planning.resolve import Layout, resolve_layout
from trainer.util.tables import format_bytes, format_number, format_sizes

TOO_BIG = "the model's states do not fit"
"""How the refusal begins: by these words a sweep knows it from others."""


@dataclass(frozen=True)
class MachineMemory:
    """Bytes of memory. device: of one GPU, None where processes compute on CPUs; host: of this machine."""

    device: int | None
    host: int


def persistent_bytes(config: Config, layout: Layout, node: int) -> StateBytes:
    """What the rank that has most keeps from step to step, without activations. node: processes on this machine."""
    spec, plan, pipeline = layout.spec, layout.plan, layout.pipeline
    once = reduces_at_step_end(config.parallel.grad_comm, plan, node)
    feedback = feedback_bytes(config, spec, plan, pipeline, node)
    return fullest_rank(config, spec, plan, pipeline, layout.batch, once, feedback)


def find_missing_memory(states: StateBytes, node: int, memory: MachineMemory) -> str | None:
    """Which memory does not hold the states of `node` processes like this one; None where they fit."""
    device, host = (0, states.total) if memory.device is None else (states.device, states.host)
    if memory.device is not None and device > memory.device:
        return f"{format_bytes(device)} on each GPU, which has {format_bytes(memory.device)}"
    if host * node > memory.host:
        return (
            f"{format_bytes(host * node)} on a machine with {format_number(node, 'process', 'es')}, which "
            f"has {format_bytes(memory.host)}"
        )
    return None


def check_fit(config: Config, layout: Layout, world: int, node: int, memory: MachineMemory) -> None:
    """Raises `ConfigError`, with the smallest override that fits, where the plan's states alone do not."""
    states = persistent_bytes(config, layout, node)
    if config.run.force or (lack := find_missing_memory(states, node, memory)) is None:
        return
    names, values = zip(*states.rows())
    parts = ", ".join(f"{name} {value}" for name, value in zip(names, format_sizes(values)))
    raise ConfigError(
        f"{TOO_BIG}: {lack}, and activations come on top (a rank keeps {parts}); "
        f"{_way_out(config, layout, world, node, memory)}, or go on all the same with run.force=true"
    )


def _way_out(config: Config, layout: Layout, world: int, node: int, memory: MachineMemory) -> str:
    """The smallest override that fits: of one setting, then of two; of each, the least costly first."""

    def fits(changes: Changes, processes: int) -> bool:
        changed = change_settings(config, changes)
        try:
            states = persistent_bytes(changed, resolve_layout(changed, processes, layout.spec, node), node)
        except ConfigError:
            return False
        return find_missing_memory(states, node, memory) is None

    stages, others = (
        [*generate_neighbours(config, layout, moves, world)]
        for moves in (("more sharding",), ("more ranks a model", "states in host memory"))
    )
    for changes in (*stages, *others, *(one | other for one, other in itertools.product(stages, others))):
        if fits(changes, world):
            return "set " + " ".join(f"{name}={str(value).lower()}" for name, value in changes.items())
    shared = {"parallel.zero.stage": 3}
    more = next((count for power in range(1, 13) if fits(shared, count := world * 2**power)), None)
    return f"set parallel.zero.stage=3 and start {more} processes" if more else "take a smaller model"
