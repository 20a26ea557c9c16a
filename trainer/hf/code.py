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
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.config import ConfigError
from trainer.config.model import CodeSpec
from trainer.distributed.collectives import GatherTokens, ReduceScatterSum, TensorGroup
from trainer.model.attention import build_mask, causal_attention, pad_heads
from trainer.model.cache import CachedPass, KVCache
from trainer.model.context_attention import ContextGroup, without_regather
from trainer.model.initial import DeclaredModule
from trainer.model.layers import ATTENTION_BACKENDS
from trainer.model.linear import DeferredGrads, column_parallel, number_layer
from trainer.model.stage import GraphBreak, join_reports, keep_here, run_as_one_graph, split_report
from trainer.model.transformer import Embedding, Head, Transformer, document_positions
from trainer.planning.parameters import ParameterInfo, layer_tables, outer_tables
from trainer.precision.products import Multiply, matmul

ATTENTION = "trainer"
"""The name of `attend_in_pass` among transformers' attention functions. It has no mask function, so the code makes no
masks."""

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
    of them returned. shape: (batch, length) of this rank's tokens. documents, length: of whole sequences. entered: the
    pass of a KV cache, None in training."""

    hidden: Tensor
    shape: tuple[int, int]
    documents: Tensor | None
    length: int
    group: TensorGroup | None
    context: ContextGroup | None
    entered: CachedPass | None = None
    result: Tensor | None = None
    masks: dict[tuple[int, bool], Any] = field(default_factory=dict)

    def mask(self, module: nn.Module, window: int, changed: bool, device: torch.device) -> Any:
        """The mask of a kind of attention, made once. module: that asks for it, whose keys a cache keeps."""
        if self.entered is not None:
            return self.entered.mask(str(id(module)), window, changed)
        if (window, changed) not in self.masks:
            build = build_mask if self.context is None else self.context.build_mask
            self.masks[window, changed] = build(self.documents, self.length, window, changed, device)
        return self.masks[window, changed]


class TrialPass(StagePass):
    """A pass without values that records the kinds of attention: each module that called it -> (window, whether the
    softmax is changed)."""

    kinds: dict[nn.Module, tuple[int, bool]]

    def mask(self, module: nn.Module, window: int, changed: bool, device: torch.device) -> None:
        self.kinds[module] = window, changed


class PassHolder:
    """The forward pass that is being computed, also where backward computes it again. regather: whether backward
    gathers keys again; a recomputed layer does so anyway.

    A plain object, because the compiler cannot read a `ContextVar`. Passes of one process do not run at the same time:
    the thread that calls backward waits for the threads in which layers are computed again.
    """

    current: StagePass
    regather = True


PASS = PassHolder()


@contextlib.contextmanager
def use_pass(current: StagePass, regather: bool = True) -> Iterator[None]:
    """Context in which code belongs to a pass."""
    before = dict(vars(PASS))
    PASS.current, PASS.regather = current, regather
    try:
        yield
    finally:
        vars(PASS).clear()
        vars(PASS).update(before)


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
    current, window, cap = PASS.current, sliding_window or 0, softcap or 0.0
    mask = current.mask(module, window, bool(cap) or s_aux is not None, query.device)
    if current.context is not None and not PASS.regather:
        mask = without_regather(mask)
    scale, width = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    kernel = ATTENTION_BACKENDS.get(type(mask))
    if kernel is not None:
        # Ranks exchange keys and values as one tensor.
        value = pad_heads(value, key.shape[-1])
    attended = (kernel or causal_attention)(query, key, value, mask, scale, cap, s_aux)
    return attended[..., :width].transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend_in_pass)


def build_code(spec: CodeSpec) -> PreTrainedModel:
    """The model of transformers for a spec, on the meta device, with the attention function of this project."""
    return build_model(spec.transformers["config"])


def build_model(values: dict[str, Any], attention: str = ATTENTION) -> PreTrainedModel:
    """The model of a complete config.json on the meta device. Code of the folder is never run."""
    values = {key: value for key, value in values.items() if key not in ("dtype", "torch_dtype", "auto_map")}
    config = AutoConfig.for_model(**copy.deepcopy(values))
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
        )
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
        return value.to_local() if isinstance(value, DTensor) and (self.active or is_compiling()) else value

    def forward(self, *arguments: Any, **named: Any) -> Any:
        current, kind = PASS.current, self.kind
        group = current.group if kind else None
        if group is not None:
            arguments, named = self.gather(current, group, arguments, named)
        if is_compiling():  # what is recomputed must not change any object
            output = super().forward(*arguments, **named)  # of the module's own class
        else:
            self.active = True
            try:
                output = super().forward(*arguments, **named)
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
        if is_compiling():
            return function
        current = PASS.current

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
        if self._buffers:
            filled = fill_alone(self.code, self)
            buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
            check_filled({name: filled[name] for name in buffers}, type(self).__name__)
            for name, buffer in buffers.items():
                buffer.copy_(filled[name])


class CodeLinear(CodeModule):
    """An `nn.Linear` of transformers. Its weight gradient may be deferred."""

    deferred: DeferredGrads
    number: Tensor | None
    multiply: Multiply = matmul

    def defer(self, deferred: DeferredGrads) -> None:
        """From now on this layer may defer its weight gradient, to `deferred`."""
        self.deferred, self.number = deferred, number_layer(self)

    def forward(self, x: Tensor) -> Tensor:
        bias, group = None if self.bias is None else self.local("bias"), PASS.current.group
        if bias is not None and group is not None and self.declared["weight"].cut == 1:
            bias = bias / group.size  # the block's output is a sum over ranks, to which each rank adds its bias
        numbers = [] if self.number is None else [self.number]
        (y,) = column_parallel(x.flatten(0, -2), [self.local("weight")], [bias], None, numbers, self.multiply)
        return y.view(*x.shape[:-1], -1)


class CodeLayer(CodeModule):
    """A decoder layer of transformers, a `StageLayer`. It returns hidden states, or a tuple that begins with them."""

    recompute: Callable | None
    run: Callable
    tile = 0
    run_tile: Callable
    keep: Callable
    caches: bool

    def prepare(self, last: bool) -> None:
        """last: whether it is the last layer of its stage."""
        self.recompute, self.last, self.keep = None, last, keep_here
        self.run = self.run_tile = self.run_body

    def forward(self, *arguments: Any, **named: Any) -> Any:
        current = PASS.current
        x = arguments[0] if arguments else named.pop("hidden_states")
        with self.keep(x), use_pass(current, regather=self.recompute is None):
            try:
                output = run_as_one_graph(self.run, x, current, arguments[1:], named)
            except GraphBreak as error:
                report_break(kind_of(self).__name__, str(error).partition("\n")[0])
                self.run = self.run_body
                output = self.run(x, current, arguments[1:], named)
        if self.last:
            current.result = output[0] if isinstance(output, tuple) else output
        return output

    def run_body(self, x: Tensor, current: StagePass, arguments: tuple, named: dict[str, Any]) -> Any:
        work = partial(self.body, current=current, arguments=arguments, named=named)
        return work(x) if self.recompute is None else self.recompute(work, x)

    feed = run_body

    def body(self, x: Tensor, current: StagePass, arguments: tuple, named: dict[str, Any]) -> Any:
        """The layer's own code. Backward may run it again after other passes have begun, hence the explicit pass. What
        is compiled computes that again by itself, and must not change any object."""
        if is_compiling():
            return super().forward(x, *arguments, **named)
        with use_pass(current, regather=self.recompute is None):
            return super().forward(x, *arguments, **named)


@cache
def report_break(kind: str, reason: str) -> None:
    """Says once that layers of a kind are not compiled."""
    warnings.warn(f"compile=true: layers of {kind} run without compilation: {reason}", stacklevel=2)


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
    layer keeps its place and its plain attributes. It hands on what the stage's own layers read or returned."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        current = PASS.current
        return current.hidden if current.result is None else current.result


class CodeStage(Transformer):
    """Layers `layers` of the model that `spec` describes, a `Stage`: transformers' own layers, its final norm, and this
    project's embedding, head and loss. Names of parameters are those of `declare_parameters`.

    The base model's own forward runs the layers, so it makes positions and rotations, and whatever else they share.
    """

    def __init__(self, spec: CodeSpec, layers: range | None = None):
        nn.Module.__init__(self)
        layers = range(spec.depth) if layers is None else layers
        self.spec, self.depth, self.reports = spec, spec.depth, {}
        self.head_scale: float = spec.transformers["head_scale"]
        self.first, self.last = layers.start == 0, layers.stop == spec.depth
        self.group: TensorGroup | None = None
        self.context: ContextGroup | None = None
        causal = build_code(spec)
        base, code = base_of(causal), causal._init_weights
        kinds = try_attention(causal)
        # The base model is no child: its own modules would have second names.
        self.__dict__["base"] = base
        if self.first or (self.last and spec.tied):
            self.embedding = Embedding(spec.vocab_size, spec.width, "vocab")
        self.layers = nn.ModuleDict({str(index): base.layers[index] for index in layers})
        tables, (_, behind) = layer_tables(spec), outer_tables(spec, self.first, self.last)
        for index in layers:
            layer = base.layers[index]
            adapt_tree(layer, code, dict(tables[index]))
            adapt_module(layer, CodeLayer, code, {})
            layer.prepare(index == layers.stop - 1)
            for name, kind in spec.layer(index).code["blocks"].items():
                layer.get_submodule(name).kind = kind
            # A layer that mixes tokens otherwise has nothing that a cache keeps.
            layer.caches = any(module in kinds for module in layer.modules())
        own = {module for index in layers for module in base.layers[index].modules()}
        self.attention_kinds = dict.fromkeys(kind for module, kind in kinds.items() if module in own)
        for index in set(range(spec.depth)) - set(layers):
            base.layers[index] = Elsewhere(base.layers[index])
        # The padding token's row is not trained by looking it up, as in `nn.Embedding`.
        self.padding = base.embed_tokens.padding_idx
        base.embed_tokens = nn.Identity()
        if self.last:
            self.norm = base.norm
            infos = {name: info for name, info in behind.items() if name.startswith("norm.")}
            adapt_tree(self.norm, code, {name.removeprefix("norm."): info for name, info in infos.items()})
            self.head = Head(spec)
        else:
            base.norm = nn.Identity()
        for name, module in base.named_children():
            if name not in ("layers", "norm", "embed_tokens"):
                adapt_tree(module, code, {})
                self.add_module(name, module)
        self.tie()

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
            return self.extend(tokens, hidden, cache)
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
        current = StagePass(x, shape, documents, length, self.group, self.context)
        for kind in self.attention_kinds:  # before the layers, because compiled ones must not make a mask each
            current.mask(self, *kind, tokens.device)
        x = self.run_layers(current, positions)
        if not self.last:
            return x
        x, report = split_report(self.head(x, None if targets is None else targets.flatten()))
        x = x.view(*shape, -1) if targets is None else (x[0], x[1].view(shape).sum(1))
        return join_reports(x, {"head": report})

    def run_layers(self, current: StagePass, positions: Tensor) -> Tensor:
        """What the head reads, or the next stage: [tokens / t, width]."""
        # Blocks see [batch, length, width]. Ranks that share tokens have no whole sequences between blocks.
        x = current.hidden
        current.hidden = x = x.view(*current.shape, -1) if self.group is None else x[None]
        with use_pass(current):
            output = self.base(inputs_embeds=x, position_ids=positions.expand(current.shape), use_cache=False)
        if not self.last:
            # What the code does behind its last layer belongs to the last stage. A copy, because FSDP warns of stages
            # that return views.
            assert current.result is not None
            return current.result.flatten(0, 1).clone()
        x = output.last_hidden_state.flatten(0, 1)
        return x if self.head_scale == 1 else x * self.head_scale

    def extend(self, tokens: Tensor, hidden: Tensor | None, cache: KVCache) -> Tensor:
        """See `Transformer.extend`. The cache keeps what the attention function is given."""
        shape = tuple(tokens.shape)
        entered = cache.enter(shape)
        x = self.embed(tokens, entered.positions) if self.first else hidden
        current = StagePass(x, shape, None, shape[1], self.group, None, entered)
        x = self.run_layers(current, entered.positions)
        return self.read_last(x, entered) if self.last else x

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = super().embed(tokens, positions)
        if self.padding is None:
            return x
        tokens = tokens.flatten() if self.group is None else self.group.own(tokens.flatten())
        return torch.where((tokens == self.padding)[:, None], x.detach(), x)


def try_attention(causal: PreTrainedModel) -> dict[nn.Module, tuple[int, bool]]:
    """Runs the layers without values, on the meta device, to see what they ask of attention. Returns the kind of
    attention of each module that calls it, see `TrialPass`. Raises `UnsupportedAttention`. Experts are left out,
    because their number of tokens is not known."""
    base = base_of(causal)
    experts = [one for one in base.modules() if any(own.dim() == 3 for own in one.parameters(recurse=False))]
    for module in experts:
        module.forward = lambda x, *_, **__: x
    x = torch.empty(1, 4, causal.get_output_embeddings().in_features, device="meta")
    current, positions = TrialPass(x, (1, 4), None, 4, None, None), torch.arange(4, device="meta")[None]
    current.kinds = {}
    # What else the meta device cannot do, the code may do elsewhere.
    with use_pass(current), contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError):
        base(inputs_embeds=x, position_ids=positions, use_cache=False)
        if len(current.kinds) < len(base.layers):
            raise UnsupportedAttention(
                f"{len(base.layers) - len(current.kinds)} of its layers mix tokens without the attention function of "
                "transformers, by which documents are masked"
            )
    for module in experts:
        del module.forward
    return current.kinds


def base_of(causal: PreTrainedModel) -> nn.Module:
    """The model without the head."""
    return getattr(causal, causal.base_model_prefix)


def adapt_tree(root: nn.Module, code: Callable, table: dict[str, ParameterInfo]) -> None:
    """Adapts all modules below `root`, and `root` itself unless it is a layer. table: their parameters by name."""
    for path, module in list(root.named_modules()):
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
