"""What a model costs: parameters, floating-point operations, bytes of state. Pure functions of the spec."""
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer.model.axes import ROLES, parameter_infos
from trainer.config.model import ModelSpec
from trainer.model.transformer import Transformer, declarations

if TYPE_CHECKING:
    from trainer.planning.plan import Plan

MASTER_BYTES, MOMENT_BYTES = 4, 8  # an fp32 parameter or gradient; AdamW's two fp32 moments


def parameter_counts(spec: ModelSpec) -> dict[str, int]:
    """Numbers of parameters: `total`; `embedding` (token and position tables); `matmul`, those that every token is
    multiplied with. A tied head is counted once in `total`, and in `matmul` as well as in `embedding`."""
    infos = declarations(spec)
    sizes = dict.fromkeys(ROLES, 0)
    for info in infos.values():
        sizes[info.role] += info.size
    head = infos["embedding.weight"].size if spec.tied else sizes["head"]
    return {"total": sum(sizes.values()), "embedding": sizes["embedding"], "matmul": sizes["matrix"] + head}


def flops_per_token(spec: ModelSpec, length: int, causal: bool) -> float:
    """Floating-point operations of one training step per token of a sequence of `length`: the forward pass and twice as
    much for the backward pass, matrix products only, recompute not counted (PaLM, arXiv 2204.02311, appendix B).

    causal: whether attention counts the keys that a token sees, averaged over the positions and within the window, or
    all `length` keys (as published MFU figures often do).
    """
    flops = 6.0 * parameter_counts(spec)["matmul"]
    for index in range(spec.depth):
        a = spec.layer(index).attention
        flops += 12.0 * a.heads * a.head_dim * (seen_keys(length, a.window) if causal else length)
    return flops


def seen_keys(length: int, window: int = 0) -> float:
    """Keys that a token sees under causal attention, on average over the positions of a sequence."""
    window = min(window or length, length)
    # The first `window` positions see 1, 2, ... window keys; the others see `window`.
    return window * (length - (window - 1) / 2) / length


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one rank holds for the model's states. An estimate: activations, buffers of communication and the
    allocator's fragmentation come on top.

    parameters, gradients, optimizer: what is kept from step to step or micro-batch to micro-batch, in fp32.
    gathered: copies of parameters in the compute type; unreduced: gradients of a unit before they are reduced.
    offloaded: whether what is kept lies in host memory; sums: of offloaded gradients, on the device until the last micro-batch.
    feedback: what quantised gradients have left out.
    """
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
        return self.parameters + self.gathered + self.gradients + self.sums + self.unreduced + self.optimizer + self.feedback

    def rows(self) -> list[tuple[str, int]]:
        """Labels and bytes for a table; terms of zero are left out."""
        rows = [("parameters", self.parameters), ("gathered copies", self.gathered), ("gradients", self.gradients),
                ("sums of gradients", self.sums), ("unreduced gradients", self.unreduced), ("optimizer", self.optimizer),
                ("error feedback", self.feedback)]
        if self.offloaded:
            rows += [("sum on the device", self.device), ("sum in host memory", self.host)]
        else:
            rows += [("sum", self.total)]
        return [(label, size) for label, size in rows if size]


def state_bytes(spec: ModelSpec, plan: Plan, compute_bytes: int, layers: Iterable[range] | None = None, once: bool = False,
                device_sums: bool = False) -> StateBytes:
    """The states on one rank under a plan (ZeRO, arXiv 1910.02054), with AdamW.

    compute_bytes: size of an element of the compute type, 4 for fp32, 2 for bf16 and fp16; layers: of each pipeline stage
    on the rank, all of them in one stage if None; once: whether gradients are reduced once a step whatever the stage; device_sums:
    whether those that are reduced every micro-batch and offloaded are added up on the device.
    """
    units = [held_units(spec, plan.tp, part) for part in layers or [range(spec.depth)]]
    total, shard = sum(map(sum, units)), plan.shard if plan.stage >= 1 else 1
    # Gathered or unreduced at a time where layers are gathered one by one: each stage's outer unit, and the largest layer.
    at_once = sum(unit[0] for unit in units) + max(max(unit[1:]) for unit in units)
    kept, whole = -(-total // shard), plan.stage <= 1 or once
    shares_copies = plan.engine == "deepspeed" and plan.stage == 3  # which are kept in the compute type, beside the masters
    return StateBytes(
        parameters=(MASTER_BYTES + compute_bytes * shares_copies) * kept,
        gathered=compute_bytes * (at_once if plan.stage == 3 else total),
        gradients=MASTER_BYTES * (total if whole and not plan.offload else kept),
        sums=MASTER_BYTES * (total if whole else kept * device_sums) * plan.offload,
        unreduced=0 if whole else compute_bytes * at_once,
        optimizer=MOMENT_BYTES * kept,
        offloaded=plan.offload)


def held_units(spec: ModelSpec, tp: int, layers: range) -> list[int]:
    """Parameters that one tensor-parallel rank holds of a stage, by unit of gathering: [outer unit, layer, layer, ...]."""
    with torch.device("meta"):
        infos = parameter_infos(Transformer(spec, layers))
    units: dict[str, int] = {"outer": 0}
    for name, info in infos.items():
        layer = re.match(r"layers\.\d+\.", name)
        unit = layer[0] if layer else "outer"
        cut = info.tensor_dimension(tp) is not None
        units[unit] = units.get(unit, 0) + (-(-info.size // tp) if cut else info.size)
    return list(units.values())
