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
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.config import ConfigError
from trainer.config.model import CodeSpec
from trainer.distributed.collectives import GatherTokens, ReduceScatterSum, TensorGroup
from trainer.model.attention import build_mask, causal_attention, pad_heads
from trainer.model.cache import KVCache
from trainer.model.context_attention import ContextGroup, without_regather
from trainer.model.experts import RoutedExperts, project_rows
from trainer.model.initial import DeclaredModule
from trainer.model.layers import ATTENTION_BACKENDS, AdaptableLinear, ExpertUnit
from trainer.model.linear import DeferredGrads, column_parallel, number_layer
from trainer.model.stage import join_reports, keep_here, split_report
from trainer.model.transformer import Embedding, Head, Transformer, adapt_model, document_positions
from trainer.planning.parameters import ParameterInfo, layer_tables, outer_tables
from trainer.precision.products import Multiply, matmul

ATTENTION = "trainer"
"""The name of `attend_in_pass` among transformers' attention functions. It has no mask function, so the code makes no
masks."""

EXPERTS = "trainer"
"""The name of `run_experts` among transformers' experts functions."""

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
    of them returned. calls: of attention. shape: (batch, length) of this rank's tokens. documents, length: of whole
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


def run_experts(module: CodeExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An experts function of transformers. hidden_states and result: [tokens, width]. top_k_index, top_k_weights: the
    experts of each token and the weights of their outputs, [tokens, top_k]."""
    count = module.declared["down_proj"].shape[0]
    return module.dispatch.run(hidden_states, top_k_index, top_k_weights, count, module.compute).output


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, run_experts)


def build_code(spec: CodeSpec) -> PreTrainedModel:
    """The model of transformers for a spec, on the meta device, with the attention and experts functions of this
    project."""
    return build_model(spec.transformers["config"])


def build_model(values: dict[str, Any], attention: str = ATTENTION) -> PreTrainedModel:
    """The model of a complete config.json on the meta device. Code of the folder is never run."""
    values = {key: value for key, value in values.items() if key not in ("dtype", "torch_dtype", "auto_map")}
    config = AutoConfig.for_model(**copy.deepcopy(values))
    config.use_cache = False
    implementations = {"attn_implementation": attention, "experts_implementation": EXPERTS}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False, **implementations
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
        if self._buffers:
            filled = fill_alone(self.code, self)
            buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
            check_filled({name: filled[name] for name in buffers}, type(self).__name__)
            for name, buffer in buffers.items():
                buffer.copy_(filled[name])


class CodeLinear(CodeModule, AdaptableLinear):
    """An `nn.Linear` of transformers. Its weight gradient may be deferred."""

    multiply = staticmethod(matmul)

    def forward(self, x: Tensor) -> Tensor:
        bias, group = None if self.bias is None else self.local("bias"), PASS.get().group
        if bias is not None and group is not None and self.declared["weight"].cut == 1:
            bias = bias / group.size  # the block's output is a sum over ranks, to which each rank adds its bias
        numbers = [] if self.number is None else [self.number]
        adapters = [] if self.adapter_scale is None else [self.local_adapter()]
        (y,) = column_parallel(x.flatten(0, -2), [self.local("weight")], [bias], None, numbers, adapters=adapters)
        return y.view(*x.shape[:-1], -1)


class CodeExperts(CodeModule, RoutedExperts):
    """Stacks of experts of transformers that its experts interface runs. Their weight gradients may be deferred."""

    stacks: dict[str, ExpertStack]

    def defer(self, deferred: DeferredGrads) -> None:
        """From now on the stacks may defer their weight gradients, to `deferred`."""
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dim() == 3 and parameter.requires_grad:
                self.stacks[name] = ExpertStack(self, name, deferred)

    def matrices(self, name: str) -> Tensor:
        """What this rank holds of a stack: [experts, outputs, inputs]."""
        stack = self.local(name)
        return TransposedStack.apply(stack) if self.is_transposed else stack

    def project(self, name: str, x: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
        """The products with a stack, see `project_rows`."""
        bias = self.local(f"{name}_bias") if self.has_bias else None
        number = self.stacks[name].number if name in self.stacks else None
        return project_rows(x, self.matrices(name), bias, ends, weights, number)

    def compute(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """See `Experts.compute`."""
        hidden = self.project("gate_up_proj" if self.has_gate else "up_proj", rows, ends)
        hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
        if self.has_post_expert_norm:  # its output is not linear in what `down_proj` reads
            output = self.post_expert_norm(self.project("down_proj", hidden, ends))
            return (output * weights[:, None]).to(rows.dtype)
        return self.project("down_proj", (hidden * weights[:, None]).to(rows.dtype), ends, weights)


class TransposedStack(torch.autograd.Function):
    """[experts, inputs, outputs] -> [experts, outputs, inputs]; unlike `mT`, differentiable inside of an operator's own
    implementation too."""

    @staticmethod
    def forward(ctx: Any, stack: Tensor) -> Tensor:
        return stack.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mT


class ExpertStack:
    """A stack of matrices of `experts`, as the operators of linear layers know a layer."""

    def __init__(self, experts: CodeExperts, name: str, deferred: DeferredGrads):
        self.experts, self.name, self.deferred = experts, name, deferred
        self.group: TensorGroup | None = None
        self.multiply: Multiply = matmul
        self.number = number_layer(self)

    def local(self, name: str) -> Tensor:
        return self.experts.matrices(self.name)


def runs_by_interface(module: nn.Module) -> bool:
    """Whether transformers runs a module by an experts function. Its decorator leaves these attributes."""
    return {"is_transposed", "has_bias", "has_gate", "has_post_expert_norm"} <= vars(module).keys()


def can_share(module: nn.Module) -> bool:
    """Whether ranks can share the experts of a module: an experts function runs them, and each parameter is a stack."""
    return runs_by_interface(module) and len({len(parameter) for parameter in module.parameters()}) == 1


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
        self.expert_unit: ExpertUnit | None = None
        self.run = self.run_tile = self.run_body

    def forward(self, *arguments: Any, **named: Any) -> Any:
        current = PASS.get()
        x = arguments[0] if arguments else named.pop("hidden_states")
        with self.keep(x):
            output = (self.expert_unit or self.run)(x, current, arguments[1:], named)
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
    module.__dict__ |= {"declared": infos, "part": None, "kind": None, "active": False, "code": code, "stacks": {}}


class Elsewhere(nn.Module):
    """Stands for a layer of another stage. The code picks masks and kinds of attention by a layer's place, so every
    layer keeps its place and its plain attributes. It hands on what the stage's own layers read or returned."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        current = PASS.get()
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
        if spec.adapter.rank:
            adapt_model(self, spec.adapter)
        self.tie()

    def defer(self, deferred: DeferredGrads) -> None:
        for module in self.modules():
            if isinstance(module, CodeLinear | CodeExperts):
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
        with use_pass(current):
            x = self.base(inputs_embeds=x, position_ids=positions.expand(shape), use_cache=False).last_hidden_state
        if not self.last:
            # What the code does behind its last layer belongs to the last stage. A copy, because FSDP warns of stages
            # that return views.
            assert current.result is not None
            return current.result.flatten(0, 1).clone()
        x = x.flatten(0, 1) if self.head_scale == 1 else x.flatten(0, 1) * self.head_scale
        x, report = split_report(self.head(x, None if targets is None else targets.flatten()))
        x = x.view(*shape, -1) if targets is None else (x[0], x[1].view(shape).sum(1))
        return join_reports(x, {"head": report})

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = super().embed(tokens, positions)
        if self.padding is None:
            return x
        tokens = tokens.flatten() if self.group is None else self.group.own(tokens.flatten())
        return torch.where((tokens == self.padding)[:, None], x.detach(), x)


def try_attention(causal: PreTrainedModel) -> None:
    """Runs the layers without values, on the meta device, to see what they ask of attention. Raises
    `UnsupportedAttention`. Experts are left out, because their number of tokens is not known."""
    base = base_of(causal)
    for module in base.modules():
        if any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            module.forward = lambda x, *_, **__: x
    x = torch.empty(1, 4, causal.get_output_embeddings().in_features, device="meta")
    current, positions = StagePass(x, (1, 4), None, 4, None, None), torch.arange(4, device="meta")[None]
    # What else the meta device cannot do, the code may do elsewhere.
    with use_pass(current), contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError):
        base(inputs_embeds=x, position_ids=positions, use_cache=False)
        if current.calls < len(base.layers):
            raise UnsupportedAttention(
                f"{len(base.layers) - current.calls} of its layers mix tokens without the attention function of "
                "transformers, by which documents are masked"
            )


