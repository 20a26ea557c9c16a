"""Decides what the settings leave open (`auto`) and memory answers: activation checkpointing, tiles, and offload.

`decide` is called once, when the memory of all ranks is known: by a run after its process group exists, and by
estimates, suggestions and the search for plans with the memory of the machine that they are about. Only
`schedule=auto` is decided later, since it is measured.

Tiles and offload are taken in the order of what they cost, as many as the predicted peak needs: tiles of the loss (a
gradient in fp32), tiles of the feed-forward blocks (their last linear layer again in backward, and an input a layer),
inputs of recomputed layers in host memory (copies, and that memory), both."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainer.config import ActivationConfig, Config
from trainer.config.hardware import HardwareConfig
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.planning.estimate.memory import MemoryPeak, can_replay, find_peaks
from trainer.planning.estimate.recompute import RecomputeChoice, decide_recompute, measure_choice, with_section
from trainer.planning.fit import MachineMemory
from trainer.planning.resolve import Layout
from trainer.util.tables import format_bytes, format_duration

GIB = 2**30

TILE = 8192
"""Tokens: enough for products at full speed, and for adding up a gradient in fp32 to be some percent of them."""

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


class Decision(NamedTuple):
    """config, layout: with everything decided. peak, limit: bytes that a rank's step is predicted to take and may take,
    where `activation.mode=auto` was decided; notes: what it chose, in a line."""

    config: Config
    layout: Layout
    peak: float | None = None
    limit: float | None = None
    notes: tuple[str, ...] = ()


def decide(
    config: Config, layout: Layout, room: MemoryLimit, node: int, hardware: HardwareConfig | None = None
) -> Decision:
    """Everything that is left open, decided. The result is equal on ranks that agree on the arguments.

    room: the least of all ranks. node: processes of a machine. hardware: how fast it is, which `activation.mode=auto`
    needs to know."""
    chosen, layout = decide_memory(config, layout, room, node, hardware)
    if config.activation.mode != "auto" or hardware is None:
        return Decision(chosen, layout)
    one, limit = measure_choice(chosen, layout, hardware, node), limit_of(config, room) or room.host
    note = (
        f"activation=auto chose {describe_recompute(chosen.activation)}: predicted step "
        f"{format_duration(one.seconds)}, peak {format_bytes(one.peak)} of the {format_bytes(limit)} that it may take"
    )
    return Decision(chosen, layout, one.peak, limit, (note,))


def decide_memory(
    config: Config, layout: Layout, room: MemoryLimit, node: int, hardware: HardwareConfig | None
) -> tuple[Config, Layout]:
    """The configuration with `auto` of `activation.mode`, `loss.tile`, `activation.tile` and `activation.offload`
    decided, and its layout: the first choice whose predicted peak fits, or else the one with the smallest.

    node: processes of a machine. hardware: how fast they are, which `activation.mode=auto` needs to know: of its
    choices the fastest that fits is taken, and inputs wait in host memory only if none fits otherwise."""
    tokens = layout.batch.sequence_length * layout.batch.micro_size / layout.plan.token_ranks
    limit = limit_of(config, room)
    automatic = config.activation.mode == "auto"
    ways = list(memory_choices(config, tokens))
    if not can_replay(layout.plan) or (limit is None or len(ways) == 1) and not automatic:
        return ways[0], _layout(ways[0], layout)
    if automatic:
        assert hardware is not None
        return _least_recompute(
            ways if limit is not None else ways[:1], layout, hardware, limit or room.host, room.host, node
        )
    assert limit is not None
    found: list[tuple[float, tuple[Config, Layout]]] = []
    for way in ways:
        choice = way, _layout(way, layout)
        ranks = find_peaks(*choice, lowered=False, node=node)
        if found and max(peak.host for peak in ranks) > room.host:
            continue
        found.append((max(peak.reserved for peak in ranks), choice))
        if found[-1][0] <= limit:
            return choice
    return min(found, key=lambda one: one[0])[1]


def limit_of(config: Config, room: MemoryLimit) -> float | None:
    """Bytes that a predicted peak may take; None where nothing is known of them."""
    if config.activation.memory is not None:
        return config.activation.memory * GIB
    return None if room.device is None else SHARE * room.device


def _least_recompute(
    ways: Sequence[Config], layout: Layout, hardware: HardwareConfig, limit: float, host: float, node: int
) -> tuple[Config, Layout]:
    """Of choices of tiles and host memory the one with which recompute takes least time."""
    found: list[RecomputeChoice] = []
    for offload in (False, True):
        some = [way for way in ways if bool(way.activation.offload) == offload]
        found += [decide_recompute(way, _layout(way, layout), hardware, limit, node) for way in some]
        if fitting := [one for one in found if one.peak <= limit and one.host <= host]:
            return min(fitting, key=lambda one: one.seconds)[:2]
    return min(found, key=lambda one: (one.host > host, one.peak))[:2]


def memory_choices(config: Config, tokens: float) -> Iterator[Config]:
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
    if activation.tile is None and tokens > TILE and activation.mode != "budget" and not activation.modules:
        more.append({"tile": TILE})
    recomputed = activation.mode in ("full", "selective", "auto") and not activation.modules
    if activation.offload is None and recomputed and not config.run.cuda_graphs:  # a replay would copy to old places
        more.append({"offload": True})
    yield from (with_section(chosen, "activation", **values) for values in more)
    if len(more) > 1:
        yield with_section(chosen, "activation", **{name: value for values in more for name, value in values.items()})


def _layout(config: Config, layout: Layout) -> Layout:
    return replace(layout, pipeline=resolve_pipeline(config, layout.spec, layout.plan, layout.batch))


def describe_recompute(activation: ActivationConfig) -> str:
    """What is recomputed, in words."""
    if activation.mode == "selective" and not activation.modules:
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
