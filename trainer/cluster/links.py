"""What collectives reach: by axis of a plan and by size, within a node and between nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainer.cluster.stopwatch import Stopwatch
from trainer.config import ConfigError
from trainer.distributed.boxes import buffers_of
from trainer.distributed.copied import CopyEngineGroup, copy_stream
from trainer.distributed.copied import PendingGather as Gathered
from trainer.distributed.world import World, own_group
from trainer.parallel.compress.links import all_gather, reduce_scatter
from trainer.planning.estimate.calibrate import COLLECTIVES, MeasuredCollective, fit_link
from trainer.planning.plan import Plan

SIZES = {"cuda": (2**12, 2**16, 2**20, 2**24, 2**28), "cpu": (2**12, 2**16, 2**20, 2**22)}
"""Bytes of the whole tensor of a collective."""

CALLS, AHEAD = 8, 5e-3
"""Calls by copies that are timed together, and seconds of work before them, in which the host launches them."""


@dataclass(frozen=True)
class LinkAxis:
    """Ranks that send to each other. name: of the axes of the plan that have these groups; place: the link between
    them, empty where it is not one alone; groups: of all ranks; group: this rank's."""

    name: str
    place: str
    groups: list[list[int]]
    group: Any


def list_axes(plan: Plan, world: World, node: int) -> list[LinkAxis]:
    """The ranks of a node; those with the same place on every node; and every axis of the plan with other groups."""
    nodes = world.size // node
    found: dict[str, list[list[int]]] = {
        "node": [[first + place for place in range(node)] for first in range(0, world.size, node)],
        "network": [[place + first for first in range(0, world.size, node)] for place in range(node)],
    }
    found |= {name: plan.groups(name) for name in ("tp", "cp", "shard", "replicate", "pp")}
    names: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, groups in found.items():
        if len(groups[0]) > 1:
            names.setdefault(tuple(sorted(map(tuple, groups))), []).append(name)
    result = []
    for groups, who in names.items():
        spans = {len({rank // node for rank in group}) for group in groups}
        place = "node" if spans == {1} else "network" if spans == {len(groups[0])} and nodes > 1 else ""
        lists = [list(group) for group in groups]
        result.append(LinkAxis(", ".join(who), place, lists, own_group(lists, world.timeout, f"probe {who[0]}")))
    return result


class LinkProbe:
    """Measures collectives. seconds: to measure in, about. All ranks call its methods together."""

    def __init__(self, world: World, axes: Sequence[LinkAxis], seconds: float):
        self.world, self.axes, self.watch = world, axes, Stopwatch(world)
        self.sizes = SIZES[world.device.type]
        self.limit = seconds / max(1, len(axes) * len(COLLECTIVES) * len(self.sizes))

    def measure(self) -> list[MeasuredCollective]:
        """Every collective of every axis by size."""
        return [
            MeasuredCollective(axis.name, axis.place, kind, len(axis.groups[0]), size, self._seconds(axis, kind, size))
            for axis in self.axes
            for kind in COLLECTIVES
            for size in self.sizes
        ]

    def _seconds(self, axis: LinkAxis, kind: str, size: int) -> float:
        return self.watch.seconds(self._collective(axis, kind, size), self.limit)

    def _collective(self, axis: LinkAxis, kind: str, size: int, later: bool = False) -> Callable[[], Any]:
        """A call of a collective whose whole tensor has `size` bytes. later: it returns what is to be waited for."""
        ranks, group = len(axis.groups[0]), axis.group
        part = torch.ones(max(1, size // ranks // 4), device=self.world.device)
        whole = torch.ones(part.numel() * ranks, device=self.world.device)
        if kind == "point to point":
            return self._transfer(axis, whole)
        return {
            "all-gather": lambda: all_gather(whole, part, group=group, async_op=later),
            "reduce-scatter": lambda: reduce_scatter(part, whole, group=group, async_op=later),
            "all-reduce": lambda: dist.all_reduce(whole, group=group, async_op=later),
            "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group, async_op=later),
        }[kind]

    def _transfer(self, axis: LinkAxis, tensor: torch.Tensor) -> Callable[[], Any]:
        """From the first rank of each pair of neighbours to the second; a last one without a neighbour has nothing to
        do."""
        ranks = next(group for group in axis.groups if self.world.rank in group)
        place = ranks.index(self.world.rank)
        if place == len(ranks) - 1 and place % 2 == 0:
            return lambda: None
        if place % 2:
            return lambda: dist.recv(tensor, ranks[place - 1], group=axis.group)
        return lambda: dist.send(tensor, ranks[place + 1], group=axis.group)

    def signal(self, work: Callable[[], Any], seconds: float) -> float | None:
        """Seconds of a call by copies between the processes of a node, beside its bytes: a gather of next to nothing.
        None where a node has one process, or they cannot share memory. work: a computation that takes so many
        `seconds`, behind which a GPU's host can be ahead of its device."""
        axis = next((axis for axis in self.axes if axis.place == "node"), None)
        if axis is None:
            return None
        group, device = axis.group, self.world.device
        everyone = CopyEngineGroup(group.group_name, dist.get_rank(group), dist.get_world_size(group))
        tiny, ahead = torch.ones(64, device=device), max(1, math.ceil(AHEAD / seconds)) * (device.type == "cuda")

        def computing(calls: int) -> None:
            for _ in range(ahead):
                work()
            for _ in range(calls):
                for _ in Gathered("probe", [tiny], everyone).arriving():
                    pass
                copy_stream(device).end()

        try:
            both = self.watch.seconds(lambda: computing(CALLS), 10 * self.limit)
        except (ConfigError, RuntimeError):  # of all ranks alike: see `symmetric_memory.run_on_all`
            return None
        buffers_of("probe", group, torch.uint8).free()
        alone = self.watch.seconds(lambda: computing(0), 10 * self.limit) if ahead else 0.0
        return max(0.0, both - alone) / CALLS

    def hidden(self, sent: Sequence[MeasuredCollective], work: Callable[[], Any], seconds: float) -> float:
        """Which share of an all-gather behind computation does not slow it down. work: a computation that takes so many
        `seconds`; both are made about equally long."""
        axis = self.axes[0]
        latency, bandwidth = fit_link([one for one in sent if one.axis == axis.name and one.kind == "all-gather"])
        most = max(self.sizes)
        size = round(min(most, max(2**16, bandwidth * max(seconds, 20 * latency))))
        gather = self._collective(axis, "all-gather", size, later=True)
        limit = 10 * self.limit
        alone = self.watch.seconds(lambda: gather().wait(), limit)
        times = max(1, round(alone / seconds))

        def compute() -> None:
            for _ in range(times):
                work()

        def both() -> None:
            handle = gather()
            compute()
            handle.wait()

        computed, together = self.watch.seconds(compute, limit), self.watch.seconds(both, limit)
        return min(1.0, max(0.0, (computed + alone - together) / min(computed, alone)))
