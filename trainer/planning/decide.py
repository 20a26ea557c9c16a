"""Refuses a plan whose states do not fit into memory, and decides what the settings leave open (`auto`) and memory
answers: activation checkpointing, tiles, and offload.

`decide` is called once, when the memory of all ranks is known: by a run after its process group exists, and by
estimates, suggestions and the search for plans with the memory of the machine that they are about. Only
`schedule=auto` is decided later, since it is measured.

Tiles and offload are taken in the order of what they cost, as many as the predicted peak needs: tiles of the loss (a
gradient in fp32), tiles of the feed-forward blocks (their last linear layer again in backward, and an input a layer),
inputs of recomputed layers in host memory (copies, and that memory), both."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainer.config import ActivationConfig, Config, ConfigError
from trainer.config.hardware import HardwareConfig
from trainer.config.model import CodeSpec, ModelSpec
from trainer.parallel.compress.plan import enabled_codecs, reduces_at_step_end
from trainer.parallel.experts.plan import choose_dispatch
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.planning.estimate.memory import MemoryPeak, can_replay, find_peaks
from trainer.planning.estimate.recompute import RecomputeChoice, decide_recompute, with_section
from trainer.planning.float8 import can_cast_once
from trainer.planning.layer import has_experts
from trainer.planning.neighbours import TILE, Changes, change_settings, generate_neighbours
from trainer.planning.resolve import Layout, resolve_layout
from trainer.planning.states import StateBytes, feedback_bytes, fullest_rank
from trainer.util.tables import format_bytes, format_duration, format_number, format_sizes

# Whether what a plan keeps fits into memory, and what would fit. Pure: the caller says how much memory there is.


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


# What `auto` leaves open, decided so that a step fits into memory.


GIB = 2**30

SHARE = 0.92
"""Of a device's memory that a predicted peak may take."""


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes for one process. device: None where the device's memory is the host's, whose use is not predicted."""

    device: float | None
    host: float

    @classmethod
    def of(cls, memory: MachineMemory, node: int) -> MemoryLimit:
        """node: processes of a machine, which share its memory."""
        return cls(memory.device, SHARE * memory.host / node)


MEASURED_COPIES = 2
"""Ranks of the largest group in which copies between GPUs were measured."""


class Decision(NamedTuple):
    """config, layout: with every `auto` that depends on memory decided. predicted: the step with what
    `activation.mode=auto` chose, None where it was not asked; limit: bytes that a rank's step may take."""

    config: Config
    layout: Layout
    predicted: RecomputeChoice | None = None
    limit: float | None = None

    @property
    def notes(self) -> list[str]:
        """What `activation.mode=auto` chose, in a line."""
        if self.predicted is None or self.limit is None:
            return []
        return [
            f"activation=auto chose {describe_recompute(self.config.activation)}: predicted step "
            f"{format_duration(self.predicted.seconds)}, peak {format_bytes(self.predicted.peak)} of the "
            f"{format_bytes(self.limit)} that it may take"
        ]


def decide(
    config: Config,
    layout: Layout,
    available: MemoryLimit,
    node: int,
    hardware: HardwareConfig | None = None,
    reachable: bool | None = None,
) -> Decision:
    """Decides `auto` of `activation.mode`, `loss.tile`, `activation.tile` and `activation.offload`: takes the first
    choice whose predicted peak fits, or else the one with the smallest peak. And `parallel.ep_dispatch`, by time,
    `parallel.zero.collectives`, and whether a step casts weights to fp8 once, where there is memory for it. Ranks that
    agree on the arguments get the same decision.

    available: memory of the rank with least. node: processes of a machine. hardware: how fast the machine is, which
    `activation.mode=auto` needs to know; `parallel.ep_dispatch=auto` takes an H200 where it is not known.
    `activation.mode=auto` takes the fastest choice that fits, and keeps inputs in host memory only if nothing fits
    otherwise. reachable: whether the GPUs of a machine can share memory; None for what is known of the hardware.
    """
    if reachable is None:
        reachable = hardware is not None and hardware.device != "CPU"
    config = decide_collectives(decide_dispatch(config, layout, hardware), layout, node, reachable)
    tokens = layout.batch.sequence_length * layout.batch.micro_size / layout.plan.token_ranks
    limit = limit_of(config, available)
    automatic = config.activation.mode == "auto"
    choices = list(memory_choices(config, layout.spec, tokens))
    once = can_cast_once(config, layout.spec, layout.plan, layout.batch.accumulation)
    ways = list(itertools.product(choices, [once, *[False] * once]))
    if not can_replay(layout.plan) or (limit is None or len(ways) == 1) and not automatic:
        return Decision(choices[0], _resolve_choice(layout, *ways[0]))
    if automatic:
        assert hardware is not None
        some, bound = (ways[:1], available.host) if limit is None else (ways, limit)
        one = _least_recompute(some, layout, hardware, bound, available.host, node)
        return Decision(one.config, one.layout, one, bound)
    assert limit is not None
    found: list[tuple[float, Decision]] = []
    for choice, once in ways:
        decision = Decision(choice, _resolve_choice(layout, choice, once))
        ranks = find_peaks(decision.config, decision.layout, lowered=False, node=node)
        if found and max(peak.host for peak in ranks) > available.host:
            continue
        found.append((max(peak.reserved for peak in ranks), decision))
        if found[-1][0] <= limit:
            return decision
    return min(found, key=lambda one: one[0])[1]


