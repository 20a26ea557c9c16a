"""Whether a schedule computes everything once, in a possible order, within a memory cap, and without deadlock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from trainer.planning.schedules.ir import COMPUTE, MAX_PROBLEMS, Action, Schedule, split_overlaps
from trainer.planning.schedules.lower import find_blocked_ranks, lower_all


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """By rank, the peak of activations held, each from its F to its B or W.

    The unit is the activations of one micro-batch in all k stages of the rank; those of one stage count 1/k."""
    return tuple(
        max(held, default=0) / max(1, schedule.placement.count(rank))
        for rank, order in enumerate(schedule.orders)
        for held in [[count for _, _, count in _activation_counts(order)]]
    )


def _activation_counts(order: tuple[Action, ...]) -> Iterator[tuple[int, Action, int]]:
    """After each action: its index in the order, the action, and how many stage activations are then held."""
    count = 0
    for index, whole in enumerate(order):
        for action in split_overlaps([whole]):
            count += {"F": 1, "I": 0, "W": -1, "B": -1}[action.kind]
            yield index, whole, count


def validate_schedule(schedule: Schedule, cap: float | None = None, trains: bool = True) -> list[str]:
    """Everything that keeps the schedule from running, one sentence each; empty for a schedule that runs.

    A schedule runs if all stages are placed on ranks; if each stage computes F, I and W (or B) of each micro-batch
    once, on its rank and in this order; if no rank waits for ever, which is tested by replaying the lowered programs of
    all ranks; and if no rank holds more than `cap` activations (in the unit of `peak_activations`). Positions in a
    rank's order are counted from 1. trains: False for an evaluation, which has forwards only. It is not inferred: a
    training schedule without backwards would pass as an evaluation."""
    problems = [*_misplaced(schedule), *_miscounted(schedule, trains)]
    if not problems:
        problems = _stuck(schedule)
    if cap is not None and not problems:
        for rank, order in enumerate(schedule.orders):
            share = schedule.placement.count(rank)
            above = next(
                (
                    (index, action, count)
                    for index, action, count in _activation_counts(order)
                    if count > cap * share + 1e-9
                ),
                None,
            )
            if above:
                problems.append(
                    f"{_where(rank, *above[:2])}: the rank then holds the activations of {above[2] / share:g} "
                    f"micro-batches, above the cap of {cap:g}"
                )
    return problems


def _where(rank: int, index: int, action: Action) -> str:
    return f"rank {rank}, action {index + 1} ({action})"


def _misplaced(schedule: Schedule) -> Iterator[str]:
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.ranks:
            yield f"stage {stage} is placed on rank {rank}; legal: 0 to {schedule.ranks - 1}"
    for rank in sorted(set(range(schedule.ranks)) - set(schedule.placement)):
        yield f"rank {rank} holds no stage"


def _miscounted(schedule: Schedule, trains: bool) -> Iterator[str]:
    """Actions that are no computation, out of range, on the wrong rank, repeated, too early for their stage, or
    missing."""
    needs = {"F": (), "I": "F", "W": "I"}
    did: dict[tuple[str, int, int], tuple[int, Action]] = {}
    for rank, order in enumerate(schedule.orders):
        for index, whole in enumerate(order):
            where = _where(rank, index, whole)
            for action in split_overlaps([whole]):
                stage, microbatch = action.stage, action.microbatch
                if action.kind not in COMPUTE:
                    yield f"{where}: {action.kind} is no compute action; legal: {', '.join(COMPUTE)} and OVERLAP_F_B"
                elif action.kind != "F" and not trains:
                    yield f"{where}: an evaluation has no {action.kind}; legal: F"
                elif not 0 <= stage < schedule.stages:
                    yield f"{where}: there is no stage {stage}; legal: 0 to {schedule.stages - 1}"
                elif microbatch is None or not 0 <= microbatch < schedule.microbatches:
                    yield f"{where}: there is no micro-batch {microbatch}; legal: 0 to {schedule.microbatches - 1}"
                elif schedule.placement[stage] != rank:
                    yield f"{where}: stage {stage} is held by rank {schedule.placement[stage]}"
                else:
                    for kind in "IW" if action.kind == "B" else action.kind:
                        if earlier := did.get((kind, stage, microbatch)):
                            yield f"{where}: repeats what action {earlier[0] + 1} ({earlier[1]}) did"
                            break
                        for need in needs[kind]:
                            if (need, stage, microbatch) not in did:
                                yield f"{where}: comes before {stage}{need}{microbatch}"
                        did[kind, stage, microbatch] = index, whole
    for stage, rank in enumerate(schedule.placement):
        for kind in "FIW" if trains else "F":
            absent = (f"{stage}{kind}{m}" for m in range(schedule.microbatches) if (kind, stage, m) not in did)
            missing = list(itertools.islice(absent, MAX_PROBLEMS + 1))
            if missing and 0 <= rank < schedule.ranks:
                names = ", ".join(missing[:MAX_PROBLEMS]) + (" and more" if len(missing) > MAX_PROBLEMS else "")
                yield f"rank {rank}, end of its {len(schedule.orders[rank])} actions: {names} never computed"


def _stuck(schedule: Schedule) -> list[str]:
    programs = lower_all(schedule)
    problems = []
    for rank, position in find_blocked_ranks(programs, schedule.placement).items():
        action = programs[rank][position]
        done = sum(earlier.kind in COMPUTE for earlier in programs[rank][:position])
        order = schedule.orders[rank]
        computations = [(index, whole) for index, whole in enumerate(order) for _ in split_overlaps([whole])]
        what = (
            f"the output of stage {action.stage - 1}"
            if action.kind == "F"
            else f"the gradient from stage {action.stage + 1}"
        )
        problems.append(
            f"{_where(rank, *computations[done])}: waits for ever for {what}, micro-batch {action.microbatch}"
        )
    return problems
