"""From a schedule to what one rank executes: communication and work on parameters, from the order of computation. And
whether a schedule can run at all (`validate_schedule`).

All ranks' computations and transfers are put in one order, a transfer being one event of both its ranks; the program of
a rank is what is its own in this order. So no ranks wait for each other in a circle, whatever waits for whatever: the
programs end even if every action first waits for all that its rank has started before it, and every send and receive
for its other end (`find_blocked_ranks` checks just that). GPUs need this much. A receive that is posted there is a
kernel that runs until the data come, and whatever makes the host or the device wait for all kernels (the first use of a
kernel or of a library, memory given back to the driver, a compiler that times variants) waits for that one too. So a
receive must not be posted while what it waits for depends on anything that its rank has still to launch, there or
through other ranks.

The order also holds with replicas of a pipeline and with ranks that share a stage: they run the same programs, in which
the collectives among them stand at the same places.

Both ends of a directed edge (from one rank to another) transfer in the same order, the one in which the sender
computes, so channels need neither tags nor buffers of their own.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from trainer.planning.schedules.ir import COMPUTE, MAX_PROBLEMS, Action, Schedule, split_overlaps

SECONDS = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
"""How long actions take, for their order among ranks: a receive is posted before the action during which its data
come."""


def lower_schedule(
    schedule: Schedule, rank: int, reduce: Literal["last", "every"] = "last", ahead: int = 1, overlaps: bool = False
) -> tuple[Action, ...]:
    """The rank's program: its computation with sends, receives, and gathers and reductions of parameters.

    Actions are torch's. A RECV posts a receive into a new buffer; the computation that reads it waits for it. A SEND
    starts a transfer of what the rank has computed. Sends carry the sender's stage, receives the receiver's; stages on
    one rank exchange nothing.

    overlaps: whether an OVERLAP_F_B stays one action, which needs the inputs of both passes before and sends both
    results afterwards. Otherwise it becomes its forward and its backward, one after the other.

    ahead: receives and gathers of the next `ahead` compute actions are started before the current one: gathers always,
    a receive if its data come meanwhile and no more than `ahead` posted buffers wait for a later action. 0 posts a
    receive when it is needed. Receives are earlier only where their senders, which wait for them, would otherwise hold
    up all ranks.
    reduce: REDUCE_GRAD after the stage's last B or W of the step ("last") or after that of every micro-batch ("every").
    UNSHARD comes before the stage's first action, RESHARD after its last.
    The schedule must be valid (`validate`).
    """
    return lower_all(schedule, reduce, ahead, overlaps)[rank]


def lower_all(
    schedule: Schedule, reduce: Literal["last", "every"] = "last", ahead: int = 1, overlaps: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """The programs of all ranks, see `lower_schedule`."""
    return tuple(map(tuple, _Order(schedule, reduce, ahead, overlaps).programs))


class _Order:
    """Puts the events of all ranks in one order and writes their programs.

    Events come in the order in which they would end if actions took `SECONDS` and transfers no time, but that a
    transfer waits until its receiver wants it, and its sender with it.
    """

    def __init__(self, schedule: Schedule, reduce: str, ahead: int, overlaps: bool):
        self.placement, self.ahead = schedule.placement, ahead
        self.orders = [list(order if overlaps else split_overlaps(order)) for order in schedule.orders]
        self.reads = [[self._receives(action) for action in order] for order in self.orders]
        self.read_at = {
            receive: place for reads in self.reads for place, receives in enumerate(reads) for receive in receives
        }
        self.parameters = [_work_on_parameters(order, reduce, ahead) for order in self.orders]
        self.programs: list[list[Action]] = [[] for _ in self.orders]
        self.places = [0] * len(self.orders)  # of the next compute action
        self.clocks = [0.0] * len(self.orders)  # when the last one ended
        self.ends: dict[Action | None, float] = {}  # when a result was there, that of a B also as of an I
        self.unread: list[set[Action]] = [set() for _ in self.orders]  # receives posted, for actions to come
        self.sending: dict[int, list[Action]] = {}  # by rank that has results to send, the receives of them
        self.held: defaultdict[int, list[int]] = defaultdict(
            list
        )  # by receiver, ranks whose results it does not want yet
        self.events: list[tuple[float, int, int]] = []  # heap of (time, turn among those of that time, rank)
        for rank in range(len(self.orders)):
            self._go_on(rank)
        while self.events or any(self.held.values()):
            if not self.events:
                self._transfer(self._most_wanted())
                continue
            rank = heapq.heappop(self.events)[-1]
            if rank not in self.sending:
                self._compute(rank)
            elif self._wanted(receive := self.sending[rank][0]):
                self._transfer(rank)
            else:
                self.held[self.placement[receive.stage]].append(rank)
        for rank, place in enumerate(self.places):
            self.programs[rank] += self.orders[rank][place:]  # what waits for ever, for `find_blocked_ranks` to find

    def _receives(self, action: Action) -> frozenset[Action]:
        """The receives that bring what an action reads from other ranks."""
        return frozenset(
            receive for part in action.computed if (receive := _receive_of_input(part, self.placement)) is not None
        )

    def _go_on(self, rank: int) -> None:
        """The rank is done with an action."""
        self.programs[rank] += self.parameters[rank][self.places[rank]]
        self._try(rank)

    def _try(self, rank: int) -> None:
        """Makes the rank's next compute action an event if its input is here."""
        place = self.places[rank]
        if place == len(self.orders[rank]):
            return
        action = self.orders[rank][place]
        local = [part for part in action.computed if _receive_of_input(part, self.placement) is None]
        sources = [source for part in local if (source := input_of(part, len(self.placement))) is not None]
        if self.reads[rank][place] <= self.unread[rank] and all(source in self.ends for source in sources):
            heapq.heappush(self.events, (self._end(rank, action), min(map(self._turn, action.computed)), rank))

    def _end(self, rank: int, action: Action) -> float:
        """When the rank's next action ends, whose input is here."""
        parts = action.computed
        start = max(self.clocks[rank], *(self.ends.get(input_of(part, len(self.placement)), 0.0) for part in parts))
        return start + sum(SECONDS[part.kind] for part in parts)

    def _turn(self, action: Action) -> int:
        """Of actions that end together, one that sends to another comes first, and its receive before the other."""
        return {"F": 1 + action.stage, "W": 1 + len(self.placement)}.get(
            action.kind, len(self.placement) - action.stage
        )

    def _compute(self, rank: int) -> None:
        place = self.places[rank]
        action = self.orders[rank][place]
        self.clocks[rank] = end = self._end(rank, action)
        for part in action.computed:
            self.ends[replace(part, kind="I") if part.kind == "B" else part] = end
        self.programs[rank].append(action)
        self.unread[rank] -= self.reads[rank][place]
        self.places[rank] += 1
        for sender in self.held.pop(rank, ()):
            heapq.heappush(self.events, (self.clocks[sender], 0, sender))
        results = (_receive_of_result(part, self.placement) for part in action.computed)
        if receives := [receive for receive in results if receive is not None]:
            self.sending[rank] = receives
            heapq.heappush(self.events, (end, 0, rank))
        else:
            self._go_on(rank)

    def _transfer(self, sender: int) -> None:
        receive = self.sending[sender].pop(0)
        receiver = self.placement[receive.stage]
        self.programs[receiver].append(receive)
        self.unread[receiver].add(receive)
        self.programs[sender].append(_send_of_receive(receive))
        if receive in self.reads[receiver][self.places[receiver]] and receiver not in self.sending:
            self._try(receiver)
        if self.sending[sender]:
            heapq.heappush(self.events, (self.clocks[sender], 0, sender))
        else:
            del self.sending[sender]
            self._go_on(sender)

    def _wanted(self, receive: Action) -> bool:
        rank = self.placement[receive.stage]
        distance = self.read_at[receive] - self.places[rank]
        later = self.unread[rank] - self.reads[rank][self.places[rank]]
        return distance == 0 or distance <= self.ahead and len(later) < self.ahead

    def _most_wanted(self) -> int:
        """Of the ranks that hold a result, the one whose receiver needs it soonest; without it no rank goes on."""

        def urgency(rank: int) -> tuple[int, float, int]:
            receive = self.sending[rank][0]
            return self.read_at[receive] - self.places[self.placement[receive.stage]], self.clocks[rank], rank

        chosen = min((rank for ranks in self.held.values() for rank in ranks), key=urgency)
        self.held[self.placement[self.sending[chosen][0].stage]].remove(chosen)
        return chosen


