"""Machines as data: what one device, a node and the network between nodes can do, in files of `configs/hardware/`.

A file names what is published (memory, bandwidths) and what is reached of it in practice (`achieved`), so a measurement
can write one. Peaks of known devices stand in `planning/hardware.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config import typed
from trainer.config.fields import ConfigError, option

NEEDED = "???"


@dataclass
class LinkConfig:
    """How devices reach each other."""

    bandwidth: float = option(NEEDED, "into one device, in one direction", unit="GB/s", range="(0, inf)")
    latency: float = option(NEEDED, "of a transfer, and of each step of a ring", unit="microseconds", range="[0, inf)")
    achieved: float = option(NEEDED, "share of the bandwidth that large collectives reach", range="(0, 1]")


@dataclass
class AchievedConfig:
    """What programs reach of the peaks, on large operations; small ones lose more by `HardwareConfig.kernel`."""

    product: float = option(NEEDED, "share of the peak that large matrix products reach", range="(0, 1]")
    attention: float = option(NEEDED, "share of the peak that causal flash attention reaches", range="(0, 1]")
    last_queries: float = option(
        0.58,
        "what causal attention of queries that are not the first of their keys reaches, as a share of `attention` "
        "(ranks that share sequences in zigzag order); that of an H200 until it is measured",
        range="(0, inf)",
    )
    block_mask: float = option(
        0.69,
        "the same of attention with documents, windows, soft caps, sinks, or in order of blocks, over all keys of "
        "blocks of which some are seen (CPUs: over all keys); that of an H200 until it is measured",
        range="(0, inf)",
    )
    memory: float = option(NEEDED, "share of the memory's bandwidth that kernels between GEMMs reach", range="(0, 1]")
    optimizer: float = option(NEEDED, "the same for the kernels of the update", range="(0, 1]")
    copy: float = option(NEEDED, "the same for casts, and copies in and out of flat buffers", range="(0, 1]")
    float8: float = option(
        0.9,
        "what large products in fp8 reach of their peak, as a share of `product`; a guess until it is measured",
        range="(0, 1]",
    )
    hidden: float = option(
        1.0, "share of the communication behind computation that does not slow it down", range="[0, 1]"
    )
    copies: float | None = option(
        None,
        "share of the node's bandwidth that copies between devices reach (`parallel.tp_overlap`); null: as collectives",
        range="(0, 1]",
    )

    def of_attention(self, kernel: str) -> float:
        """What a kernel of attention reaches (see `parallel/context/plan.py`), as a share of `attention`."""
        return 1.0 if kernel == "attention" else getattr(self, kernel)


@dataclass
class HardwareConfig:
    """One kind of machine."""

    device: str = option(NEEDED, "name of a device, as torch.cuda.get_device_name() has it")
    memory: float = option(NEEDED, "memory of a device", unit="GiB", range="(0, inf)")
    bandwidth: float = option(NEEDED, "of a device's memory", unit="GB/s", range="(0, inf)")
    devices: int = option(NEEDED, "devices of a node", range="[1, inf)")
    node: LinkConfig = option(LinkConfig(), "between the devices of a node")
    network: LinkConfig = option(LinkConfig(), "between nodes, for each device")
    achieved: AchievedConfig = option(AchievedConfig(), "what is reached of the peaks")
    peak: dict[str, float] = option(
        {},
        "dense arithmetic in TFLOP/s by type (bf16, fp16, fp8, tf32, fp32), of a device that is not known by its name",
    )
    kernel: float = option(NEEDED, "what a kernel takes beside its work", unit="microseconds", range="[0, inf)")
    launch: float = option(NEEDED, "what the host takes to launch a kernel", unit="microseconds", range="[0, inf)")
    signal: float = option(
        30.0,
        "what a call of `parallel.tp_overlap=copy_engine` takes beside the bytes: flags, and streams that wait for "
        "each other; that of an H200 until it is measured",
        unit="microseconds",
        range="[0, inf)",
    )
    fixed: float = option(
        NEEDED, "memory that the allocator does not see: context, communicators", unit="GiB", range="[0, inf)"
    )
    band: float = option(NEEDED, "relative error of predicted times that is to be expected", range="[0, 1)")
    memory_band: float = option(0.05, "the same of predicted memory", range="[0, 1)")


def build_hardware(values: Mapping[str, Any]) -> HardwareConfig:
    """Plain values as hardware. Raises `ConfigError` with everything that is wrong."""
    problems: typed.Problems = {}
    complete = typed.complete_values(HardwareConfig(), dict(values))
    complete = typed.choose_written(HardwareConfig, complete, complete, problems, "hardware")
    hardware = typed.build_typed(complete, problems, HardwareConfig, "hardware")
    found = list(problems.values()) or typed.out_of_range(hardware, "hardware")
    found += [f"hardware.peak.{kind}={peak} must be above 0" for kind, peak in hardware.peak.items() if not peak > 0]
    if found:
        raise ConfigError(found)
    return hardware
