"""Whether a schedule computes everything once, in a possible order, within a cap of memory, and without deadlock."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.planning.schedules.ir import COMPUTE, Action, Schedule, flat
from trainer.planning.schedules.lower import lower_all, replay


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """By rank, the most activations held at once, kept from F until B or W, in micro-batches of the rank's whole share
    of the model (a rank's k stages hold 1/k of it each)."""
    return tuple(
        max(held, default=0) / max(1, schedule.placement.count(rank))
        for rank, order in enumerate(schedule.orders)
        for held in [[count for _, _, count in _held(order)]]
    )


def _held(order: tuple[Action, ...]) -> Iterator[tuple[int, Action, int]]:
    """After each action: its place in the order, the action, and the stage activations then held."""
    count = 0
    for index, whole in enumerate(order):
        for action in flat([whole]):
            count += {"F": 1, "I": 0, "W": -1, "B": -1}[action.kind]
            yield index, whole, count


def validate(schedule: Schedule, cap: float | None = None, trains: bool = True) -> list[str]:
    """Everything that keeps the schedule from running, one sentence each; empty for a schedule that runs.

    Checks that stages are placed on ranks, that each stage computes F, I and W (or B) of each micro-batch once, on its
    rank and in this order, that no rank waits for ever (by replaying the lowered programs of all ranks), and that no
    rank holds more than `cap` activations (in the unit of `peak_activations`). Positions in a rank's order are counted
    from 1. trains: False for an evaluation, which has forwards only. It has to be said, since forwards without any
    backward would otherwise pass as one and train nothing."""
    problems = [*_misplaced(schedule), *_miscounted(schedule, trains)]
    if not problems:
        problems = _stuck(schedule)
    if cap is not None and not problems:
        for rank, order in enumerate(schedule.orders):
            share = schedule.placement.count(rank)
            above = next(
                ((index, action, count) for index, action, count in _held(order) if count > cap * share + 1e-9), None
            )
            if above:
                problems.append(
                    f"{_where(rank, *above[:2])}: the rank then holds the activations of {above[2] / share:g} "
                    "micro-batches, "
                    f"above the cap of {cap:g}"
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
    """Actions that are no compute actions, out of range, on a rank that does not hold their stage, repeated, before
    what they need of their own stage, or missing."""
    needs = {"F": (), "I": "F", "W": "I"}
    did: dict[tuple[str, int, int], tuple[int, Action]] = {}
    for rank, order in enumerate(schedule.orders):
        for index, whole in enumerate(order):
            where = _where(rank, index, whole)
            for action in flat([whole]):
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
            missing = [f"{stage}{kind}{m}" for m in range(schedule.microbatches) if (kind, stage, m) not in did]
            if missing and 0 <= rank < schedule.ranks:
                yield (
                    f"rank {rank}, end of its {len(schedule.orders[rank])} actions: {', '.join(missing)} never computed"
                )


def _stuck(schedule: Schedule) -> list[str]:
    programs = lower_all(schedule)
    problems = []
    for rank, place in replay(programs, schedule.placement).items():
        action = programs[rank][place]
        done = sum(earlier.kind in COMPUTE for earlier in programs[rank][:place])
        whole = [(index, whole) for index, whole in enumerate(schedule.orders[rank]) for _ in flat([whole])][done]
        what = (
            f"the output of stage {action.stage - 1}"
            if action.kind == "F"
            else f"the gradient from stage {action.stage + 1}"
        )
        problems.append(f"{_where(rank, *whole)}: waits for ever for {what}, micro-batch {action.microbatch}")
    return problems
