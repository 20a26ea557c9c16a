"""A pipeline schedule as data: for each rank, the order of what it computes; for each stage, the rank that holds it.

Actions, their notation (`2F0`: stage 2, forward, micro-batch 0) and the CSV format (one line a rank) are those of
torch.distributed.pipelining, so that schedules can be exchanged with it.
"""
from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from trainer.config import ConfigError

COMPUTE = ("F", "I", "W", "B")
"""Forward; gradient of the stage's input; gradient of its weights; both gradients at once (a full backward)."""
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""A stage's output sent, its input received, its input's gradient sent, its output's gradient received."""
PARAMETERS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""On a stage's parameters, so without a micro-batch."""

_SIMPLE = re.compile(rf"(\d+)(?:({'|'.join(COMPUTE + COMMUNICATION)})(\d+)|({'|'.join(PARAMETERS)}))")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does. `microbatch` is None for actions on a stage's parameters; `parts` are the (forward,
    backward) actions of an OVERLAP_F_B, whose own stage is -1."""
    stage: int
    kind: str
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        """torch's notation: `2F0`, `1UNSHARD`, `(0F7;7B3)OVERLAP_F_B`."""
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """What every rank computes, in order.

    orders: by rank, compute actions (F, I, W, B, OVERLAP_F_B) only; communication is derived from them (`lower`).
    placement: by stage, the rank that holds it.
    """
    name: str
    orders: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """Stages on one rank."""
        return self.stages // self.ranks

    @property
    def trains(self) -> bool:
        """Whether it computes gradients; an evaluation has forwards only."""
        return any(action.kind != "F" for order in self.orders for action in order)


def flat(order: Iterable[Action]) -> Iterator[Action]:
    """The order with each OVERLAP_F_B replaced by its forward and its backward."""
    for action in order:
        yield from action.parts or (action,)


def parse(text: str) -> Action:
    """Reads one action in torch's notation. Raises `ConfigError` for anything else."""
    text = text.strip()
    if match := _OVERLAP.fullmatch(text):
        forward, backward = map(parse, match.groups())
        if forward.kind == "F" and backward.kind in ("I", "B"):
            return Action(-1, "OVERLAP_F_B", None, (forward, backward))
        raise ConfigError(f"'{text}' overlaps {forward.kind} with {backward.kind}; legal: a forward with a backward, "
                          "such as (0F7;7B3)OVERLAP_F_B")
    if match := _SIMPLE.fullmatch(text):
        stage, kind, microbatch, parameters = match.groups()
        return Action(int(stage), kind or parameters, None if microbatch is None else int(microbatch))
    raise ConfigError(f"'{text}' is not an action; legal: stage, kind, micro-batch such as 2F0, 2I0, 2W0 or 2B0, "
                      "or (0F7;7B3)OVERLAP_F_B")


def loads(text: str, placement: tuple[int, ...] | None = None, name: str = "csv") -> Schedule:
    """Reads a schedule from CSV: a line a rank, a cell an action; empty cells (idle slots) are skipped.

    Files that list communication too (torch's `compute_comms`) lose it here, since `lower` derives it.
    placement: taken from the lines that hold the stages' actions unless given; without it a stage on two lines is an error.
    name: of the schedule and, in messages, of the file. Raises `ConfigError` naming line and cell, both counted from 1.
    `validate` says whether the schedule can run.
    """
    orders, held, problems = [], {}, []
    for line, cells in enumerate(csv.reader(io.StringIO(text.rstrip())), 1):
        order = []
        for cell, content in enumerate(cells, 1):
            if not content.strip():
                continue
            where = f"{name}, line {line}, cell {cell}"
            try:
                action = parse(content)
            except ConfigError as error:
                problems.append(f"{where}: {error}")
                continue
            if action.kind in COMMUNICATION + PARAMETERS:
                continue
            order.append(action)
            for part in flat([action]):
                first = held.setdefault(part.stage, (line, cell))
                if placement is None and first[0] != line:
                    problems.append(f"{where}: {action} puts stage {part.stage} on rank {line - 1}, but line {first[0]}, "
                                    f"cell {first[1]} puts it on rank {first[0] - 1}")
        if not order and not problems:
            problems.append(f"{name}, line {line}: rank {line - 1} computes nothing; each line needs its rank's actions")
        orders.append(tuple(order))
    stages = max(held, default=-1) + 1
    if not orders:
        problems.append(f"{name} is empty; it needs a line of actions for each rank")
    elif placement is None and len(held) < stages and not problems:
        problems.append(f"{name}: no line has an action of stage {min(set(range(stages)) - set(held))}, but one has stage {stages - 1}")
    if problems:
        raise ConfigError(problems)
    microbatches = 1 + max(action.microbatch for order in orders for action in flat(order))
    return Schedule(name, tuple(orders), placement or tuple(held[stage][0] - 1 for stage in range(stages)), microbatches)


