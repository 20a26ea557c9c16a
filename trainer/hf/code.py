"""A pipeline stage that runs transformers' own modelling code, unmodified.

The code is split over ranks by its own tensor-parallel plan under one rule. A block is what a decoder layer calls with
hidden states. The input of a block whose weights the plan cuts is all-gathered, and its output, a sum over ranks, is
reduce-scattered. Attention that the plan does not cut is computed on every rank, and each rank keeps its own tokens.
Everything else treats tokens alone, and runs on the rank's own tokens. So the gradient of every parameter that is not
cut is a partial sum over ranks, as in the project's own blocks, and no style of the plan needs code of its own.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    eager_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.config import ConfigError
from trainer.config.model import CodeSpec
from trainer.distributed.collectives import GatherTokens, ReduceScatterSum, TensorGroup
from trainer.hf.scans import replace_scans
from trainer.model.attention import build_mask, causal_attention, pad_heads
from trainer.model.cache import KVCache
from trainer.model.context_attention import ContextGroup, without_regather
from trainer.model.initial import DeclaredModule
from trainer.model.layers import ATTENTION_BACKENDS
from trainer.model.linear import DeferredGrads, column_parallel, number_layer
from trainer.model.stage import join_reports, keep_here, split_report
from trainer.model.transformer import Embedding, Head, Transformer, document_positions
from trainer.planning.parameters import ParameterInfo, layer_tables, outer_tables
from trainer.precision.products import matmul

ATTENTION = "trainer"
"""The name of `attend_in_pass` among transformers' attention functions. It has no mask function, so the code makes no
masks."""

MASKS = "trainer_masks"
"""The name of `mask_with_documents` among transformers' mask functions."""

KNOWN = frozenset(
    ("dropout", "position_ids", "is_causal", "use_cache", "cache_position", "output_attentions", "output_hidden_states")
    + ("position_embeddings", "past_key_values", "cache", "return_dict", "output_router_logits")
)
"""Arguments of an attention function that do not change its result here: dropout is refused before."""


class UnsupportedAttention(Exception):
    """What a model's code asks of attention, and cannot have."""


@dataclass
class StagePass:
    """What the layers of a stage share in one forward pass. hidden: what the first of them reads; result: what the last
    of them returned; head: what the head reads. calls: of attention and other functions that keep documents apart;
    recurrent, stateful: see `Mixing`. shape: (batch, length) of this rank's tokens. documents, length: of whole
    sequences."""

    hidden: Tensor
    shape: tuple[int, int]
    documents: Tensor | None
    length: int
    group: TensorGroup | None
    context: ContextGroup | None
    result: Tensor | None = None
    masks: dict[tuple[int, bool], Any] = field(default_factory=dict)
    calls: int = 0
    recurrent: bool = False
    stateful: bool = False
    head: Tensor | None = None

    def mask(self, window: int, changed: bool, device: torch.device) -> Any:
        """The mask of a kind of attention, made once."""
        if (window, changed) not in self.masks:
            build = build_mask if self.context is None else self.context.build_mask
            self.masks[window, changed] = build(self.documents, self.length, window, changed, device)
        return self.masks[window, changed]


PASS: ContextVar[StagePass] = ContextVar("pass")
"""The forward pass that is being computed, also where backward computes it again."""

REGATHER: ContextVar[bool] = ContextVar("regather", default=True)
"""Whether backward gathers keys again. A recomputed layer does so anyway."""


@contextlib.contextmanager
def use_pass(current: StagePass, regather: bool = True) -> Iterator[None]:
    """Context in which code belongs to a pass."""
    tokens = PASS.set(current), REGATHER.set(regather)
    try:
        yield
    finally:
        PASS.reset(tokens[0])
        REGATHER.reset(tokens[1])


