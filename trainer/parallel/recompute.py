"""Activation checkpointing: what the backward pass finds saved and what it recomputes (Chen et al., arXiv 1604.06174).

The policy is applied to what a layer runs, not by wrapping modules, so that parameter names stay global. It composes
with compilation (the compiler sees the marks and plans the recompute) and with sharding (applied before it)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.config import ActivationConfig, ConfigError
from trainer.distributed.collectives import TensorGroup
from trainer.model.axes import parameter_infos
from trainer.model.stage import Stage
from trainer.planning.recompute import ALL, MATMULS, SaveEntry, entry_problems, saved_in

# Inputs of recomputed layers in host memory, from a layer's forward pass until its backward pass. A copy out runs
# behind the computation of the layer whose input it is. It has until the next layer's call, which waits for it and
# then gives the device's memory back to its own stream: no more than two inputs are on the device, however far the
# host is ahead. A copy back begins with the backward pass of the layer behind. The newest input stays on the device
# until another comes, and so need not come back where backward follows at once. On a CPU both are plain copies within
# one memory: the same order of things, with nothing won.


PIECE = 1 << 26
"""Bytes of a block of host memory: torch rounds page-locked blocks up to powers of two, which for whole tensors could
double them. It keeps those that are free for the next ones."""


class HostStore:
    """What the layers of a pipeline stage keep in host memory."""

    def __init__(self) -> None:
        self.newest: HostTensor | None = None
        self.stream: torch.cuda.Stream | None = None  # for copies, once the device is known

    def keep(self, layer: int, x: Tensor, part: int = 0) -> saved_tensors_hooks:
        """The context in which autograd keeps `x`, the input of the part `part` of a layer, in host memory. layer: its
        place among those that do so."""
        return saved_tensors_hooks(partial(self.pack, tensor_identity(x), (layer, part)), unpack_host)

    def pack(self, wanted: tuple, place: tuple[int, int], saved: Tensor) -> Any:
        """wanted: the identity of the input, not the input: autograd keeps this function as long as what it returns."""
        if tensor_identity(saved) != wanted:
            return saved
        newest = self.newest
        if newest is not None and newest.there is not None and newest.there.data_ptr() == saved.data_ptr():
            newest.uses += 1
            return newest
        if saved.is_cuda and self.stream is None:
            self.stream = torch.cuda.Stream(saved.device)
        if newest is not None:
            newest.leave()
        self.newest = HostTensor(saved.detach(), place, newest, self)
        return self.newest


def tensor_identity(x: Tensor) -> tuple:
    """What tells a tensor from all others that are alive."""
    return x.data_ptr(), x.shape, x.dtype


def unpack_host(packed: Any) -> Tensor:
    return packed.take() if isinstance(packed, HostTensor) else packed


class HostTensor:
    """A tensor in host memory; `there`: on the device, as long as it still is or again is. uses: how often it will be
    taken. before: the one that was kept before it in the same forward pass, and is needed after it."""

    def __init__(self, x: Tensor, place: tuple[int, int], newest: HostTensor | None, store: HostStore):
        self.place, self.store, self.uses = place, store, 1
        self.before = newest if newest is not None and newest.place < place else None
        self.there: Tensor | None = x.contiguous()
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.step = PIECE // x.element_size()
        self.pieces = [
            torch.empty(len(part), dtype=x.dtype, pin_memory=x.is_cuda) for part in self.there.view(-1).split(self.step)
        ]
        self.copy(out=True)

    def copy(self, out: bool) -> None:
        """Starts a copy to the host or from it, behind what has been asked of the device."""
        stream = self.store.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for here, there in zip(self.pieces, self.there.view(-1).split(self.step)):
                (here if out else there).copy_(there if out else here, non_blocking=True)
        self.copied = None if stream is None else stream.record_event()

    def wait(self) -> None:
        """What is asked of the device from now on comes behind the copy."""
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)

    def leave(self) -> None:
        """Gives up the tensor on the device. What takes its memory next comes behind the copy."""
        self.wait()
        self.there = None

    def fetch(self) -> None:
        """Starts to bring the tensor back."""
        if self.there is None:
            self.there = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self.copy(out=False)

    def take(self) -> Tensor:
        """The tensor on the device, for the backward pass of its layer; the one that is needed next is fetched behind
        that."""
        self.fetch()
        self.wait()
        x, self.uses = self.there, self.uses - 1
        if self.uses <= 0:
            self.there = None
            if self.store.newest is self:
                self.store.newest = None
        if self.before is not None:
            self.before.fetch()
        return x


SHARED = ("trainer.copied_gather_matmul", "trainer.fused_gather_matmul")
"""Operators (x, weights, ...) that give the products of one gathered input with several matrices."""

ALIASES = {
    "matmul": (
        *("aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_mm"),
        *SHARED,
        *("trainer.copied_matmul_scatter", "trainer.fused_matmul_scatter"),
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
    if config.mode == "auto":
        raise ValueError("activation.mode=auto has not been decided")
    functorch.activation_memory_budget = config.budget if config.mode == "budget" else 1.0
    for layer in model.layers.values():
        layer.tile = config.tile or 0
    if config.mode in ("none", "budget"):
        return
    layers = {int(index): layer for index, layer in model.layers.items()}
    if config.mode == "selective" and config.modules:
        for name, module in named_submodules(model, list(layers.values())).items():
            if any(fnmatchcase(name, pattern) for pattern in config.modules):
                module.__class__ = recomputing_class(type(module))
        return
    policies: dict[
        tuple, partial
    ] = {}  # one object for all layers that keep the same: the compiler makes a graph of each
    store = HostStore() if config.offload else None
    for index, layer in layers.items():
        entries = saved_in(config.save, index) if config.mode == "selective" else ()
        if any(entry.name == ALL for entry in entries):
            continue
        names = linear_names(layer)
        if (entries, names) not in policies:
            policies[entries, names] = policy_of(entries, names, backend)
        layer.recompute = policies[entries, names]
        if store is not None:
            layer.keep = partial(store.keep, index)


def policy_of(entries: Sequence[SaveEntry], names: Sequence[str], backend: type[TensorGroup]) -> partial:
    """How a layer with the products `names` is run, so that backward finds saved what entries of `activation.save`
    keep."""
    if not entries:
        return recompute_all
    rules: Rules = {}
    for number, (operators, every, places) in enumerate(
        [*(rule_of(entry, names) for entry in entries), recompute_reductions(backend)]
    ):
        for operator in operators:
            rules[operator] = (*rules.get(operator, ()), (number, every, places))
    return partial(recompute_all, context_fn=partial(selective_contexts, rules))


def recompute_all(function: Callable, *arguments: Any, **keywords: Any) -> Any:
    """The result of a function that backward runs again. keywords: of `checkpoint`.

    What is compiled has a policy even where nothing is to be saved: without one torch 2.11 marks the operators that it
    sees in the function, not those within an autograd.Function, and keeps what these communicate. No layer draws random
    numbers, so there is no generator state to keep."""
    if torch.compiler.is_compiling():
        keywords = {"context_fn": NOTHING_SAVED, **keywords}
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **keywords)


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
        if found := list(entry_problems(config.save, model.depth)):
            raise ConfigError(found)
        for index, layer in model.layers.items():
            for entry in saved_in(config.save, int(index)):
                if entry.name != ALL:
                    rule_of(entry, linear_names(layer))
        return
    inside = named_submodules(model, list(model.layers.values()))
    unmatched = [p for p in config.modules if not any(fnmatchcase(name, p) for name in inside)]
    if unmatched:
        raise ConfigError(
            f"activation.modules={unmatched} match no submodule; names look like: {', '.join(list(inside)[:8])}"
        )


def recomputes_attention(model: Stage, config: ActivationConfig) -> bool:
    """Whether the backward pass runs the kernel of attention again, in some layer."""
    if config.mode == "selective" and config.modules:
        inside = named_submodules(model, list(model.layers.values()))
        return any(name.endswith(".attention") and fnmatchcase(name, p) for name in inside for p in config.modules)
    if config.mode == "selective":
        kept = [{entry.name for entry in saved_in(config.save, int(index))} for index in model.layers]
        return any(not names & {"attention", ALL} for names in kept)
    return config.mode == "full"


def named_submodules(model: Stage, layers: list[nn.Module]) -> dict[str, nn.Module]:
    """What is inside of `layers`, by global name."""
    names = {module: name for name, module in model.named_modules()}
    return {names[module]: module for layer in layers for module in layer.modules() if module is not layer}


@cache
def recomputing_class(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind` with its forward recomputed. One class for all modules of a kind, so that the compiler makes one graph of
    them."""

    class Recomputed(kind):
        recomputed = True

        def forward(self, *arguments: Any) -> Any:
            return recompute_all(super().forward, *arguments)

    return Recomputed


