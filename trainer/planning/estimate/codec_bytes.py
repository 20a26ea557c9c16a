"""Quantised gradients in predictions: bytes on their way, and what encoding takes."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import Config
from trainer.parallel.compress.plan import enabled_codecs, reduction_routes
from trainer.planning.plan import Plan

CODE_BYTES = {"bf16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
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
        return elements * (PLAIN * (1 + (self.codec != "bf16")) + self.width) if self.codec else 0.0

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
