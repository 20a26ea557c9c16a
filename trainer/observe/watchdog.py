"""Ends a run that hangs, so that it can be restarted, after reporting where each rank stands.

Each rank has two watchdog threads besides its training. The first sends heartbeats through torch's store: every few
seconds, which phase of which step its rank is in. From the store it also learns that another rank has given up. The
second uses the clock alone, since the store, which lives in rank 0 or in torchrun, may hang itself. For the same reason
ranks write their last reports to the run's folder, not to the store."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import secrets
import selectors
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.config import GuardConfig
from trainer.distributed.c10d_internals import default_store
from trainer.distributed.p2p import FAILING
from trainer.distributed.symmetric_memory import pending_waits
from trainer.observe import flight
from trainer.observe.sinks import write_status
from trainer.util.exit_codes import STALLED
from trainer.util.lines import read_status
from trainer.util.reading import Malformed, Shape, find_mismatch, parse_json, read_json, write_atomic

# Notices within a second that the process of another rank has ended, whatever this rank waits for. A rank that waits
# for its GPU does not learn from NCCL that another rank is gone, and handles no signal: torchrun ends it by SIGKILL,
# 30 seconds later. The kernel, however, closes the TCP connections of a process that ends for any reason. Each rank
# therefore holds one to the next rank, and a thread that waits for it to close.


CONNECT = 10.0
"""Seconds that a connection to an address of the next rank may take."""

GOODBYE = b"end\n"
"""The last line of a rank that ends in order. Any other line is the number of a rank that has not."""


class NeighbourWatch:
    """Connections of this rank to the ranks before and after it, in a ring over all ranks.

    When a neighbour's connection closes without a goodbye, or a neighbour says that of another rank, `lost` is called
    once, with the number of that rank, in the thread of the watch; the other neighbour is told before. Where no
    connection can be made, as between networks that refuse it, nothing is noticed."""

    def __init__(self, store: dist.Store, rank: int, size: int, lost: Callable[[int], None]):
        self.store, self.rank, self.size, self.lost = store, rank, size, lost
        self.token = secrets.token_hex(16)
        self.connections: dict[socket.socket, int] = {}  # and the rank at the other end
        self.lock, self.closed, self.orderly = threading.Lock(), False, False
        self.waking, self.wake = socket.socketpair()
        threading.Thread(target=self._run, name="neighbours", daemon=True).start()

    def close(self, orderly: bool) -> None:
        """Ends the watch. orderly: the neighbours are told that this rank ends; otherwise they find it lost."""
        with self.lock:
            self.closed, self.orderly = True, orderly
            for connection in self.connections:
                self._part(connection)
        self.wake.close()

    def _part(self, connection: socket.socket) -> None:
        """Closes a connection, after a goodbye if this rank ends in order."""
        if self.orderly:
            with contextlib.suppress(OSError):
                connection.sendall(GOODBYE)
        connection.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError, RuntimeError, ValueError), socket.create_server(("", 0)) as server:
            self._meet(server)
            self._listen()

    def _meet(self, server: socket.socket) -> None:
        """Connects to the next rank, and waits for the one before."""
        mine = {"hosts": own_addresses(), "port": server.getsockname()[1], "token": self.token}
        self.store.set(f"address/{self.rank}", json.dumps(mine))
        following = (self.rank + 1) % self.size
        address = parse_json(self.store.get(f"address/{following}"))
        if find_mismatch(address, {"hosts": [str], "port": int, "token": str}):
            raise ValueError("another program writes to the store of this run")
        for host in address["hosts"]:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, address["port"]), CONNECT)
                connection.sendall(address["token"].encode())
                self._add(connection, following)
                break
        server.settimeout(CONNECT)
        with contextlib.suppress(OSError):
            while True:  # the token tells the rank before from other programs that connect to the port
                connection, _ = server.accept()
                connection.settimeout(CONNECT)
                with contextlib.suppress(OSError):
                    if connection.recv(len(self.token), socket.MSG_WAITALL) == self.token.encode():
                        return self._add(connection, (self.rank - 1) % self.size)
                connection.close()

    def _add(self, connection: socket.socket, rank: int) -> None:
        connection.settimeout(None)
        with self.lock:
            if self.closed:
                self._part(connection)
            else:
                self.connections[connection] = rank

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.waking, selectors.EVENT_READ)
            for connection in self.connections:
                selector.register(connection, selectors.EVENT_READ)
            while not self.closed:
                for key, _ in selector.select():
                    if key.fileobj is self.waking:
                        return
                    if (lost := self._hear(key.fileobj)) is not None:
                        self._tell(lost, key.fileobj)
                        return self.lost(lost)
                    if key.fileobj not in self.connections:
                        selector.unregister(key.fileobj)

    def _hear(self, connection: socket.socket) -> int | None:
        """The rank that is lost, by what a neighbour says or by its silence; None after a goodbye."""
        try:
            said = connection.recv(64)
        except OSError:
            said = b""
        with self.lock:
            rank = self.connections.pop(connection, None)
        if self.closed or rank is None or said.startswith(GOODBYE):
            return None
        number = said.partition(b"\n")[0]
        return int(number) if number.isdigit() else rank

    def _tell(self, lost: int, heard: socket.socket) -> None:
        with self.lock:
            for connection in self.connections:
                if connection is not heard:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"%d\n" % lost)


def own_addresses() -> list[str]:
    """Addresses by which other ranks may reach this machine: that of its route to the master, then its name."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        found.append(probe.getsockname()[0])
    return [*found, socket.gethostname()]


