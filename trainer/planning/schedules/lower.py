"""From a schedule to what one rank executes: communication and work on parameters, derived from the order of
computation.

Both ends of a directed edge (from one rank to another) transfer in the same order, the one in which the sender
computes, so channels need neither tags nor buffers of their own."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from trainer.planning.schedules.ir import COMPUTE, Action, Schedule, flat

Edge = tuple[int, int]
"""Sending rank and receiving rank."""


def lower(
    schedule: Schedule, rank: int, reduce: Literal["last", "every"] = "last", unshard: bool = True, ahead: int = 1
) -> tuple[Action, ...]:
    """The rank's program: its computation with sends, receives, and gathers and reductions of parameters, in torch's
    terms.

    A RECV posts a receive into a new buffer; the computation that reads it waits for it. A SEND starts a transfer of
    what the rank has computed. Sends carry the sender's stage, receives the receiver's; stages on one rank exchange
    nothing. An OVERLAP_F_B becomes its forward and its backward, one after the other.

    ahead: receives and gathers of the next `ahead` compute actions are started before the current one, a receive only
    while no more than `ahead` posted buffers wait for a later action. 0 posts a receive when it is needed. Receives are
    earlier where ranks would otherwise wait for each other if every SEND waited for its receive (see `replay`). reduce:
    REDUCE_GRAD after the stage's last B or W of the step ("last") or after that of every micro-batch ("every").
    unshard: UNSHARD before the stage's first action, RESHARD after its last; False leaves both out. The schedule must
    be valid (`ir.validate`)."""
    return lower_all(schedule, reduce, unshard, ahead)[rank]


def lower_all(
    schedule: Schedule, reduce: Literal["last", "every"] = "last", unshard: bool = True, ahead: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """The programs of all ranks, see `lower`."""
    edges = _edges(schedule)
    programs = [_program(schedule, rank, edges, reduce, unshard, ahead) for rank in range(schedule.ranks)]
    run = _Replay(programs, schedule.placement, rendezvous=True)
    run.advance(range(schedule.ranks))
    while blocked := next((action for _, action in run.stuck() if action.kind.startswith("SEND")), None):
        receive = _receive_of_send(blocked)
        rank = schedule.placement[receive.stage]
        program, now = programs[rank], run.places[rank]
        program.insert(now, program.pop(program.index(receive, now)))
        run.advance([rank])
    return tuple(map(tuple, programs))


def _program(
    schedule: Schedule, rank: int, edges: dict[Edge, list[Action]], reduce: str, unshard: bool, ahead: int
) -> list[Action]:
    order = list(flat(schedule.orders[rank]))
    last = {action.stage: place for place, action in enumerate(order)}
    complete = {action.stage: place for place, action in enumerate(order) if action.kind in ("B", "W")}
    receives = _Receives(
        [_receive_of_input(action, schedule.placement) for action in order],
        [edge for (_, target), edge in edges.items() if target == rank],
        ahead,
    )
    gathered: set[int] = set()
    program: list[Action] = []
    for place, action in enumerate(order):
        if unshard:
            new = dict.fromkeys(
                later.stage for later in order[place : place + ahead + 1] if later.stage not in gathered
            )
            program.extend(Action(stage, "UNSHARD") for stage in new)
            gathered.update(new)
        program.extend(receives.before(place))
        program.append(action)
        if (receive := _receive_of_result(action, schedule.placement)) is not None:
            program.append(Action(action.stage, receive.kind.replace("RECV", "SEND"), action.microbatch))
        if action.kind in ("B", "W") and (reduce == "every" or place == complete[action.stage]):
            program.append(Action(action.stage, "REDUCE_GRAD"))
        if unshard and place == last[action.stage]:
            program.append(Action(action.stage, "RESHARD"))
    return program


class _Receives:
    """Which receives a rank posts when."""

    def __init__(self, needs: list[Action | None], edges: list[list[Action]], ahead: int):
        self.needs, self.ahead = needs, ahead
        self.waiting: set[Action] = set()  # posted, for later actions
        # What is still to be posted, each receive with the queue it stands in.
        self.queues = {receive: queue for queue in map(deque, edges) for receive in queue}

    def before(self, place: int) -> Iterator[Action]:
        """Receives to post before the rank's compute action at `place`."""
        need = self.needs[place]
        if need is not None and need not in self.waiting:
            yield from self._post(need)
        self.waiting.discard(need)
        for later in self.needs[place + 1 : place + 1 + self.ahead]:
            if later is not None and later not in self.waiting:
                if len(self.waiting) + self.queues[later].index(later) + 1 > self.ahead:
                    return
                yield from self._post(later)

    def _post(self, receive: Action) -> Iterator[Action]:
        """The receive, after those that its sender sends earlier."""
        while receive not in self.waiting:
            earliest = self.queues[receive].popleft()
            self.waiting.add(earliest)
            yield earliest