def attend_in_pass(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers. query: [batch, heads, length, head_dim]; key, value: [batch, kv_heads,
    length, ...]. Returns [batch, length, heads, value_dim]. Documents and windows are masked; attention_mask must be
    None. s_aux: sinks [heads]. Raises `UnsupportedAttention` for an argument that is not known."""
    unknown = [name for name, given in more.items() if given is not None and name not in KNOWN]
    if more.get("is_causal") is False:
        unknown.append("is_causal=False")
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise UnsupportedAttention(
            f"{type(module).__name__.removeprefix(CodeModule.__name__)} passes {', '.join(unknown)} to attention, "
            "which model.code=transformers does not support"
        )
    current, window, cap = PASS.get(), sliding_window or 0, softcap or 0.0
    current.calls += 1
    mask = current.mask(window, bool(cap) or s_aux is not None, query.device)
    if current.context is not None and not REGATHER.get():
        mask = without_regather(mask)
    scale, width = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    kernel = ATTENTION_BACKENDS.get(type(mask))
    if kernel is not None:
        # Ranks exchange keys and values as one tensor.
        value = pad_heads(value, key.shape[-1])
    attended = (kernel or causal_attention)(query, key, value, mask, scale, cap, s_aux)
    return attended[..., :width].transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend_in_pass)


def mask_with_documents(*arguments: Any, mask_function: Callable, **named: Any) -> Tensor:
    """A mask function of transformers: the dense mask of eager attention, in which documents do not see each other."""
    current = PASS.get()
    if (documents := current.documents) is not None:
        mask_function = and_masks(mask_function, packed_sequence_mask_function(documents))
    return eager_mask(*arguments, mask_function=mask_function, **named)


ALL_MASK_ATTENTION_FUNCTIONS.register(MASKS, mask_with_documents)


def build_code(spec: CodeSpec) -> PreTrainedModel:
    """The model of transformers for a spec, on the meta device, with the attention function of this project, or with
    dense masks."""
    return build_model(spec.transformers["config"], spec.transformers.get("masks", False))


def build_model(values: dict[str, Any], masks: bool = False) -> PreTrainedModel:
    """The model of a complete config.json on the meta device. masks: whether its code computes attention itself and
    reads dense masks. Code of the folder is never run."""
    values = {key: value for key, value in values.items() if key not in ("dtype", "torch_dtype", "auto_map")}
    config = AutoConfig.for_model(**copy.deepcopy(values))
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager" if masks else ATTENTION, dtype=torch.float32, trust_remote_code=False
        )
    if masks:
        # What is above the layers makes the masks. The layers keep eager attention, which reads them.
        above = AutoConfig.for_model(**copy.deepcopy(values), attn_implementation=MASKS)
        above.use_cache = False
        for module in model.modules():
            if "config" in vars(module) and any(isinstance(child, nn.ModuleList) for child in module.modules()):
                module.config = above
    replace_scans(sys.modules[type(model).__module__], partial(PASS.get, None))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:  # it is kept and not trained, as a buffer is
                delattr(module, name)
                module.register_buffer(name, parameter.detach())
    return model


class CodeModule(DeclaredModule):
    """What a module of transformers becomes besides its own class: its parameters are declared, and its code finds the
    local parts of parameters that ranks share. kind: "cut" or "whole" of a block whose tokens ranks gather, see
    `CodeSpec`."""

    kind: str | None
    code: Callable[[nn.Module], None]
    active: bool

    # Collectives stand around whole blocks, so products inside of a block are those of one rank.
    group = property(lambda self: None, lambda self, group: None)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return value.to_local() if isinstance(value, DTensor) and self.active else value

    def forward(self, *arguments: Any, **named: Any) -> Any:
        current, kind = PASS.get(), self.kind
        group = current.group if kind else None
        if group is not None:
            arguments, named = self.gather(current, group, arguments, named)
        self.active = True
        try:
            output = super().forward(*arguments, **named)  # of the module's own class
        finally:
            self.active = False
        if group is None:
            return output
        first, *rest = output if isinstance(output, tuple) else (output,)
        first = first.flatten(0, 1)
        first = (ReduceScatterSum.apply(group, first) if kind == "cut" else group.own(first))[None]
        return (first, *rest) if isinstance(output, tuple) else first

    def bind_pass(self, function: Callable) -> Callable:
        """`function` as a part of the present pass, whenever it is called."""
        current = PASS.get()

        def run(*arguments: Any) -> Any:
            with use_pass(current, regather=False):
                return function(*arguments)

        return run

    @staticmethod
    def gather(current: StagePass, group: TensorGroup, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict]:
        """The arguments of a block with all tokens [batch, length, width] instead of this rank's [1, tokens / t,
        width]."""
        name = None if arguments else "hidden_states"
        own = arguments[0] if name is None else named[name]
        whole = GatherTokens.apply(group, own.flatten(0, 1)).view(*current.shape, -1)
        return ((whole, *arguments[1:]), named) if name is None else (arguments, named | {name: whole})

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Fills the buffers of this module by its model's own `_init_weights`."""
        fill_buffers_of(self, self.code)