def dumps(schedule: Schedule) -> str:
    """The schedule as CSV that `loads` and torch read: a line a rank, compute actions only."""
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)


def merge_backward(schedule: Schedule) -> Schedule:
    """Each I directly followed by its W becomes a B: one pass over the graph instead of two, at the price that the
    previous stage waits for the weight gradient too."""
    def merged(order: tuple[Action, ...]) -> tuple[Action, ...]:
        out: list[Action] = []
        for action in order:
            if action.kind == "W" and out and out[-1] == replace(action, kind="I"):
                out[-1] = replace(action, kind="B")
            else:
                out.append(action)
        return tuple(out)
    return replace(schedule, orders=tuple(map(merged, schedule.orders)))


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """By rank, the most activations held at once, kept from F until B or W, in micro-batches of the rank's whole share of
    the model (a rank's k stages hold 1/k of it each)."""
    return tuple(max(held, default=0) / max(1, schedule.placement.count(rank))
                 for rank, order in enumerate(schedule.orders) for held in [[count for _, _, count in _held(order)]])


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
    rank and in this order, that no rank waits for ever (by replaying the lowered programs of all ranks), and that no rank
    holds more than `cap` activations (in the unit of `peak_activations`). Positions in a rank's order are counted from 1.
    trains: False for an evaluation, which has forwards only. It has to be said, since forwards without any backward would
    otherwise pass as one and train nothing.
    """
    problems = [*_misplaced(schedule), *_miscounted(schedule, trains)]
    if not problems:
        problems = _stuck(schedule)
    if cap is not None and not problems:
        for rank, order in enumerate(schedule.orders):
            share = schedule.placement.count(rank)
            above = next(((index, action, count) for index, action, count in _held(order) if count > cap * share + 1e-9), None)
            if above:
                problems.append(f"{_where(rank, *above[:2])}: the rank then holds the activations of {above[2] / share:g} micro-batches, "
                                f"above the cap of {cap:g}")
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
    """Actions that are no compute actions, out of range, on a rank that does not hold their stage, repeated, before what
    they need of their own stage, or missing."""
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
                yield f"rank {rank}, end of its {len(schedule.orders[rank])} actions: {', '.join(missing)} never computed"


def _stuck(schedule: Schedule) -> list[str]:
    from trainer.planning.schedules.lower import lower_all, replay
    programs = lower_all(schedule)
    problems = []
    for rank, place in replay(programs, schedule.placement).items():
        action = programs[rank][place]
        done = sum(earlier.kind in COMPUTE for earlier in programs[rank][:place])
        whole = [(index, whole) for index, whole in enumerate(schedule.orders[rank]) for _ in flat([whole])][done]
        what = f"the output of stage {action.stage - 1}" if action.kind == "F" else f"the gradient from stage {action.stage + 1}"
        problems.append(f"{_where(rank, *whole)}: waits for ever for {what}, micro-batch {action.microbatch}")
    return problems