def _edges(schedule: Schedule) -> dict[Edge, list[Action]]:
    """What each rank sends to each other, in order, as the receives of the other."""
    edges = defaultdict(list)
    for rank, order in enumerate(schedule.orders):
        for action in flat(order):
            if (receive := _receive_of_result(action, schedule.placement)) is not None:
                edges[rank, schedule.placement[receive.stage]].append(receive)
    return edges


def _receive_of_input(action: Action, placement: Sequence[int]) -> Action | None:
    """The receive that brings what a compute action reads, if another rank computes it."""
    need = input_of(action, len(placement))
    if need is None or placement[need.stage] == placement[action.stage]:
        return None
    return Action(action.stage, "RECV_F" if action.kind == "F" else "RECV_B", action.microbatch)


def _receive_of_result(action: Action, placement: Sequence[int]) -> Action | None:
    """The receive by which another rank gets what a compute action computes, if one needs it."""
    target = action.stage + {"F": 1, "I": -1, "B": -1, "W": 0}[action.kind]
    if not 0 <= target < len(placement) or placement[target] == placement[action.stage]:
        return None
    return Action(target, "RECV_F" if action.kind == "F" else "RECV_B", action.microbatch)


def _receive_of_send(send: Action) -> Action:
    return Action(send.stage + (1 if send.kind == "SEND_F" else -1), send.kind.replace("SEND", "RECV"), send.microbatch)


def input_of(action: Action, stages: int) -> Action | None:
    """The action whose result a compute action reads, a backward being named I even where it is a B; None for the
    tokens."""
    if action.kind == "W":
        return Action(action.stage, "I", action.microbatch)
    if action.kind == "F":
        return Action(action.stage - 1, "F", action.microbatch) if action.stage > 0 else None
    if action.stage == stages - 1:
        return Action(action.stage, "F", action.microbatch)
    return Action(action.stage + 1, "I", action.microbatch)


def replay(programs: Sequence[Sequence[Action]], placement: Sequence[int], rendezvous: bool = False) -> dict[int, int]:
    """By rank that cannot finish its program, the place in it where it waits for ever; empty if all end, at whatever
    speed.

    The n-th send of an edge meets its n-th receive; if they are of different things, nothing arrives from then on.
    rendezvous: a SEND holds its rank until the receive is posted, as on channels without buffers; otherwise sends never
    wait."""
    run = _Replay(programs, placement, rendezvous)
    run.advance(range(len(programs)))
    return {rank: run.places[rank] for rank, _ in run.stuck()}


class _Replay:
    """Executes the programs of all ranks without computing anything."""

    def __init__(self, programs: Sequence[Sequence[Action]], placement: Sequence[int], rendezvous: bool):
        self.programs, self.placement, self.rendezvous = programs, placement, rendezvous
        self.places = [0] * len(programs)
        # By edge, what has been sent and not received, and posted and not sent, as receives.
        self.sent: defaultdict[Edge, deque[Action]] = defaultdict(deque)
        self.posted: defaultdict[Edge, deque[Action]] = defaultdict(deque)
        self.done: set[Action] = set()  # computed (a B also as I), and receives that have arrived

    def advance(self, ranks: Iterable[int]) -> None:
        """Goes on, from these ranks, until no rank can."""
        self.woken = deque(ranks)
        while self.woken:
            rank = self.woken.popleft()
            program = self.programs[rank]
            while self.places[rank] < len(program) and self._execute(rank, program[self.places[rank]]):
                self.places[rank] += 1

    def stuck(self) -> Iterator[tuple[int, Action]]:
        """The ranks that have not finished and the actions that they stand at."""
        for rank, (program, place) in enumerate(zip(self.programs, self.places)):
            if place < len(program):
                yield rank, program[place]

    def _execute(self, rank: int, action: Action) -> bool:
        """Executes the action unless it has to wait."""
        if action.kind in COMPUTE:
            need = _receive_of_input(action, self.placement) or input_of(action, len(self.placement))
            if need is not None and need not in self.done:
                return False
            self.done.update((action, replace(action, kind="I")) if action.kind == "B" else (action,))
        elif action.kind.startswith("SEND"):
            receive = _receive_of_send(action)
            edge = rank, self.placement[receive.stage]
            if self.rendezvous and not self.posted[edge]:
                return False
            self.sent[edge].append(receive)
            self._transfer(edge)
            self.woken.append(edge[1])
        elif action.kind.startswith("RECV"):
            edge = self.placement[action.stage - (1 if action.kind == "RECV_F" else -1)], rank
            self.posted[edge].append(action)
            self._transfer(edge)
            self.woken.append(edge[0])
        return True

    def _transfer(self, edge: Edge) -> None:
        sent, posted = self.sent[edge], self.posted[edge]
        while sent and posted and sent[0] == posted[0]:
            self.done.add(posted.popleft())
            sent.popleft()
