"""Activation checkpointing: which activations the backward pass finds saved and which it recomputes (Chen et al., arXiv
1604.06174).

The policy is applied to the functions that a layer runs, not by wrapping modules, so parameter names stay global. It
composes with compilation (the compiler sees which operators are recomputed) and with sharding (it is applied before
sharding).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.config import ActivationConfig, ConfigError
from trainer.distributed.collectives import TensorGroup
from trainer.model.experts import RoutedExperts, choose_largest
from trainer.model.initial import parameter_infos
from trainer.model.stage import Stage
from trainer.planning.recompute import ALL, MATMULS, SaveEntry, entry_problems, saved_in

# Offload of activations: the inputs of recomputed layers lie in host memory from a layer's forward pass to its backward
# pass. A copy to the host runs while the layer whose input it is computes. The next layer's call waits for that copy
# and then returns the device memory to the compute stream. So at most two inputs are on the device, however far the
# host runs ahead. A copy back starts with the backward pass of the layer behind it. The newest input stays on the
# device until another one comes, so it needs no copy back where backward follows at once. On a CPU both directions are
# plain copies within one memory: the same order of operations, without a gain.


PIECE = 1 << 26
"""Bytes of a block of pinned host memory. torch rounds pinned blocks up to powers of two, which could double the size
of a whole tensor. torch caches free blocks and reuses them."""


class HostStore:
    """The layer inputs of a pipeline stage in host memory."""

    def __init__(self) -> None:
        self.newest: HostTensor | None = None
        self.stream: torch.cuda.Stream | None = None  # for copies; created when the device is known

    def keep(self, layer: int, x: Tensor, part: int = 0) -> saved_tensors_hooks:
        """The context in which autograd keeps `x`, the input of part `part` of a layer, in host memory. layer: its
        number among the layers that do so."""
        return saved_tensors_hooks(partial(self.pack, tensor_identity(x), (layer, part)), unpack_host)

    def pack(self, identity: tuple, place: tuple[int, int], saved: Tensor) -> Any:
        """Hook for saved tensors: replaces the layer's input by a `HostTensor`. identity: that of the input. The input
        itself must not be passed: autograd keeps this function for as long as what it returns, and would keep the input
        on the device."""
        if tensor_identity(saved) != identity:
            return saved
        newest = self.newest
        # Several operators may save the same input. It is copied once and counts its uses.
        if newest is not None and newest.on_device is not None and newest.on_device.data_ptr() == saved.data_ptr():
            newest.uses += 1
            return newest
        if saved.is_cuda and self.stream is None:
            self.stream = torch.cuda.Stream(saved.device)
        if newest is not None:
            # The input before this one is given up only now. Its copy has had a whole layer's time.
            newest.release()
        self.newest = HostTensor(saved.detach(), place, newest, self)
        return self.newest


def tensor_identity(x: Tensor) -> tuple:
    """What distinguishes a tensor from all others that are alive: address, shape and type."""
    return x.data_ptr(), x.shape, x.dtype


def unpack_host(packed: Any) -> Tensor:
    return packed.take() if isinstance(packed, HostTensor) else packed


class HostTensor:
    """A tensor in host memory. on_device: the tensor on the device, as long as it is still or again there. uses: how
    often backward will take it. previous: a weak reference to the tensor that was saved before it in the same forward
    pass, which backward needs after it."""

    def __init__(self, x: Tensor, place: tuple[int, int], newest: HostTensor | None, store: HostStore):
        self.place, self.store, self.uses = place, store, 1
        # A `place` that does not rise means that a new forward pass has begun: the other micro-batch's tensor is not
        # the next one. The reference is weak because autograd does not keep the input of a frozen layer. Backward does
        # not take that input: if it were fetched, its memory would be freed while the copy is still running.
        self.previous = weakref.ref(newest) if newest is not None and newest.place < place else None
        self.on_device: Tensor | None = x.contiguous()
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.piece_elements = PIECE // x.element_size()
        self.pieces = [
            torch.empty(len(part), dtype=x.dtype, pin_memory=x.is_cuda)
            for part in self.on_device.view(-1).split(self.piece_elements)
        ]
        self.copy(out=True)

    def copy(self, out: bool) -> None:
        """Starts a copy to the host (`out`) or from it, after all work that is queued on the current stream."""
        stream = self.store.stream
        if stream is not None:
            # To the host: the tensor must have been computed. From it: the memory's former user must have finished.
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for on_host, on_device in zip(self.pieces, self.on_device.view(-1).split(self.piece_elements)):
                (on_host if out else on_device).copy_(on_device if out else on_host, non_blocking=True)
        self.copied = None if stream is None else stream.record_event()

    def wait(self) -> None:
        """Makes the current stream wait for the copy. The host does not wait."""
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)

    def release(self) -> None:
        """Frees the tensor on the device. Whatever uses its memory next is queued behind the copy."""
        # The memory belongs to the compute stream, which reuses it in its own order. After this wait that order
        # includes the copy, so the memory can be given out at once. `record_stream` would return it only when the
        # device has come this far, and the host, layers ahead, would have allocated more by then.
        self.wait()
        self.on_device = None

    def fetch(self) -> None:
        """Starts to copy the tensor back to the device, unless it is there."""
        if self.on_device is None:
            self.on_device = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self.copy(out=False)

    def take(self) -> Tensor:
        """The tensor on the device, for the backward pass of its layer. Starts to fetch the tensor that is needed next,
        which overlaps with that backward pass."""
        self.fetch()
        self.wait()
        x, self.uses = self.on_device, self.uses - 1
        if self.uses <= 0:
            self.on_device = None
            if self.store.newest is self:
                self.store.newest = None
        if (previous := self.previous and self.previous()) is not None:
            previous.fetch()
        return x


SHARED = ("trainer.copied_gather_matmul",)
"""Operators (x, weights, ...) that compute the products of one gathered input with several matrices."""

ALIASES = {
    "matmul": (
        *("aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_mm", "trainer.multiply_blocks"),
        "trainer.grouped_matmul",
        *SHARED,
        "trainer.copied_matmul_scatter",
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
    """Sets the recompute of every layer of a model or of a stage of it. The settings have been checked. backend: the
    communication of tensor-parallel ranks, whose reductions selective recompute saves too."""
    if config.mode == "auto":
        raise ValueError("activation.mode=auto has not been decided")
    for layer in model.layers.values():
        layer.tile = config.tile or 0
    if config.mode == "none":
        return
    layers = {int(index): layer for index, layer in model.layers.items()}
    # One object for all layers that save the same: the compiler makes a graph for each object.
    policies: dict[tuple, partial] = {}
    store = HostStore() if config.offload else None
    for index, layer in layers.items():
        entries = saved_in(config.save, index) if config.mode == "selective" else ()
        if any(entry.name == ALL for entry in entries):
            continue
        key = entries, linear_names(layer), routing_contexts(layer)
        if key not in policies:
            policies[key] = policy_of(entries, key[1], backend, key[2])
        layer.recompute = policies[key]
        if store is not None:
            layer.keep = partial(store.keep, index)


def routing_contexts(layer: nn.Module) -> Contexts | None:
    """What makes the contexts in which a layer is recomputed without choosing experts again; None for a layer without
    experts."""
    experts = [module for module in layer.modules() if isinstance(module, RoutedExperts)]
    return None if not experts else foreign_contexts if experts[0].foreign else selective_contexts


def policy_of(
    entries: Sequence[SaveEntry], names: Sequence[str], backend: type[TensorGroup], routing: Contexts | None = None
) -> Callable:
    """The function that runs a layer with the products `names`, such that backward finds saved what `entries` of
    `activation.save` name, and what was summed over ranks. routing: `routing_contexts` of the layer. Where it has
    experts, backward finds their choice saved too."""
    if not entries:
        return recompute_unrouted(routing)
    rules: Rules = dict(ROUTING) if routing else {}
    # Sums over ranks are saved: recomputing them would communicate again.
    sums = list(backend.reductions), 1, ()
    for number, (operators, every, places) in enumerate([*(rule_of(entry, names) for entry in entries), sums]):
        for operator in operators:
            rules[operator] = (*rules.get(operator, ()), (number, every, places))
    return save_by_rules(rules, routing)


def save_by_rules(rules: Rules, routing: Contexts | None) -> Callable:
    """The function that runs a layer such that backward finds saved what `rules` say. routing: see `policy_of`."""
    found = partial(recompute_all, context_fn=partial(routing or selective_contexts, rules))
    if routing is not foreign_contexts:
        return found
    # Changes in place are gone from a graph, so it can save the results of `topk` themselves.
    return partial(found, compiled=partial(selective_contexts, {**rules, torch.ops.aten.topk.default: ROUTING_RULE}))


# torch 2.14 asks whether hooks for saved tensors also see what a policy saves. Earlier versions never show it to them.
HOOKS = {"respect_saved_tensors_hooks": False} if torch.__version__ >= "2.14" else {}


def recompute_all(function: Callable, *arguments: Any, compiled: Callable | None = None, **keywords: Any) -> Any:
    """The result of `function`, which backward runs again. compiled: the contexts of compiled code, where they are
    others. keywords: of `torch.utils.checkpoint.checkpoint`.

    Compiled code has a policy even where nothing is to be saved. Without one, torch 2.11 marks only the operators that
    it sees in the function itself, not those inside of an autograd.Function, and saves what these communicate. No layer
    draws random numbers, so no generator state is preserved.
    """
    if torch.compiler.is_compiling():
        keywords["context_fn"] = compiled or keywords.get("context_fn", NOTHING_SAVED)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **keywords, **HOOKS)


def check_recompute(model: Stage, config: ActivationConfig) -> None:
    """Raises `ConfigError` for settings of activation checkpointing that match nothing in the whole model, or
    contradict each other."""
    reporting = [name for name, module in model.named_modules() if config.tile and getattr(module, "reports", None)]
    if blocks := [name for name in reporting if name.endswith(".feed_forward")]:
        raise ConfigError(
            f"activation.tile={config.tile}: {blocks[0]} computes its report over all of its tokens at once; set "
            "activation.tile=0"
        )
    if config.mode != "selective":
        return
    if found := list(entry_problems(config.save, model.depth)):
        raise ConfigError(found)
    for index, layer in model.layers.items():
        for entry in saved_in(config.save, int(index)):
            if entry.name != ALL:
                rule_of(entry, linear_names(layer))


def recomputes_attention(model: Stage, config: ActivationConfig) -> bool:
    """Whether the backward pass runs the attention kernel again in some layer."""
    if config.mode == "selective":
        saved_names = [{entry.name for entry in saved_in(config.save, int(index))} for index in model.layers]
        return any(not names & {"attention", ALL} for names in saved_names)
    return config.mode == "full"


def linear_names(layer: nn.Module) -> tuple[str, ...]:
    """The GEMMs of a layer by name, in the order in which they run, as `planning.layer.Program.gemms` has them."""
    infos = parameter_infos(layer)
    return tuple(
        name.removesuffix(".weight") for name, info in infos.items() if info.role == "matrix" and not info.adapter
    )


Contexts = Callable[["Rules"], Any]
"""Makes the contexts of a forward pass and of its recomputation from rules."""

Rules = dict[Any, tuple[tuple[int, int, tuple[int, ...]], ...]]
"""Operator -> the rules that apply to it: (number, n, places). Every n-th call of the rule's operators is saved, or
with places the calls of these numbers, counted from 1. Plain values, which the compiler treats as constants."""


def rule_of(entry: SaveEntry, names: Sequence[str]) -> tuple[list[Any], int, tuple[int, ...]]:
    """Operators, n and places of an entry of `activation.save` in a layer with the products `names`; see `Rules`.
    Raises `ConfigError`."""
    if entry.name not in MATMULS and (named := entry.products(names)):
        return operators_of("matmul"), 1, tuple(names.index(name) + 1 for name in named)
    if operators := operators_of(entry.name):
        return operators, entry.every, ()
    raise ConfigError(
        f"activation.save: '{entry.name}' names no operation; legal: {', '.join(ALIASES)}, {ALL}, products such as "
        f"{', '.join(names[:1])}, or a torch operator such as 'aten.mm', each also as NAME/2 for every second call, "
        "and as NAME@4-31 for some layers"
    )


def operators_of(name: str) -> list[Any]:
    """The torch operators that a name in `activation.save` stands for."""
    return [operator for target in ALIASES.get(name, (name,)) for operator in find_operators(target)]


def find_operators(name: str) -> list[Any]:
    """All overloads of a torch operator 'namespace.operator', or the one overload 'namespace.operator.overload'."""
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
    """The contexts of one forward pass and of its recomputation. Calls are counted separately in each, so both decide
    alike."""
    calls: Counter = Counter()
    shared = {operator for name in SHARED for operator in find_operators(name)}

    def policy(context: Any, operator: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
        # The largest element of a whole tensor: a scalar, with which fp8 scales an operand in both passes.
        saved = operator is torch.ops.aten.amax.default and len(arguments) == 1
        for number, every, places in rules.get(operator, ()):
            products = len(arguments[1]) if operator in shared else 1  # they are saved together or not at all
            calls[context.is_recompute, number] += products
            last = calls[context.is_recompute, number]
            saved |= any(last - products < place <= last for place in places) if places else last % every == 0
        # Of every n calls the last is saved. With matmul/2 a gated layer saves k, o and up, and recomputes q, v and
        # gate.
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


NOTHING_SAVED = partial(selective_contexts, {})

ROUTED = "choose_experts choose_largest count_by_sequence exchange_counts order_arrivals select_choices".split()
ROUTING_RULE = ((-1, 1, ()),)
ROUTING: Rules = dict.fromkeys([getattr(torch.ops.trainer, name).default for name in ROUTED], ROUTING_RULE)
"""Saves the choice of experts and the counts, sizes and orders that follow from it. Chosen again, a token could go to
another expert, because scores that are nearly equal are not computed to the same bits by every kernel. Counts and sizes
would be sent again, and the host would wait for them."""


class SavedChoices(TorchDispatchMode):
    """A context of selective recompute in which routers of transformers' code find their choice saved. Such code calls
    `topk`, and may change the values that it returns, so these cannot be saved. Here its numbers are the result of an
    operator of our own, and its values are taken from the scores again."""

    def __init__(self, context: Any):
        super().__init__()
        self.context = context

    def __enter__(self) -> Any:
        self.context.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.context.__exit__(*error)

    def __torch_dispatch__(self, operator: Any, _: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        if operator is not torch.ops.aten.topk.default:
            return operator(*arguments, **keywords or {})
        numbers = choose_largest(*arguments)
        return arguments[0].gather(arguments[2] if len(arguments) > 2 else -1, numbers), numbers


def foreign_contexts(rules: Rules) -> tuple[SavedChoices, ...]:
    """`selective_contexts` for a layer of transformers' code that chooses experts."""
    return tuple(map(SavedChoices, selective_contexts(rules)))


def recompute_unrouted(routing: Contexts | None) -> Callable:
    """`recompute_all` without routing tokens again. routing: see `policy_of`."""
    return save_by_rules(ROUTING, routing) if routing else recompute_all