def base_of(causal: PreTrainedModel) -> nn.Module:
    """The model without the head."""
    return getattr(causal, causal.base_model_prefix)


def adapt_tree(root: nn.Module, code: Callable, table: dict[str, ParameterInfo]) -> None:
    """Adapts all modules below `root`, and `root` itself unless it is a layer. table: their parameters by name."""
    for path, module in list(root.named_modules()):
        own = {name: table[f"{path}.{name}" if path else name] for name, _ in module.named_parameters(recurse=False)}
        if path or own or module._buffers or not list(module.children()):
            role = CodeLinear if type(module) is nn.Linear else CodeExperts if runs_by_interface(module) else CodeModule
            adapt_module(module, role, code, own)


@torch.no_grad()
def fill_alone(
    code: Callable[[nn.Module], None], module: nn.Module, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Tensor]:
    """The module's own parameters and buffers in fp32 on the CPU, as the model's own `_init_weights` fills them; NaN
    where it leaves one as it was. shapes: of those that are filled, where others than all as they are."""
    alone = object.__new__(type(module))  # FSDP's classes construct a module when they are copied
    alone.__dict__ |= module.__dict__

    def empty_tensor(name: str, like: Tensor) -> Tensor:
        if shapes is None or name in shapes:
            return torch.full(shapes[name] if shapes else like.shape, torch.nan)
        return torch.empty_like(like, device="meta")

    empty = [
        {name: None if one is None else empty_tensor(name, one) for name, one in some.items()}
        for some in (module._parameters, module._buffers)
    ]
    alone.__dict__["_parameters"] = {n: None if one is None else nn.Parameter(one) for n, one in empty[0].items()}
    alone.__dict__["_buffers"] = empty[1]
    code(alone)
    found = {**alone._parameters, **alone._buffers}
    found = {name: value for name, value in found.items() if shapes is None or name in shapes}
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
