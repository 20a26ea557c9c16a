"""Accounts of steps as a run of several ranks would have them, with costs of known size in them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.diagnosis.time_breakdown import KernelTotal, TimeBreakdown

QUIET = {
    "products": 0.62,
    "attention": 0.10,
    "memory_bound": 0.14,
    "optimizer": 0.04,
    "communication/data/transfer": 0.04,
    "host/launch": 0.02,
    "data": 0.005,
    "other": 0.005,
}
"""Seconds of a rank's step that computes."""


@dataclass
class Case:
    """A run. terms: seconds of every rank's own work; slow: factors on the computation of single ranks; stages: factors
    on that of pipeline ranks; micro: micro-batches, of which the pipeline's own bubble follows; ranks: in all; tell:
    what bounds it."""

    terms: Mapping[str, float]
    tell: str = "compute"
    slow: Mapping[int, float] = field(default_factory=dict)
    stages: Sequence[float] = (1.0,)
    micro: int = 8
    ranks: int = 4


COMPUTED = ("products", "attention", "memory_bound", "recompute", "optimizer")


def accounts(case: Case, draw: random.Random, steps: int = 6, noise: float = 0.04) -> list[TimeBreakdown]:
    """What each rank notes of some steps, each term with noise of its own. Ranks wait for the slowest."""
    return [account for step in range(steps) for account in one_step(case, draw, 10 * (step + 1), noise)]


def one_step(case: Case, draw: random.Random, step: int, noise: float) -> list[TimeBreakdown]:
    depth, shards = len(case.stages), case.ranks // len(case.stages)
    found = []
    for rank in range(case.ranks):
        stage = rank // shards
        factor = case.slow.get(rank, 1.0) * case.stages[stage]
        terms = {
            name: seconds * (factor if name in COMPUTED else 1.0) * draw.lognormvariate(0, noise)
            for name, seconds in case.terms.items()
        }
        found.append((rank, stage, terms))
    work = [sum(terms.values()) for _, _, terms in found]
    by_stage = [max(work[stage * shards : (stage + 1) * shards]) for stage in range(depth)]
    own = (depth - 1) / case.micro * sum(by_stage) / depth
    accounts = []
    for (rank, stage, terms), mine in zip(found, work):
        if depth > 1:
            terms |= {"bubble/schedule": own, "bubble/imbalance": max(by_stage) - by_stage[stage]}
        terms["communication/data/waiting"] = by_stage[stage] - mine
        last = {"data": (10 if mine == max(work) else 0, 10)}
        place = {"pp": stage, "replicate": 0, "shard": rank % shards, "tp": 0}
        kernels = (KernelTotal("gemm", "products", 40, terms["products"], 6e12, 4e10),)
        accounts.append(
            TimeBreakdown(rank, step, place, "cpu", sum(terms.values()), terms, {}, last, 100, None, 1e-4, 0, kernels)
        )
    return accounts


def quiet(draw: random.Random) -> dict[str, float]:
    """A step without a disturbance: every term differs, and none is above its limit."""
    return {name: seconds * draw.uniform(0.7, 1.2) for name, seconds in QUIET.items()}
