"""Bytes of parameters, gradients and optimizer state that a plan leaves to each rank (ZeRO, arXiv 1910.02054)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.parallel.pipeline.plan import PipelinePlan
from trainer.planning.cost.parameters import Table, by_value, layer_tables, outer_tables
from trainer.planning.cost.updates import UpdateSettings, moment_count
from trainer.planning.plan import BatchPlan, Plan

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
        return self.kept + self.gathered + self.sums + self.unreduced + self.feedback

    def rows(self) -> list[tuple[str, int]]:
        """Labels and bytes for a table; terms of zero are left out."""
        rows = [
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


@by_value
def local_parameters(spec: ModelSpec, tp: int) -> LocalParameters:
    """What each of `tp` tensor-parallel ranks holds of a model."""

    def held(*tables: Table) -> int:
        return sum(info.held(tp) for table in tables for info in table.values())

    ends = [(first, last) for first in (True, False) for last in (True, False)]
    return LocalParameters(
        layers=tuple(held(table) for table in layer_tables(spec)),
        outer={end: held(*outer_tables(spec, *end)) for end in ends},
    )


@by_value
def sent_parameters(spec: ModelSpec, tp: int, shards: int) -> LocalParameters:
    """What the first of `tp` tensor-parallel ranks sends of each unit that `shards` ranks gather and reduce: what it
    holds, and padding."""

    def sent(*tables: Table) -> int:
        return shards * sum(info.row(tp, shards) for table in tables for info in table.values())

    ends = [(first, last) for first in (True, False) for last in (True, False)]
    return LocalParameters(
        layers=tuple(sent(table) for table in layer_tables(spec)),
        outer={end: sent(*outer_tables(spec, *end)) for end in ends},
    )


@by_value
def local_moments(spec: ModelSpec, tp: int, updates: UpdateSettings) -> LocalParameters:
    """Bytes of what the optimizers of a model keep on each of `tp` tensor-parallel ranks."""

    def held(table: Table, prefix: str = "") -> int:
        infos = {prefix + name: info for name, info in table.items()}
        return sum(
            infos[name].held(tp) * len(moment_count(policy.optimizer)) * ELEMENT_BYTES[policy.state_dtype]
            for name, policy in updates.policies(infos).items()
            if policy.optimizer
        )

    ends = [(first, last) for first in (True, False) for last in (True, False)]
    return LocalParameters(
        layers=tuple(held(table, f"layers.{index}.") for index, table in enumerate(layer_tables(spec))),
        outer={end: sum(map(held, outer_tables(spec, *end))) for end in ends},
    )


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
    held, updates, layers = (
        local_parameters(spec, plan.tp),
        updates or UpdateSettings(),
        [*(layers or [range(spec.depth)])],
    )
    units = [held.units(part) for part in layers]
    moments = sum(sum(local_moments(spec, plan.tp, updates).units(part)) for part in layers)
    total, shard = sum(map(sum, units)), plan.shard if plan.stage >= 1 else 1
    # Gathered or unreduced at a time where layers are gathered one by one: each stage's outer unit, the largest layer.
    at_once = sum(unit[0] for unit in units) + max(max(unit[1:]) for unit in units)
    kept, whole = -(-total // shard), plan.stage <= 1 or once
    shares_copies = (
        plan.engine == "deepspeed" and plan.stage == 3
    )  # which are kept in the compute type, beside the masters
    return StateBytes(
        parameters=(MASTER_BYTES + compute_bytes * shares_copies) * kept,
        gathered=compute_bytes * (at_once if plan.stage == 3 else total),
        gradients=MASTER_BYTES * (total if whole and not plan.offload else kept),
        sums=MASTER_BYTES * (total if whole else kept * device_sums) * plan.offload,
        unreduced=0 if whole else compute_bytes * at_once,
        optimizer=-(-moments // shard),
        average=MASTER_BYTES * kept if updates.optimizer.ema.decay else 0,
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
    return plan.offload and plan.stage >= 2 and (plan.replicate > 1 or (fp32 and not plan.sum_on_host))