def linear_names(layer: nn.Module) -> tuple[str, ...]:
    """The GEMMs of a layer by name, in the order in which they run, as `planning.layer.Program.gemms` has them."""
    infos = parameter_infos(layer)
    return tuple(name.removesuffix(".weight") for name, info in infos.items() if info.role == "matrix")


Rules = dict[Any, tuple[tuple[int, int, tuple[int, ...]], ...]]
"""Operator -> the rules that it falls under: number, n (every n-th call of the rule's operators is saved), and places
(the products that are saved, from 1; empty: every n-th). Plain values, which the compiler takes for constants."""


def rule_of(entry: SaveEntry, names: Sequence[str]) -> tuple[list[Any], int, tuple[int, ...]]:
    """Operators, n and places of an entry of `activation.save`, in a layer with the products `names`. Raises
    `ConfigError`."""
    if entry.name not in MATMULS and (named := entry.products(names)):
        return operators_of("matmul"), 1, tuple(names.index(name) + 1 for name in named)
    if operators := operators_of(entry.name):
        return operators, entry.every, ()
    raise ConfigError(
        f"activation.save: '{entry.name}' names no operation; legal: {', '.join(ALIASES)}, {ALL}, products such as "
        f"{', '.join(names[:1])}, or a torch operator such as 'aten.mm', each also as NAME/2 for every second call, "
        "and as NAME@4-31 for some layers"
    )


def recompute_reductions(backend: type[TensorGroup]) -> tuple[list[Any], int, tuple[int, ...]]:
    """The same of sums over ranks."""
    return list(backend.reductions), 1, ()


def operators_of(name: str) -> list[Any]:
    """The torch operators that a name stands for."""
    return [operator for target in ALIASES.get(name, (name,)) for operator in find_operators(target)]


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


def selective_contexts(rules: Rules) -> Any:
    """Contexts of one forward and its recomputation; calls are counted in each, so that both decide alike."""
    calls: Counter = Counter()
    shared = {operator for name in SHARED for operator in find_operators(name)}

    def policy(context: Any, operator: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
        saved = False
        for number, every, places in rules.get(operator, ()):
            products = len(arguments[1]) if operator in shared else 1  # which are saved together, or not at all
            calls[context.is_recompute, number] += products
            last = calls[context.is_recompute, number]
            saved |= any(last - products < place <= last for place in places) if places else last % every == 0
        # Of every n calls the last is saved: with matmul/2 a gated layer keeps k, o and up, and recomputes q, v and
        # gate.
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


NOTHING_SAVED = partial(selective_contexts, {})
