"""The reference that every plan is compared with: one process, plain modules and autograd, fp32, torch's AdamW, and
Muon by singular values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import Config, PrecisionConfig
from trainer.config.model import ModelSpec
from trainer.config.schema import MuonConfig
from trainer.data.batches import MicroBatch
from trainer.model.axes import parameter_infos
from trainer.model.initial import Weights, initialize_model
from trainer.model.loss import loss_terms
from trainer.model.stage import split_report
from trainer.model.transformer import Transformer
from trainer.optim.muon import COEFFICIENTS
from trainer.optim.optimizer import learning_rate, parameter_policies
from trainer.parallel.parallelize import multiply_in_float8
from trainer.planning.cost.updates import NEWTON_SCHULZ_STEPS

IGNORE = -100
"""The target of a token that has no target."""

LOSS_SCALE = 4096.0
"""The first loss scale of an fp16 reference. It halves while a gradient overflows, as a run's does."""


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


def train_reference(
    config: Config,
    spec: ModelSpec,
    steps: Iterable[list[MicroBatch]],
    device: torch.device,
    weights: Weights | None = None,
    compute: torch.dtype = torch.float32,
    float8: PrecisionConfig | None = None,
) -> Trajectory:
    """Trains in this process with none of the project's parallel, optimizer or loss code.

    steps: the micro-batches of each optimizer step, of any size. compute: the type of forward and backward, float8: of
    products; a type other than fp32 shows how much accuracy the type by itself costs."""
    model = Transformer(spec).to(device)
    if float8 is not None:
        multiply_in_float8(model, spec, float8)
    initialize_model(model, spec, config.run.seed, device, weights)
    optimizers = optimizers_of(model, config)
    seen, scale = Trajectory(initial=copy_parameters(model)), LOSS_SCALE if compute is torch.float16 else 1.0
    for number, batches in enumerate(steps):
        valid = max(1, sum(int((batch.targets != IGNORE).sum()) for batch in batches))
        while True:
            loss = 0.0
            for batch in batches:
                copies = {name: parameter.to(compute) for name, parameter in model.named_parameters()}
                output = torch.func.functional_call(model, copies, (batch.tokens,), {"documents": batch.documents})
                objective, entropy = losses_of(output, batch.targets.flatten(), config)
                (objective * (scale / valid)).backward()
                loss += entropy.item() / valid
            if scale <= 1 or all(parameter.grad.isfinite().all() for parameter in model.parameters()):
                break
            scale /= 2
            model.zero_grad()
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
        rate = learning_rate(config.lr, config.run.steps, torch.tensor(float(number))).item()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["scale"] * rate
            optimizer.step()
            optimizer.zero_grad()
    seen.parameters = copy_parameters(model)
    return seen


def optimizers_of(model: Transformer, config: Config) -> list[torch.optim.Optimizer]:
    """torch's AdamW, and `ReferenceMuon`, with a parameter group for each policy."""
    policies = parameter_policies(parameter_infos(model), config.precision.types, config.optimizer)
    groups: dict[Any, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(policies[name], []).append(parameter)
    by_optimizer: dict[str, list[dict[str, Any]]] = {}
    for policy, parameters in groups.items():
        by_optimizer.setdefault(policy.optimizer, []).append(
            {"params": parameters, "weight_decay": policy.weight_decay, "scale": policy.lr_scale}
        )
    betas, eps = (config.optimizer.beta1, config.optimizer.beta2), config.optimizer.eps
    return [
        ReferenceMuon(some, config.optimizer.muon) if name == "muon" else torch.optim.AdamW(some, betas=betas, eps=eps)
        for name, some in by_optimizer.items()
    ]


def losses_of(output: Any, targets: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """The objective and the cross-entropy of a micro-batch, both sums over its valid targets.

    output: what the model returned, logits [batch, length, vocab]; targets: [batch x length]."""
    logits, report = split_report(output)
    logits, valid = logits.flatten(0, 1).float(), targets != IGNORE
    entropy = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    auxiliary = 0.0 if report is None or report.objective is None else report.objective
    added = sum(term(logits, targets)[valid].sum() for term in loss_terms(config.loss).values())
    square = logits.logsumexp(-1)[valid].square().sum()
    return entropy + config.loss.z_loss * square + added + auxiliary, entropy


class ReferenceMuon(torch.optim.Optimizer):
    """Muon without its iteration: that changes singular values alone, which are changed here one by one, in fp64."""

    def __init__(self, groups: list[dict[str, Any]], config: MuonConfig):
        super().__init__(groups, {"lr": 0.0})
        self.config = config

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        config, (a, b, c) = self.config, COEFFICIENTS
        for group in self.param_groups:
            for weight in group["params"]:
                moment = self.state[weight].setdefault("moment", torch.zeros_like(weight))
                moment.lerp_(weight.grad, 1 - config.momentum)
                direction = weight.grad.lerp(moment, config.momentum)
                left, values, right = torch.linalg.svd(direction.double(), full_matrices=False)
                values /= max(values.norm().item(), 1e-7)
                for _ in range(NEWTON_SCHULZ_STEPS):
                    values = a * values + b * values**3 + c * values**5
                rows, columns = weight.shape
                original = max(1.0, rows / columns) ** 0.5
                factor = original if config.adjust_lr == "original" else 0.2 * max(rows, columns) ** 0.5
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(((left * values) @ right * (group["lr"] * factor)).to(weight.dtype))


def copy_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}