def decide_dispatch(config: Config, layout: Layout, hardware: HardwareConfig | None) -> Config:
    """The configuration with `parallel.ep_dispatch=auto` decided for a layout on a kind of machine."""
    if layout.plan.ep == 1 or config.parallel.ep_dispatch != "auto":
        return config
    decided = copy.copy(config)
    tokens = layout.tokens / layout.plan.tp
    chosen = choose_dispatch(config, layout.spec, layout.plan, hardware, tokens)
    decided.parallel = replace(config.parallel, ep_dispatch=chosen)
    return decided


def decide_collectives(config: Config, layout: Layout, node: int, reachable: bool) -> Config:
    """The configuration with `parallel.zero.collectives=auto` decided: copies where they were measured to be faster and
    the rest of the plan allows them. node: processes of a machine. reachable: as for `decide`."""
    if config.parallel.zero.collectives != "auto":
        return config
    by_nccl, by_copies = (
        with_section(config, "parallel", zero=replace(config.parallel.zero, collectives=name))
        for name in ("nccl", "copy_engine")
    )
    if not reachable or not 1 < layout.plan.shard <= MEASURED_COPIES or enabled_codecs(config.parallel.grad_comm):
        return by_nccl
    try:
        resolve_layout(by_copies, layout.plan.world, layout.spec, node)
    except ConfigError:
        return by_nccl
    return by_copies


def limit_of(config: Config, available: MemoryLimit) -> float | None:
    """Bytes that a predicted peak may take; None where nothing is known of them."""
    if config.activation.memory is not None:
        return config.activation.memory * GIB
    return None if available.device is None else SHARE * available.device


def _least_recompute(
    ways: Sequence[tuple[Config, bool]], layout: Layout, hardware: HardwareConfig, limit: float, host: float, node: int
) -> RecomputeChoice:
    """Of choices of tiles and offload, each with whether a step casts weights once, the one whose recompute takes the
    least time."""
    found: list[RecomputeChoice] = []
    for offload in (False, True):
        some = [(one, once) for one, once in ways if bool(one.activation.offload) == offload]
        found += [
            decide_recompute(one, _resolve_choice(layout, one, once), hardware, limit, node) for one, once in some
        ]
        if fitting := [one for one in found if one.peak <= limit and one.host <= host]:
            return min(fitting, key=lambda one: one.seconds)
    return min(found, key=lambda one: (one.host > host, one.peak))


def memory_choices(config: Config, spec: ModelSpec, tokens: float) -> Iterator[Config]:
    """What `auto` may become where a rank holds so many tokens of a micro-batch, the cheapest first. What cannot be is
    left out."""
    chosen = copy.copy(config)
    chosen.loss = replace(config.loss, tile=config.loss.tile or 0)
    chosen.activation = replace(
        config.activation, tile=config.activation.tile or 0, offload=bool(config.activation.offload), memory=None
    )
    yield chosen
    activation = config.activation
    if config.loss.tile is None and tokens > TILE:
        chosen = with_section(chosen, "loss", tile=TILE)
        yield chosen
    more: list[dict[str, object]] = []
    if activation.tile is None and tokens > TILE and not (has_experts(spec) or isinstance(spec, CodeSpec)):
        more.append({"tile": TILE})
    recomputed = activation.mode != "none"
    if activation.offload is None and recomputed and not config.run.cuda_graphs:  # a replay would copy to old places
        more.append({"offload": True})
    yield from (with_section(chosen, "activation", **values) for values in more)
    if len(more) > 1:
        yield with_section(chosen, "activation", **{name: value for values in more for name, value in values.items()})


def _resolve_choice(layout: Layout, config: Config, once: bool) -> Layout:
    """The layout with what follows from a choice. once: whether a step casts weights once."""
    pipeline = resolve_pipeline(config, layout.spec, layout.plan, layout.batch)
    return replace(layout, plan=replace(layout.plan, casts_once=once), pipeline=pipeline)


def describe_recompute(activation: ActivationConfig) -> str:
    """What is recomputed, in words."""
    if activation.mode == "selective":
        kept = ", ".join(activation.save)
        return f"selective, which keeps {kept}"
    return activation.mode


def describe_measures(config: Config, fullest: MemoryPeak | None = None) -> str:
    """What is done for long sequences, in words; empty for nothing."""
    tile = config.activation.tile
    parts = [f"loss in tiles of {config.loss.tile} tokens"] if config.loss.tile else []
    parts += [f"feed-forward in tiles of {tile}"] if tile else []
    if config.activation.offload:
        size = f" ({fullest.host / 2**30:.1f} GiB)" if fullest is not None else ""
        parts.append(f"inputs of recomputed layers in host memory{size}")
    return ", ".join(parts)
