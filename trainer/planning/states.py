"""What each rank holds of a model's states under a plan: parameters, gradients, optimizer state and error feedback, and
the collectives that gather and reduce them (ZeRO, Rajbhandari et al., arXiv 1910.02054)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from trainer.config import Config, GradCommConfig, TypePolicy
from trainer.config.model import ModelSpec
from trainer.parallel.compress.plan import BLOCK, ReductionRoute, enabled_codecs, reduction_routes
from trainer.parallel.pipeline.plan import PipelinePlan
from trainer.planning.float8 import float8_linears
from trainer.planning.layer import Op, Program
from trainer.planning.parameters import Table, UpdateSettings, by_value, moment_count, named_tables, outer_tables
from trainer.planning.plan import BatchPlan, Plan

# Which collectives a plan's data-parallel ranks run for the states of a unit (a layer; or embedding, final norm and
# head together), and how many bytes they move. Those of tensor-parallel ranks: `planning/estimate/rates.py`.


class StateCollective(NamedTuple):
    """Collectives of one kind: how many in each micro-batch and once a step, and bytes of the whole tensor of each."""

    each: int
    once: int
    size: float

    def calls(self, microbatches: int) -> int:
        """In a step."""
        return self.each * microbatches + self.once


def of_states(
    plan: Plan, gathered: float, reduced: float, outer: bool, once: bool = False
) -> dict[str, StateCollective]:
    """By kind: `gather` and `scatter` among the ranks that share states, `reduce`, an all-reduce, among replicas.

    gathered, reduced: bytes of a unit's parameters, and of its gradients, as they travel. outer: whether it is that of
    embedding and head, which ZeRO-3 keeps gathered between the passes of a micro-batch. once: whether gradients are
    reduced once a step whatever the ZeRO stage."""
    every, again = plan.reduces_each_micro_batch and not once, plan.stage == 3
    return {
        "gather": StateCollective(again * (1 if outer else 2), plan.stage in (1, 2), gathered),
        "scatter": StateCollective(every, plan.stage >= 1 and not every, reduced),
        "reduce": StateCollective(0, plan.replicate > 1, reduced / plan.shard),
    }


# Bytes of parameters, gradients and optimizer state that a plan leaves to each rank (ZeRO, arXiv 1910.02054).

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Size of an element by the name of its type in the settings."""

MASTER_BYTES = 4  # an fp32 parameter or gradient

MAX_IN_FLIGHT = 2**26
"""Elements of shards or gradients that are on their way at once under `parallel.zero.collectives=copy_engine`."""


