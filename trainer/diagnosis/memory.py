"""The memory of a run over its steps, from its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.diagnosis.evidence import RunEvidence

POINTS = 200
"""Of a timeline, at most."""


@dataclass(frozen=True)
class MemoryUse:
    """GiB of the fullest rank. timeline: (step, peak so far as the run notes it); peak: the highest; grown: by what
    share of it the peak rose in the second half of the run; capacity: of a device, None where it is not known;
    planned: predicted for the plan, None where it is not."""

    timeline: tuple[tuple[int, float], ...]
    peak: float
    grown: float
    capacity: float | None
    planned: float | None

    @property
    def used(self) -> float | None:
        """Share of the device's memory."""
        return self.peak / self.capacity if self.capacity else None


def summarise_memory(evidence: RunEvidence, planned: float | None) -> MemoryUse | None:
    """None where nothing is known of it. planned: predicted peak in GiB."""
    points = [
        (int(record["step"]), float(record["memory_gib"]))
        for record in evidence.records
        if record.get("memory_gib") is not None
    ]
    if not points:
        return None
    peak = max(used for _, used in points)
    half = [used for _, used in points[: max(1, len(points) // 2)]]
    grown = (peak - max(half)) / peak if peak > 0 and len(points) > 1 else 0.0
    stride = -(-len(points) // POINTS)
    capacity = evidence.hardware.memory if evidence.hardware else None
    return MemoryUse(tuple(points[::stride]), peak, grown, capacity, planned)
