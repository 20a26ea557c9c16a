"""How long amounts of work take on a kind of machine.

An operation takes the time of its arithmetic at the share of the peak that large operations reach, or that of its
bytes at the share of the memory's bandwidth (a smooth maximum of the two, the root of the sum of their squares), and
the fixed time of a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config import ConfigError, PrecisionConfig
from trainer.config.hardware import HardwareConfig, LinkConfig
from trainer.parallel.context.plan import KERNELS
from trainer.planning.cost.devices import peak_flops, product_type
from trainer.planning.float8_settings import float8_settings
from trainer.planning.plan import Plan


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one device. peak, products: FLOP/s; attention: the same by kernel (`context.attention_kernel`); float8:
    of those products in fp8, None if there are none; memory, optimizer, copy: bytes/s; kernel, launch: seconds of one,
    on the device and on the host; hidden: share of hidden communication that is free."""

    peak: float
    products: float
    float8: float | None
    attention: Mapping[str, float]
    memory: float
    optimizer: float
    copy: float
    kernel: float
    launch: float
    hidden: float

    @classmethod
    def of(cls, hardware: HardwareConfig, precision: PrecisionConfig) -> DeviceRates:
        """Raises `ConfigError` where the peak in the type of the products is not known."""
        kind, reached = product_type(precision), hardware.achieved
        peak, float8 = peak_of(hardware, kind, "precision.compute"), None
        if settings := float8_settings(precision):
            float8 = peak_of(hardware, "fp8", next(iter(settings))) * reached.product * reached.float8
        bandwidth, attention = hardware.bandwidth * 1e9, peak * reached.attention
        return cls(
            peak=peak,
            products=peak * reached.product,
            float8=float8,
            attention={name: attention * reached.of_attention(name) for name in KERNELS},
            memory=bandwidth * reached.memory,
            optimizer=bandwidth * reached.optimizer,
            copy=bandwidth * reached.copy,
            kernel=hardware.kernel * 1e-6,
            launch=hardware.launch * 1e-6,
            hidden=reached.hidden,
        )

    def exposed(self, communication: float, computation: float) -> float:
        """Seconds that communication adds to the computation that it runs behind."""
        behind = min(communication, computation)
        return communication - self.hidden * behind


def peak_of(hardware: HardwareConfig, kind: str, setting: str) -> float:
    """FLOP/s of a device in a type. Raises `ConfigError` where they are not known."""
    given = hardware.peak.get(kind)
    peak = given * 1e12 if given else peak_flops(hardware.device, kind)
    if peak is None:
        raise ConfigError(
            f"hardware.device={hardware.device} has no known peak in {kind}; set hardware.peak.{kind}=TFLOP/s, or "
            f"another {setting}"
        )
    return peak


@dataclass(frozen=True)
class RingTimes:
    """A group of ranks that gather and reduce. bandwidth: bytes/s into a device; latency: seconds of a step."""

    ranks: int
    bandwidth: float
    latency: float

    @classmethod
    def of(cls, hardware: HardwareConfig, plan: Plan, dimension: str) -> RingTimes:
        """The groups of a dimension of the mesh. Those that span nodes use all adapters of their ranks on a node."""
        return cls.among(hardware, plan.groups(dimension)[0])

    @classmethod
    def among(cls, hardware: HardwareConfig, ranks: list[int]) -> RingTimes:
        """The group of these global ranks."""
        size, node = len(ranks), hardware.devices
        local = sum(rank // node == ranks[0] // node for rank in ranks)
        if local == size:
            return cls(size, link_bandwidth(hardware.node), hardware.node.latency * 1e-6)
        between = min(link_bandwidth(hardware.node), local * link_bandwidth(hardware.network))
        return cls(size, between, hardware.network.latency * 1e-6)

    def seconds(self, size: float) -> float:
        """Of an all-gather or reduce-scatter whose whole tensor has `size` bytes; an all-reduce takes twice as long."""
        return (self.ranks - 1) * (self.latency + size / self.ranks / self.bandwidth)

    def transfer(self, size: float) -> float:
        """Of `size` bytes from one rank to the next."""
        return self.latency + size / self.bandwidth


def link_bandwidth(link: LinkConfig) -> float:
    """Bytes per second that large transfers reach."""
    return link.bandwidth * 1e9 * link.achieved