class CodeLinear(CodeModule):
    """An `nn.Linear` of transformers. Its weight gradient may be deferred."""

    deferred: DeferredGrads
    number: Tensor | None
    multiply = staticmethod(matmul)

    def defer(self, deferred: DeferredGrads) -> None:
        """From now on this layer may defer its weight gradient, to `deferred`."""
        self.deferred, self.number = deferred, number_layer(self)

    def forward(self, x: Tensor) -> Tensor:
        bias, group = None if self.bias is None else self.local("bias"), PASS.get().group
        if bias is not None and group is not None and self.declared["weight"].cut == 1:
            bias = bias / group.size  # the block's output is a sum over ranks, to which each rank adds its bias
        numbers = [] if self.number is None else [self.number]
        (y,) = column_parallel(x.flatten(0, -2), [self.local("weight")], [bias], None, numbers)
        return y.view(*x.shape[:-1], -1)


class CodeLayer(CodeModule):
    """A decoder layer of transformers, a `StageLayer`. It returns hidden states, or a tuple that begins with them."""

    recompute: Callable | None
    run: Callable
    tile = 0
    run_tile: Callable
    keep: Callable

    def prepare(self, last: bool) -> None:
        """last: whether it is the last layer of its stage."""
        self.recompute, self.last, self.keep = None, last, keep_here
        self.run = self.run_tile = self.run_body

    def forward(self, *arguments: Any, **named: Any) -> Any:
        current = PASS.get()
        x = arguments[0] if arguments else named.pop("hidden_states")
        with self.keep(x):
            output = self.run(x, current, arguments[1:], named)
        if self.last:
            current.result = output[0] if isinstance(output, tuple) else output
        return output

    def run_body(self, x: Tensor, current: StagePass, arguments: tuple, named: dict[str, Any]) -> Any:
        work = partial(self.body, current=current, arguments=arguments, named=named)
        return work(x) if self.recompute is None else self.recompute(work, x)

    def body(self, x: Tensor, current: StagePass, arguments: tuple, named: dict[str, Any]) -> Any:
        """The layer's own code. Backward may run it again after other passes have begun, hence the explicit pass."""
        with use_pass(current, regather=self.recompute is None):
            return super().forward(x, *arguments, **named)


@cache
def adapt_class(kind: Any, role: Any) -> Any:
    """`kind` with the members of `role`."""
    return type(f"{role.__name__}{kind.__name__}", (role, kind), {})


def adapt_module(module: nn.Module, role: type[CodeModule], code: Callable, infos: dict[str, ParameterInfo]) -> None:
    """Makes a module of transformers a `CodeModule`, in place. infos: its own parameters."""
    kinds: list[Any] = [type(module), role]
    module.__class__ = adapt_class(*kinds)
    module.__dict__ |= {"declared": infos, "part": None, "kind": None, "active": False, "code": code, "number": None}


class Elsewhere(nn.Module):
    """Stands for a layer of another stage. The code picks masks and kinds of attention by a layer's place, so every
    layer keeps its place and its plain attributes. It hands on what the stage's own layers read or returned. outputs:
    the length of the tuple that layers return, 0 where they return a tensor."""

    def __init__(self, layer: nn.Module, outputs: int = 0):
        super().__init__()
        self.outputs = outputs
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        current = PASS.get()
        x = current.hidden if current.result is None else current.result
        return (x, *[None] * (self.outputs - 1)) if self.outputs else x


class Absent(nn.Module):
    """Stands for a module of another stage outside of the layers, whose result is not read here. lookup: whether its
    result is added to hidden states."""

    def __init__(self, lookup: bool):
        super().__init__()
        self.lookup = lookup

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return PASS.get().hidden.new_zeros(()) if self.lookup else x


class OuterBuffers(nn.Module):
    """The buffers of a module that has parts of several stages inside, which keeps them too."""

    def __init__(self, owner: nn.Module, code: Callable):
        super().__init__()
        self.__dict__ |= {"owner": owner, "code": code, "_buffers": owner._buffers}

    @torch.no_grad()
    def reset_buffers(self) -> None:
        fill_buffers_of(self.owner, self.code)


class HeadInput(nn.Module):
    """Stands for the head in the code, and keeps what it reads."""

    def forward(self, x: Tensor) -> Tensor:
        PASS.get().head = x
        return x


