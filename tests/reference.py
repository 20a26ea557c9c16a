"""The reference that every plan is compared with: one process, plain modules, plain autograd, fp32, torch's own optimizer."""
from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import Config
from trainer.model.axes import parameter_infos
from trainer.model.init import initialize
from trainer.model.spec import ModelSpec, assign
from trainer.model.transformer import Transformer
from trainer.optim.schedule import learning_rate
from trainer.precision.policy import parameter_policies


@dataclass
class Trajectory:
    """What is compared: per step the loss, the gradient norm and every parameter's gradient; the last parameters."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def tiny_spec(**changes) -> ModelSpec:
    """A model with all kinds of parameters whose sizes no number of ranks divides."""
    spec = ModelSpec(vocab_size=61, width=24, depth=3, max_length=32)
    spec.attention.heads, spec.attention.kv_heads, spec.attention.bias, spec.attention.qk_norm = 4, 2, True, "head"
    spec.feed_forward.width = 38
    assign(spec, changes, "model")
    return spec


def random_batch(step: int, sequences: int, length: int, vocab: int, documents: bool, device: str = "cpu") -> SimpleNamespace:
    """The global batch of a step; rows have different numbers of valid targets."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocab, (sequences, length), generator=generator)
    targets = torch.randint(0, vocab, (sequences, length), generator=generator)
    for row in range(sequences):
        targets[row, :row * 3 % length] = -100
    index = (torch.arange(length) // 7).expand(sequences, length).int()
    return SimpleNamespace(tokens=tokens.to(device), targets=targets.to(device), documents=index.to(device) if documents else None)


def reference(config: Config, spec: ModelSpec, steps: int, sequences: int, length: int, documents: bool = False,
              device: str = "cpu") -> Trajectory:
    """Trains in this process with none of the project's parallel, optimizer or loss code."""
    model = Transformer(spec).to(device)
    initialize(model, spec, config.run.seed, torch.device(device))
    policies = parameter_policies(parameter_infos(model), config.precision.types, config.optimizer)
    groups: dict = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(policies[name], []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": parameters, "weight_decay": policy.weight_decay} for policy, parameters in groups.items()],
                                  betas=(config.optimizer.beta1, config.optimizer.beta2), eps=config.optimizer.eps)
    seen = Trajectory()
    for step in range(steps):
        batch = random_batch(step, sequences, length, spec.vocab_size, documents, device)
        logits = model(batch.tokens, documents=batch.documents)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=-100)
        loss.backward()
        seen.losses.append(loss.item())
        seen.gradients.append({name: p.grad.cpu().clone() for name, p in model.named_parameters()})
        seen.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm or float("inf")).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.lr, config.run.steps, torch.tensor(float(step))).item()
        optimizer.step()
        optimizer.zero_grad()
    seen.parameters = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return seen
