"""Runs a step again, in place, whose loss or gradient was not finite: the same again points to the data or to the
optimisation, another result to the hardware.

A step that is not finite changes nothing, so the state from which it ran is still there, if no later step has changed
it. On a GPU the host knows the numbers of a step when the next one is already under way. The gate therefore keeps every
step behind a suspicious one from changing anything, by a scalar on the device: no host waits for it, and the numbers of
ordinary steps are the same with and without it. When the host reads that a step was suspicious, it runs that step again
on the batch, which it has kept, with the same random numbers; then the steps behind it.

An fp16 step whose gradient alone overflows is ordinary: the loss scale explains it. DeepSpeed moves the loss scale
itself, so its fp16 steps are not run again. A loss that is finite and merely high is not suspicious: its update has
been made by the time that it is known, and clipping bounds it."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.data.batches import MicroBatch
from trainer.distributed.tensors import local_values
from trainer.observe.deferred import Ready
from trainer.training.state import TrainState

TOLERANCE = 1e-3
"""Relative difference of two losses of the same sequence that kernels without a fixed order of additions explain."""


@dataclass(frozen=True)
class TakenStep:
    """A step that was taken: its number, what it was taken on, and the counters of the host behind it."""

    step: int
    batches: list[MicroBatch]
    asked: int
    position: int
    tokens: int


class StepRepeats:
    """The newest steps of a run, and what became of those that were run again. All ranks keep it together."""

    def __init__(self, state: TrainState):
        self.steps: deque[TakenStep] = deque()
        self.looked_at = 0
        self.watch(state)

    def watch(self, state: TrainState) -> None:
        """Takes over a new state, between two steps."""
        self.state, self.world = state, state.world
        state.gate.active = state.scaler.can_hold

    def note(self, taken: TakenStep) -> None:
        """A step is about to be taken, for the first time or again."""
        if not self.steps or self.steps[-1].step < taken.step:
            self.steps.append(taken)

    def suspicious(self, ready: Sequence[Ready]) -> Ready | None:
        """The first of the steps that have been read back that has to be run again. The others are forgotten."""
        for one in ready:
            if one[0] > self.looked_at and self.state.gate.suspects(one[1]):
                return one
            while self.steps and self.steps[0].step <= one[0]:
                self.steps.popleft()
        return None

    def rewind(self, step: int) -> list[TakenStep]:
        """Goes back to before a suspicious step. Returns it, and the steps behind it, which have changed nothing."""
        self.looked_at, self.state.step = step, step - 1
        self.state.gate.open()
        return [taken for taken in self.steps if taken.step >= step]

    def settle(self, first: Ready, second: Ready) -> tuple[str, bool]:
        """Compares both executions of a step. Returns what they tell, for people, and whether the second result is not
        finite either."""
        step, numbers, host = first
        again = self.state.gate.suspects(second[1])
        self.state.gate.open()
        if again:  # which the gate has kept from the loss scale
            self.state.scaler.update(torch.ones_like(self.state.gate.shut))
        reports = self.world.gather(self._report(numbers, second[1], host["ids"], again))
        same = not self.state.config.run.deterministic or np.array_equal(
            numbers["squares"], second[1]["squares"], equal_nan=True
        )
        text = explain_repeat(reports, numbers, second[1], again, same)
        return f"step {step} was run again on the same batch: {text}", again

    def _report(self, first: Mapping[str, Any], second: Mapping[str, Any], ids: list[str], again: bool) -> RepeatReport:
        """What this rank has seen of both executions."""
        one, two = first["losses"], second["losses"]
        if self.state.config.run.deterministic:
            same = (one == two) | (np.isnan(one) & np.isnan(two))
        else:
            same = np.isclose(one, two, rtol=TOLERANCE, atol=0, equal_nan=True)
        broken = [
            name
            for name, parameter in (self.state.parameters.items() if again else ())
            if not torch.isfinite(local_values(parameter)).all()
        ]
        return RepeatReport(
            socket.gethostname(),
            self.world.data.get_local_rank(),
            [sample for sample, bad in zip(ids, ~np.isfinite(two)) if bad],
            [sample for sample, equal in zip(ids, same) if not equal],
            broken,
        )


@dataclass(frozen=True)
class RepeatReport:
    """What a rank has seen of a step that was run twice.

    data: its place among the ranks that see different data. samples: whose loss was not finite the second time;
    differing: whose loss was another. broken: its weights that are not finite."""

    node: str
    data: int
    samples: list[str]
    differing: list[str]
    broken: list[str]


def explain_repeat(
    reports: Sequence[RepeatReport], first: Mapping[str, Any], second: Mapping[str, Any], again: bool, same: bool
) -> str:
    """What both executions of a step tell. reports: by rank; again: whether the second is not finite either; same:
    whether both have the same gradient norms, as far as that can be expected."""
    differing = list(dict.fromkeys(sample for report in reports for sample in report.differing))
    places = {report.data for report in reports if report.differing}
    suspects = [f"rank {rank} on {report.node}" for rank, report in enumerate(reports) if report.data in places]
    result = f"loss {first['loss']:g} and gradient norm {first['grad_norm']:g} at first, {second['loss']:g} and "
    result += f"{second['grad_norm']:g} then"
    if not again or differing or not same:
        more = f" or {len(suspects) - 8} more" if len(suspects) > 8 else ""
        where = (
            f"of {' or '.join(suspects[:8])}{more}, which computed other losses for {', '.join(differing[:5])}"
            if suspects
            else "in a backward pass or a reduction of gradients; the losses are equal, and do not tell the rank"
        )
        end = "neither result is finite, and nothing is updated" if again else "the second result is taken"
        return f"{result}. Equal arithmetic gave different results: a hardware fault {where}; {end}"
    broken = [f"{report.broken[0]} on rank {rank}" for rank, report in enumerate(reports) if report.broken]
    samples = list(dict.fromkeys(sample for report in reports for sample in report.samples))
    if broken:
        cause = f"weights are not finite: {', '.join(broken[:5])}; an update diverged, or memory there is faulty"
    else:
        of = f", by its samples {', '.join(samples[:5])}" if samples else ""
        cause = f"the data or the optimisation is the cause{of}"
    return f"{result}. The result is reproducible: {cause}"
