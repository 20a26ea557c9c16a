"""The plan: how one model is laid over the ranks, and which meshes are legal. What else makes a plan illegal, each
feature says itself (`planning/features.py`).

Pure functions of the configuration and the number of processes; no process group is needed to check a plan.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from trainer.config import BatchConfig, Config, ConfigError, ParallelConfig, RunConfig
from trainer.config.fields import list_divisors
from trainer.config.model import ModelSpec
from trainer.config.typed import out_of_range

MOST_PROCESSES = 1 << 16
"""Processes of a run. Whoever asks for more has probably typed a digit too many, and tables of all ranks would fill the
memory."""


OVERLAPPED = "alltoall_overlap"
"""The way of `parallel.ep_dispatch` in which a forward and a backward pass run in turns."""


@dataclass(frozen=True)
class Plan:
    """A resolved plan; its mesh says which rank is where.

    The ranks between `pp` and `tp` have two orders: `replicate` x `shard` says who shares the model's states, and dp x
    `cp`, with `cp` the faster, who shares sequences. Shards may be cut across both.

    casts_once: whether a step casts each weight to fp8 once, where `decide` finds memory for it. overlaps: whether the
    forward pass of a micro-batch and the backward pass of another run in turns, where the schedule pairs them."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    stage: int = 0
    offload: bool = False
    engine: str = "torch"
    nvme: bool = False
    cp: int = 1
    ep: int = 1
    casts_once: bool = False
    overlaps: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """The dimensions of the mesh and their sizes, from the slowest to the fastest: ranks that differ in the last
        one only are neighbours, on one node as far as it goes."""
        return {"pp": self.pp, "replicate": self.replicate, "shard": self.shard, "tp": self.tp}

    @property
    def expert_mesh(self) -> dict[str, int]:
        """The same ranks as experts see them. Those that share a layer's experts (`ep`) are neighbours, whether they
        are tensor-, context- or data-parallel ranks otherwise; the ranks that are left share the states of the same
        experts, or hold copies of them (parallel folding, arXiv 2504.14960)."""
        ranks = self.replicate * self.shard * self.tp // self.ep
        shard = max(1, self.shard * self.tp // self.ep) if self.stage else 1
        return {"pp": self.pp, "expert_replicate": ranks // shard, "expert_shard": shard, "ep": self.ep}

    def shards(self, experts: bool) -> tuple[int, int]:
        """Ranks that share one copy of a parameter's states, and ranks that experts are dealt out to before: for those
        of experts, or for other parameters."""
        return (self.expert_mesh["expert_shard"], self.ep) if experts and self.ep > 1 else (self.shard, 1)

    @property
    def world(self) -> int:
        """Processes."""
        return math.prod(self.mesh.values())

    def groups(self, dimension: str) -> list[list[int]]:
        """The process groups of a dimension of one of the two meshes, or of `dp` or `cp`: global ranks that differ in
        their place along it only."""
        first = self.first_group(dimension)
        firsts = (rank for rank in range(self.world) if rank // first.step % len(first) == 0)
        return [[rank + place for place in first] for rank in firsts]

    def first_group(self, dimension: str) -> range:
        """The group of `groups` that rank 0 is in. All groups of a dimension have the same distances."""
        sizes = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp} if dimension in ("dp", "cp") else self.mesh
        sizes = sizes if dimension in sizes else self.expert_mesh
        names = list(sizes)
        step = math.prod(sizes[name] for name in names[names.index(dimension) + 1 :])
        return range(0, sizes[dimension] * step, step)

    def to_dict(self) -> dict[str, Any]:
        """The plan as checkpoints record it, without what changes no number."""
        fields = asdict(self)
        del fields["casts_once"], fields["overlaps"]
        return {"world": self.world, **fields}

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether the gradients of each micro-batch are reduced, so that a rank keeps its shards of them only. Where no
        ranks share gradients (one GPU, `parallel.shard=1`), this would save no memory: they are reduced once a step."""
        return self.stage >= 2 and (self.engine != "torch" or self.offload or self.shard * self.shards(True)[0] > 1)

    @property
    def token_ranks(self) -> int:
        """Ranks that share the tokens of a micro-batch between the products of a layer: each holds an equal run."""
        return self.tp * self.cp

    @property
    def dp(self) -> int:
        """Ranks that see different data."""
        return self.replicate * self.shard // self.cp

    @property
    def degrees(self) -> dict[str, int]:
        """The number of ranks that divide the work by each kind of parallelism."""
        return {"dp": self.dp, "cp": self.cp, "tp": self.tp, "pp": self.pp}

    def describe(self) -> str:
        parts = [f"{name}{size}" for name, size in self.degrees.items() if size > 1 or name == "dp"]
        parts += [f"ep{self.ep}"] * (self.ep > 1)
        return (
            " x ".join(parts)
            + f", ZeRO-{self.stage}"
            + (f" over {self.shard} of {self.shard * self.replicate} ranks" * bool(self.stage and self.replicate > 1))
            + (", on a disk" if self.nvme else ", offloaded to host memory" if self.offload else "")
            + (", DeepSpeed" if self.engine == "deepspeed" else "")
        )


class Feature(NamedTuple):
    """One way to divide or to compute a model, as planning sees it. `planning.features.FEATURES` lists all of them.

    A feature that divides work over ranks has a folder in `parallel/`: a pure `plan.py`, which answers the questions
    below, and the code that applies it to a model. A question that does not concern a feature keeps its default.

    check_model: (settings of `parallel`, model where it is known, processes, processes of a node) -> what makes it
    impossible, one sentence each. check_ranks: (settings of `parallel`, ranks that hold the same part of the model,
    processes, processes of a node) -> the same, where the mesh fits the processes. check_plan: (configuration, model,
    plan, processes of a node) -> the same of the whole configuration. collect_warnings: the same arguments -> what is
    legal and may be a mistake. describe: (configuration, model, plan) -> rows of a table of how its ranks communicate.
    """

    name: str
    check_model: Callable[[ParallelConfig, ModelSpec | None, int, int], Iterable[str]] = lambda *_: ()
    check_ranks: Callable[[ParallelConfig, int, int, int], Iterable[str]] = lambda *_: ()
    check_plan: Callable[[Config, ModelSpec | None, Plan, int], Iterable[str]] = lambda *_: ()
    collect_warnings: Callable[[Config, ModelSpec, Plan, int], Iterable[str]] = lambda *_: ()
    describe: Callable[[Config, ModelSpec, Plan], Iterable[tuple[str, str]]] = lambda *_: ()


def check_degrees(parallel: ParallelConfig, world: int) -> list[str]:
    """Settings of `parallel` that no number of processes could have, one sentence each."""
    problems = out_of_range(parallel, "parallel")
    if world > MOST_PROCESSES:
        return [*problems, f"{world} processes are more than any plan is made for; legal: up to {MOST_PROCESSES}"]
    if parallel.dp != -1 and parallel.dp < 1:
        problems.append(f"parallel.dp={parallel.dp} must be positive, or -1 for the processes that are left")
    return problems


def can_divide(parallel: ParallelConfig, world: int) -> bool:
    """Whether processes can be divided by the degrees at all, so that features can be asked about the plan."""
    degrees = (parallel.tp, parallel.pp, parallel.cp, parallel.ep, abs(parallel.dp))
    return world <= MOST_PROCESSES and min(degrees) >= 1 and parallel.dp >= -1


def check_mesh(parallel: ParallelConfig, world: int, node: int | None) -> list[str]:
    """What keeps legal degrees from making a mesh of `world` processes.

    node: processes on a machine, all of them if None."""
    cp, dp = parallel.cp, parallel.dp
    model, context = parallel.tp * parallel.pp * cp, f" parallel.cp={cp}" if cp > 1 else ""
    degrees = f"parallel.tp={parallel.tp} x parallel.pp={parallel.pp}" + (context and f" x{context}")
    degrees += "" if dp == -1 else f" x parallel.dp={dp}"
    if world % model or dp not in (-1, world // model):
        counts = [model * dp] if dp != -1 else nearby_worlds(world, model, node or world)
        ways = [f"start {' or '.join(map(str, counts))} processes"]
        if world % model == 0:
            ways.append(f"set parallel.dp={world // model}, or -1 for what is left")
        else:
            ways += [f"set parallel.tp={tp} parallel.pp={pp}{context}" for tp, pp in _smaller(parallel, world)]
            if cp > 1 and (shorter := [n for n in list_divisors(cp) if world % (model // cp * n) == 0]):
                ways.append(f"set parallel.cp={shorter[-1]}")
        needs = f"needs {model * dp} processes" if dp != -1 else f"needs a multiple of {model} processes"
        return [f"{degrees} {needs}, but {world} run; {', or '.join(ways)}"]
    return []


def _smaller(parallel: ParallelConfig, world: int) -> list[tuple[int, int]]:
    """The nearest smaller degrees of tp, and of pp, with which a plan fits `world` processes."""
    tp, pp, cp, sizes = parallel.tp, parallel.pp, parallel.cp, list_divisors(world)
    fewer = [(n, pp) for n in sizes if n < tp and world % (n * pp * cp) == 0][-1:]
    fewer += [(tp, n) for n in sizes if n < pp and world % (n * tp * cp) == 0][-1:]
    return fewer or [(1, 1)] * (cp == 1)


def nearby_worlds(world: int, model: int, node: int) -> list[int]:
    """The numbers of processes around `world` that a plan can have whose model takes `model` of them, in whole nodes of
    `node` where there are several."""
    unit = model if node >= world else math.lcm(model, node)
    return [count for count in (world // unit * unit, world // unit * unit + unit) if count]


def node_size(world: int) -> int:
    """Processes on this machine: of the launcher's LOCAL_WORLD_SIZE, else all. Raises `ConfigError`."""
    given = os.environ.get("LOCAL_WORLD_SIZE", str(world))
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={given} in the environment must be the number of processes on this machine; unset it, "
            "or start with torchrun"
        )
    return int(given)


def build_plan(parallel: ParallelConfig, world: int) -> Plan:
    """The plan of settings that `planning.features.check_plan` has nothing against."""
    stage, dp = parallel.zero.stage, world // (parallel.tp * parallel.pp)  # cp ranks among them
    shard = 1 if stage == 0 else dp if parallel.shard == -1 else parallel.shard
    return Plan(
        pp=parallel.pp,
        replicate=dp // shard,
        shard=shard,
        tp=parallel.tp,
        stage=stage,
        offload=parallel.zero.offload or parallel.zero.nvme is not None,
        engine=parallel.zero.engine,
        nvme=parallel.zero.nvme is not None,
        cp=parallel.cp,
        ep=parallel.ep,
        overlaps=parallel.ep_dispatch == OVERLAPPED,
    )


# Batch arithmetic: global batch = micro-batch x accumulation x data-parallel ranks, exactly. Pure functions of the
# configuration and the number of data-parallel ranks.


MICRO_TOKENS = 8192
"""Tokens in one forward pass that a micro-batch size is chosen for when none is given."""

PIPELINE_FILL = 4
"""Micro-batches for each pipeline rank that a micro-batch size is chosen for: 1F1B's bubble is then below a fifth."""


MOST_MICRO_BATCHES = 1 << 16
"""Micro-batches of a step, times the ranks of the pipeline: a schedule lists each of them, and an estimate replays
it."""


@dataclass(frozen=True)
class BatchPlan:
    """A resolved batch; sizes in sequences, `sequence_length` in tokens."""

    sequence_length: int
    global_size: int
    micro_size: int
    accumulation: int

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step over all ranks."""
        return self.global_size * self.sequence_length


def training_steps(run: RunConfig, batch: BatchPlan, step: int = 0, tokens: int = 0) -> int:
    """Optimizer steps of a run: run.steps, or as many as run.tokens needs where `step` steps have taken `tokens`."""
    return run.steps if run.tokens is None else step + max(0, math.ceil((run.tokens - tokens) / batch.tokens))


def resolve_batch(batch: BatchConfig, dp: int, tp: int = 1, pp: int = 1, cp: int = 1) -> BatchPlan:
    """The batch on `dp` data-parallel ranks; sizes that are not given are derived and none is ever rounded. The `cp`
    context-parallel x `tp` tensor-parallel ranks share the tokens of a sequence evenly; `pp` pipeline ranks want
    several micro-batches each.

    With a global size and one of `micro_size` and `accumulation`, the third follows. A missing `micro_size` is
    otherwise the largest that divides what a rank reads and holds at most `MICRO_TOKENS` tokens (one sequence where a
    sequence is longer), small enough for `PIPELINE_FILL` micro-batches a pipeline rank where there is a pipeline; a
    missing `accumulation` without a global size is 1, or so many. Raises `ConfigError` with legal neighbours."""
    problems = out_of_range(batch, "batch")
    if batch.sequence_length % (cp * tp):
        ranks = " x ".join(f"parallel.{name}={size}" for name, size in (("cp", cp), ("tp", tp)) if size > 1)
        problems.append(
            f"batch.sequence_length={batch.sequence_length} is not a multiple of {ranks}, whose ranks share "
            f"the tokens; legal: {_either(_multiples(batch.sequence_length, cp * tp))}"
        )
    if problems:
        raise ConfigError(problems)
    length, micro, accumulation = batch.sequence_length, batch.micro_size, batch.accumulation
    size, fill = _global_size(batch), PIPELINE_FILL * pp if pp > 1 else 1
    if size is None:
        micro = micro or max(1, MICRO_TOKENS // length)
        accumulation = accumulation or fill
        return _within_limits(BatchPlan(length, micro * accumulation * dp, micro, accumulation), pp)

    named, scale = ("global_tokens", length) if batch.global_tokens else ("global_size", 1)
    given = [(name, value) for name, value in (("micro_size", micro), ("accumulation", accumulation)) if value]
    factors = [f"batch.{name}={value}" for name, value in given] + ([f"{dp} data-parallel ranks"] if dp > 1 else [])
    unit = (micro or 1) * (accumulation or 1) * dp
    product = " x ".join(factors) + (f" = {unit}" if len(factors) > 1 else "")
    stated = f"batch.{named}={size * scale}" + (f" ({size} sequences)" if scale > 1 else "")
    if len(given) == 2 and size != unit:
        raise ConfigError(
            f"{stated} is not {product}; set batch.{named}={unit * scale}, or leave one of the three out and it is "
            "derived"
        )
    if size % unit:
        legal = [f"batch.{named}={_either(_multiples(size, unit), scale)}"]
        if given and size % dp == 0:
            name, value = given[0]
            legal.append(f"batch.{name}={_either(_around(value, list_divisors(size // dp)))}")
        raise ConfigError(f"{stated} is not a multiple of {product}; legal: {', or '.join(legal)}")
    if micro is None:
        fitting = [
            fit
            for fit in list_divisors(size // dp)
            if fit == 1 or fit * length <= MICRO_TOKENS and fit * dp * fill <= size
        ]
        micro = size // (dp * accumulation) if accumulation else max(fitting)
    return _within_limits(BatchPlan(length, size, micro, size // (micro * dp)), pp)


def _within_limits(plan: BatchPlan, pp: int) -> BatchPlan:
    """The plan. Raises `ConfigError` where its schedule, with an entry for each micro-batch on each of the `pp` ranks,
    is too long."""
    if plan.accumulation * pp > MOST_MICRO_BATCHES:
        pipeline = f" on each of parallel.pp={pp} ranks" if pp > 1 else ""
        raise ConfigError(
            f"batch.accumulation={plan.accumulation}: so many micro-batches of a step{pipeline} are more than a "
            f"schedule is made for; legal: up to {MOST_MICRO_BATCHES // pp}, with a larger batch.micro_size"
        )
    return plan


def _global_size(batch: BatchConfig) -> int | None:
    """The global size in sequences, if it is given in any unit."""
    tokens, length, size = batch.global_tokens, batch.sequence_length, batch.global_size
    if tokens is None:
        return size
    if tokens % length:
        raise ConfigError(
            f"batch.global_tokens={tokens} is not a multiple of batch.sequence_length={length}; legal: "
            f"batch.global_tokens={_either(_multiples(tokens, length))}"
        )
    if size not in (None, tokens // length):
        raise ConfigError(
            f"batch.global_size={size} x batch.sequence_length={length} = {size * length} tokens, but "
            f"batch.global_tokens={tokens}; give one of the two"
        )
    return tokens // length


def _multiples(value: int, step: int) -> list[int]:
    """The multiples of `step` right below and above `value`."""
    return [multiple for multiple in (value // step * step, value // step * step + step) if multiple]


def _around(value: int, legal: list[int]) -> list[int]:
    """The legal values right below and above `value`."""
    return [n for n in legal if n < value][-1:] + [n for n in legal if n > value][:1]


def _either(values: list[int], scale: int = 1) -> str:
    return " or ".join(str(value * scale) for value in values)