# Heartbeats of all ranks, and the watchdog that reads them.


STARTING, DATA, STEP, SCHEDULE, EVALUATING, SAVING, ENDING = (
    "starting",
    "waiting for data",
    "training",
    "choosing a schedule",
    "evaluating",
    "saving",
    "ending",
)
"""The phases of a run. A step is `DATA`, then `STEP`; every other phase may take guard.stall_allowance."""

KNOWN = 3
"""So many steps must be timed before their times limit the next ones: the first steps compile and allocate."""

FIRST = 8
"""Only the ranks below this one give up when their time is over. The others wait to be told through the store, and give
up by themselves later: all ranks at once would flood the store."""

GRACE = 8.0
"""Seconds in which this rank may end by an error of its own, once another rank is known to have ended. Ranks of a
pipeline learn of it one after the other, some after five seconds, and name the rank and the action."""

PATIENCE = 15.0
"""Once a rank has given up, the others have at most so many seconds to write their reports."""


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank is, as it sends it to the others.

    count: phases entered so far, equal on all ranks at the same point of the run. Times are in seconds since 1970 by
    the node's clock: `since`, when the phase began; `until`, its limit; `said`, when the heartbeat was sent. Only their
    differences mean something to other nodes, whose clocks may differ."""

    rank: int
    node: str
    count: int
    phase: str
    step: int
    since: float
    until: float
    said: float

    def describe(self) -> str:
        return f"{self.phase} in step {self.step} for {self.said - self.since:.1f} s"


BEAT: Shape = {
    **dict.fromkeys(("rank", "count", "step"), int),
    **dict.fromkeys(("node", "phase"), str),
    **dict.fromkeys(("since", "until", "said"), float),
}
GROUPS: Shape = {str: {"desc": str, "ranks": [int], "entered": int}}
INSIDE: Shape = {"number": int, "what": str, "at": str}
"""What other ranks send, and write into the run's folder."""


def parse_heartbeat(text: bytes) -> Heartbeat | None:
    """What a rank has sent; None where it is no heartbeat."""
    try:
        beat = parse_json(text)
    except ValueError:
        return None
    return None if find_mismatch(beat, BEAT) else Heartbeat(**{name: beat[name] for name in BEAT})


@dataclass(frozen=True)
class RankReport:
    """What a rank writes before it ends: where it is, at which source lines, what its flight recorder has, and what it
    waits for in memory that ranks share."""

    beat: Heartbeat
    at: str
    groups: flight.Groups = field(default_factory=dict)
    late: list[str] = field(default_factory=list)


