"""What this machine has and uses, as Linux tells it: memory, processors, disks."""

from __future__ import annotations

import contextlib
import os
import shutil
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
