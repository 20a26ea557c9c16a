"""How long computation, collectives and their overlap take on a kind of machine.

An operation takes the time of its arithmetic at the share of the peak that large operations reach, or that of its
bytes at the share of the memory's bandwidth (a smooth maximum of the two, the root of the sum of their squares), and
the fixed time of a kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainer.config import Config, ConfigError, PrecisionConfig
from trainer.config.hardware import HardwareConfig, LinkConfig
from trainer.parallel.compress.plan import enabled_codecs, reduction_routes
from trainer.parallel.context.plan import KERNELS
from trainer.planning.hardware import peak_flops, product_type
from trainer.planning.layer import Program
from trainer.planning.parameters import float8_settings
from trainer.planning.plan import Plan

# Quantised gradients in predictions: bytes on their way, and what encoding takes.


CODE_BYTES = {"int8": 1.0, "int4": 0.5}
"""Of an element of quantised gradients, less the scales."""

PLAIN = 4
"""Bytes of an element before it is encoded, and of sums."""


@dataclass(frozen=True)
class WireFormat:
    """How gradients travel over a route of `ranks`. width: bytes of an element on its slowest hop; codec: there."""

    ranks: int
    width: float
    codec: str

    def encoding(self, elements: float) -> float:
        """Bytes that move in memory to encode so many elements: read for their scales, read again, and written."""
        return elements * (2 * PLAIN + self.width) if self.codec else 0.0

    def decoding(self, elements: float, sums: float) -> float:
        """The same to decode elements into fewer sums."""
        return elements * self.width + sums * PLAIN if self.codec else 0.0

    def scatter(self, elements: float) -> float:
        """Bytes that coding moves in a reduce-scatter of elements on each rank."""
        return self.encoding(elements) + self.decoding(elements, elements / self.ranks)

    def reduce(self, elements: float) -> float:
        """The same in an all-reduce, whose sums are encoded once more."""
        return self.scatter(elements) + self.encoding(elements / self.ranks) + self.decoding(elements, elements)


def wire_formats(config: Config, plan: Plan, node: int, plain: float) -> tuple[WireFormat, WireFormat]:
    """Of the reduce-scatter among ranks that share states, and of the all-reduce among replicas. plain: bytes of an
    element that is not encoded."""
    settings, sizes = config.parallel.grad_comm, (plan.shard, plan.replicate)
    if not enabled_codecs(settings):
        return WireFormat(sizes[0], plain, ""), WireFormat(sizes[1], plain, "")
    found = []
    for route, ranks in zip(reduction_routes(plan, node), sizes):
        codec = getattr(settings, route.hops[-1][0]).codec if route else "none"
        known = codec in CODE_BYTES
        found.append(WireFormat(ranks, CODE_BYTES[codec] if known else plain, codec if known else ""))
    return found[0], found[1]


# Seconds of tensor-parallel products together with their collectives, by each way of `parallel.tp_overlap`. A way
# here is what the class of that name in `distributed/` does: which parts travel while which are multiplied. With r
# the collective's time over the product's, hiding makes a product at most (1 + r) / max(1, r) times as fast; what is
# left open at the ends follows from the order of the parts.


class OverlapTime(NamedTuple):
    """Seconds of products, and what communication adds to them."""

    products: float
    exposed: float = 0.0


@dataclass(frozen=True)
class TensorGroupLink:
    """What a tensor group communicates by. ranks: of the group; collective, copied: seconds of a gather, or of a
    reduction, of a micro-batch's hidden states, by collectives and by copies; call: what copies take in a call beside
    their bytes; adding: to add up what all have sent; hidden: share of hidden communication that is free."""

    ranks: int
    collective: float
    copied: float
    call: float
    adding: float
    hidden: float

    def arriving(self, product: float) -> float:
        """Until a product has ended that begins with the rank's own tokens and goes on with parts as they arrive."""
        end = product / self.ranks
        for number in range(1, self.ranks):
            end = max(end, number * self.copied / (self.ranks - 1)) + product / self.ranks
        return self.beside(product + self.copied, end)

    def leaving(self, product: float, free: float = 0.0) -> float:
        """Until the last part has arrived of a product that ends with the rank's own tokens, and sends each other part
        as it is ready. free: when the link is."""
        for number in range(1, self.ranks):
            free = max(free, number * product / self.ranks) + self.copied / (self.ranks - 1)
        return max(product, free)

    def beside(self, alone: float, end: float) -> float:
        """When products and copies end that would end at `end` if all that is hidden were free, and at `alone` one
        after the other."""
        return alone - self.hidden * (alone - end)


