"""Activation checkpointing: what the backward pass finds saved and what it recomputes (Chen et al., arXiv 1604.06174).

The policy is applied to what a layer runs, not by wrapping modules, so that parameter names stay global. It composes
with compilation (the compiler sees the marks and plans the recompute) and with sharding (applied before it)."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.checkpointing.host import HostStore
from trainer.config import ActivationConfig, ConfigError
from trainer.distributed.collectives import TensorGroup
from trainer.model.stage import Stage

# No layer draws random numbers, so there is no generator state to keep for the second forward.
recompute_all = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

ALIASES = {
    "matmul": (
        *("aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_mm"),
        *("trainer.multiply_gathered", "trainer.fused_gather_matmul"),
    ),
    "attention": (
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "higher_order.flex_attention",
    ),
}


def apply_recompute(model: Stage, config: ActivationConfig, backend: type[TensorGroup] = TensorGroup) -> None:
    """Sets the recompute of every layer of a model or of a stage of it; settings are taken as checked. backend: what
    tensor-parallel ranks communicate by, whose reductions selective recompute keeps too."""
    functorch.activation_memory_budget = config.budget if config.mode == "budget" else 1.0
    for layer in model.layers.values():
        layer.tile = config.tile or 0
    if config.mode in ("none", "budget"):
        return
    layers = [layer for index, layer in model.layers.items() if int(index) % config.every == 0]
    if config.mode == "selective" and config.modules:
        for name, module in submodules(model, layers).items():
            if any(fnmatchcase(name, pattern) for pattern in config.modules):
                module.__class__ = recomputed(type(module))
        return
    policy = recompute_all
    if config.mode == "selective":
        operations = saved_operations(config.save) | {operator: ("reduction", 1) for operator in backend.reductions}
        policy = partial(recompute_all, context_fn=partial(selective_contexts, operations))
    store = HostStore() if config.offload else None
    for number, layer in enumerate(layers):
        layer.recompute = policy
        if store is not None:
            layer.keep = partial(store.keep, number)


def check_recompute(model: Stage, config: ActivationConfig) -> None:
    """Raises `ConfigError` for names that match nothing in the whole model."""
    reporting = [name for name, module in model.named_modules() if config.tile and getattr(module, "reports", None)]
    if blocks := [name for name in reporting if name.endswith(".feed_forward")]:
        raise ConfigError(
            f"activation.tile={config.tile}: {blocks[0]} reports of all its tokens at once; set activation.tile=0"
        )
    if config.mode != "selective":
        return
    if not config.modules:
        saved_operations(config.save)
        return
    inside = submodules(model, list(model.layers.values()))
    unmatched = [p for p in config.modules if not any(fnmatchcase(name, p) for name in inside)]
    if unmatched:
        raise ConfigError(
            f"activation.modules={unmatched} match no submodule; names look like: {', '.join(list(inside)[:8])}"
        )
    fed = [name for name in inside if ".feed_forward" in name and any(fnmatchcase(name, p) for p in config.modules)]
    if config.tile and fed:
        raise ConfigError(
            f"activation.modules={config.modules} match {fed[0]}, which activation.tile={config.tile} recomputes by "
            "itself; take it out of activation.modules"
        )


def recomputes_attention(model: Stage, config: ActivationConfig) -> bool:
    """Whether the backward pass runs the kernel of attention again, in some layer."""
    if config.mode == "selective" and config.modules:
        inside = submodules(model, list(model.layers.values()))
        return any(name.endswith(".attention") and fnmatchcase(name, p) for name in inside for p in config.modules)
    return config.mode == "full" or config.mode == "selective" and "attention" not in config.save


def submodules(model: Stage, layers: list[nn.Module]) -> dict[str, nn.Module]:
    """What is inside of `layers`, by global name."""
    names = {module: name for name, module in model.named_modules()}
    return {names[module]: module for layer in layers for module in layer.modules() if module is not layer}


@cache
def recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind` with its forward recomputed. One class for all modules of a kind, so that the compiler makes one graph of
    them."""

    class Recomputed(kind):
        recomputed = True

        def forward(self, *arguments: Any) -> Any:
            return recompute_all(super().forward, *arguments)

    return Recomputed


def saved_operations(names: list[str]) -> dict[Any, tuple[str, int]]:
    """Operator -> (the name it is counted under, n: every n-th call is saved), from names such as 'matmul/2'."""
    operations: dict[Any, tuple[str, int]] = {}
    for entry in names:
        name, _, every = entry.partition("/")
        found = [operator for target in ALIASES.get(name, (name,)) for operator in find_operators(target)]
        if not found or (every and not every.isdigit()) or every == "0":
            raise ConfigError(
                f"activation.save: '{entry}' names no operation; legal: {', '.join(ALIASES)}, or a torch operator "
                "such as 'aten.mm', each also as NAME/2 for every second call"
            )
        operations.update({operator: (name, int(every or 1)) for operator in found})
    return operations


def find_operators(name: str) -> list[Any]:
    """All overloads of a torch operator named 'namespace.operator' (or one, 'namespace.operator.overload')."""
    target: Any = torch.ops
    try:
        for part in name.split("."):
            target = getattr(target, part)
    except (AttributeError, RuntimeError):
        return []
    if hasattr(target, "overloads"):
        return [getattr(target, overload) for overload in target.overloads()]
    return [] if target is torch.ops or isinstance(target, type(torch.ops.aten)) else [target]


def selective_contexts(operations: dict[Any, tuple[str, int]]) -> Any:
    """Contexts of one forward and its recomputation; calls are counted in each, so that both decide alike."""
    calls: Counter = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator not in operations:
            return CheckpointPolicy.PREFER_RECOMPUTE
        name, every = operations[operator]
        key = (context.is_recompute, name)
        calls[key] += 1
        # Of every n calls the last is saved: with matmul/2 a gated layer keeps k, o and up, and recomputes q, v and
        # gate.
        return CheckpointPolicy.MUST_SAVE if calls[key] % every == 0 else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
