"""What is private in torch.distributed and used here, in one place: the default store, timeouts of groups and of
communicators made by hand, threads of gloo, the recorders of collectives."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Backend = c10d.Backend
"""A communicator without the process group around it."""


def default_store() -> dist.Store:
    """The store that the processes of the run met on."""
    return c10d._get_default_store()


def set_timeout(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Sets how long a collective of a group that exists may take. Until torch 2.14, the public way is for new groups
    only."""
    (getattr(dist, "set_timeout", None) or c10d._set_pg_timeout)(limit, group)


@functools.cache
def give_gloo_one_thread() -> None:
    """Every gloo communicator that this process makes from now on, by whatever function of torch, runs its collectives
    one after the other.

    By default two threads run them, and note the name of each collective that has ended in one string, without a lock
    (`ProcessGroupGloo::runLoop`, torch 2.13). Two that end together free its memory twice. torch makes groups
    with options for NCCL only."""
    construct = dist.ProcessGroupGloo.__init__

    def with_one_thread(
        self: Backend,
        store: dist.Store,
        rank: int,
        size: int,
        options: dist.ProcessGroupGloo._Options | None = None,
        timeout: timedelta = dist.default_pg_timeout,
        **newer: Any,  # of torch 2.14: `enable_reconfigure`, which options have too
    ) -> None:
        if options is None:
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout = gloo_devices(), timeout
        for name, value in newer.items():
            setattr(options, name, value)
        options._threads = 1
        construct(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = with_one_thread


def interrupt_nobody() -> None:
    """Lets this thread, and those that it starts from now on, wait for a free core when they wake up, instead of
    interrupting another (SCHED_BATCH; nothing where the system has none).

    gloo's thread would otherwise interrupt one of its own rank that holds the lock of a connection to send, and ask for
    that lock again and again until its time slice ends (`gloo::transport::tcp::Pair::handleEvents`, torch 2.13). Where
    ranks are more than cores, that was a fifth to a third of a step."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@functools.cache
def gloo_devices() -> list[Any]:
    """The network interfaces that gloo uses: those of GLOO_SOCKET_IFNAME, or the one of this machine's name.

    All communicators of this process share them: each device has a thread that wakes up a hundred times a second, and
    torch would make one for each communicator."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]


def make_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """A communicator on gloo, made on the store alone."""
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def make_nccl(store: dist.Store, rank: int, ranks: list[int], name: str, timeout: timedelta) -> Backend:
    """A communicator on NCCL, made on the store alone. ranks: of the whole run; rank: this one's place among them."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = ranks
    options.group_name = name
    return dist.ProcessGroupNCCL(store, rank, len(ranks), options)


def list_groups() -> dict[str, dist.ProcessGroup]:
    """The process groups of this process by name, in the order in which they were made, which is the same on all
    ranks."""
    return {name: group for group, name in c10d._world.pg_names.items()}


def group_members() -> dict[str, list[int]]:
    """The ranks of every process group of this process, by the group's name."""
    ranks = c10d._world.pg_group_ranks
    return {name: sorted(ranks.get(group, {})) for name, group in list_groups().items()}


def list_recorders() -> dict[str, Callable[..., Any]]:
    """What dumps the collectives that torch has recorded, by name of the recorder: NCCL's, or that of other backends,
    where this build of torch has them."""
    names = {"nccl_trace": "_dump_nccl_trace", "fr_trace": "_dump_fr_trace"}
    found = {name: getattr(torch._C._distributed_c10d, dump, None) for name, dump in names.items()}
    return {name: dump for name, dump in found.items() if dump is not None}