class CollectiveOverlap:
    """A collective before or behind each product, and in backward two of three behind other products."""

    def __init__(self, link: TensorGroupLink):
        self.link = link
        self.moving = link.collective  # seconds of one gather or reduction, exposed or hidden

    def gathered(self, product: float) -> OverlapTime:
        """Products of one gathered input, forward."""
        return OverlapTime(product, self.link.collective)

    def reduced(self, product: float) -> OverlapTime:
        """A product whose result is reduced, forward."""
        return OverlapTime(product, self.link.collective)

    def columns(self, to_input: float, to_weights: float) -> OverlapTime:
        """Backward of products of one gathered input: it is gathered again behind the product for the input's gradient,
        and that is reduced behind the weights' gradients."""
        return OverlapTime(to_input + to_weights, self.behind(to_input) + self.behind(to_weights))

    def rows(self, to_input: float, to_weight: float) -> OverlapTime:
        """Backward of a product whose result is reduced, and its gradient gathered therefore."""
        return OverlapTime(to_input + to_weight, self.link.collective)

    def behind(self, product: float) -> float:
        """What is left open of a collective behind a product."""
        return self.link.collective - self.link.hidden * min(self.link.collective, product)


class CopyEngineOverlap(CollectiveOverlap):
    """Copies beside cuBLAS's products."""

    def __init__(self, link: TensorGroupLink):
        super().__init__(link)
        self.moving = link.copied

    def gathered(self, product: float) -> OverlapTime:
        return OverlapTime(product, self.link.call + self.link.arriving(product) - product)

    def reduced(self, product: float) -> OverlapTime:
        link = self.link
        end = link.beside(product + link.copied, link.leaving(product))
        return OverlapTime(product, link.call + link.adding + end - product)

    def columns(self, to_input: float, to_weights: float) -> OverlapTime:
        """The input travels first, then parts of its gradient; weights' gradients need all of the input."""
        link, products = self.link, to_input + to_weights
        end = max(max(link.copied, to_input) + to_weights, link.leaving(to_input, link.copied))
        end = link.beside(products + 2 * link.copied, end)
        return OverlapTime(products, 2 * link.call + link.adding + end - products)

    def rows(self, to_input: float, to_weight: float) -> OverlapTime:
        took = self.gathered(to_input)
        return took._replace(products=took.products + to_weight)


OVERLAP_MODELS: dict[str, type[CollectiveOverlap]] = {"off": CollectiveOverlap, "copy_engine": CopyEngineOverlap}
"""By the value of `parallel.tp_overlap`."""


class LayerPasses(NamedTuple):
    """What all products of a layer take in each pass, and in backward those that are repeated. moved: seconds of all
    communication, exposed or hidden."""

    forward: OverlapTime
    backward: OverlapTime
    again: OverlapTime
    moved: float