def symmetric_buffer_bytes(tp_overlap: str, stream: float) -> float:
    """Bytes that a rank shares with its tensor group (`distributed/symmetric_memory.py`): for what is gathered and for
    what is summed, each in two halves. stream: bytes of the hidden states of a micro-batch, all ranks' tokens."""
    return 2 * 2 * stream if tp_overlap != "off" else 0.0


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one rank holds for the model's states. An estimate: activations, buffers of communication and the
    allocator's fragmentation come on top.

    parameters, gradients, optimizer: what is kept from step to step or micro-batch to micro-batch, in fp32.
    gathered: copies of parameters in the compute type. unreduced: gradients of a unit before they are reduced.
    offloaded: whether what is kept lies in host memory.
    sums: of offloaded gradients, on the device until the last micro-batch.
    feedback: what quantised gradients have left out.
    average: of the weights.
    frozen: parameters that are not trained, in the compute type or in fp8, on the device.
    """

    parameters: int
    gathered: int
    gradients: int
    unreduced: int
    optimizer: int
    offloaded: bool
    sums: int = 0
    feedback: int = 0
    average: int = 0
    frozen: int = 0

    @property
    def host(self) -> int:
        return self.kept if self.offloaded else 0

    @property
    def device(self) -> int:
        return self.total - self.host

    @property
    def kept(self) -> int:
        """What is offloaded, where anything is."""
        return self.parameters + self.gradients + self.optimizer + self.average

    @property
    def total(self) -> int:
        return self.kept + self.frozen + self.gathered + self.sums + self.unreduced + self.feedback

    def rows(self) -> list[tuple[str, int]]:
        """Labels and bytes for a table; terms of zero are left out."""
        rows = [
            ("frozen parameters", self.frozen),
            ("parameters", self.parameters),
            ("gathered copies", self.gathered),
            ("gradients", self.gradients),
            ("sums of gradients", self.sums),
            ("unreduced gradients", self.unreduced),
            ("optimizer", self.optimizer),
            ("average of weights", self.average),
            ("error feedback", self.feedback),
        ]
        if self.offloaded:
            rows += [("sum on the device", self.device), ("sum in host memory", self.host)]
        else:
            rows += [("sum", self.total)]
        return [(label, size) for label, size in rows if size]


@dataclass(frozen=True)
class LocalParameters:
    """Numbers of parameters that one tensor-parallel rank holds, or the bytes of their states.

    layers: of each layer.
    outer: of a pipeline stage beside its layers, by whether it is the model's first and whether it is its last.
    """

    layers: tuple[int, ...]
    outer: dict[tuple[bool, bool], int]

    def units(self, layers: range) -> list[int]:
        """Of the stage with `layers`, by unit of gathering: [outer unit, layer, layer, ...]."""
        outer = self.outer[layers.start == 0, layers.stop == len(self.layers)]
        return [outer, *self.layers[layers.start : layers.stop]]


def sum_by_unit(spec: ModelSpec, size: Callable[[Table], int]) -> LocalParameters:
    """The size of each unit of a model. size: of a table of parameters by global name."""
    ends = [(first, last) for first in (True, False) for last in (True, False)]
    return LocalParameters(
        layers=tuple(map(size, named_tables(spec))),
        outer={end: sum(map(size, outer_tables(spec, *end))) for end in ends},
    )


@by_value
def local_parameters(spec: ModelSpec, tp: int, ep: int = 1) -> LocalParameters:
    """What each of `tp` tensor-parallel ranks holds of the trained parameters of a model, whose experts `ep` ranks
    share."""
    return sum_by_unit(spec, lambda table: sum(info.held(tp, ep) for info in table.values() if info.trained))


@by_value
def frozen_bytes(spec: ModelSpec, tp: int, ep: int, compute_bytes: int, experts: bool = False) -> LocalParameters:
    """The same of the frozen parameters, in bytes: of all of them, or of the experts that `ep` ranks share."""

    def held(table: Table) -> int:
        chosen = (info for info in table.values() if not info.trained and (not experts or info.stacked and ep > 1))
        return sum(info.held(tp, ep) * info.element_bytes(compute_bytes) for info in chosen)

    return sum_by_unit(spec, held)


@by_value
def shared_experts(spec: ModelSpec, ep: int) -> LocalParameters:
    """The part of `local_parameters` that experts are, where ranks share them."""

    def held(table: Table) -> int:
        return sum(info.held(1, ep) for info in table.values() if info.stacked and ep > 1 and info.trained)

    return sum_by_unit(spec, held)


@by_value
def sent_parameters(
    spec: ModelSpec, tp: int, shards: int, experts: bool = False, ep: int = 1, frozen: int = 0
) -> LocalParameters:
    """What the first of `tp` tensor-parallel ranks sends of each unit that `shards` ranks gather and reduce: what it
    holds, and padding. experts: of the units of experts that `ep` ranks share, or of all others. frozen: 0 for the
    trained parameters; for the bytes of the frozen ones, those of an element of the compute type."""

    def sent(table: Table) -> int:
        unit = [
            info for info in table.values() if (info.stacked and ep > 1) == experts and info.trained == (not frozen)
        ]
        return shards * sum(info.row(tp, shards, ep) * (info.element_bytes(frozen) if frozen else 1) for info in unit)

    return sum_by_unit(spec, sent)


@by_value
def local_moments(spec: ModelSpec, tp: int, updates: UpdateSettings, experts: bool, ep: int) -> LocalParameters:
    """Bytes of what the optimizers of a model keep on each of `tp` tensor-parallel ranks: for the experts that `ep`
    ranks share, or for all other parameters."""

    def held(table: Table) -> int:
        return sum(
            table[name].held(tp, ep) * len(moment_count(policy.optimizer)) * ELEMENT_BYTES[policy.state_dtype]
            for name, policy in updates.policies(table).items()
            if policy.optimizer and (table[name].stacked and ep > 1) == experts
        )

    return sum_by_unit(spec, held)


@by_value
def find_local_sizes(
    spec: ModelSpec, tp: int, ep: int, compute_bytes: int, updates: UpdateSettings
) -> tuple[LocalParameters, ...]:
    """What states need of the above: trained parameters and the experts among them, bytes of moments of other
    parameters and of experts, bytes of frozen parameters and of the experts among them. A search needs them tens of
    thousands of times, and finds them all by one key."""
    moments = (local_moments(spec, tp, updates, experts, ep) for experts in (False, True))
    frozen = (frozen_bytes(spec, tp, ep, compute_bytes, experts) for experts in (False, True))
    return local_parameters(spec, tp, ep), shared_experts(spec, ep), *moments, *frozen


def shares_frozen(plan: Plan) -> bool:
    """Whether ranks share parameters that are not trained. Where parameters are whole in a step, each rank has them."""
    return plan.stage == 3 and plan.shard > 1


def state_bytes(
    spec: ModelSpec,
    plan: Plan,
    compute_bytes: int,
    layers: Iterable[range] | None = None,
    once: bool = False,
    device_sums: bool = False,
    updates: UpdateSettings | None = None,
) -> StateBytes:
    """The states on one rank under a plan.

    compute_bytes: size of an element of the compute type, 4 for fp32, 2 for bf16 and fp16.
    layers: of each pipeline stage on the rank, all of them in one stage if None.
    once: whether gradients are reduced once a step whatever the ZeRO stage.
    device_sums: whether those that are reduced every micro-batch and offloaded are added up on the device.
    updates: how parameters are updated; None: by AdamW.
    """
    updates, layers = updates or UpdateSettings(), [*(layers or [range(spec.depth)])]
    held, held_experts, *kept_moments, fixed_sizes, fixed_experts = find_local_sizes(
        spec, plan.tp, plan.ep, compute_bytes, updates
    )

    def sum_layers(sizes: LocalParameters) -> int:
        return sum(sum(sizes.units(part)) for part in layers)

    def share(dense: int, experts: int) -> int:
        return -(-dense // plan.shard) + -(-experts // plan.expert_mesh["expert_shard"])

    units = [held.units(part) for part in layers]
    moments = share(*map(sum_layers, kept_moments))
    total, experts = sum(map(sum, units)), sum_layers(held_experts)
    # Gathered or unreduced at a time where layers are gathered one by one: each stage's outer unit, the largest layer.
    at_once = sum(unit[0] for unit in units) + max(max(unit[1:]) for unit in units)
    fixed = [fixed_sizes.units(part) for part in layers]
    frozen, frozen_experts = sum(map(sum, fixed)), sum_layers(fixed_experts)
    gathered = compute_bytes * at_once
    if shares_frozen(plan):
        frozen = share(frozen - frozen_experts, frozen_experts)
        both = [[compute_bytes * one + other for one, other in zip(*pair)] for pair in zip(units, fixed)]
        gathered = sum(unit[0] for unit in both) + max(max(unit[1:]) for unit in both)
    kept, whole = share(total - experts, experts), not plan.reduces_each_micro_batch or once
    shares_copies = (
        plan.engine == "deepspeed" and plan.stage == 3
    )  # which are kept in the compute type, beside the masters
    return StateBytes(
        # With the states of the others, what ranks share of frozen ones goes to the host.
        parameters=(MASTER_BYTES + compute_bytes * shares_copies) * kept
        + frozen * (plan.offload and shares_frozen(plan)),
        gathered=gathered if plan.stage == 3 else compute_bytes * total,
        gradients=MASTER_BYTES * (total if whole and not plan.offload else kept),
        sums=MASTER_BYTES * (total if whole else kept * device_sums) * plan.offload,
        unreduced=0 if whole else compute_bytes * at_once,
        optimizer=moments,
        average=MASTER_BYTES * kept if updates.optimizer.ema.decay else 0,
        frozen=frozen * (not (plan.offload and shares_frozen(plan))),
        offloaded=plan.offload,
    )


def rank_states(
    spec: ModelSpec,
    plan: Plan,
    compute_bytes: int,
    split: Sequence[range],
    placement: Sequence[int],
    once: bool = False,
    device_sums: bool = False,
    updates: UpdateSettings | None = None,
) -> list[StateBytes]:
    """The states on each pipeline rank.

    split: the layers of each pipeline stage. placement: the rank of each stage. The others are those of `state_bytes`.
    """
    stages = [[part for part, place in zip(split, placement, strict=True) if place == rank] for rank in range(plan.pp)]
    return [state_bytes(spec, plan, compute_bytes, parts, once, device_sums, updates) for parts in stages]


def constant_bytes(
    spec: ModelSpec,
    plan: Plan,
    compute_bytes: int,
    split: Sequence[range],
    placement: Sequence[int],
    updates: UpdateSettings | None = None,
) -> list[float]:
    """Bytes on the device of each pipeline rank that no schedule changes."""
    ranks = rank_states(spec, plan, compute_bytes, split, placement, updates=updates)
    return [states.device for states in ranks]


def fullest_rank(
    config: Config,
    spec: ModelSpec,
    plan: Plan,
    pipeline: PipelinePlan,
    batch: BatchPlan,
    once: bool,
    feedback: Sequence[int],
) -> StateBytes:
    """The states of the pipeline rank that has most.

    once: whether gradients are reduced once a step whatever the ZeRO stage.
    feedback: of each rank, bytes that quantised gradients have left out.
    """
    sums = batch.accumulation > 1 and sums_on_device(plan, config.precision.reduce == "fp32")
    element, placement = ELEMENT_BYTES[config.precision.compute], pipeline.schedule.placement
    ranks = rank_states(spec, plan, element, pipeline.split, placement, once, sums, UpdateSettings.of(config))
    ranks = [replace(states, feedback=size) for states, size in zip(ranks, feedback, strict=True)]
    return max(ranks, key=lambda states: states.total)


def sums_on_device(plan: Plan, fp32: bool) -> bool:
    """Whether gradients that are reduced every micro-batch and offloaded are added up on the device.

    Partial sums are in the type of the reduction (`fp32` or not). With replicas there is no choice; without, only fp32
    is good enough.
    """
    return plan.offload and plan.stage >= 2 and (plan.replicate > 1 or fp32)


def sums_in_gemms(config: Config, spec: ModelSpec, plan: Plan, microbatches: int) -> bool:
    """Whether the GEMM of a linear layer adds its weight gradient to that of earlier micro-batches: where FSDP sums
    gradients on each rank, in fp32, until it reduces them once a step. With adapters most matrices are frozen."""
    return (
        microbatches > 1
        and not plan.reduces_each_micro_batch
        and plan.engine == "torch"
        and config.precision.reduce == "fp32"
        and not enabled_codecs(config.parallel.grad_comm)
        and not spec.adapter.rank
    )


def summed_gemms(
    config: Config, spec: ModelSpec, plan: Plan, microbatches: int, programs: Sequence[Program]
) -> list[dict[str, Op]]:
    """The GEMMs of each layer that do so, by name. Those of experts, in fp8 and in tiles do not."""
    if not sums_in_gemms(config, spec, plan, microbatches) or config.activation.tile:
        return [{} for _ in programs]
    float8 = float8_linears(config.precision, spec)
    return [
        {
            name: gemm
            for name, gemm in program.gemms.items()
            if gemm.matrices == 1 and not gemm.wide and f"layers.{index}.{name}" not in float8
        }
        for index, program in enumerate(programs)
    ]


def sums_in_head(config: Config, spec: ModelSpec, plan: Plan, microbatches: int) -> bool:
    """Whether that of the head does so."""
    return sums_in_gemms(config, spec, plan, microbatches) and not config.loss.tile


# Bytes of error feedback: what quantised gradients have left out, which waits on each rank for the next step. FSDP
# passes one message for each unit (each layer, and embedding, final norm and head together), with a row for each rank
# that shares states. A hop with error feedback keeps the errors of the blocks that it encodes twice: those of earlier
# steps, and those of the step in progress, which count only if it is not skipped. See `parallel/compress/`.


class ReductionHop(NamedTuple):
    """A hop of a reduction. ranks: that it joins; block: elements that share a scale, None where nothing is encoded;
    feedback: whether it has error feedback."""

    ranks: int
    block: int | None
    feedback: bool

    def keeps(self, elements: int) -> int:
        """Bytes of the errors of so many elements, which fill blocks."""
        return 2 * MASTER_BYTES * elements if self.block is not None and self.feedback else 0


def feedback_bytes(config: Config, spec: ModelSpec, plan: Plan, pipeline: PipelinePlan, node: int) -> list[int]:
    """Of each pipeline rank, on nodes of `node` processes."""
    settings, kept = config.parallel.grad_comm, [0] * plan.pp
    if all(hop.error_feedback == "none" for hop in enabled_codecs(settings).values()):
        return kept
    updates, layers = UpdateSettings.of(config), named_tables(spec)
    for part, place in zip(pipeline.split, pipeline.schedule.placement, strict=True):
        before, behind = outer_tables(spec, part.start == 0, part.stop == spec.depth)
        units = [{**before, **behind}, *layers[part.start : part.stop]]
        kept[place] += sum(_of_unit(unit, updates.policies(unit), settings, plan, node) for unit in units)
    return kept


def _of_unit(unit: Table, policies: Mapping[str, TypePolicy], settings: GradCommConfig, plan: Plan, node: int) -> int:
    """Of the message of one unit."""
    sizes = {name: unit[name].row(plan.tp, plan.shard) for name in policies}
    coded, chunk = [size for name, size in sizes.items() if policies[name].quantise], sum(sizes.values())
    scattered, reduced = (_hops(route, settings) for route in reduction_routes(plan, node))
    total = 0
    if coded and MASTER_BYTES * chunk * plan.shard >= settings.min_size:
        total += _of_path(scattered, coded * plan.shard, plan.shard, scatters=True)
    if coded and MASTER_BYTES * chunk >= settings.min_size:
        total += _of_path(reduced, coded, plan.replicate, scatters=False)
    return total


def _hops(route: ReductionRoute | None, settings: GradCommConfig) -> list[ReductionHop]:
    found = []
    for kind, ranks in route.hops if route else ():
        hop = getattr(settings, kind)
        block = None if hop.codec == "none" else BLOCK[hop.codec]
        found.append(ReductionHop(ranks, block, hop.error_feedback != "none"))
    return found


def _of_path(hops: Sequence[ReductionHop], segments: Sequence[int], rows: int, scatters: bool) -> int:
    """Of a reduce-scatter of `rows` rows over hops, and unless it only `scatters`, of the all-gather on the way back,
    which the last hop that has a codec encodes. segments: elements of the parameters, each of which fills blocks."""
    blocks = [hop.block for hop in hops if hop.block is not None]
    if not blocks:
        return 0
    grain = max(blocks)
    length = -(-sum(-(-size // grain) for size in segments) // rows) * grain  # elements of a row
    left, total = rows, 0
    for hop in hops:
        total += hop.keeps(left * length)
        left //= hop.ranks
    if not scatters:
        encoder = max(place for place, hop in enumerate(hops) if hop.block is not None)
        behind = prod(hop.ranks for hop in hops[encoder + 1 :])
        total += hops[encoder].keeps(left * behind * length)
    return total
