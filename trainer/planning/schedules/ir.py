"""A pipeline schedule as data: for each rank the order of its computations, for each stage the rank that holds it.

Actions, their notation (`2F0`: stage 2, forward, micro-batch 0) and the CSV format (one line a rank) are those of
torch.distributed.pipelining, so that schedules can be exchanged with it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.config import ConfigError
from trainer.util.reading import Malformed, read_bytes, shorten_foreign

COMPUTE = ("F", "I", "W", "B")
"""Forward; gradient of the stage's input; gradient of its weights; both gradients at once (a full backward)."""
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""Send a stage's output, receive its input, send its input's gradient, receive its output's gradient."""
PARAMETERS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""Actions on a stage's parameters, which have no micro-batch."""

MAX_PROBLEMS = 20
"""Problems of a schedule that are told: a file of another kind has one in every cell."""

_NUMBER = r"([0-9]{1,6})"  # a million stages, or micro-batches, is beyond any run
_SIMPLE = re.compile(rf"{_NUMBER}(?:({'|'.join(COMPUTE + COMMUNICATION)}){_NUMBER}|({'|'.join(PARAMETERS)}))")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does.

    microbatch: None for actions on a stage's parameters. parts: the forward and the backward of an OVERLAP_F_B, whose
    own stage is -1."""

    stage: int
    kind: str
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    @property
    def computed(self) -> tuple[Action, ...]:
        """The parts of an OVERLAP_F_B, or the action itself."""
        return self.parts or (self,)

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


def split_overlaps(order: Iterable[Action]) -> Iterator[Action]:
    """The order with each OVERLAP_F_B replaced by its forward and its backward."""
    for action in order:
        yield from action.computed


def pair_actions(forward: Action, backward: Action) -> Action:
    """The OVERLAP_F_B of two actions of one rank."""
    return Action(-1, "OVERLAP_F_B", None, (forward, backward))


def parse_action(text: str) -> Action:
    """Reads one action in torch's notation. Raises `ConfigError` for anything else."""
    text = text.strip()
    if match := _OVERLAP.fullmatch(text):
        forward, backward = map(parse_action, match.groups())
        if forward.kind == "F" and backward.kind in ("I", "B"):
            return pair_actions(forward, backward)
        raise ConfigError(
            f"'{shorten_foreign(text)}' overlaps {forward.kind} with {backward.kind}; legal: a forward with a "
            "backward, such as "
            "(0F7;7B3)OVERLAP_F_B"
        )
    if match := _SIMPLE.fullmatch(text):
        stage, kind, microbatch, parameters = match.groups()
        return Action(int(stage), kind or parameters, None if microbatch is None else int(microbatch))
    raise ConfigError(
        f"'{shorten_foreign(text)}' is not an action; legal: stage, kind, micro-batch such as 2F0, 2I0, 2W0 or 2B0, or "
        "(0F7;7B3)OVERLAP_F_B"
    )


def _lines(text: str, name: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(io.StringIO(text.rstrip()))
    except csv.Error as error:
        raise ConfigError(f"{name} is not a schedule: {error}; give a line a rank, a cell an action") from None


def load_schedule(path: Path, name: str) -> Schedule:
    """The schedule in a CSV file. Raises `OSError`, and `ConfigError` as `parse_schedule` does."""
    try:
        return parse_schedule(read_bytes(path).decode(), name=name)
    except UnicodeDecodeError:
        raise Malformed(f"{name} is not a text file; give a schedule in torch's notation") from None


def parse_schedule(text: str, placement: tuple[int, ...] | None = None, name: str = "csv") -> Schedule:
    """Reads a schedule from CSV: a line a rank, a cell an action; empty cells (idle slots) are skipped.

    Communication in the file (torch's `compute_comms`) is dropped, since `lower` derives it. placement: if None, each
    stage lies on the rank whose line has its actions, and a stage on two lines is an error. name: of the schedule and,
    in messages, of the file. Raises `ConfigError` naming line and cell, both counted from 1. `validate` says whether
    the schedule can run."""
    orders: list[tuple[Action, ...]] = []
    held: dict[int, tuple[int, int]] = {}  # stage -> line and cell where it first stands
    problems: list[str] = []
    for line, cells in enumerate(_lines(text, name), 1):
        order = []
        for cell, content in enumerate(cells, 1):
            if not content.strip():
                continue
            where = f"{name}, line {line}, cell {cell}"
            try:
                action = parse_action(content)
            except ConfigError as error:
                problems.append(f"{where}: {error}")
                continue
            if action.kind in COMMUNICATION + PARAMETERS:
                continue
            order.append(action)
            for part in split_overlaps([action]):
                first = held.setdefault(part.stage, (line, cell))
                if placement is None and first[0] != line:
                    problems.append(
                        f"{where}: {action} puts stage {part.stage} on rank {line - 1}, but line {first[0]}, cell "
                        f"{first[1]} puts it on rank {first[0] - 1}"
                    )
        if not order and not problems:
            problems.append(
                f"{name}, line {line}: rank {line - 1} computes nothing; each line needs its rank's actions"
            )
        orders.append(tuple(order))
    stages = max(held, default=-1) + 1
    if not orders:
        problems.append(f"{name} is empty; it needs a line of actions for each rank")
    elif placement is None and len(held) < stages and not problems:
        problems.append(
            f"{name}: no line has an action of stage {min(set(range(stages)) - set(held))}, but one has stage "
            f"{stages - 1}"
        )
    if problems:
        raise ConfigError(problems[:MAX_PROBLEMS])
    microbatches = 1 + max(action.microbatch or 0 for order in orders for action in split_overlaps(order))
    return Schedule(
        name, tuple(orders), placement or tuple(held[stage][0] - 1 for stage in range(stages)), microbatches
    )


def format_schedule(schedule: Schedule) -> str:
    """The schedule as CSV that `parse_schedule` and torch read: a line a rank, compute actions only."""
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)
