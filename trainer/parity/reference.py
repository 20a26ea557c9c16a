"""The reference that every plan is compared with: one process, plain modules and autograd, fp32, torch's optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.data.batches import Batch
from trainer.model.axes import parameter_infos
from trainer.model.initial import Weights, initialize
from trainer.model.loss import loss_terms
from trainer.model.stage import apart
from trainer.model.transformer import Transformer
from trainer.optim.groups import parameter_policies
from trainer.optim.lr_schedule import learning_rate

IGNORE = -100
"""The target of a token that has no target."""

LOSS_SCALE = 4096.0
"""The constant loss scale of an fp16 reference."""


@dataclass
class Trajectory:
    """What is compared: losses, norms, and whole fp32 tensors on the CPU by global name.

    problems: faults on the way, whatever the numbers. overflows: how many steps the loss scaler skipped.
    """

    initial: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    overflows: int = 0


def reference(
    config: Config,
    spec: ModelSpec,
    steps: Iterable[list[Batch]],
    device: torch.device,
    weights: Weights | None = None,
    compute: torch.dtype = torch.float32,
) -> Trajectory:
    """Trains in this process with none of the project's parallel, optimizer or loss code.

    steps: the micro-batches of each optimizer step, of any size. compute: the type of forward and backward; a type
    other than fp32 shows how much accuracy the type by itself costs."""
    model = Transformer(spec).to(device)
    initialize(model, spec, config.run.seed, device, weights)
    policies = parameter_policies(parameter_infos(model), config.precision.types, config.optimizer)
    groups: dict[Any, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(policies[name], []).append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": policy.weight_decay, "scale": policy.lr_scale}
            for policy, parameters in groups.items()
        ],
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
    )
    seen, scale = Trajectory(initial=snapshot(model)), LOSS_SCALE if compute is torch.float16 else 1.0
    for number, batches in enumerate(steps):
        valid = max(1, sum(int((batch.targets != IGNORE).sum()) for batch in batches))
        loss = 0.0
        for batch in batches:
            copies = {name: parameter.to(compute) for name, parameter in model.named_parameters()}
            output = torch.func.functional_call(model, copies, (batch.tokens,), {"documents": batch.documents})
            logits, report = apart(output)
            logits = logits.flatten(0, 1).float()
            auxiliary = 0.0 if report is None or report.objective is None else report.objective
            targets = batch.targets.flatten()
            entropy = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
            normalizers = logits.logsumexp(-1)[targets != IGNORE]
            added = sum(term(logits, targets)[targets != IGNORE].sum() for term in loss_terms(config.loss).values())
            objective = entropy + config.loss.z_loss * normalizers.square().sum() + added + auxiliary
            (objective * (scale / valid)).backward()
            loss += entropy.item() / valid
        for parameter in model.parameters():
            parameter.grad /= scale
        seen.losses.append(loss)
        seen.gradients.append(
            {name: parameter.grad.to("cpu", copy=True) for name, parameter in model.named_parameters()}
        )
        norm = torch.stack(
            [parameter.grad.norm(dtype=torch.float64) for parameter in model.parameters()]
        ).norm()  # fp32 loses digits
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), config.optimizer.clip_norm or math.inf, norm.float())
        seen.norms.append(norm.item())
        for group in optimizer.param_groups:
            group["lr"] = (
                group["scale"] * learning_rate(config.lr, config.run.steps, torch.tensor(float(number))).item()
            )
        optimizer.step()
        optimizer.zero_grad()
    seen.parameters = snapshot(model)
    return seen


def snapshot(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}
