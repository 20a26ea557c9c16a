"""Expert parallelism as it is planned: which ranks can share experts, and how tokens reach them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trainer.config import Config, ParallelConfig
from trainer.config.fields import list_divisors
from trainer.config.hardware import HardwareConfig
from trainer.config.model import ModelSpec
from trainer.parallel.compress.plan import enabled_codecs
from trainer.planning.estimate.rates import RingTimes
from trainer.planning.hardware import load_hardware
from trainer.planning.parameters import layer_specs
from trainer.planning.plan import OVERLAPPED, Feature, Plan
from trainer.planning.states import ELEMENT_BYTES

BY_ALL_TO_ALL = ("alltoall", OVERLAPPED)
"""The ways of `parallel.ep_dispatch` that send a row for each choice of a token."""

WEIGHT, INDEX = 4, 8
"""Bytes of the weight of an expert's output, and of the number of an expert, as they travel."""


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
    if plan.overlaps and plan.stage == 3:
        yield (
            f"parallel.ep_dispatch={OVERLAPPED}: parallel.zero.stage=3 gathers a layer for one pass and frees it while "
            "the other one needs it; set parallel.zero.stage=2, or parallel.ep_dispatch=alltoall"
        )
    if plan.overlaps and config.loss.terms:
        # Autograd has one thread for a GPU, which stands still while the forward pass has its turn.
        yield (
            f"parallel.ep_dispatch={OVERLAPPED}: loss.terms are differentiated in the forward pass, and autograd is "
            "busy with the backward pass then; set parallel.ep_dispatch=alltoall, or leave loss.terms out"
        )
    if parallel.ep_capacity and parallel.ep_dispatch in BY_ALL_TO_ALL:
        yield (
            f"parallel.ep_capacity={parallel.ep_capacity:g}: an all-to-all has to know on the host how many rows each "
            "rank sends; set parallel.ep_dispatch=shared_memory or allgather, or parallel.ep_capacity=0"
        )
    if plan.engine == "deepspeed":
        yield (
            f"parallel.ep={plan.ep}: DeepSpeed partitions all parameters over the same ranks, and experts have ranks "
            "of their own; set parallel.zero.engine=torch, or parallel.ep=1"
        )
    if parallel.zero.collectives == "copy_engine":
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


class DispatchTimes(NamedTuple):
    """Seconds in which the tokens of a micro-batch go to the experts of a layer and back: link, of collectives; copies,
    of what is copied on each rank, beside what a rank copies that holds all experts."""

    link: float
    copies: float


def dispatch_times(
    dispatch: str, top_k: int, tokens: float, row: float, ring: RingTimes, memory: float
) -> DispatchTimes:
    """The forward pass of a way of `parallel.ep_dispatch`, where the experts have equal load; backward takes as long.

    tokens: of a rank. row: bytes of a token. ring: of the ranks that share experts. memory: bytes/s of a rank's own."""
    if dispatch not in BY_ALL_TO_ALL:  # tokens, weights and choices; sums of the outputs of each rank's experts
        sizes = [tokens * row, WEIGHT * top_k * tokens, INDEX * top_k * tokens, tokens * row]
        # In shared memory tokens are copied into a rank's own buffer, and sums out of it.
        copied = ring.ranks - 1 if dispatch == "allgather" else ring.ranks + 2
        return DispatchTimes(sum(ring.seconds(ring.ranks * size) for size in sizes), copied * tokens * row / memory)
    # Counts; rows and weights, and rows back. What arrives is sorted by expert, and put back in the order of arrival.
    sizes = [0.0, top_k * tokens * row, WEIGHT * top_k * tokens, top_k * tokens * row]
    return DispatchTimes(sum(map(ring.seconds, sizes)), 4 * top_k * tokens * row / memory)


def choose_dispatch(
    config: Config, spec: ModelSpec, plan: Plan, hardware: HardwareConfig | None = None, tokens: float = 0.0
) -> str:
    """How tokens reach experts: where the settings leave it open, the way that takes less time, on `hardware` or else
    on H200s. tokens: of a rank in a micro-batch, or 0 where that is not known. A model has one dispatch."""
    if config.parallel.ep_dispatch != "auto":
        return config.parallel.ep_dispatch
    if config.parallel.ep_capacity:
        return "allgather"  # an all-to-all has no fixed room
    hardware = hardware or load_hardware("h200")
    tokens = tokens or config.batch.sequence_length * (config.batch.micro_size or 1) / plan.token_ranks
    ring, memory = RingTimes.of(hardware, plan, "ep"), hardware.bandwidth * 1e9 * hardware.achieved.memory
    row = float(ELEMENT_BYTES[config.precision.compute] * spec.width)
    choices = [layer.feed_forward.experts.top_k for layer in layer_specs(spec) if layer.feed_forward.experts.count]
    return min(
        ("alltoall", "allgather"),
        key=lambda name: sum(sum(dispatch_times(name, top_k, tokens, row, ring, memory)) for top_k in choices),
    )


def describe_experts(config: Config, spec: ModelSpec, plan: Plan) -> list[tuple[str, str]]:
    """How tokens reach experts."""
    if plan.ep == 1:
        return []
    return [("tokens of experts", f"parallel.ep_dispatch={choose_dispatch(config, spec, plan)}")]


FEATURE = Feature(
    "experts",
    check_model=check_experts,
    check_ranks=check_expert_ranks,
    check_plan=check_expert_plan,
    describe=describe_experts,
)
