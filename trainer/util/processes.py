"""Processes of this machine."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that the main thread of the process `pid` has started; empty where it has ended."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []
