"""Ends a run that makes no progress, after saying which rank stands where, so that it can be started again.

Each rank has two threads besides its training. One tells the others through the store, every few seconds, in which
phase of which step its rank is, and learns from there whether one of them has given up. The other goes by the clock
alone, since the store may be what hangs: it lives in a process of rank 0, or in torchrun. What ranks write down at the
end goes to the run's folder, for the same reason."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.config import GuardConfig
from trainer.observe import flight
from trainer.observe.sinks import write_status
from trainer.util.exit_codes import STALLED
from trainer.util.files import write_atomic

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
"""Steps whose times must be known before they limit the next ones: the first compile and allocate."""

FIRST = 8
"""Ranks that give up by themselves. The others do so only if nobody tells them to: all at once they would flood the
store."""

PATIENCE = 15.0
"""At most so many seconds are left to ranks for writing down where they are, once one of them has given up."""


@dataclass(frozen=True)
class Beat:
    """Where a rank is. count: phases entered so far, equal on all ranks at the same point of the run; since, until,
    said: when the phase began, when it is to have ended, and when this was said, in seconds since 1970 by the node's
    clock."""

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


@dataclass(frozen=True)
class Record:
    """What a rank writes down at the end: where it is, at which lines, and what its flight recorder has."""

    beat: Beat
    at: str
    groups: flight.Groups = field(default_factory=dict)


class Watchdog:
    """Watches over the progress of this rank from construction until `close`; the training thread calls `enter`.

    Every rank constructs it, with the same `start`, a name for this start of the run. guard.stall_factor=0 makes it do
    nothing."""

    def __init__(self, folder: Path, start: str, rank: int, size: int, settings: GuardConfig, steps: int):
        self.folder, self.place, self.rank, self.size, self.settings, self.total = (
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
        self.began: float | None = None  # the present step
        self.beats: dict[int, Beat] = {}
        self.reason = ""  # of the first rank to give up
        self.stalled, self.closed, self.hurry, self.asking, self.answered = (threading.Event() for _ in range(5))
        self.enter(STARTING, 0)
        if not settings.stall_factor:
            return
        if dist.is_nccl_available() and size > 1:
            self.place.parent.mkdir(exist_ok=True)  # for NCCL's own dump
        if size > 1:
            # A connection of its own: on a shared one, whoever waits for a key holds up the others.
            self.store = dist.PrefixStore(f"watchdog/{start}", dist.distributed_c10d._get_default_store().clone())
            threading.Thread(target=self._talk, name="watchdog's store", daemon=True).start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def enter(self, phase: str, step: int) -> None:
        """Notes that this rank has come to a phase of a step, which is progress."""
        now = time.monotonic()
        if self.began is not None and phase != STEP:
            self.steps.append(now - self.began)
        if phase == SCHEDULE:  # steps will take another time
            self.steps.clear()
        self.began = now if phase == DATA else self.began if phase == STEP else None
        known, limit = len(self.steps) >= KNOWN, self.settings.stall_allowance
        if known:
            ordinary = max(self.settings.stall_seconds, self.settings.stall_factor * statistics.median(self.steps))
            limit = ordinary if phase in (DATA, STEP) else max(ordinary, limit)
        self.count, self.phase, self.step, self.since, self.limit = self.count + 1, phase, step, now, limit

    def close(self) -> None:
        """Ends the watch."""
        self.closed.set()
        self.hurry.set()
        if self.settings.stall_factor and self.size > 1:
            faulthandler.cancel_dump_traceback_later()

    def beat(self) -> Beat:
        now, since = time.time(), time.time() - (time.monotonic() - self.since)
        return Beat(self.rank, self.node, self.count, self.phase, self.step, since, since + self.limit, now)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self.closed.wait(self.period):
            now = time.monotonic()
            if now - before > 10 * self.period:  # this process itself was suspended, or got no processor
                self.since += now - before
            before = now
            if self.size > 1:
                # Should a library hold Python's lock for ever, neither thread runs again. A third one, of C, then ends
                # the process, when the other ranks have reported.
                faulthandler.dump_traceback_later(2 * self.limit + 2 * self.patience, exit=True)
            limit = self.limit + (0 if self.rank < FIRST else 2 * self.patience)
            if self.stalled.is_set() or now > self.since + limit and not self._excused():
                self._give_up()

    def _excused(self) -> bool:
        """Whether a rank that is behind this one is alive, and in a phase that may take longer."""
        now = time.time()
        return any(
            beat.count < self.count and now < beat.until and self._alive(beat) for beat in self._others().values()
        )

    def _alive(self, beat: Beat) -> bool:
        return time.time() - beat.said < 5 * self.period + 1

    def _others(self) -> dict[int, Beat]:
        """What all ranks have said last, as far as the store answers."""
        if self.size > 1:
            self.answered.clear()
            self.asking.set()
            self.hurry.set()
            self.answered.wait(self.patience / 5)
        return self.beats

    def _talk(self) -> None:
        keys = list(map(str, range(self.size)))
        # Without the store, which goes with rank 0 or torchrun, the clock decides.
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
                    self.beats = {
                        int(key): Beat(**json.loads(value))
                        for key, value in zip(present, self.store.multi_get(present))
                    }
                    self.asking.clear()
                    self.answered.set()
                self.hurry.wait(self.period)
                self.hurry.clear()

    def _give_up(self) -> None:
        """Writes down where this rank is; one rank also says where all are. Then ends this process."""
        # A file system or torch may hold this thread up.
        faulthandler.dump_traceback_later(4 * self.patience, exit=True)
        error_file = os.environ.pop(
            "TORCHELASTIC_ERROR_FILE", ""
        )  # what the training thread may still want to write is no news
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
                f"{self.place}: {error}",
                file=sys.stderr,
                flush=True,
            )
        with contextlib.suppress(OSError):
            try:
                json.loads(Path(error_file).read_text())
            except ValueError:  # it has just begun to: torchrun dies of half a file, and restarts nothing
                os.remove(error_file)
        os._exit(STALLED)

    def _write_down(self, beats: dict[int, Beat]) -> None:
        answering = {rank for rank in range(self.size) if rank not in beats or self._alive(beats[rank])}
        self.place.mkdir(parents=True, exist_ok=True)
        with open(self.place / f"rank-{self.rank}.stack.txt", "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        record = Record(self.beat(), flight.main_thread(), self._recorded())
        write_atomic(self.place / f"rank-{self.rank}.json", json.dumps(asdict(record)))
        if self._speaks():
            lines = describe(self._records(answering), beats, self.size)
            report = "\n  ".join(
                [f"training stalled: {self.reason}", *lines, f"stacks of all threads: {self.place}/rank-N.stack.txt"]
            )
            print(report, file=sys.stderr, flush=True)
            write_atomic(self.place / "report.txt", report + "\n")
            write_status(self.folder, "failed", self.step, self.total, f"{self.reason}; {lines[0]}")
        else:
            end = time.monotonic() + 2 * self.patience
            while not (self.place / "report.txt").stat().st_size and time.monotonic() < end:
                time.sleep(0.1)

    def _rule(self) -> str:
        guard = self.settings
        if self.limit == guard.stall_allowance:
            return f"guard.stall_allowance={guard.stall_allowance:g}"
        return (
            f"guard.stall_factor={guard.stall_factor:g} x the median step of {statistics.median(self.steps):.3g} s, "
            "at least "
            f"guard.stall_seconds={guard.stall_seconds:g}"
        )

    def _recorded(self) -> flight.Groups:
        """What the flight recorder has, kept in full beside. In a thread, for what is stuck in torch may hold its
        locks; first without source lines, which may take long."""
        found: flight.Groups = {}

        def read() -> None:
            for stacks in (False, True):
                for name, dump in flight.dumps(stacks).items():
                    found.update(flight.recorded(name, dump))
                    (self.place / f"{name}_rank_{self.rank}").write_bytes(dump)

        reader = threading.Thread(target=read, name="flight recorder", daemon=True)
        reader.start()
        reader.join(self.patience / 2)
        return dict(found)

    def _speaks(self) -> bool:
        """Whether this rank, as the first to ask, reports for all."""
        try:
            os.close(os.open(self.place / "report.txt", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        except FileExistsError:
            return False

    def _records(self, answering: set[int]) -> dict[int, Record]:
        """What ranks write down, waiting for all of them, and longer for those that were heard of just before."""
        everyone, records = set(range(self.size)), {}
        start = time.monotonic()
        while (waited := time.monotonic() - start) < self.patience and (missing := everyone - set(records)):
            if waited > self.patience / 5 and not missing & answering:
                break
            for rank in missing:
                with contextlib.suppress(FileNotFoundError):
                    content = json.loads((self.place / f"rank-{rank}.json").read_text())
                    records[rank] = Record(Beat(**content["beat"]), content["at"], content["groups"])
            time.sleep(0.1)
        return records


def describe(records: dict[int, Record], beats: dict[int, Beat], size: int) -> list[str]:
    """Where the ranks are, those first that hold up the others: the ones that wrote nothing down, then those that are
    behind, then collectives that not all ranks have entered. `beats`: what ranks said last before."""
    texts = []
    for rank in sorted(set(range(size)) - set(records)):
        last = f"; last heard of: {beats[rank].describe()}, on {beats[rank].node}" if rank in beats else ""
        texts.append(f"rank {rank} does not answer: its process is stopped or stuck, or its machine is lost{last}")
    alike: dict[tuple[Any, ...], list[Record]] = {}
    for record in records.values():
        alike.setdefault((record.beat.count, record.beat.phase, record.beat.step, record.at), []).append(record)
    counts = {count for count, *_ in alike}
    for (count, *_, at), group in sorted(alike.items(), key=lambda item: item[0]):
        slowest = max((record.beat for record in group), key=lambda beat: beat.said - beat.since)
        behind = " (behind the others)" if count < max(counts) else ""
        nodes = ", ".join(sorted({record.beat.node for record in group})[:4])
        who = flight.ranks(record.beat.rank for record in group)
        texts.append(f"{who}{behind} on {nodes}: {slowest.describe()}, at {at or 'no line of the project'}")
    waits = flight.waits({rank: record.groups for rank, record in records.items()})
    return [*texts[:12], *waits[:8]]
