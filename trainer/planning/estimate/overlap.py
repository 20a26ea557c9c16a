"""Seconds of tensor-parallel products together with their collectives, by each way of `parallel.tp_overlap`.

A way here is what the class of that name in `distributed/` does: which parts travel while which are multiplied. With r
the collective's time over the product's, hiding makes a product at most (1 + r) / max(1, r) times as fast; what is left
open at the ends follows from the order of the parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainer.planning.cost.layers import LayerWork

GATHERED, SENT = (1.135, 20e-6), (1.07, 130e-6)
"""Triton: times of its products over cuBLAS's, and seconds that each takes besides, where input is gathered and where
results are sent. Fitted to eight products on two H200, four of each: right within 6%
(bench/results/2026-11-tensor-parallel-h200-h100.md)."""


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


class TritonOverlap(CopyEngineOverlap):
    """The same in kernels, which copy while they multiply, slower; weights' gradients are cuBLAS's products. What a
    call takes besides, sums too, is in the constants of the products."""

    def __init__(self, link: TensorGroupLink):
        super().__init__(replace(link, call=0.0, adding=0.0))

    def gathered(self, product: float) -> OverlapTime:
        return super().gathered(GATHERED[0] * product + GATHERED[1])

    def reduced(self, product: float) -> OverlapTime:
        return super().reduced(SENT[0] * product + SENT[1])

    def columns(self, to_input: float, to_weights: float) -> OverlapTime:
        sent = self.reduced(to_input)
        return OverlapTime(sent.products + to_weights, sent.exposed + self.behind(sent.products))


OVERLAP_MODELS: dict[str, type[CollectiveOverlap]] = {
    "off": CollectiveOverlap,
    "copy_engine": CopyEngineOverlap,
    "triton": TritonOverlap,
}
"""By the value of `parallel.tp_overlap`."""


class LayerPasses(NamedTuple):
    """What all products of a layer take in each pass, and in backward those that are repeated. moved: seconds of all
    communication, exposed or hidden."""

    forward: OverlapTime
    backward: OverlapTime
    again: OverlapTime
    moved: float


def layer_passes(
    way: CollectiveOverlap,
    work: LayerWork,
    products: Mapping[str, float],
    for_weights: Mapping[str, float],
    again: Mapping[str, float],
    apart: bool,
) -> LayerPasses:
    """products, for_weights: seconds of each projection's product forward, which that for its input's gradient takes
    too, and of that for its weight's gradient; again: which are repeated, and what share of each; apart: whether
    weights' gradients have a pass of their own, behind whose products their factors are gathered."""
    forward, backward, repeated = [], [], []
    for names in work.gathers:
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
    for name in work.reduces:
        product, to_weight, share = products[name], for_weights[name], again.get(name, 0.0)
        took = way.reduced(product)
        forward.append(took)
        backward += (
            [way.gathered(product), hidden_behind_gemm(way, to_weight)] if apart else [way.rows(product, to_weight)]
        )
        repeated.append(OverlapTime(share * took.products, share * took.exposed))
    calls = len(forward) + 2 * len(work.gathers) + len(work.reduces) * (1 + apart)
    calls += sum(took.products > 0 for took in repeated)
    return LayerPasses(sum_times(forward), sum_times(backward), sum_times(repeated), calls * way.moving)


def hidden_behind_gemm(way: CollectiveOverlap, product: float) -> OverlapTime:
    return OverlapTime(product, way.behind(product))


def sum_times(parts: Iterable[OverlapTime]) -> OverlapTime:
    return OverlapTime(*map(sum, zip(OverlapTime(0.0), *parts)))
