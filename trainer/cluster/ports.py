"""TCP ports for a rendezvous of processes that are started later; `python -m trainer.cluster.ports` prints one."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""From which to which port Linux takes those that nobody named: of connections opened, of sockets bound to 0."""

LOWEST = 10_000
"""Services have their fixed ports below, Slurm's among them."""


def free_ports(count: int = 1) -> list[int]:
    """`count` different ports on which nothing listens now on this machine, and which the system hands out to nobody.

    A port that it does hand out can be gone before a rendezvous listens there, which takes seconds of imports: each
    connection that any process opens meanwhile may get it. torchrun then fails after 104 s (torch 2.13), or, where
    what took it listens, talks to a stranger. Raises `OSError` if there are not so many."""
    try:
        low, high = (int(bound) for bound in HANDED_OUT.read_text().split())
    except (OSError, ValueError):  # not Linux; IANA's range
        low, high = 49_152, 65_535
    every = range(LOWEST, 65_536)
    own = [port for port in every if not low <= port <= high] or list(every)
    found: list[int] = []
    for port in random.SystemRandom().sample(own, len(own)):  # never by a run's seed: two runs would take the same
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"{len(found)} of {len(own)} ports are free, and {count} are wanted")


if __name__ == "__main__":
    print(*free_ports())