class Watchdog:
    """Watches the progress of this rank from construction until `close`; the training thread calls `enter`.

    Every rank constructs it, with the same `start`, a name for this start of the run. With guard.stall_factor=0 it does
    nothing."""

    def __init__(self, folder: Path, start: str, rank: int, size: int, settings: GuardConfig, steps: int):
        self.folder, self.reports, self.rank, self.size, self.settings, self.total = (
            folder,
            folder / "flight" / start,
            rank,
            size,
            settings,
            steps,
        )
        self.period, self.patience = (
            max(0.1, min(5.0, settings.stall_seconds / 5)),
            min(PATIENCE, 3 * settings.stall_seconds),
        )
        self.node = socket.gethostname()
        self.count, self.phase, self.step, self.since, self.limit = 0, "", 0, 0.0, 0.0
        self.steps: deque[float] = deque(maxlen=50)
        self.began: float | None = None  # when the step in progress began
        self.beats: dict[int, Heartbeat] = {}
        self.heard: dict[int, float] = {}  # when each of them was first seen here, by this rank's monotonic clock
        self.reason = ""  # why the first rank gave up
        self.stalled, self.closed, self.hurry, self.asking, self.answered = (threading.Event() for _ in range(5))
        self.neighbours: NeighbourWatch | None = None
        self.enter(STARTING, 0)
        if not settings.stall_factor:
            return
        if dist.is_nccl_available() and size > 1:
            with contextlib.suppress(OSError):  # for NCCL's own dump, without which a run can do
                self.reports.parent.mkdir(exist_ok=True)
        if size > 1:
            # It has its own connection: on a shared one, a thread that waits for a key blocks the others.
            self.store = dist.PrefixStore(f"watchdog/{start}", default_store().clone())
            threading.Thread(target=self._exchange, name="watchdog's store", daemon=True).start()
            connections = dist.PrefixStore(f"neighbours/{start}", default_store().clone())
            self.neighbours = NeighbourWatch(connections, rank, size, self._leave_after)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @property
    def done(self) -> int:
        """Steps that have been done, as far as phases were told."""
        return self.step - (self.phase in (DATA, STEP))

    def enter(self, phase: str, step: int) -> None:
        """Notes that this rank has entered a phase of a step. This is what counts as progress."""
        now = time.monotonic()
        if self.began is not None and phase != STEP:
            self.steps.append(now - self.began)
        if phase == SCHEDULE:  # the new schedule will have other step times
            self.steps.clear()
        self.began = now if phase == DATA else self.began if phase == STEP else None
        known, limit = len(self.steps) >= KNOWN, self.settings.stall_allowance
        if known:
            ordinary = max(self.settings.stall_seconds, self.settings.stall_factor * statistics.median(self.steps))
            limit = ordinary if phase in (DATA, STEP) else max(ordinary, limit)
        self.count, self.phase, self.step, self.since, self.limit = self.count + 1, phase, step, now, limit

    def close(self, orderly: bool) -> None:
        """Ends the watch. orderly: whether this rank ends without an error; otherwise the others need not wait for
        it."""
        self.closed.set()
        if self.neighbours is not None:
            self.neighbours.close(orderly)
        self.hurry.set()
        if self.settings.stall_factor and self.size > 1:
            faulthandler.cancel_dump_traceback_later()

    def beat(self) -> Heartbeat:
        now, since = time.time(), time.time() - (time.monotonic() - self.since)
        return Heartbeat(self.rank, self.node, self.count, self.phase, self.step, since, since + self.limit, now)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self.closed.wait(self.period):
            now = time.monotonic()
            if now - before > 10 * self.period:  # this process itself was suspended, or got no processor
                self.since += now - before
            before = now
            if self.size > 1:
                # If a library never releases the GIL, neither thread runs again. Then faulthandler's thread, which
                # needs no GIL, ends the process, after the other ranks have reported.
                faulthandler.dump_traceback_later(2 * self.limit + 2 * self.patience, exit=True)
            limit = self.limit + (0 if self.rank < FIRST else 2 * self.patience)
            if self.stalled.is_set() or now > self.since + limit and not self._excused():
                self._end_process()

    def _excused(self) -> bool:
        """Whether this rank waits for one that is not ahead of it, alive, and in a phase whose limit is not over:
        behind it, or come to the same phase later, whose part all the others still wait for."""
        return any(
            beat.count <= self.count and self._age(beat) < beat.until - beat.said and self._alive(beat)
            for beat in self._others().values()
        )

    def _alive(self, beat: Heartbeat) -> bool:
        return self._age(beat) < 5 * self.period + 1

    def _age(self, beat: Heartbeat) -> float:
        """Seconds since this rank has first seen a heartbeat: at most its age, and no clock of another node counts."""
        return time.monotonic() - self.heard.get(beat.rank, -math.inf)

    def _hear(self, beats: dict[int, Heartbeat]) -> None:
        """Takes up heartbeats that have been read."""
        for rank, beat in beats.items():
            if rank not in self.beats or self.beats[rank].said != beat.said:
                self.heard[rank] = time.monotonic()
        self.beats = beats

    def _others(self) -> dict[int, Heartbeat]:
        """The last heartbeat of all ranks, as far as the store answers."""
        if self.size > 1:
            self.answered.clear()
            self.asking.set()
            self.hurry.set()
            self.answered.wait(self.patience / 5)
        return self.beats

    def _exchange(self) -> None:
        keys = list(map(str, range(self.size)))
        # When the store is gone, with rank 0 or torchrun, the other thread goes on by the clock.
        with contextlib.suppress(RuntimeError):
            while not self.closed.is_set():
                self.store.set(str(self.rank), json.dumps(asdict(self.beat())))
                if self.stalled.is_set():
                    self.store.set("stalled", self.reason)
                elif self.store.check(["stalled"]):
                    self.reason = self.store.get("stalled").decode()
                    self.stalled.set()
                if self.asking.is_set():
                    present = keys if self.store.check(keys) else [key for key in keys if self.store.check([key])]
                    heard = zip(present, map(parse_heartbeat, self.store.multi_get(present)))
                    self._hear({int(key): beat for key, beat in heard if beat})
                    self.asking.clear()
                    self.answered.set()
                self.hurry.wait(self.period)
                self.hurry.clear()

    def _leave_after(self, lost: int) -> None:
        """Ends this process, since that of another rank has ended without a goodbye, unless this one ends by itself or
        reports a stall."""
        if self.closed.wait(GRACE) or FAILING.is_set() and self.closed.wait(PATIENCE):
            return
        if self.stalled.is_set() or self.phase == ENDING:
            return
        reason = f"the process of rank {lost} ended during {self.phase}, step {self.step}"
        print(f"rank {self.rank} leaves: {reason}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            if read_status(self.folder).get("status") == "running":
                write_status(self.folder, "failed", self.done, self.total, reason)
        os._exit(STALLED)

    def _end_process(self) -> None:
        """Writes this rank's report; one rank also prints a report on all. Then ends this process."""
        # If a file system or torch blocks this thread, faulthandler's ends the process.
        faulthandler.dump_traceback_later(4 * self.patience, exit=True)
        # The training thread is not to write an error of its own to torchrun's file any more.
        os.environ.pop("TORCHELASTIC_ERROR_FILE", "")
        self.reason = self.reason or (
            f"no progress for {time.monotonic() - self.since:.1f} s in {self.phase}, step {self.step} (limit "
            f"{self.limit:.4g} s: {self._rule()})"
        )
        self.stalled.set()
        try:
            self._write_down(dict(self._others()))
        except OSError as error:
            print(
                f"training stalled: {self.reason}; rank {self.rank}, at {flight.main_thread()}, cannot write to "
                f"{self.reports}: {error}",
                file=sys.stderr,
                flush=True,
            )
        os._exit(STALLED)

    def _write_down(self, beats: dict[int, Heartbeat]) -> None:
        answering = {rank for rank in range(self.size) if rank not in beats or self._alive(beats[rank])}
        self.reports.mkdir(parents=True, exist_ok=True)
        with open(self.reports / f"rank-{self.rank}.stack.txt", "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        record = RankReport(self.beat(), flight.main_thread(), *self._recorded())
        write_atomic(self.reports / f"rank-{self.rank}.json", json.dumps(asdict(record)))
        if self._reports_for_all():
            lines = describe_ranks(self._reports_of_ranks(answering), beats, self.size)
            report = "\n  ".join(
                [f"training stalled: {self.reason}", *lines, f"stacks of all threads: {self.reports}/rank-N.stack.txt"]
            )
            print(report, file=sys.stderr, flush=True)
            write_atomic(self.reports / "report.txt", report + "\n")
            write_status(self.folder, "failed", self.step, self.total, f"{self.reason}; {lines[0]}")
        else:
            end = time.monotonic() + 2 * self.patience
            while not (self.reports / "report.txt").stat().st_size and time.monotonic() < end:
                time.sleep(0.1)

    def _rule(self) -> str:
        guard = self.settings
        if self.limit == guard.stall_allowance:
            return f"guard.stall_allowance={guard.stall_allowance:g}"
        return (
            f"guard.stall_factor={guard.stall_factor:g} x the median step of {statistics.median(self.steps):.3g} s, "
            f"at least guard.stall_seconds={guard.stall_seconds:g}"
        )

    def _recorded(self) -> tuple[flight.Groups, list[str]]:
        """A summary of the flight recorder, whose full dump goes to a file; and what has not come by copies.

        Both are read in threads, since a call stuck in torch may hold the recorder's locks, and a GPU may not answer.
        Stacks are read in a second pass, since they may take long."""
        found: flight.Groups = {}
        missing: list[str] = []

        def read() -> None:
            for stacks in (False, True):
                for name, dump in flight.dump_recorders(stacks).items():
                    found.update(flight.summarise_own(name, dump))
                    write_atomic(self.reports / f"{name}_rank_{self.rank}", dump)

        works = {"flight recorder": read, "flags": lambda: missing.extend(pending_waits())}
        readers = [threading.Thread(target=work, name=name, daemon=True) for name, work in works.items()]
        for reader in readers:
            reader.start()
        end = time.monotonic() + self.patience / 2
        for reader in readers:
            reader.join(max(0.0, end - time.monotonic()))
        return dict(found), list(missing)

    def _reports_for_all(self) -> bool:
        """Whether this rank reports for all: the first one that creates report.txt."""
        try:
            os.close(os.open(self.reports / "report.txt", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        except FileExistsError:
            return False

    def _reports_of_ranks(self, answering: set[int]) -> dict[int, RankReport]:
        """The reports of all ranks. Waits for each rank, and longest while a rank in `answering` has not reported."""
        everyone, records = set(range(self.size)), {}
        start = time.monotonic()
        while (waited := time.monotonic() - start) < self.patience and (missing := everyone - set(records)):
            if waited > self.patience / 5 and not missing & answering:
                break
            for rank in missing:
                with contextlib.suppress(OSError, Malformed):
                    records[rank] = read_report(self.reports / f"rank-{rank}.json")
            time.sleep(0.1)
        return records


def read_report(path: Path) -> RankReport:
    """What a rank has written. Raises `OSError`, and `Malformed` for what no rank writes."""
    content = read_json(path, {"beat": BEAT, "at": str, "groups": GROUPS, "late": [str]}, "the rank counts as silent")
    for group in content["groups"].values():
        if "number" in group and (wrong := find_mismatch(group, INSIDE)):
            raise Malformed(f"{path} is not what it should be: {wrong}; the rank counts as silent")
    beat = Heartbeat(**{name: content["beat"][name] for name in BEAT})
    return RankReport(beat, content["at"], content["groups"], content["late"])


def describe_ranks(records: dict[int, RankReport], beats: dict[int, Heartbeat], size: int) -> list[str]:
    """Where the ranks are, one line each; those that hold up the others come first.

    First come ranks without a report, then the other ranks, those that are behind before the rest, then collectives
    that not all ranks have entered, and what ranks wait for in shared memory. beats: the last heartbeats."""
    texts = []
    for rank in sorted(set(range(size)) - set(records)):
        last = f"; last heard of: {beats[rank].describe()}, on {beats[rank].node}" if rank in beats else ""
        texts.append(f"rank {rank} does not answer: its process is stopped or stuck, or its machine is lost{last}")
    alike: dict[tuple[Any, ...], list[RankReport]] = {}
    for record in records.values():
        alike.setdefault((record.beat.count, record.beat.phase, record.beat.step, record.at), []).append(record)
    counts = {count for count, *_ in alike}
    for (count, *_, at), group in sorted(alike.items(), key=lambda item: item[0]):
        slowest = max((record.beat for record in group), key=lambda beat: beat.said - beat.since)
        behind = " (behind the others)" if count < max(counts) else ""
        nodes = ", ".join(sorted({record.beat.node for record in group})[:4])
        who = flight.format_ranks(record.beat.rank for record in group)
        texts.append(f"{who}{behind} on {nodes}: {slowest.describe()}, at {at or 'no line of the project'}")
    waits = flight.describe_waits({rank: record.groups for rank, record in records.items()})
    missing = [text for _, record in sorted(records.items()) for text in record.late]
    return [*texts[:12], *waits[:8], *missing[:8]]
