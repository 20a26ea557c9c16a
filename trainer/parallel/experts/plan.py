"""Expert parallelism as it is planned: which ranks can share experts, and how tokens reach them."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config import Config, ParallelConfig
from trainer.config.fields import list_divisors
from trainer.config.model import ModelSpec
from trainer.parallel.compress.plan import enabled_codecs
from trainer.planning.parameters import layer_specs
from trainer.planning.plan import Feature, Plan


def list_mixtures(spec: ModelSpec) -> list[tuple[int, int]]:
    """The number of experts, and of those that a token is sent to, of each kind of layer with experts."""
    blocks = [layer.feed_forward.experts for layer in layer_specs(spec)]
    return list(dict.fromkeys((experts.count, experts.top_k) for experts in blocks if experts.count))


def check_experts(parallel: ParallelConfig, spec: ModelSpec | None, world: int, node: int) -> Iterator[str]:
    """What keeps the model's experts from being shared by parallel.ep ranks."""
    if parallel.ep == 1 and parallel.ep_dispatch != "auto":
        yield (
            f"parallel.ep_dispatch={parallel.ep_dispatch} is for ranks that share experts, and parallel.ep=1 has none; "
            "set parallel.ep_dispatch=auto, or parallel.ep=2 or more"
        )
    if parallel.ep == 1 and parallel.ep_capacity:
        yield (
            f"parallel.ep_capacity={parallel.ep_capacity:g} is for ranks that share experts, and parallel.ep=1 has "
            "none; set parallel.ep_capacity=0, or parallel.ep=2 or more"
        )
    if 0 < parallel.ep_capacity < 1:
        yield (
            f"parallel.ep_capacity={parallel.ep_capacity:g} has no room for balanced experts; set 0, or 1 or more, "
            "such as 1.5"
        )
    if parallel.ep_dispatch == "shared_memory" and node % parallel.ep:
        yield (
            f"parallel.ep_dispatch=shared_memory: groups of parallel.ep={parallel.ep} span nodes of {node} processes; "
            "set parallel.ep_dispatch=alltoall, or parallel.ep to one of "
            f"{', '.join(map(str, list_divisors(node)))}"
        )
    if parallel.ep == 1 or spec is None:
        return
    counts = [count for count, _ in list_mixtures(spec)]
    if not counts:
        yield (
            f"parallel.ep={parallel.ep} shares experts, and the model has none (model.feed_forward.experts.count=0); "
            "set parallel.ep=1"
        )
    for count in counts:
        if count % parallel.ep:
            yield (
                f"parallel.ep={parallel.ep} does not divide model.feed_forward.experts.count={count}; legal: "
                f"{', '.join(map(str, list_divisors(count)))}"
            )


def check_expert_ranks(parallel: ParallelConfig, ranks: int, world: int, node: int) -> Iterator[str]:
    """What keeps the ranks of a pipeline stage from making groups of parallel.ep. ranks: data x context ranks."""
    stage, ep = ranks * parallel.tp, parallel.ep
    shard = (ranks if parallel.shard == -1 else parallel.shard) * parallel.tp if parallel.zero.stage else 1
    if stage % ep:
        yield (
            f"parallel.ep={ep} does not divide the {stage} ranks of a pipeline stage; legal: "
            f"{', '.join(map(str, list_divisors(stage)))}"
        )
    elif parallel.zero.stage and shard % ep and ep % shard:
        legal = [n for n in list_divisors(stage) if shard % n == 0 or n % shard == 0]
        yield (
            f"parallel.ep={ep} neither divides the {shard} ranks that share the model's states (parallel.shard x "
            f"parallel.tp) nor is a multiple of them; legal: {', '.join(map(str, legal))}"
        )


def check_expert_plan(config: Config, spec: ModelSpec | None, plan: Plan, node: int) -> Iterator[str]:
    """What expert parallelism cannot go with."""
    if plan.ep == 1:
        return
    parallel = config.parallel
    if parallel.ep_capacity and spec is not None and choose_dispatch(parallel, spec, plan.ep) == "alltoall":
        yield (
            f"parallel.ep_capacity={parallel.ep_capacity:g}: an all-to-all has to know on the host how many rows each "
            "rank sends; set parallel.ep_dispatch=shared_memory or allgather, or parallel.ep_capacity=0"
        )
    if plan.engine == "deepspeed":
        yield (
            f"parallel.ep={plan.ep}: DeepSpeed partitions all parameters over the same ranks, and experts have ranks "
            "of their own; set parallel.zero.engine=torch, or parallel.ep=1"
        )
    if parallel.zero.collectives != "nccl":
        yield (
            f"parallel.ep={plan.ep}: parallel.zero.collectives={parallel.zero.collectives} moves states among the "
            "ranks of parallel.shard, and experts have ranks of their own; set parallel.zero.collectives=nccl, or "
            "parallel.ep=1"
        )
    if codecs := enabled_codecs(parallel.grad_comm):
        yield (
            f"parallel.ep={plan.ep}: parallel.grad_comm.{next(iter(codecs))}.codec encodes messages among the ranks of "
            "parallel.shard, and experts have ranks of their own; set codec=none, or parallel.ep=1"
        )


def choose_dispatch(parallel: ParallelConfig, spec: ModelSpec, ep: int) -> str:
    """How tokens reach experts on `ep` ranks. An all-to-all sends top_k (ep - 1) / ep rows a token, an all-gather
    ep - 1, each way. A model has one dispatch, which its kind of layer with most choices decides."""
    if parallel.ep_dispatch != "auto":
        return parallel.ep_dispatch
    return "allgather" if max((top_k for _, top_k in list_mixtures(spec)), default=0) > ep else "alltoall"


def describe_experts(config: Config, spec: ModelSpec, plan: Plan) -> list[tuple[str, str]]:
    """How tokens reach experts."""
    if plan.ep == 1:
        return []
    return [("tokens of experts", f"parallel.ep_dispatch={choose_dispatch(config.parallel, spec, plan.ep)}")]


FEATURE = Feature(
    "experts",
    check_model=check_experts,
    check_ranks=check_expert_ranks,
    check_plan=check_expert_plan,
    describe=describe_experts,
)