class CodeStage(Transformer):
    """Layers `layers` of the model that `spec` describes, a `Stage`: transformers' own layers, its final norm, and this
    project's embedding, head and loss. Names of parameters are those of `declare_parameters`.

    The base model's own forward runs the layers, so it makes positions and rotations, and whatever else they share.
    """

    def __init__(self, spec: CodeSpec, layers: range | None = None):
        nn.Module.__init__(self)
        layers = range(spec.depth) if layers is None else layers
        self.spec, self.depth, self.reports = spec, spec.depth, {}
        self.facts: dict[str, Any] = spec.transformers
        self.head_scale: float = self.facts["head_scale"]
        self.first, self.last = layers.start == 0, layers.stop == spec.depth
        self.group: TensorGroup | None = None
        self.context: ContextGroup | None = None
        causal, outer = build_code(spec), spec.transformers["outer"]
        base, code, paths = base_of(causal), causal._init_weights, spec.transformers["paths"]
        # The code's own model is no child: its modules would have second names.
        self.__dict__["runs"] = causal if outer["through_head"] else base
        self.takes_positions: bool = outer["takes_positions"]
        self.first_position: int = outer["first_position"]
        if self.first or (self.last and spec.tied):
            self.embedding = Embedding(spec.vocab_size, spec.width, "vocab")
        tables, (before, behind) = layer_tables(spec), outer_tables(spec, self.first, self.last)
        self.take_outer(causal, code, outer["before"], before, self.first)
        every = causal.get_submodule(paths["layers"])
        self.layers = nn.ModuleDict({str(index): every[index] for index in layers})
        for index in layers:
            layer = every[index]
            adapt_tree(layer, code, dict(tables[index]))
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(tables[index][name].trained)
            adapt_module(layer, CodeLayer, code, {})
            layer.prepare(index == layers.stop - 1)
            for name, kind in spec.layer(index).code["blocks"].items():
                layer.get_submodule(name).kind = kind
        for index in set(range(spec.depth)) - set(layers):
            every[index] = Elsewhere(every[index], outer["outputs"])
        # The padding token's row is not trained by looking it up, as in `nn.Embedding`.
        self.padding = causal.get_submodule(paths["embedding"]).padding_idx
        holder = nn.Identity()
        causal.set_submodule(paths["embedding"], holder)
        self.take_outer(causal, code, outer["behind"], behind, self.last)
        if self.last:
            self.head = Head(spec, outer["head_bias"])
        causal.set_submodule(paths["head"], HeadInput())
        shared = {}
        for name, path in outer["shared"].items():
            shared[name] = causal.get_submodule(path)
            adapt_tree(shared[name], code, {})
        around = [one for one in causal.modules() if one._buffers and {every, holder} & set(one.modules())]
        shared |= {f"buffers_{number}": OuterBuffers(one, code) for number, one in enumerate(around)}
        self.shared = nn.ModuleDict(shared)
        self.tie()

    def take_outer(self, causal: PreTrainedModel, code: Callable, names: list[str], table: Any, present: bool) -> None:
        """Makes modules of the code outside of its layers modules of this stage, if it is the one that has them, and
        otherwise replaces them. names: of ours."""
        for name in names:
            path, inside = self.facts["paths"][name], f"{name}."
            module = causal.get_submodule(path)
            if not present:
                causal.set_submodule(path, Absent(isinstance(module, nn.Embedding)))
                continue
            infos = {key.removeprefix(inside): info for key, info in table.items() if key.startswith(inside)}
            adapt_tree(module, code, infos)
            group, _, last = name.rpartition(".")
            if group and not hasattr(self, group):
                self.add_module(group, nn.ModuleDict())
            (getattr(self, group) if group else self).add_module(last, module)

    def defer(self, deferred: DeferredGrads) -> None:
        for module in self.modules():
            if isinstance(module, CodeLinear):
                module.defer(deferred)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        hidden: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """See `Stage`."""
        if cache is not None:
            raise NotImplementedError("a model that runs by transformers' code does not generate here")
        length = tokens.shape[1]
        positions = (
            document_positions(documents) if documents is not None else torch.arange(length, device=tokens.device)[None]
        )
        if self.context is not None:
            own = self.context.own(length, tokens.device)
            tokens, positions = tokens[:, own], positions[..., own]
            targets = None if targets is None else targets[:, own]
        shape = tuple(tokens.shape)
        x: Any = self.embed(tokens, positions) if self.first else hidden
        # Blocks see [batch, length, width]. Ranks that share tokens have no whole sequences between blocks.
        x = x.view(*shape, -1) if self.group is None else x[None]
        current = StagePass(x, shape, documents, length, self.group, self.context)
        places = positions.expand(shape) + self.first_position if self.first_position else positions.expand(shape)
        named: dict[str, Any] = {"position_ids": places} if self.takes_positions else {}
        if self.facts["masks"]:
            # Without it, the code would read positions on the host to find out where documents begin.
            named["attention_mask"] = torch.ones(shape, dtype=torch.long, device=tokens.device)
        with use_pass(current):
            output = self.runs(inputs_embeds=x, use_cache=False, **named)
        if not self.last:
            # What the code does behind its last layer belongs to the last stage. A copy, because FSDP warns of stages
            # that return views.
            assert current.result is not None
            return current.result.flatten(0, 1).clone()
        x = (output.last_hidden_state if current.head is None else current.head).flatten(0, 1)
        x = x if self.head_scale == 1 else x * self.head_scale
        x, report = split_report(self.head(x, None if targets is None else targets.flatten()))
        x = x.view(*shape, -1) if targets is None else (x[0], x[1].view(shape).sum(1))
        return join_reports(x, {"head": report})

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = super().embed(tokens, positions)
        if self.padding is None:
            return x
        tokens = tokens.flatten() if self.group is None else self.group.own(tokens.flatten())
        return torch.where((tokens == self.padding)[:, None], x.detach(), x)


