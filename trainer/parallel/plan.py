"""The plan: how one model is laid over the ranks. Which plans are legal is decided here and nowhere else.

Pure functions of the configuration and the number of processes; no process group is needed to check a plan.
"""
from __future__ import annotations

from dataclasses import dataclass

from trainer.config import ConfigError, ParallelConfig
from trainer.model.spec import divisors


@dataclass(frozen=True)
class Plan:
    """A resolved plan. `world = pp * replicate * shard * tp`, ranks ordered with tp fastest."""
    world: int
    pp: int
    replicate: int
    shard: int
    tp: int
    stage: int
    offload: bool

    @property
    def dp(self) -> int:
        """Ranks that see different data."""
        return self.replicate * self.shard

    def describe(self) -> str:
        parts = [f"{name}{size}" for name, size in (("pp", self.pp), ("tp", self.tp)) if size > 1]
        return " x ".join([f"dp{self.dp}", *parts]) + f", ZeRO-{self.stage}" + (
            f" over {self.shard} of {self.dp} ranks" if self.stage and self.shard < self.dp else "") + (
            ", offloaded to host memory" if self.offload else "")


def check_plan(parallel: ParallelConfig, world: int) -> list[str]:
    """Everything that makes the plan impossible on `world` processes, one sentence each."""
    problems = []
    for name, reason in (("tp", "tensor"), ("pp", "pipeline")):
        size = getattr(parallel, name)
        if size != 1:
            problems.append(f"parallel.{name}={size}: {reason} parallelism is not part of this version; legal: 1 "
                            "(parallel.zero.stage=3 spreads a large model over the data-parallel ranks)")
    if parallel.dp != -1 and parallel.dp < 1:
        return [*problems, f"parallel.dp={parallel.dp} must be positive, or -1 for all {world} processes"]
    if parallel.dp not in (-1, world) and not problems:
        problems.append(f"parallel.dp={parallel.dp} x tp={parallel.tp} x pp={parallel.pp} needs {parallel.dp} processes, but {world} "
                        f"run; legal: {world}, or -1 for what is left (or start {parallel.dp} with --nproc-per-node)")
    dp, shard, stage = world if parallel.dp == -1 else parallel.dp, parallel.shard, parallel.zero.stage
    if shard != -1 and shard not in divisors(dp):
        problems.append(f"parallel.shard={shard} does not divide the {dp} data-parallel ranks; legal: "
                        f"{', '.join(map(str, divisors(dp)))}, or -1 for all")
    if stage == 0 and shard not in (-1, 1):
        problems.append(f"parallel.shard={shard} has nothing to share at parallel.zero.stage=0; set parallel.zero.stage=1, 2 or 3, "
                        "or parallel.shard=-1")
    if stage == 0 and parallel.zero.offload:
        problems.append("parallel.zero.offload=true keeps sharded state in host memory, and parallel.zero.stage=0 shards none; "
                        "set parallel.zero.stage=1, 2 or 3")
    return problems


def resolve_plan(parallel: ParallelConfig, world: int) -> Plan:
    """The plan on `world` processes. Raises `ConfigError` with all problems."""
    problems = check_plan(parallel, world)
    if problems:
        raise ConfigError(problems)
    stage = parallel.zero.stage
    shard = 1 if stage == 0 else world if parallel.shard == -1 else parallel.shard
    return Plan(world=world, pp=1, replicate=world // shard, shard=shard, tp=1, stage=stage, offload=parallel.zero.offload)
