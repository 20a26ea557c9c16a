"""Which ranks are profiled, where their traces lie, and what their process groups are for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

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