def layer_passes(
    way_of: Callable[[float], CollectiveOverlap],
    program: Program,
    products: Mapping[str, float],
    for_weights: Mapping[str, float],
    again: Mapping[str, float],
    apart: bool,
) -> LayerPasses:
    """way_of: how collectives run, by the bytes that they send of a token. products, for_weights: seconds of each
    projection's product forward, which that for its input's gradient takes too, and of that for its weight's gradient;
    again: which are repeated, and what share of each; apart: whether weights' gradients have a pass of their own,
    behind whose products their factors are gathered."""
    forward, backward, repeated, moved = [], [], [], 0.0
    alone = {*program.gemms}  # products without a collective
    for op in program.gathers:
        way, names = way_of(op.sends), op.gemms
        to_input, to_weights = (sum(seconds[name] for name in names) for seconds in (products, for_weights))
        forward.append(way.gathered(to_input))
        backward += (
            [way.reduced(to_input), hidden_behind_gemm(way, to_weights)]
            if apart
            else [way.columns(to_input, to_weights)]
        )
        if share := max(again.get(name, 0.0) for name in names):
            took = way.gathered(sum(again.get(name, 0.0) / share * products[name] for name in names))
            repeated.append(OverlapTime(share * took.products, share * took.exposed))
        moved += (3 + bool(share)) * way.moving
        alone -= {*names}
    for op in program.scatters:
        way, (name,) = way_of(op.sends), op.gemms
        # The only GEMM of a block is that of its gather too, and counted there.
        product, to_weight = (seconds[name] * (name in alone) for seconds in (products, for_weights))
        share = again.get(name, 0.0)
        took = way.reduced(product)
        forward.append(took)
        backward += (
            [way.gathered(product), hidden_behind_gemm(way, to_weight)] if apart else [way.rows(product, to_weight)]
        )
        repeated.append(OverlapTime(share * took.products, share * took.exposed))
        moved += (2 + apart + bool(share)) * way.moving
        alone.discard(name)
    for name in sorted(alone):
        forward.append(OverlapTime(products[name]))
        backward.append(OverlapTime(products[name] + for_weights[name]))
        repeated.append(OverlapTime(again.get(name, 0.0) * products[name]))
    return LayerPasses(sum_times(forward), sum_times(backward), sum_times(repeated), moved)


def hidden_behind_gemm(way: CollectiveOverlap, product: float) -> OverlapTime:
    return OverlapTime(product, way.behind(product))


def sum_times(parts: Iterable[OverlapTime]) -> OverlapTime:
    return OverlapTime(*map(sum, zip(OverlapTime(0.0), *parts)))


# What a device and its links sustain.


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one device. peak, products: FLOP/s; wide: of products in fp32; attention: the same by kernel
    (`context.attention_kernel`); float8: of those products in fp8, None if there are none; memory, optimizer, copy:
    bytes/s; kernel, launch: seconds of one, on the device and on the host; hidden: share of hidden communication that
    is free."""

    peak: float
    products: float
    wide: float
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
        wide = known_peak(hardware, product_type(replace(precision, compute="fp32"))) or peak
        return cls(
            peak=peak,
            products=peak * reached.product,
            wide=wide * reached.product,
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
    peak = known_peak(hardware, kind)
    if peak is None:
        raise ConfigError(
            f"hardware.device={hardware.device} has no known peak in {kind}; set hardware.peak.{kind}=TFLOP/s, or "
            f"another {setting}"
        )
    return peak


def known_peak(hardware: HardwareConfig, kind: str) -> float | None:
    """FLOP/s of a device in a type, or None."""
    given = hardware.peak.get(kind)
    return given * 1e12 if given else peak_flops(hardware.device, kind)


@dataclass(frozen=True)
class RingTimes:
    """A group of ranks that gather and reduce. bandwidth: bytes/s into a device; latency: seconds of a step."""

    ranks: int
    bandwidth: float
    latency: float

    @classmethod
    def of(cls, hardware: HardwareConfig, plan: Plan, dimension: str) -> RingTimes:
        """The groups of a dimension of the mesh. Those that span nodes use all adapters of their ranks on a node."""
        return cls.among(hardware, plan.first_group(dimension))

    @classmethod
    def among(cls, hardware: HardwareConfig, ranks: Sequence[int]) -> RingTimes:
        """The group of these global ranks, in ascending order."""
        size, node = len(ranks), hardware.devices
        local = bisect_left(ranks, (ranks[0] // node + 1) * node)
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
