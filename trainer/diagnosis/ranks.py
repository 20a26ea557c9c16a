"""Ranks of a run: which are profiled, where their traces lie, what their process groups are for, and which is slow."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import inf, log, prod, sqrt
from pathlib import Path
from typing import Any, NamedTuple

TRACES = "traces"
"""In the folder of a run."""

EVERYONE = 8
"""The most ranks that are all profiled."""

CONTEXT = "mesh_cp"
"""Description of the groups that share sequences. Their ranks may be those of a data-parallel group too."""

DATA = ("replicate", "shard")


def trace_of(run: Path, step: int, rank: int) -> Path:
    """The file with the trace of a step on a rank."""
    return run / TRACES / f"step-{step:08d}-rank-{rank:05d}.json"


def rank_coordinates(mesh: Mapping[str, int]) -> list[dict[str, int]]:
    """The coordinates of every rank. mesh: sizes of its dimensions, the fastest last (`Plan.mesh`)."""
    return [dict(zip(mesh, place)) for place in itertools.product(*map(range, mesh.values()))]


def choose_ranks(mesh: Mapping[str, int], slow: int | None = None) -> list[int]:
    """The ranks of which a step is profiled: all of a small world; else the pipelines of two data-parallel ranks, the
    first and that of the rank that has been `slow`, or the last; of the ranks that share matrices, the first and that
    of the slow one."""
    if prod(mesh.values()) <= EVERYONE:
        return list(range(prod(mesh.values())))
    everyone = rank_coordinates(mesh)
    second = everyone[-1 if slow is None else slow]
    data = [tuple(place[name] for name in DATA) for place in (everyone[0], second)]
    others = [name for name in mesh if name not in (*DATA, "pp")]
    inner = [tuple(place[name] for name in others) for place in (everyone[0], second)]
    return [
        rank
        for rank, place in enumerate(everyone)
        if tuple(place[name] for name in DATA) in data and tuple(place[name] for name in others) in inner
    ]


def axis_of(ranks: Sequence[int], mesh: Mapping[str, int], description: str) -> str:
    """What a process group communicates for (`account.AXES`), by the dimensions of the mesh that its ranks differ in.

    Pipelines have communicators of their own, so a group along one only serves sums over all ranks."""
    if description == CONTEXT:
        return "context"
    everyone = rank_coordinates(mesh)
    differ = {name for name in mesh if len({everyone[rank][name] for rank in ranks}) > 1}
    if differ == {"tp"}:
        return "tensor"
    return "data" if differ and differ <= set(DATA) else "all"


STEADILY = 0.60
"""Share of the steps in which a straggler is the slowest of its peers."""

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The 97.5% quantile of Student's t for 1, 2, ... degrees of freedom; `MANY` for more."""
MANY = 2.1


class Straggler(NamedTuple):
    """A rank that is the slowest in most steps. ratio: of its time to the lower median of its peers', the median over
    steps; steadily: share of the steps in which it is the slowest; certain: whether the difference is more than that
    among steps."""

    rank: int
    ratio: float
    steadily: float
    certain: bool

    def is_slow(self, factor: float) -> bool:
        """Whether the rank holds up the others: by this factor, steadily, and beyond noise."""
        return self.certain and self.ratio >= factor and self.steadily >= STEADILY


def peer_ratios(seconds: Mapping[int, float], roles: Mapping[int, Hashable]) -> dict[int, float]:
    """The time of each rank in a step over the lower median of the ranks with its role; ranks without a peer are left
    out. Of two ranks the slower one is thereby compared with the other."""
    peers: dict[Hashable, list[float]] = {}
    for rank, time in seconds.items():
        peers.setdefault(roles[rank], []).append(time)
    medians = {role: statistics.median_low(times) for role, times in peers.items() if len(times) > 1}
    return {rank: time / typical for rank, time in seconds.items() if (typical := medians.get(roles[rank], 0.0)) > 0}


def logged_ratios(lines: Iterable[Mapping[str, Any]]) -> list[dict[int, float]]:
    """The ratio of the slowest rank in each line of metrics that names one."""
    return [
        {int(line["straggler_rank"]): float(line["straggler"])}
        for line in lines
        if line.get("straggler") is not None and line.get("straggler_rank") is not None
    ]


def find_straggler(steps: Sequence[Mapping[int, float]]) -> Straggler | None:
    """The rank that is the slowest in most steps; None where no rank has peers. steps: `peer_ratios` of each, at least
    that of the slowest rank."""
    slowest = [max(ratios, key=ratios.__getitem__) for ratios in steps if ratios]
    if not slowest:
        return None
    rank = statistics.mode(slowest)
    ratios = [ratio for step in steps if (ratio := step.get(rank, 0.0)) > 0]
    certain = significance_ratio([log(ratio) for ratio in ratios]) > 1  # logs: what slows a step down slows all of it
    return Straggler(rank, statistics.median(ratios or [0.0]), slowest.count(rank) / len(slowest), certain)


def significance_ratio(differences: Sequence[float]) -> float:
    """The mean of differences over what it has to be to differ from zero with 97.5% certainty; one alone tells
    nothing."""
    if len(differences) < 2:
        return 0.0
    needed = STUDENT[len(differences) - 2] if len(differences) - 2 < len(STUDENT) else MANY
    error = needed * statistics.stdev(differences) / sqrt(len(differences))
    mean = statistics.fmean(differences)
    return mean / error if error > 0 else inf if mean > 0 else 0.0
