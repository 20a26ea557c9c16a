"""Bytes that a rank holds of the model's states."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.model.axes import parameter_infos
from trainer.model.transformer import Transformer
from trainer.planning.batch import BatchPlan
from trainer.planning.pipeline import Pipeline
from trainer.planning.schedules.partition import Split

if TYPE_CHECKING:
    from trainer.planning.plan import Plan

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of the types that `precision.compute` names."""

MASTER_BYTES, MOMENT_BYTES = 4, 8  # an fp32 parameter or gradient; AdamW's two fp32 moments


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one rank holds for the model's states. An estimate: activations, buffers of communication and the
    allocator's fragmentation come on top.

    parameters, gradients, optimizer: what is kept from step to step or micro-batch to micro-batch, in fp32. gathered:
    copies of parameters in the compute type; unreduced: gradients of a unit before they are reduced. offloaded: whether
    what is kept lies in host memory; sums: of offloaded gradients, on the device until the last micro-batch. feedback:
    what quantised gradients have left out."""

    parameters: int
    gathered: int
    gradients: int
    unreduced: int
    optimizer: int
    offloaded: bool
    sums: int = 0
    feedback: int = 0

    @property
    def host(self) -> int:
        return self.parameters + self.gradients + self.optimizer if self.offloaded else 0

    @property
    def device(self) -> int:
        return self.total - self.host

    @property
    def total(self) -> int:
        return (
            self.parameters
            + self.gathered
            + self.gradients
            + self.sums
            + self.unreduced
            + self.optimizer
            + self.feedback
        )

    def rows(self) -> list[tuple[str, int]]:
        """Labels and bytes for a table; terms of zero are left out."""
        rows = [
            ("parameters", self.parameters),
            ("gathered copies", self.gathered),
            ("gradients", self.gradients),
            ("sums of gradients", self.sums),
            ("unreduced gradients", self.unreduced),
            ("optimizer", self.optimizer),
            ("error feedback", self.feedback),
        ]
        if self.offloaded:
            rows += [("sum on the device", self.device), ("sum in host memory", self.host)]
        else:
            rows += [("sum", self.total)]
        return [(label, size) for label, size in rows if size]


def state_bytes(
    spec: ModelSpec,
    plan: Plan,
    compute_bytes: int,
    layers: Iterable[range] | None = None,
    once: bool = False,
    device_sums: bool = False,
) -> StateBytes:
    """The states on one rank under a plan (ZeRO, arXiv 1910.02054), with AdamW.

    compute_bytes: size of an element of the compute type, 4 for fp32, 2 for bf16 and fp16; layers: of each pipeline
    stage on the rank, all of them in one stage if None; once: whether gradients are reduced once a step whatever the
    stage; device_sums: whether those that are reduced every micro-batch and offloaded are added up on the device."""
    units = [held_units(spec, plan.tp, part) for part in layers or [range(spec.depth)]]
    total, shard = sum(map(sum, units)), plan.shard if plan.stage >= 1 else 1
    # Gathered or unreduced at a time where layers are gathered one by one: each stage's outer unit, and the largest
    # layer.
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
        optimizer=MOMENT_BYTES * kept,
        offloaded=plan.offload,
    )


def held_units(spec: ModelSpec, tp: int, layers: range) -> list[int]:
    """Parameters that one tensor-parallel rank holds of a stage, by unit of gathering: [outer unit, layer, layer,
    ...]."""
    with torch.device("meta"):
        infos = parameter_infos(Transformer(spec, layers))
    units: dict[str, int] = {"outer": 0}
    for name, info in infos.items():
        layer = re.match(r"layers\.\d+\.", name)
        unit = layer[0] if layer else "outer"
        cut = info.tensor_dimension(tp) is not None
        units[unit] = units.get(unit, 0) + (-(-info.size // tp) if cut else info.size)
    return list(units.values())


def fullest_rank(
    config: Config, spec: ModelSpec, plan: Plan, pipeline: Pipeline, batch: BatchPlan, once: bool, feedback: int
) -> StateBytes:
    """The states of the pipeline rank that has most. once: whether gradients are reduced once a step whatever the
    stage; feedback: bytes that quantised gradients have left out, on the rank with most of them."""
    sums = batch.accumulation > 1 and sums_on_device(plan, config.precision.reduce == "fp32")
    element = ELEMENT_BYTES[config.precision.compute]
    ranks = (state_bytes(spec, plan, element, pipeline.stages(rank).values(), once, sums) for rank in range(plan.pp))
    return replace(max(ranks, key=lambda states: states.total), feedback=feedback)


def sums_on_device(plan: Plan, fp32: bool) -> bool:
    """Whether gradients that are reduced every micro-batch and offloaded are added up on the device. Partial sums are
    in the type of the reduction (`fp32` or not): without replicas, for which there is no choice, only fp32 is good
    enough."""
    return plan.offload and plan.stage >= 2 and (plan.replicate > 1 or not plan.sum_on_host and fp32)


def constant_bytes(spec: ModelSpec, plan: Plan, element: int, split: Split, placement: tuple[int, ...]) -> list[float]:
    """Bytes of parameters, gradients and optimizer state on each pipeline rank."""
    return [
        state_bytes(spec, plan, element, [part for part, place in zip(split, placement) if place == rank]).device
        for rank in range(plan.pp)
    ]
