"""What this machine has and uses, as Linux tells it: memory, processors, disks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def host_memory() -> int:
    """Bytes of memory that the machine has, or that its container may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        total = min(total, int((CGROUP / "memory.max").read_text()))
    return total


def used_memory() -> int:
    """Bytes of it that are in use, without what only caches files."""
    with contextlib.suppress(OSError, ValueError):
        int((CGROUP / "memory.max").read_text())  # a limit, within which the container's own use counts
        cached = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return int((CGROUP / "memory.current").read_text()) - int(cached["inactive_file"])
    found = {name: int(rest.split()[0]) for name, rest in _lines(Path("/proc/meminfo"))}
    return 1024 * (found["MemTotal"] - found["MemAvailable"])


def resident_memory() -> int:
    """Bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def processor_ticks() -> tuple[int, int]:
    """What all processors together have done since the machine's start: ticks of work, and all ticks."""
    ticks = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    idle = ticks[3] + ticks[4]  # idle, and waiting for disks
    return sum(ticks) - idle, sum(ticks)


def free_disk(folder: Path) -> int:
    """Bytes that are free where `folder` lies."""
    return shutil.disk_usage(folder).free


def _lines(path: Path) -> list[tuple[str, str]]:
    pairs = (line.partition(":") for line in path.read_text().splitlines())
    return [(name, rest) for name, _, rest in pairs]


# Errors that say that memory ran out. They are recognised by their text: libraries raise them as different exception
# types, the errors of other ranks reach torchrun as text, and a pipeline wraps them in an error of its own.


SIGNS = re.compile(
    r"\bOutOfMemoryError\b|\bMemoryError\b|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
    r"CUDNN_STATUS_ALLOC_FAILED|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory"
)
"""Of GPU allocators, cuBLAS and cuDNN, the host's allocator, Python and NumPy, the operating system."""

NOISE = re.compile(
    r"^\w*(?:Error|Exception): |\[enforce fail at [^]]*\] \S* == \S* |^\. | If reserved but unallocated memory.*|"
    r" See documentation.*"
)


def lacks_memory(text: str) -> bool:
    """Whether an error's text says that memory ran out."""
    return SIGNS.search(text) is not None


def missing_memory(error: BaseException | None) -> str | None:
    """What an error, or a cause of it, says of the memory that could not be had, on one line; None where it is another
    error."""
    while error is not None:
        if lacks_memory(text := f"{type(error).__name__}: {error}"):
            return error_reason(text)
        error = error.__cause__
    return None


def error_reason(text: str) -> str:
    """The first line of an error's text, without what is of no use to its reader."""
    first = next(filter(None, map(str.strip, text.splitlines())), "")
    return NOISE.sub("", NOISE.sub("", first)).strip(" .")


# Processes of this machine.


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
