"""List scheduling: builds a schedule by letting every rank, whenever it is free, start the best action that is ready.

A weight gradient (W) needs only its own input gradient (I), and no action waits for it. So W fill the gaps, and run
earlier only where the memory cap delays the next forward. This alone turns an order of F and I into a zero-bubble
schedule (Qi et al. 2024, arXiv 2401.10241, section 3)."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import accumulate

from trainer.config import ConfigError
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.ir import Action, Schedule

Line = list[Action]
"""Forwards and backwards (I or B) of one rank, in order."""


def least_cap(costs: StageCosts, placement: tuple[int, ...], split: bool = True) -> float:
    """The least cap that lets every rank run: the activation of one micro-batch, and what an I adds by recomputing."""
    return max(
        sum(activation for activation, owner in zip(costs.activation, placement) if owner == rank) + growth
        for rank, growth in enumerate(_growth(costs, placement, split))
    )


def fits_cap(lines: list[Line], costs: StageCosts, placement: tuple[int, ...], cap: float | None) -> bool:
    """Whether the lines hold no more activation than the cap if every W directly follows its I."""
    if cap is None:
        return True
    growth = _growth(costs, placement, any(action.kind == "I" for line in lines for action in line))
    held = ([costs.activation[action.stage] * (1 if action.kind == "F" else -1) for action in line] for line in lines)
    return all(total + growth[rank] <= cap * (1 + 1e-9) for rank, line in enumerate(held) for total in accumulate(line))


def _growth(costs: StageCosts, placement: tuple[int, ...], split: bool) -> list[float]:
    """By rank, the most by which an I increases what is held.

    It does where it recomputes: then it leaves more for its W than its F has left for it."""
    share = max(0.0, costs.kept - 1) if split else 0.0
    return [
        max(share * activation for activation, owner in zip(costs.activation, placement) if owner == rank)
        for rank in range(max(placement) + 1)
    ]


def list_schedule(
    name: str,
    costs: StageCosts,
    placement: tuple[int, ...],
    microbatches: int,
    *,
    cap: float | None = None,
    split: bool = True,
    patience: float = 0.0,
    lines: list[Line] | None = None,
    trains: bool = True,
) -> tuple[Schedule, float]:
    """The schedule and the seconds it takes on `costs`.

    A free rank prefers a backward (the earliest micro-batch), then a forward (the latest stage), then the oldest W.
    cap: the most activation a rank may hold, in the unit of `costs.activation`. Room for one whole micro-batch is kept
    free, so that no rank waits for ever; a cap below `least_cap` raises `ConfigError`. split: False for full backwards
    (B) instead of I and W. patience: a W does not start if an F or I is due within this share of the W's duration.
    lines: by rank, its F and I (or B) in the order to keep, so that only W are placed; they must fit the cap if every W
    directly follows its I. trains: False for forwards only."""
    return _ListScheduler(costs, placement, microbatches, cap, split, patience, lines, trains).run(name)


class _ListScheduler:
    def __init__(
        self,
        costs: StageCosts,
        placement: tuple[int, ...],
        microbatches: int,
        cap: float | None,
        split: bool,
        patience: float,
        lines: list[Line] | None,
        trains: bool,
    ):
        ranks, stages = max(placement) + 1, len(placement)
        self.costs, self.placement, self.microbatches, self.trains = costs, placement, microbatches, trains
        self.split, self.patience, self.lines = split, patience, lines
        self.own = [[stage for stage in range(stages) if placement[stage] == rank] for rank in range(ranks)]
        self.share = [sum(costs.activation[stage] for stage in own) for own in self.own]
        self.growth = _growth(costs, placement, split)
        self.cap = None if cap is None or not trains else cap * (1 + 1e-9)
        if self.cap is not None and self.cap < (least := least_cap(costs, placement, split)):
            raise ConfigError(
                f"a cap of {cap:g} on a rank's activations is below the {least:g} that one micro-batch takes; legal: "
                f"{least:g} or more"
            )
        self.tolerance = 1e-9 * max(*costs.f, *costs.i, *costs.w, *costs.b)
        # By stage, when the inputs of the next micro-batches arrive; stages take micro-batches in order.
        self.forward_due = [deque([0.0] * microbatches if stage == 0 else []) for stage in range(stages)]
        self.backward_due = [deque[float]() for _ in range(stages)]
        self.forwards, self.backwards = [0] * stages, [0] * stages
        self.weights_due = [deque[tuple[int, int]]() for _ in range(ranks)]
        self.held, self.free, self.links = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        self.taken = [0] * ranks
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]

    def run(self, name: str) -> tuple[Schedule, float]:
        # A rank looks for work when its action ends and when an input arrives: at no other time can it start anything
        # new.
        self.events = [(0.0, rank) for rank in range(len(self.own))]
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.free[rank] and (action := self._choose(rank, now)):
                self.free[rank] = now + self.costs.host + self._start(action, rank, now + self.costs.host)
                heappush(self.events, (self.free[rank], rank))
        expected = len(self.placement) * self.microbatches * ((3 if self.split else 2) if self.trains else 1)
        if sum(map(len, self.orders)) != expected:
            raise ValueError(
                f"{name}: the given lines of F and I cannot be kept within a cap of {self.cap} activations"
            )
        return Schedule(name, tuple(map(tuple, self.orders)), self.placement, self.microbatches), max(self.free)

    def _choose(self, rank: int, now: float) -> Action | None:
        """What the rank starts now, or None to wait."""
        soon = now + self.tolerance
        options = self._next(rank)
        arrived = [action for due, action in options if due <= soon]
        ready = [action for action in arrived if self._fits(action, rank)]
        if backwards := [action for action in ready if action.kind != "F"]:
            return min(backwards, key=lambda action: (action.microbatch, -action.stage))
        if ready:
            return max(ready, key=lambda action: action.stage)
        if not self.weights_due[rank]:
            return None
        stage, microbatch = self.weights_due[rank][0]
        # If an action has arrived and does not fit the cap, only a W makes room for it: waiting would not help.
        if not arrived and any(due < now + self.patience * self.costs.w[stage] for due, _ in options):
            return None
        return Action(stage, "W", microbatch)

    def _next(self, rank: int) -> list[tuple[float, Action]]:
        """The next F and I (or B) whose input has arrived or is on its way, each with the time of arrival."""
        backward = "I" if self.split else "B"
        if self.lines is not None:
            if self.taken[rank] == len(self.lines[rank]):
                return []
            action = self.lines[rank][self.taken[rank]]
            due = (self.forward_due if action.kind == "F" else self.backward_due)[action.stage]
            return [(due[0], action)] if due else []
        return [
            (due[action.stage][0], action)
            for due, kind, count in (
                (self.forward_due, "F", self.forwards),
                (self.backward_due, backward, self.backwards),
            )
            for stage in self.own[rank]
            if due[stage]
            for action in [Action(stage, kind, count[stage])]
        ]

    def _fits(self, action: Action, rank: int) -> bool:
        """Whether an F or I leaves room to finish all that has started.

        Room for the growth in an I is always kept free. A micro-batch that has not reached the rank's last stage still
        needs room for its other stages there. Micro-batches are finished in order, and each frees its room for the
        next. So it is enough if the first of them fits beside what the later ones hold already."""
        stage, activation = action.stage, self.costs.activation
        if self.cap is None or action.kind == "B":
            return True
        if action.kind == "I":
            return self.held[rank] + activation[stage] * (self.costs.kept - 1) <= self.cap
        room = self.cap - self.growth[rank]
        if self.held[rank] + activation[stage] > room:
            return False
        if self.lines is not None:
            return True
        started = {own: self.forwards[own] + (own == stage) for own in self.own[rank]}
        first = started[self.own[rank][-1]]
        later = sum(activation[own] * max(0, count - first - 1) for own, count in started.items())
        return first == self.microbatches or self.share[rank] + later <= room

    def _start(self, action: Action, rank: int, start: float) -> float:
        """Appends an action to the rank's order and announces its result to the next rank. Returns its duration."""
        self.orders[rank].append(action)
        stage, costs = action.stage, self.costs
        if action.kind == "W":
            self.weights_due[rank].popleft()
            self.held[rank] -= costs.activation[stage] * costs.kept
            return costs.w[stage]
        self.taken[rank] += 1
        if action.kind == "F":
            self.forwards[stage] += 1
            self.forward_due[stage].popleft()
            self.held[rank] += costs.activation[stage]
            if stage < len(self.placement) - 1:
                self._announce(self.forward_due, stage + 1, rank, start + costs.f[stage])
            elif self.trains:
                self._announce(self.backward_due, stage, rank, start + costs.f[stage])
            return costs.f[stage]
        self.backwards[stage] += 1
        self.backward_due[stage].popleft()
        seconds = costs.i[stage] if action.kind == "I" else costs.b[stage]
        self.held[rank] += costs.activation[stage] * (costs.kept - 1 if action.kind == "I" else -1)
        if action.kind == "I":
            self.weights_due[rank].append((stage, action.microbatch))  # type: ignore[arg-type]  # what computes has one
        if stage > 0:
            self._announce(self.backward_due, stage - 1, rank, start + seconds)
        return seconds

    def _announce(self, dues: list[deque[float]], stage: int, rank: int, end: float) -> None:
        owner, due = self.placement[stage], end
        if owner != rank:
            leaves = max(end, self.links[rank])
            self.links[rank], due = leaves + self.costs.occupied, leaves + self.costs.transfer
        dues[stage].append(due)
        heappush(self.events, (due, owner))
