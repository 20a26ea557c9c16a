"""What a run decides by the memory that is free: recompute, tiles, and inputs of layers in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainer.config import Config, ConfigError
from trainer.config.hardware import HardwareConfig
from trainer.diagnosis.evidence import RunMachine
from trainer.observe.report import device_name
from trainer.planning.estimate.hardware import load_hardware, shipped_for
from trainer.planning.estimate.recompute import measure_choice
from trainer.planning.estimate.sequence import SHARE, MemoryLimit, decide_memory, describe_recompute, limit_of
from trainer.planning.fit import MachineMemory
from trainer.planning.resolve import Layout
from trainer.training.out_of_memory import suggest_overrides
from trainer.util.tables import format_bytes, format_duration


def free_memory(device: torch.device) -> int | None:
    """Bytes of a GPU that this process has or can have; None on CPUs."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


@dataclass(frozen=True)
class AutoSettings:
    """A configuration with its `auto`s, and its layout. node: processes of this machine; hardware: how fast it is,
    where that matters."""

    config: Config
    layout: Layout
    memory: MachineMemory
    node: int
    hardware: HardwareConfig | None

    @classmethod
    def of(cls, config: Config, layout: Layout, memory: MachineMemory, node: int, device: torch.device) -> AutoSettings:
        """Raises `ConfigError` where `activation.hardware` cannot be read."""
        return cls(config, layout, memory, node, find_hardware(config, device))

    def settle(self, free: Sequence[int | None] = ()) -> tuple[Config, Layout]:
        """The configuration with everything decided, and its layout. free: `free_memory` of every rank, the least of
        which counts; without it, the whole memory does."""
        return decide_memory(self.config, self.layout, self.room(free), self.node, self.hardware)

    def room(self, free: Sequence[int | None]) -> MemoryLimit:
        device = min((found for found in free if found is not None), default=self.memory.device)
        return MemoryLimit(device, SHARE * self.memory.host / self.node)

    def explain(self, config: Config, layout: Layout, free: Sequence[int | None] = ()) -> list[str]:
        """What `activation.mode=auto` has chosen, in a line. Raises `ConfigError` where nothing fits."""
        if self.hardware is None:
            return []
        room = self.room(free)
        one, limit = measure_choice(config, layout, self.hardware, self.node), limit_of(self.config, room) or room.host
        given = self.config.activation.memory is not None
        whole = limit if given else room.device or room.host
        if one.peak > whole and not config.run.force:
            there = (
                f"activation.memory={self.config.activation.memory:g}" if given else f"there are {format_bytes(whole)}"
            )
            place, memory = RunMachine(layout.plan.world, self.node, self.hardware.device), self.memory
            ways = suggest_overrides(
                self.config, layout, place, replace(memory, device=int(whole) if memory.device else None)
            )
            if given:
                ways = f"set activation.memory={1.01 * one.peak / 2**30:.3g}, which would do, or {ways}"
            raise ConfigError(
                "activation.mode=auto: nothing fits: the least that a step is predicted to take is "
                f"{format_bytes(one.peak)} a "
                f"rank ({describe_recompute(config.activation)}), and {there}; {ways}, "
                "or go on all the same with run.force=true"
            )
        return [
            f"activation=auto chose {describe_recompute(config.activation)}: predicted step "
            f"{format_duration(one.seconds)}, peak "
            f"{format_bytes(one.peak)} of the {format_bytes(limit)} that it may take"
        ]


def find_hardware(config: Config, device: torch.device) -> HardwareConfig | None:
    """How fast the run's devices are, where `activation.mode=auto` asks. Raises `ConfigError`."""
    if config.activation.mode != "auto":
        return None
    try:
        return load_hardware(config.activation.hardware or shipped_for(device_name(device)))
    except ConfigError as error:
        raise ConfigError([f"activation.{problem}" for problem in error.problems]) from None
