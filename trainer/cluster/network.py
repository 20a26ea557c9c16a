"""What is wrong between nodes: the bandwidth of all-reduces within and between them, and their clocks."""

from __future__ import annotations

import datetime
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.cluster.node import NODE, PreflightOptions


@dataclass(frozen=True)
class BandwidthFloors:
    """Least bus bandwidths in GB/s, and the least share of the median."""

    within: float
    between: float
    share: float


FLOORS = {"nccl": BandwidthFloors(20.0, 2.0, 0.6), "gloo": BandwidthFloors(0.01, 0.002, 0.0)}
"""These are far below what NVLink, PCIe 4 and 100 Gbit/s reach, and above what broken links leave. A cluster's own
figures, given as options, find more."""

ELEMENTS = {"nccl": 2**26, "gloo": 2**20}  # fp32

HUNG = 0.0  # GB/s of an all-reduce that failed or did not end


def pair_nodes(nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs of nodes, in which each node is paired with two others, where there are as many.

    A node that is slow in both pairs is slow itself; one that is slow in only one of them is not."""
    even = [(first, first + 1) for first in range(0, nodes - 1, 2)]
    odd = [(first, first + 1) for first in range(1, nodes - 1, 2)]
    if nodes > 2 and nodes % 2 == 0:
        odd.append((nodes - 1, 0))
    return [pairs for pairs in (even, odd) if pairs]


def bandwidth_problems(
    within: dict[str, float], between: dict[tuple[str, str], float], floors: BandwidthFloors
) -> list[str]:
    """Which nodes, or pairs of nodes, are slower than they may be. GB/s; `HUNG` where an all-reduce did not end."""
    problems = [
        f"{node}: all-reduce over its processes {speed}; look at nvidia-smi topo -m and nvlink --status, and leave it "
        "out meanwhile"
        for node, speed in _slow(within, floors.within, floors.share)
    ]
    slow = dict(_slow(between, floors.between, floors.share))
    for node in dict.fromkeys(itertools.chain(*slow)):
        links = [pair for pair in between if node in pair]
        if len(links) > 1 and all(link in slow for link in links):
            problems.append(
                f"{node}: all-reduce with each of {len(links)} other nodes {slow[links[0]]}; look at its network "
                "adapter (ibstat, ethtool), and leave it out meanwhile"
            )
            slow = {pair: speed for pair, speed in slow.items() if node not in pair}
    return problems + [
        f"{first} with {second}: all-reduce {speed}; look at the adapters of both, their cables and "
        "NCCL_SOCKET_IFNAME, NCCL_IB_HCA"
        for (first, second), speed in slow.items()
    ]


def _slow(speeds: dict[Any, float], floor: float, share: float) -> Iterator[tuple[Any, str]]:
    """Those whose speed is below the floor, or below the share of the median, with a text that says so."""
    median = statistics.median(speeds.values()) if speeds else 0.0
    for who, speed in speeds.items():
        if speed == HUNG:
            yield who, "failed or did not end"
        elif speed < floor:
            yield who, f"at {speed:.3g} GB/s, below the floor of {floor:g}"
        elif speed < share * median:
            yield who, f"at {speed:.3g} GB/s, below {share:g} of the median {median:.3g}"


def clock_problems(rounds: Sequence[dict[str, float]], limit: float) -> list[str]:
    """The nodes whose clock differs from the median by more than `limit` seconds.

    rounds: the nodes' clocks, read at one moment, but for the time that a message takes. Of several rounds a node's
    smallest difference counts, since delays look like differences."""
    least: dict[str, float] = {}
    for clocks in rounds:
        median = statistics.median(clocks.values())
        for node, clock in clocks.items():
            least[node] = min(least.get(node, float("inf")), clock - median, key=abs)
    return [
        f"{node}: its clock is {abs(difference):.1f} s {'ahead of' if difference > 0 else 'behind'} the others' (more "
        f"than {limit:g}): start chrony or ntpd there"
        for node, difference in least.items()
        if abs(difference) > limit
    ]


def check_network(options: PreflightOptions) -> tuple[list[str], str]:
    """Everything that is wrong between the processes that torchrun started, and a summary of what was measured.

    Both are the same on all processes."""
    import torch
    import torch.distributed as dist

    from trainer.distributed.mesh import gather_objects

    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=datetime.timedelta(seconds=options.patience + 60)
    )

    control = dist.new_group(backend="gloo")
    names = gather_objects((int(os.environ.get("GROUP_RANK", 0)), NODE), control)
    nodes = sorted(set(names))
    members = [[other for other, name in enumerate(names) if name == node] for node in nodes]

    def measure(groups: list[list[int]]) -> list[float]:
        """The bus bandwidth of each group, measured at the same time: that of its slowest process."""
        made = [dist.new_group(group) for group in groups]
        mine = next((index for index, group in enumerate(groups) if rank in group), None)
        speed = None
        if mine is not None:
            speed = all_reduce_speed(
                made[mine], len(groups[mine]), torch.ones(ELEMENTS[backend], device=device), options.patience
            )
        speeds = gather_objects(speed, control)
        return [min(speeds[member] for member in group) for group in groups]

    rounds = []
    for _ in range(5):
        dist.barrier(group=control)
        clocks = gather_objects(time.time(), control)
        rounds.append({node[1]: clocks[ranks[0]] for node, ranks in zip(nodes, members)})
    problems = clock_problems(rounds, options.skew)
    within = dict(zip((name for _, name in nodes), measure(members))) if len(members[0]) > 1 else {}
    between: dict[tuple[str, str], float] = {}
    for pairs in pair_nodes(len(nodes)):
        if HUNG in [*within.values(), *between.values()]:
            break  # processes may be stuck in that all-reduce
        speeds = measure([members[first] + members[second] for first, second in pairs])
        between |= {(nodes[first][1], nodes[second][1]): speed for (first, second), speed in zip(pairs, speeds)}
    given = {name: value for name in ("within", "between", "share") if (value := getattr(options, name)) != -1}
    floors = replace(FLOORS[backend], **given)
    measured = [
        f"{kind} {min(speeds.values()):.3g} to {max(speeds.values()):.3g} GB/s"
        for kind, speeds in (("within nodes", within), ("between nodes", between))
        if speeds
    ]
    return problems + bandwidth_problems(
        within, between, floors
    ), f"{len(nodes)} nodes, all-reduce {', '.join(measured)}"


def all_reduce_speed(group: Any, size: int, tensor: Any, patience: float) -> float:
    """Bus bandwidth of an all-reduce in GB/s: 2 (n - 1) / n of its bytes by its time, comparable between group sizes.

    `HUNG` where it fails, gives a wrong sum, or takes longer than `patience` seconds."""
    import torch
    import torch.distributed as dist

    seconds = []
    try:
        for _ in range(5):  # the first one also connects; the best one counts
            tensor.fill_(1)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            start = time.monotonic()
            work = dist.all_reduce(tensor, group=group, async_op=True)
            while not work.is_completed():
                if time.monotonic() - start > patience:
                    return HUNG
            seconds.append(time.monotonic() - start)
            work.wait()
            if not bool((tensor == size).all()):
                return HUNG
    except RuntimeError as error:  # a connection refused or lost; NCCL's errors
        print(f"preflight: {NODE}: {' '.join(str(error).split())[:300]}", file=sys.stderr, flush=True)
        return HUNG
    return 2 * (size - 1) / size * tensor.numel() * tensor.element_size() / min(seconds) / 1e9
