"""Where the embedding, the layers and the head of transformers' code are, by its structure and not by names, and what
else it computes before its layers and behind them."""

from __future__ import annotations

import contextlib
import inspect
import re
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.hf.code import TrialPass, base_of, use_pass

POSITIONS = re.compile("position|pos_emb|wpe")
"""What names of modules have that look up positions."""


class UnsupportedCode(Exception):
    """Why code cannot be run in parts."""


@dataclass
class CodeParts:
    """The modules of a model by the first part of our names of parameters, and what else a stage has to know.

    paths: our name -> name in the code. before, behind: of ours, modules with parameters that are called before the
    first layer and behind the last one. shared: name -> name in the code, modules that all stages have. outputs: the
    length of the tuple that layers return, 0 where they return a tensor. through_head: whether modules that are called
    behind the layers belong to the model with the head. takes_positions: whether the code can be told positions,
    of which a document's first is first_position.
    kinds: number of a layer -> the kinds of its attention, (window, whether the softmax is changed).
    attends: whether nothing but attention mixes tokens. packed: whether documents of a sequence stay apart. unused:
    parameters of layers that the code does not use, such as those of attention to an encoder."""

    paths: dict[str, str]
    before: list[str] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    outputs: int = 0
    through_head: bool = False
    head_bias: bool = False
    takes_positions: bool = True
    first_position: int = 0
    kinds: dict[str, list[list]] = field(default_factory=dict)
    attends: bool = True
    packed: bool = True
    unused: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """As JSON has it, without what `CodeSpec` has elsewhere."""
        return {name: value for name, value in asdict(self).items() if name not in ("paths", "unused")}


def find_parts(causal: PreTrainedModel, masks: bool) -> CodeParts:
    """The parts of a model on the meta device. masks: see `build_model`. Its layers run without values there, which
    replaces the forward of experts. Raises `UnsupportedCode`."""
    base, head, embedding = base_of(causal), causal.get_output_embeddings(), causal.get_input_embeddings()
    if base is causal or type(head) is not nn.Linear:
        raise UnsupportedCode("its head is no linear layer, which the loss over parts of the vocabulary needs")
    if not isinstance(embedding, nn.Embedding) or embedding.embedding_dim != head.in_features:
        raise UnsupportedCode("its embedding is no table of what the head reads")
    names = {module: name for name, module in causal.named_modules()}
    layers = find_layers(base)
    if len(list(layers.named_parameters(remove_duplicate=False))) > len(list(layers.parameters())):
        raise UnsupportedCode("some of its layers share parameters")
    paths = {"embedding": names[embedding], "layers": names[layers], "head": names[head]}
    parts = CodeParts(paths, head_bias=head.bias is not None)
    if head.bias is not None:
        paths["head.bias"] = next(name for name, one in causal.named_parameters() if one is head.bias)
    outer = list(outer_modules(causal, {embedding, layers, head}))
    seen = trace_calls(causal, base, layers, [module for _, module in outer], parts, masks)
    inside, stem = f"{names[base]}.", paths["layers"].rpartition(".")[0]
    named: dict[str, str] = {}
    for path, module in outer:
        short = path.removeprefix(f"{stem}.").removeprefix(inside).replace(".", "_")
        if not any(True for _ in module.parameters()):
            parts.shared[short] = path
            continue
        # A module that is not reached without values is taken to come behind, as only experts stop such a pass.
        early = module in seen and seen.index(module) < seen.index(layers[0])
        (parts.before if early else parts.behind).append(short)
        named[short] = path
        parts.through_head |= not early and not path.startswith(inside)
    single = len(parts.behind) == 1
    renamed = {name: f"before.{name}" for name in parts.before}
    renamed |= {name: "norm" if single else f"behind.{name}" for name in parts.behind}
    parts.before, parts.behind = ([renamed[name] for name in some] for some in (parts.before, parts.behind))
    paths |= {renamed[name]: path for name, path in named.items()}
    return parts