def _work_on_parameters(order: list[Action], reduce: str, ahead: int) -> list[list[Action]]:
    """What a rank does on parameters before each place of its order, and at its end."""
    parts = [(place, part) for place, action in enumerate(order) for part in action.computed]
    last = {part.stage: place for place, part in parts}
    complete = {part.stage: place for place, part in parts if part.kind in ("B", "W")}
    gathered: set[int] = set()
    work: list[list[Action]] = [[] for _ in range(len(order) + 1)]
    for place, action in enumerate(order):
        soon = [part.stage for later in order[place : place + ahead + 1] for part in later.computed]
        new = dict.fromkeys(stage for stage in soon if stage not in gathered)
        work[place] += [Action(stage, "UNSHARD") for stage in new]
        gathered.update(new)
        for part in action.computed:
            if part.kind in ("B", "W") and (reduce == "every" or place == complete[part.stage]):
                work[place + 1].append(Action(part.stage, "REDUCE_GRAD"))
        for stage in dict.fromkeys(part.stage for part in action.computed):
            if place == last[stage]:
                work[place + 1].append(Action(stage, "RESHARD"))
    return work


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


def _send_of_receive(receive: Action) -> Action:
    return Action(
        receive.stage - (1 if receive.kind == "RECV_F" else -1),
        receive.kind.replace("RECV", "SEND"),
        receive.microbatch,
    )


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


