"""How a run's samples are spread over its sources, and how that changes while the run goes on.

A run draws sample number g from one of its sources. A mixture is a list of phases. Within a phase, sources alternate in
a fixed pattern that keeps to their weights. At the start of a phase every source continues at its next sequence. A new
phase begins where a stage of the configuration does (`data.stages`), where a source reaches its limit
(`max_tokens`, `max_epochs`), and where a resumed run has other weights than before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

PERIOD = 1 << 16
"""Samples after which the pattern of a phase repeats; shares are multiples of one over this."""


def source_shares(weights: list[float]) -> np.ndarray:
    """Samples of each source in a period, int64: by weight, rounded by largest remainder, at least one."""
    exact = np.asarray(weights, np.float64) / sum(weights) * (PERIOD - len(weights))
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: PERIOD - len(weights) - counts.sum()]] += 1
    return counts + 1


def interleave_sources(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By slot of a period, int64: its source (evenly spread), and how many slots before it have the same source."""
    source = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    slots = np.argsort((rank + 0.5) / counts[source], kind="stable")
    return source[slots], rank[slots]


@dataclass(frozen=True)
class MixturePhase:
    """The samples of the run from number `start` on. shares: how many samples of a period each source has, by name,
    sorted; their sum is `PERIOD`."""

    start: int
    shares: dict[str, int]

    @cached_property
    def counts(self) -> np.ndarray:
        """The shares, int64 [sources]."""
        return np.array([*self.shares.values()], np.int64)

    @cached_property
    def slots(self) -> tuple[np.ndarray, np.ndarray]:
        """See `interleave_sources`."""
        return interleave_sources(self.counts)

    @cached_property
    def slots_of(self) -> dict[str, np.ndarray]:
        """The slots of each source, by name."""
        return {name: np.flatnonzero(self.slots[0] == place) for place, name in enumerate(self.shares)}

    def describe(self) -> str:
        """The share of each source, for people."""
        return ", ".join(f"{name} {share / PERIOD:.1%}" for name, share in self.shares.items())

    def count(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` samples of the phase each source has."""
        periods, rest = divmod(samples, PERIOD)
        return {
            name: periods * self.shares[name] + int(np.searchsorted(slots, rest))
            for name, slots in self.slots_of.items()
        }

    def find(self, source: str, number: int) -> int:
        """The sample of the run that is the source's sample `number`, counted from the phase's start."""
        periods, rank = divmod(number, self.shares[source])
        return self.start + periods * PERIOD + int(self.slots_of[source][rank])


class MixtureStage(NamedTuple):
    """Weights of sources, by name, from sample `start` of the run on; sources that are not named have none."""

    start: int
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Mixture:
    """The phases of a run, by their starts, the first of which is 0. end: the sample number at which every source that
    has a weight has reached its limit, so that there are no more samples; None if there is no end."""

    phases: tuple[MixturePhase, ...]
    end: int | None = None

    @classmethod
    def plan(
        cls,
        stages: Iterable[MixtureStage],
        limits: Mapping[str, int],
        history: Mixture | None = None,
        position: int = 0,
    ) -> Mixture:
        """The mixture that the stages make, of which the first starts at 0. limits: the most samples of a source over
        the run, by name.

        history, position: what the samples before number `position` were drawn by. They count for the limits, and
        every source continues where it stood."""
        phases = [phase for phase in history.phases if phase.start < position] if history else []
        used = Mixture(tuple(phases)).consumed(position)
        stages = sorted(stages)
        for stage, end in zip(stages, [*(stage.start for stage in stages[1:]), math.inf]):
            current: float = max(stage.start, position)
            while current < end:
                left = {
                    name: limits.get(name, math.inf) - used.get(name, 0)
                    for name, weight in sorted(stage.weights.items())
                    if weight > 0
                }
                left = {name: count for name, count in left.items() if count > 0}
                if not left:
                    return cls(tuple(phases), int(current))
                counts = source_shares([stage.weights[name] for name in left])
                phase = MixturePhase(int(current), dict(zip(left, counts.tolist())))
                if phases and phases[-1].shares == phase.shares:
                    # The pattern goes on, so that a resumed run draws what it would have drawn without a stop.
                    phase = phases.pop()
                    before = phase.count(int(current) - phase.start)
                    left = {name: count + before[name] for name, count in left.items()}
                ends = [phase.find(name, int(count) - 1) + 1 for name, count in left.items() if count < math.inf]
                phases.append(phase)
                stop = min(end, *ends) if ends else end
                if stop < math.inf:
                    for name, count in Mixture((phase,)).consumed(int(stop), int(current)).items():
                        used[name] = used.get(name, 0) + count
                current = stop
        return cls(tuple(phases))

    def consumed(self, position: int, since: int = 0) -> dict[str, int]:
        """How many of the samples `since` to `position` (exclusive) each source has, by name."""
        total: dict[str, int] = {}
        for number, phase in enumerate(self.phases):
            end = self.phases[number + 1].start if number + 1 < len(self.phases) else position
            first, last = max(since, phase.start), min(end, position)
            if first < last:
                before = phase.count(first - phase.start)
                for name, count in phase.count(last - phase.start).items():
                    total[name] = total.get(name, 0) + count - before[name]
        return total

    def locate(self, numbers: np.ndarray, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """numbers: samples of the run, int64 [n]. Returns the place of each one's source in `names`, and how many
        samples that source has before, both int64 [n]. Raises `KeyError` for samples of a source that `names`
        lacks."""
        found = np.searchsorted([phase.start for phase in self.phases], numbers, "right") - 1
        sources, indices = np.empty_like(numbers), np.empty_like(numbers)
        for number in np.unique(found).tolist():
            phase, mine = self.phases[number], found == number
            places = {name: place for place, name in enumerate(names)}
            here, before = np.array([places[name] for name in phase.shares]), self._before[number]
            period, slot = np.divmod(numbers[mine] - phase.start, PERIOD)
            source = phase.slots[0][slot]
            indices[mine] = before[source] + period * phase.counts[source] + phase.slots[1][slot]
            sources[mine] = here[source]
        return sources, indices

    @cached_property
    def _before(self) -> list[np.ndarray]:
        """Of each phase, the samples that its sources have before it."""
        found = [self.consumed(phase.start) for phase in self.phases]
        return [np.array([one.get(name, 0) for name in phase.shares]) for one, phase in zip(found, self.phases)]

    def to_json(self) -> list[list[Any]]:
        """The phases, for a checkpoint. The end is left out: it follows from the limits of the run that resumes."""
        return [[phase.start, phase.shares] for phase in self.phases]

    @classmethod
    def parse(cls, value: Any) -> Mixture:
        """The inverse of `to_json`. Raises `ValueError` for what it cannot have written."""
        phases = []
        for entry in value if isinstance(value, list) else [None]:
            if not (
                isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and isinstance(entry[1], dict)
            ):
                raise ValueError("is no list of phases")
            start, shares = entry
            if start < 0 or start >= 2**62 or start <= (phases[-1].start if phases else -1):
                raise ValueError("has phases in no rising order")
            if not all(type(count) is int and count > 0 for count in shares.values()) or sum(shares.values()) != PERIOD:
                raise ValueError(f"has shares that do not add up to {PERIOD}")
            phases.append(MixturePhase(start, dict(sorted(shares.items()))))
        if not phases or phases[0].start:
            raise ValueError("does not begin at sample 0")
        return cls(tuple(phases))
