"""Memory of one rank in the course of a step: what its replay holds in each action, on the simulation's clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trainer.planning.estimate.memory import MemoryPeak, MemoryReplay, ModelBytes, programs_of
from trainer.planning.estimate.step import StepEstimate
from trainer.planning.schedules.ir import COMPUTE


class Segment(NamedTuple):
    """Bytes by category between two moments of the step, in seconds from its start."""

    start: float
    end: float
    categories: Mapping[str, float]


class _RecordedReplay(MemoryReplay):
    """A replay that keeps, of each action, what is held before it and at its fullest moment."""

    def peak(self) -> MemoryPeak:
        self.before: list[dict[str, float]] = []
        self.fullest: list[dict[str, float]] = []
        return super().peak()

    def look(
        self, unit: str, working: float = 0.0, gradients: float = 0.0, buffers: float = 0.0, gathered: float = 0.0
    ) -> None:
        super().look(unit, working, gradients, buffers, gathered)
        now = self.moment((working, gradients, buffers, gathered))
        if unit == "start":
            self.before.append(dict(self.held))
            self.fullest.append(now)
        elif sum(now.values()) > sum(self.fullest[-1].values()):
            self.fullest[-1] = now


def build_memory_timeline(found: StepEstimate) -> list[Segment]:
    """The step of the fullest rank from its start to its end: waiting with what is held, and computing with the most
    that is held meanwhile. The fullest stretch is the rank's peak."""
    rank, layout = found.fullest.rank, found.layout
    program = programs_of(layout.pipeline.schedule)[rank]
    replay = _RecordedReplay(
        ModelBytes(found.config, layout, min(layout.plan.world, found.hardware.devices)), rank, program
    )
    replay.peak()
    spans, now, stretches = iter(found.simulation.spans[rank]), 0.0, []
    for action, before, fullest in zip(program, replay.before, replay.fullest, strict=True):
        if action.kind in COMPUTE:
            span = next(spans)
            assert span.action == action, (span.action, action)
            stretches += [Segment(now, span.start, before)] * (span.start > now)
            stretches.append(Segment(span.start, span.end, fullest))
            now = span.end
    return [*stretches, Segment(now, found.seconds, dict(replay.held))]
