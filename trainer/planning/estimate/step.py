"""One step of a plan: its seconds by term, what follows from them, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from trainer.config import Config
from trainer.config.hardware import HardwareConfig
from trainer.planning.decide import GIB, MemoryLimit, decide, decide_dispatch
from trainer.planning.documents import USUAL, DocumentLengths, are_unknown, with_documents
from trainer.planning.estimate.memory import MemoryPeak, find_peaks
from trainer.planning.estimate.rates import DeviceRates
from trainer.planning.estimate.timing import AXES, step_seconds, step_terms, time_units
from trainer.planning.layer import flops_per_token
from trainer.planning.resolve import Layout
from trainer.planning.schedules.simulate import Simulation

SHORTEST = 128.0
"""Tokens of a document at the lower end, where the lengths of documents are not known."""


class ErrorBand(NamedTuple):
    """How much less and more something may be than predicted, as shares of it."""

    below: float
    above: float

    def of(self, value: float) -> tuple[float, float]:
        """Least and most of a time or size."""
        return value * (1 - self.below), value * (1 + self.above)

    def of_speed(self, value: float) -> tuple[float, float]:
        """The same of what is done in such a time."""
        return value / (1 + self.above), value / (1 - self.below)


@dataclass(frozen=True)
class StepEstimate:
    """What a step will take. All times in seconds.

    terms: of a step, as the mean over pipeline ranks; they add up to `seconds`. hidden: communication by axis that
    computation hides. ranks: the fullest moment of each pipeline rank.
    """

    config: Config
    layout: Layout
    hardware: HardwareConfig
    terms: dict[str, float]
    hidden: dict[str, float]
    simulation: Simulation
    ranks: tuple[MemoryPeak, ...]
    peak: float

    @cached_property
    def seconds(self) -> float:
        return sum(self.terms.values())

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Of the step's seconds, those of communication, by axis. Of a pipeline: what a rank waits for transfers, those
        between other ranks too, whose results it needs."""
        return {axis: self.terms[term] for axis, term in AXES.items()}

    @cached_property
    def communication(self) -> dict[str, float]:
        """Seconds of communication by axis, exposed and hidden; of axes that have any."""
        both = {axis: seconds + self.hidden[axis] for axis, seconds in self.exposed.items()}
        return {axis: seconds for axis, seconds in both.items() if seconds}

    @cached_property
    def _ends(self) -> list[dict[str, float]]:
        """The terms with the shortest and the longest documents, where their lengths are not known."""
        if not are_unknown(self.config.data):
            return []
        length = float(self.config.batch.sequence_length)
        ends = [with_documents(self.config, DocumentLengths(one, one)) for one in (min(SHORTEST, length), length)]
        return [terms_of(one, self.layout, self.hardware) for one in ends]

    @cached_property
    def band(self) -> ErrorBand:
        """Of the step's time: that of the hardware, around all that it may be for what is not known."""
        return self._around(self.seconds, [sum(terms.values()) for terms in self._ends])

    def band_of(self, term: str) -> ErrorBand:
        """The same of one of the terms."""
        return self._around(self.terms[term], [terms[term] for terms in self._ends])

    def _around(self, value: float, others: list[float]) -> ErrorBand:
        band, every = self.hardware.band, [value, *others]
        if not value:
            return ErrorBand(band, band)
        return ErrorBand(1 - min(every) / value * (1 - band), max(every) / value * (1 + band) - 1)

    @property
    def assumptions(self) -> list[str]:
        """What is taken where something is not known, in sentences."""
        found = []
        if are_unknown(self.config.data):
            found.append(
                f"how long documents are, which are masked: {USUAL.mean:,.0f} tokens are taken in the mean, and the "
                f"band goes from {SHORTEST:.0f} to one document a sequence; set data.documents.mean"
            )
        if self.layout.plan.ep > 1:
            found.append(
                "how many tokens choose the experts of each rank: as many for all ranks are taken; the metric "
                "experts/fullest_rank of a run says how many more the fullest rank has"
            )
        return found

    @property
    def tokens_per_second(self) -> float:
        return self.layout.batch.tokens / self.seconds

    def mfu(self, causal: bool) -> float:
        """Model FLOPs over what the devices could do at their peak; attention counted over the keys that are seen, or
        over all."""
        work = flops_per_token(self.layout.spec, self.layout.batch.sequence_length, causal)
        return work * self.tokens_per_second / (self.layout.plan.world * self.peak)

    @property
    def fullest(self) -> MemoryPeak:
        return fullest_rank(self.ranks)

    @property
    def memory(self) -> float:
        """Bytes of the fullest device, with what the allocator does not see."""
        return self.fullest.reserved + self.hardware.fixed * GIB

    @property
    def fits(self) -> str:
        """`yes`, `no`, or `perhaps` where the device's memory lies within the band."""
        used, band = self.memory / (self.hardware.memory * GIB), self.hardware.memory_band
        return "no" if used > 1 + band else "perhaps" if used > 1 - band else "yes"


def most_certain(found: Sequence[StepEstimate]) -> StepEstimate:
    """Of estimates, the fastest first: the first that fits for sure, or else may fit, or else the fastest."""
    return next((one for sure in ("yes", "perhaps") for one in found if one.fits == sure), found[0])


def estimate_step(config: Config, layout: Layout, hardware: HardwareConfig) -> StepEstimate:
    """The step of a layout on a kind of machine, with what `auto` takes there for long sequences. Raises `ConfigError`
    for a device whose peak is not known."""
    node = min(layout.plan.world, hardware.devices)
    config, layout, *_ = decide(config, layout, MemoryLimit(hardware.memory * GIB, inf), node, hardware)
    found = estimate_within(inf, config, layout, hardware)
    assert found is not None  # every time is less than infinite
    return found


def estimate_within(
    seconds: float, config: Config, layout: Layout, hardware: HardwareConfig, lowered: bool = True
) -> StepEstimate | None:
    """The same of a step that takes no longer than `seconds`, or None. lowered: see `memory.find_peaks`."""
    config = decide_dispatch(config, layout, hardware)
    node, pace = min(layout.plan.world, hardware.devices), DeviceRates.of(hardware, config.precision)
    timing = time_units(config, layout, hardware)
    simulation, least = step_seconds(config, layout, timing, pace)
    if least > seconds:
        return None
    terms, hidden = step_terms(config, layout, timing, pace, simulation)
    ranks = tuple(find_peaks(config, layout, lowered, node))
    return StepEstimate(config, layout, hardware, terms, hidden, simulation, ranks, pace.peak)


def terms_of(config: Config, layout: Layout, hardware: HardwareConfig) -> dict[str, float]:
    """Seconds of a step by term."""
    timing, pace = time_units(config, layout, hardware), DeviceRates.of(hardware, config.precision)
    simulation, _ = step_seconds(config, layout, timing, pace)
    return step_terms(config, layout, timing, pace, simulation)[0]


def fullest_rank(ranks: Sequence[MemoryPeak]) -> MemoryPeak:
    return max(ranks, key=lambda peak: peak.reserved)