def find_blocked_ranks(programs: Sequence[Sequence[Action]], placement: Sequence[int]) -> dict[int, int]:
    """By rank that cannot finish its program if it does one thing at a time, the place in it where it waits for ever.

    Every action waits for all before it on its rank, and a SEND and its RECV for each other: the slowest way in which
    the programs can run. If all ranks finish so, the result is empty, and they finish in every faster way: whatever
    waits for what its rank has started before waits for something that ends. The n-th send of an edge meets its n-th
    receive; if they are of different things, both ranks are stuck.
    """
    places = [0] * len(programs)
    done: set[Action] = set()  # computed (a B also as I), and receives that have arrived
    woken = deque(range(len(programs)))

    def standing(rank: int) -> Action | None:
        return programs[rank][places[rank]] if places[rank] < len(programs[rank]) else None

    while woken:
        rank = woken.popleft()
        while (action := standing(rank)) is not None:
            if action.parts or action.kind in COMPUTE:
                parts = action.computed
                needs = (_receive_of_input(part, placement) or input_of(part, len(placement)) for part in parts)
                if not all(need is None or need in done for need in needs):
                    break
                for part in parts:
                    done.update((part, replace(part, kind="I")) if part.kind == "B" else (part,))
            elif action.kind.startswith(("SEND", "RECV")):
                receive = _receive_of_send(action) if action.kind.startswith("SEND") else action
                other = _send_of_receive(action) if receive is action else receive
                peer = placement[other.stage]
                if standing(peer) != other:
                    break
                done.add(receive)
                places[peer] += 1
                woken.append(peer)
            places[rank] += 1
    return {rank: places[rank] for rank in range(len(programs)) if standing(rank) is not None}


# Whether a schedule computes everything once, in a possible order, and without deadlock.


def validate_schedule(schedule: Schedule) -> list[str]:
    """Everything that keeps the schedule from running, one sentence each; empty for a schedule that runs.

    A schedule runs if all stages are placed on ranks; if each stage computes F, I and W (or B) of each micro-batch
    once, on its rank and in this order; and if no rank waits for ever, which is tested by replaying the lowered
    programs of all ranks. Positions in a rank's order are counted from 1."""
    return [*_misplaced(schedule), *_list_miscounted(schedule)] or _stuck(schedule)


def _where(rank: int, index: int, action: Action) -> str:
    return f"rank {rank}, action {index + 1} ({action})"


def _misplaced(schedule: Schedule) -> Iterator[str]:
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.ranks:
            yield f"stage {stage} is placed on rank {rank}; legal: 0 to {schedule.ranks - 1}"
    for rank in sorted(set(range(schedule.ranks)) - set(schedule.placement)):
        yield f"rank {rank} holds no stage"


def _list_miscounted(schedule: Schedule) -> Iterator[str]:
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
        for kind in "FIW":
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