def base_of(causal: PreTrainedModel) -> nn.Module:
    """The model without the head."""
    named, embedding = getattr(causal, causal.base_model_prefix, None), causal.get_input_embeddings()
    return named or next(child for child in causal.children() if embedding in set(child.modules()))


def adapt_tree(root: nn.Module, code: Callable, table: dict[str, ParameterInfo]) -> None:
    """Adapts all modules below `root`, and `root` itself unless it is a layer. table: their parameters by name."""
    for path, module in list(root.named_modules()):
        if not any(True for some in (module.parameters(), module.buffers()) for _ in some):
            continue  # functions need nothing, and transformers has some of them once for all models
        own = {name: table[f"{path}.{name}" if path else name] for name, _ in module.named_parameters(recurse=False)}
        if path or own or module._buffers or not list(module.children()):
            adapt_module(module, CodeLinear if type(module) is nn.Linear else CodeModule, code, own)


@torch.no_grad()
def fill_alone(code: Callable[[nn.Module], None], module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters and buffers in fp32 on the CPU, as the model's own `_init_weights` fills them; NaN
    where it leaves one as it was."""
    alone = object.__new__(type(module))  # FSDP's classes construct a module when they are copied
    alone.__dict__ |= module.__dict__
    empty = [
        {name: None if one is None else torch.full(one.shape, torch.nan) for name, one in some.items()}
        for some in (module._parameters, module._buffers)
    ]
    alone.__dict__["_parameters"] = {n: None if one is None else nn.Parameter(one) for n, one in empty[0].items()}
    alone.__dict__["_buffers"] = empty[1]
    code(alone)
    found = {**alone._parameters, **alone._buffers}
    if any(value is not None and value.isnan().any() for value in found.values()):
        with contextlib.suppress(TypeError):  # some modules are filled by their constructor, if it needs no arguments
            fresh = kind_of(module)()
            found |= {name: value.float() for name, value in [*fresh.named_parameters(), *fresh.named_buffers()]}
    return {name: value.detach() for name, value in found.items() if value is not None}


def fill_buffers_of(module: nn.Module, code: Callable[[nn.Module], None]) -> None:
    """Fills the module's own buffers by `_init_weights`."""
    buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
    if buffers:
        filled = fill_alone(code, module)
        check_filled({name: filled[name] for name in buffers}, type(module).__name__)
        for name, buffer in buffers.items():
            buffer.copy_(filled[name])


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The module's class in transformers."""
    return next(kind for kind in type(module).__mro__ if kind.__module__.startswith(("transformers.", "torch.nn.")))


def check_filled(values: dict[str, Tensor], kind: str) -> None:
    """Raises `ConfigError` where `_init_weights` has not filled one of these tensors of a module."""
    for name, value in values.items():
        if value.isnan().any():
            raise ConfigError(
                f"model.code=transformers: _init_weights of transformers does not fill {name} of {kind}, so the model "
                "cannot be made here"
            )
