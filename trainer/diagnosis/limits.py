"""The numbers of the rules by which a diagnosis is made, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.fields import option


@dataclass(frozen=True)
class Thresholds:
    """From which share of the step on a cost is said to bound the run, and other numbers of the rules."""

    data: float = option(0.05, "waiting for the batch, of the step")
    straggler: float = option(0.05, "what the step would win if the slow rank were as fast as its peers")
    slower: float = option(1.10, "a slow rank's own work, as a multiple of the lower median of ranks with equal work")
    steadily: float = option(0.60, "share of the profiled steps in which that rank is the slowest of its peers")
    turns: float = option(0.20, "waiting that even the rank has which waits least: ranks are late in turns")
    host: float = option(0.10, "a device without work because of its host, of the step")
    host_on_cpus: float = option(0.25, "the same of CPUs, which have no queue: all between two operators is the host's")
    communication: float = option(0.15, "transfers that nothing hides, without waiting for peers, of the step")
    bubble: float = option(0.10, "waiting of pipeline ranks for each other, of the step")
    checkpoint: float = option(0.05, "saving, of the step on average")
    evaluation: float = option(0.10, "evaluating, of the step on average")
    full: float = option(0.92, "memory at the peak, of a device's or of a machine's")
    recompute: float = option(0.15, "recompute and copies to host memory, of the computation")
    memory_bound: float = option(0.35, "kernels that the memory's bandwidth bounds, of the computation")
    compute: float = option(0.60, "matrix products and attention, of the step")
    spoken_of: float = option(0.01, "any cost, of the step: what is below is not spoken of")


THRESHOLDS = Thresholds()