def find_layers(base: nn.Module) -> nn.ModuleList:
    """The list of the decoder layers: of those that are not inside of another, the one with the most parameters."""
    lists = [(name, module) for name, module in base.named_modules() if isinstance(module, nn.ModuleList) and module]
    outermost = [one for name, one in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    if not outermost:
        raise UnsupportedCode("its code has no list of layers, which pipelines and ZeRO units need")
    return max(outermost, key=lambda one: sum(parameter.numel() for parameter in one.parameters()))


def outer_modules(module: nn.Module, parts: set[nn.Module], prefix: str = "") -> Any:
    """(name, module) of the largest modules that neither are one of the parts nor have one inside. Raises
    `UnsupportedCode` where a parameter belongs to none."""
    for name, child in module.named_children():
        if child not in parts:
            if parts & set(child.modules()):
                yield from outer_modules(child, parts, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", child
    tied = {parameter for part in parts for parameter in part.parameters()}
    if loose := [name for name, one in module.named_parameters(recurse=False) if one not in tied]:
        raise UnsupportedCode(f"{prefix}{loose[0]} is a parameter outside of embedding, layers, final norm and head")


def trace_calls(
    causal: PreTrainedModel,
    base: nn.Module,
    layers: nn.ModuleList,
    outer: list[nn.Module],
    parts: CodeParts,
    masks: bool,
) -> list[nn.Module]:
    """The modules among `layers` and `outer` in the order in which they are called. Runs the code without values, on
    the meta device, to see what it asks of attention, and sets what `parts` say of that. Experts are left out, because
    their number of tokens is not known. Raises `UnsupportedAttention` and `UnsupportedCode`."""
    for module in base.modules():
        if holds_experts(module):
            module.forward = partial(stand_for_experts, module)
    length = 4
    x = torch.empty(1, length, causal.get_input_embeddings().embedding_dim, device="meta")
    current, positions = TrialPass(x, (1, length), None, length, None, None), torch.arange(length, device="meta")[None]
    current.kinds = {}
    seen: list[nn.Module] = []
    calls: list[int] = []

    def enter(module: nn.Module, *_: Any) -> None:
        seen.append(module)
        calls.append(current.calls)

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        parts.outputs = len(output) if isinstance(output, tuple) else 0

    hooks = [module.register_forward_pre_hook(enter) for module in (*layers, *outer)]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    owner = causal.get_submodule(parts.paths["layers"].rpartition(".")[0])
    parts.takes_positions = any("position_ids" in inspect.signature(one.forward).parameters for one in (base, owner))
    counts = [one for one in causal.modules() if hasattr(one, "create_position_ids_from_inputs_embeds")]
    parts.first_position = counts[0].padding_idx + 1 if counts else 0
    told = parts.takes_positions or not any(POSITIONS.search(name) for name, _ in causal.named_modules())
    named = {"position_ids": positions} if parts.takes_positions else {}
    named |= {"attention_mask": torch.ones_like(positions)} if masks else {}
    try:
        # What else the meta device cannot do, the code may do elsewhere.
        with use_pass(current), contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError):
            result = base(inputs_embeds=x, use_cache=False, **named).last_hidden_state
            mixing = [count for module, count in zip(seen, calls) if module in set(layers)] + [current.calls]
            parts.packed = all(after > before for before, after in zip(mixing, mixing[1:]))
            parts.attends = parts.packed and not current.recurrent
            names, some = zip(*layers.named_parameters())
            gradients = torch.autograd.grad(result.sum(), some, allow_unused=True)
            parts.unused = [name for name, one in zip(names, gradients) if one is None]
    finally:
        for hook in hooks:
            hook.remove()
    for index, layer in enumerate(layers):
        found = {current.kinds[module] for module in layer.modules() if module in current.kinds}
        parts.kinds[str(index)] = [list(kind) for kind in sorted(found)]
    order = [module for module in seen if module in set(layers)]
    if not order or order != list(layers)[: len(order)]:
        raise UnsupportedCode("its layers are not computed once each and in turn")
    parts.packed = told and (masks or parts.packed)
    if used := [
        name
        for name, module in causal.named_modules()
        if getattr(module, "is_causal", True) is False and not is_unused(module, layers, parts)
    ]:
        raise UnsupportedCode(f"{used[0]} is non-causal attention, which is not supported")
    return seen


def is_unused(module: nn.Module, layers: nn.ModuleList, parts: CodeParts) -> bool:
    """Whether none of the parameters of a module of the layers is used."""
    unused = {layers.get_parameter(name) for name in parts.unused}
    own = set(module.parameters())
    return bool(own) and own <= unused


def stand_for_experts(module: nn.Module, x: Tensor, *more: Any, **named: Any) -> Tensor:
    """A result that depends on what experts depend on."""
    given = [one for one in (*more, *named.values()) if isinstance(one, Tensor) and one.is_floating_point()]
    return x + sum(one.sum() for one in (*given, *module.parameters()))


def holds_experts(module: nn.Module) -> bool:
    """Whether parameters of the module itself are matrices of several experts."""
    return not isinstance(module, nn.Conv1d) and any(one.dim() == 3 for one in module.parameters(recurse=False))
