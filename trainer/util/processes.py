"""Processes of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

LAUNCH = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets for what it starts: the name of the launch."""


def child_processes(pid: int) -> list[int]:
    """The processes that the main thread of the process `pid` has started; empty where it has ended."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


@dataclass(frozen=True)
class KnownProcess:
    """A process that is not taken for a later one with its number. started: in ticks since the machine's start."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> KnownProcess | None:
        """The process `pid`; None where it has ended."""
        known = _stat(pid)
        return KnownProcess(pid, known[19]) if known and known[0] not in "ZX" else None

    def lives(self) -> bool:
        return KnownProcess.of(self.pid) == self


def find_launcher() -> KnownProcess | None:
    """The torchrun that has started this process, by way of a script or directly; None if none has.

    That is the nearest ancestor without the launch in its own environment. A process whose shell or notebook ends is
    thus no orphan: those are no torchrun."""
    if LAUNCH not in os.environ:
        return None
    mark, pid = f"{LAUNCH}={os.environ[LAUNCH]}".encode(), os.getppid()
    while pid > 1 and mark in _environment(pid):
        pid = int((_stat(pid) or ["", "0"])[1])
    return KnownProcess.of(pid)


def _environment(pid: int) -> list[bytes]:
    """What a process was started with; empty where that is not to be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on, the parent next; empty where the process has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
