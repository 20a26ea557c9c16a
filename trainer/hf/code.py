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
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
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
from trainer.model.cache import CachedPass, KVCache
from trainer.model.context_attention import ContextGroup, without_regather
from trainer.model.experts import RoutedExperts, count_choices, project_rows
from trainer.model.initial import DeclaredModule, name_seed
from trainer.model.layers import ATTENTION_BACKENDS, AdaptableLinear, ExpertUnit
from trainer.model.linear import DeferredGrads, column_parallel, number_layer
from trainer.model.stage import BlockReport, GraphBreak, join_reports, keep_here, run_as_one_graph, split_report
from trainer.model.transformer import Embedding, Head, Transformer, adapt_model, document_positions
from trainer.planning.parameters import ParameterInfo, layer_tables, outer_tables
from trainer.precision.products import Multiply, matmul

ATTENTION = "trainer"
"""The name of `attend_in_pass` among transformers' attention functions. It has no mask function, so the code makes no
masks."""

EXPERTS = "trainer"
"""The name of `run_experts` among transformers' experts functions."""
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
    of them returned; head: what the head reads. loads: how many tokens each expert has, by the module's name. calls: of
    attention and other functions that keep documents apart; recurrent: see `Mixing`. shape: (batch, length)
    of this rank's tokens. documents, length: of whole sequences. entered: the pass of a KV cache, None in training."""

    hidden: Tensor
    shape: tuple[int, int]
    documents: Tensor | None
    length: int
    group: TensorGroup | None
    context: ContextGroup | None
    entered: CachedPass | None = None
    result: Tensor | None = None
    masks: dict[tuple[int, bool], Any] = field(default_factory=dict)
    calls: int = 0
    recurrent: bool = False
    head: Tensor | None = None
    loads: dict[str, Tensor] = field(default_factory=dict)

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

    def mask(self, module: nn.Module, window: int, changed: bool, device: torch.device) -> Any:
        self.kinds[module] = window, changed
        return super().mask(module, window, changed, device)


class PassHolder:
    """The forward pass that is being computed, also where backward computes it again. regather: whether backward
    gathers keys again; a recomputed layer does so anyway.

    A plain object, because the compiler cannot read a `ContextVar`. Passes of one process do not run at the same time:
    the thread that calls backward waits for the threads in which layers are computed again.
    """

    current: StagePass
    regather = True

    def find(self) -> StagePass | None:
        """The pass, None outside of any."""
        return vars(self).get("current")


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
    if not is_compiling():  # what is recomputed must not change any object
        current.calls += 1
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


def run_experts(module: CodeExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An experts function of transformers. hidden_states and result: [tokens, width]. top_k_index, top_k_weights: the
    experts of each token and the weights of their outputs, [tokens, top_k]."""
    if module.load is not None:
        module.load.copy_(count_choices(top_k_index.flatten(), module.stacked))
    return module.dispatch.run(hidden_states, top_k_index, top_k_weights, module.stacked, module.compute).output


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, run_experts)


def mask_with_documents(*arguments: Any, mask_function: Callable, **named: Any) -> Tensor:
    """A mask function of transformers: the dense mask of eager attention, in which documents do not see each other."""
    current = PASS.current
    if (documents := current.documents) is not None:
        mask_function = and_masks(mask_function, packed_sequence_mask_function(documents))
    return eager_mask(*arguments, mask_function=mask_function, **named)


ALL_MASK_ATTENTION_FUNCTIONS.register(MASKS, mask_with_documents)


def build_code(spec: CodeSpec) -> PreTrainedModel:
    """The model of transformers for a spec, on the meta device, with the attention and experts functions of this
    project, or with dense masks."""
    return build_model(spec.transformers["config"], spec.transformers.get("masks", False))


def build_model(values: dict[str, Any], masks: bool) -> PreTrainedModel:
    """The model of a complete config.json on the meta device. masks: whether its code computes attention itself and
    reads dense masks. Code of the folder is never run."""
    values = {key: value for key, value in values.items() if key not in ("dtype", "torch_dtype", "auto_map")}
    config = AutoConfig.for_model(**copy.deepcopy(values))
    config.use_cache = False
    implementations = {"attn_implementation": "eager" if masks else ATTENTION, "experts_implementation": EXPERTS}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False, **implementations
        )
    if masks:
        # What is above the layers makes the masks. The layers keep eager attention, which reads them.
        above = AutoConfig.for_model(**copy.deepcopy(values), attn_implementation=MASKS)
        above.use_cache = False
        for module in model.modules():
            if "config" in vars(module) and any(isinstance(child, nn.ModuleList) for child in module.modules()):
                module.config = above
    replace_scans(sys.modules[type(model).__module__], PASS.find)
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
    fill: Callable[..., dict[str, Tensor]]
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

    @staticmethod
    def gather(current: StagePass, group: TensorGroup, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict]:
        """The arguments of a block with all tokens [batch, length, width] instead of this rank's [1, tokens / t,
        width]."""
        name = None if arguments else "hidden_states"
        own = arguments[0] if name is None else named[name]
        whole = GatherTokens.apply(group, own.flatten(0, 1)).view(*current.shape, -1)
        return ((whole, *arguments[1:]), named) if name is None else (arguments, named | {name: whole})

    @torch.no_grad()
    def reset_buffers(self: Any) -> None:
        """Fills the buffers of this module by its model's own `_init_weights`."""
        shapes = {name: tuple(buffer.shape) for name, buffer in self._buffers.items() if buffer is not None}
        for name, value in (self.fill(shapes=shapes) if shapes else {}).items():
            self.get_buffer(name).copy_(value)


class CodeLinear(CodeModule, AdaptableLinear):
    """An `nn.Linear` of transformers. Its weight gradient may be deferred."""

    multiply: Any = staticmethod(matmul)

    def forward(self, x: Tensor) -> Tensor:
        bias, group = None if self.bias is None else self.local("bias"), PASS.current.group
        if bias is not None and group is not None and self.declared["weight"].cut == 1:
            bias = bias / group.size  # the block's output is a sum over ranks, to which each rank adds its bias
        numbers = [] if self.number is None else [self.number]
        adapters = [] if self.adapter_scale is None else [self.local_adapter()]
        (y,) = column_parallel(
            x.flatten(0, -2), [self.local("weight")], [bias], None, numbers, self.multiply, adapters, held=self.held
        )
        return y.view(*x.shape[:-1], -1)


class CodeExperts(CodeModule, RoutedExperts):
    """Stacks of experts of transformers that its experts interface runs. Their weight gradients may be deferred."""

    foreign = True
    has_gate, has_post_expert_norm = True, False
    """Of versions of transformers that do not say so, such as 5.0 and 5.17: what is true for all of their experts."""
    stacks: dict[str, ExpertStack]
    load: Tensor | None = None
    """Where a pass of training counts the tokens of each expert: int64 [experts]. None where it is computed again."""
    stacked = property(lambda self: self.declared["down_proj"].shape[0])
    """The number of experts on all ranks."""

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
    return {"is_transposed", "has_bias"} <= vars(module).keys()


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
    counted: dict[str, CodeExperts]
    """Its experts by their names in the stage."""

    def prepare(self, last: bool, caches: bool) -> None:
        """last: whether it is the last layer of its stage. caches: whether keys and values are all that it has to know
        of earlier tokens."""
        self.caches = caches
        self.recompute, self.last, self.keep = None, last, keep_here
        self.expert_unit: ExpertUnit | None = None
        self.run = self.run_tile = self.run_body

    def forward(self, *arguments: Any, **named: Any) -> Any:
        current = PASS.current
        x = arguments[0] if arguments else named.pop("hidden_states")
        for name, module in self.counted.items() if self.training else ():
            module.load = current.loads[name] = x.new_zeros(module.stacked, dtype=torch.long)
        with self.keep(x), use_pass(current, regather=self.recompute is None):
            try:
                output = run_as_one_graph(self.expert_unit or self.run, x, current, arguments[1:], named)
            except GraphBreak as error:
                report_break(type(self).__name__.partition(CodeLayer.__name__)[2], str(error).partition("\n")[0])
                self.run = self.run_body
                output = (self.expert_unit or self.run)(x, current, arguments[1:], named)
        for module in self.counted.values():
            module.load = None
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


def adapt_module(module: nn.Module, role: type[CodeModule], fill: Callable, infos: dict[str, ParameterInfo]) -> None:
    """Makes a module of transformers a `CodeModule`, in place. fill: gives its initial values; infos: its own
    parameters."""
    kinds: list[Any] = [type(module), role]
    module.__class__ = adapt_class(*kinds)
    module.__dict__ |= {"declared": infos, "part": None, "kind": None, "active": False, "fill": fill, "stacks": {}}


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
        current = PASS.current
        x = current.hidden if current.result is None else current.result
        return (x, *[None] * (self.outputs - 1)) if self.outputs else x


class Absent(nn.Module):
    """Stands for a module of another stage outside of the layers, whose result is not read here. lookup: whether its
    result is added to hidden states."""

    def __init__(self, lookup: bool):
        super().__init__()
        self.lookup = lookup

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return PASS.current.hidden.new_zeros(()) if self.lookup else x


class OuterBuffers(nn.Module):
    """The buffers of a module that has parts of several stages inside, which keeps them too."""

    def __init__(self, owner: nn.Module, fill: Callable):
        super().__init__()
        self.__dict__ |= {"fill": fill, "_buffers": owner._buffers}

    reset_buffers = CodeModule.reset_buffers


class HeadInput(nn.Module):
    """Stands for the head in the code, and keeps what it reads."""

    def forward(self, x: Tensor) -> Tensor:
        PASS.current.head = x
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
        base, initial, paths = base_of(causal), CodeInitializer(spec), spec.transformers["paths"]
        # The code's own model is no child: its modules would have second names.
        self.__dict__["runs"] = causal if outer["through_head"] else base
        self.takes_positions: bool = outer["takes_positions"]
        self.first_position: int = outer["first_position"]
        if self.first or (self.last and spec.tied):
            self.embedding = Embedding(spec.vocab_size, spec.width, "vocab")
        tables, (before, behind) = layer_tables(spec), outer_tables(spec, self.first, self.last)
        self.take_outer(causal, initial, outer["before"], before, self.first)
        every = causal.get_submodule(paths["layers"])
        self.layers = nn.ModuleDict({str(index): every[index] for index in layers})
        for index in layers:
            layer, path = every[index], f"{paths['layers']}.{index}"
            adapt_tree(layer, initial, path, dict(tables[index]))
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(tables[index][name].trained)
            adapt_module(layer, CodeLayer, partial(initial.fill, path), {})
            layer.prepare(index == layers.stop - 1, outer["attends"] and not self.facts["masks"])
            for name, kind in spec.layer(index).code["blocks"].items():
                layer.get_submodule(name).kind = kind
            inside = layer.named_modules(prefix=f"layers.{index}")
            layer.counted = {name: module for name, module in inside if isinstance(module, CodeExperts)}
            self.reports |= {f"{name}.load": module.stacked for name, module in layer.counted.items()}
        self.attention_kinds = dict.fromkeys(
            tuple(kind) for index in layers for kind in outer["kinds"].get(str(index), ())
        )
        for index in set(range(spec.depth)) - set(layers):
            every[index] = Elsewhere(every[index], outer["outputs"])
        # The padding token's row is not trained by looking it up, as in `nn.Embedding`.
        self.padding = causal.get_submodule(paths["embedding"]).padding_idx
        holder = nn.Identity()
        causal.set_submodule(paths["embedding"], holder)
        self.take_outer(causal, initial, outer["behind"], behind, self.last)
        if self.last:
            self.head = Head(spec, outer["head_bias"])
        causal.set_submodule(paths["head"], HeadInput())
        shared = {}
        for name, path in outer["shared"].items():
            shared[name] = causal.get_submodule(path)
            adapt_tree(shared[name], initial, path, {})
        shared |= {
            f"buffers_{number}": OuterBuffers(one, partial(initial.fill, path))
            for number, (path, one) in enumerate(causal.named_modules())
            if one._buffers and {every, holder} & set(one.modules())
        }
        self.shared = nn.ModuleDict(shared)
        if spec.adapter.rank:
            adapt_model(self, spec.adapter)
        self.tie()

    def take_outer(
        self, causal: PreTrainedModel, initial: CodeInitializer, names: list[str], table: Any, present: bool
    ) -> None:
        """Makes modules of the code outside of its layers modules of this stage, if it is the one that has them, and
        otherwise replaces them. names: of ours."""
        for name in names:
            path, inside = self.facts["paths"][name], f"{name}."
            module = causal.get_submodule(path)
            if not present:
                causal.set_submodule(path, Absent(isinstance(module, nn.Embedding)))
                continue
            infos = {key.removeprefix(inside): info for key, info in table.items() if key.startswith(inside)}
            adapt_tree(module, initial, path, infos)
            group, _, last = name.rpartition(".")
            if group and not hasattr(self, group):
                self.add_module(group, nn.ModuleDict())
            (getattr(self, group) if group else self).add_module(last, module)

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
        for window, changed in self.attention_kinds:  # before the layers: compiled ones must not make a mask each
            current.mask(self, window, changed, tokens.device)
        x = self.run_layers(current, positions)
        reports = {name: BlockReport(None, {"load": load}) for name, load in current.loads.items()}
        if not self.last:
            return join_reports(x, reports)
        x, report = split_report(self.head(x, None if targets is None else targets.flatten()))
        x = x.view(*shape, -1) if targets is None else (x[0], x[1].view(shape).sum(1))
        return join_reports(x, {**reports, "head": report})

    def run_layers(self, current: StagePass, positions: Tensor) -> Tensor:
        """What the head reads, or the next stage: [tokens / t, width]."""
        # Blocks see [batch, length, width]. Ranks that share tokens have no whole sequences between blocks.
        x = current.hidden
        current.hidden = x = x.view(*current.shape, -1) if self.group is None else x[None]
        places = positions.expand(current.shape)
        if self.first_position:
            places = places + self.first_position
        named: dict[str, Any] = {"position_ids": places} if self.takes_positions else {}
        if self.facts["masks"]:
            # Without it, the code would read positions on the host to find out where documents begin.
            named["attention_mask"] = torch.ones(current.shape, dtype=torch.long, device=x.device)
        with use_pass(current):
            output = self.runs(inputs_embeds=x, use_cache=False, **named)
        if not self.last:
            # What the code does behind its last layer belongs to the last stage. A copy, because FSDP warns of stages
            # that return views.
            assert current.result is not None
            return current.result.flatten(0, 1).clone()
        x = (output.last_hidden_state if current.head is None else current.head).flatten(0, 1)
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


def base_of(causal: PreTrainedModel) -> nn.Module:
    """The model without the head."""
    named, embedding = getattr(causal, causal.base_model_prefix, None), causal.get_input_embeddings()
    return named or next(child for child in causal.children() if embedding in set(child.modules()))


def adapt_tree(root: nn.Module, initial: CodeInitializer, place: str, table: dict[str, ParameterInfo]) -> None:
    """Adapts all modules below `root`, and `root` itself unless it is a layer. place: the path of `root` in the model;
    table: their parameters by name."""
    for path, module in list(root.named_modules()):
        if not any(True for some in (module.parameters(), module.buffers()) for _ in some):
            continue  # functions need nothing, and transformers has some of them once for all models
        own = {name: table[f"{path}.{name}" if path else name] for name, _ in module.named_parameters(recurse=False)}
        if path or own or module._buffers or not list(module.children()):
            role = CodeLinear if type(module) is nn.Linear else CodeExperts if runs_by_interface(module) else CodeModule
            adapt_module(module, role, partial(initial.fill, f"{place}.{path}".rstrip(".")), own)


Shapes = Mapping[str, tuple[int, ...]]


class CodeInitializer:
    """The initial values of a model by transformers' own initialisation. Every module but the one that is filled stays
    on the meta device, so nothing is drawn for the others."""

    def __init__(self, spec: CodeSpec):
        # Constructors draw some parameters on the CPU.
        self.build = cache(lambda: build_code(spec).to("meta"))

    def fill(self, path: str, seed: int = 0, name: str = "", shapes: Shapes | None = None) -> dict[str, Tensor]:
        """The own parameters and buffers of the module at `path` in fp32 on the CPU, drawn by a seed and a name, by
        default the path. shapes: of those that are filled, where others than all as they are. Raises `ConfigError`
        where nothing fills one."""
        module = self.build().get_submodule(path)
        own = module._parameters | module._buffers
        shapes = shapes or {key: like.shape for key, like in own.items() if like is not None}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(name_seed(seed, name or path))
            for begin in (dict, partial(construct_tensors, module)):  # some modules are filled by their constructor
                values = self.call_code(path, module, begin(), shapes)
                empty = [key for key, value in values.items() if value.isnan().any()]
                if not empty:
                    return values
        raise ConfigError(
            f"model.code=transformers: _init_weights of transformers does not fill {empty[0]} of {path}, so the model "
            "cannot be made here"
        )

    def call_code(self, path: str, module: nn.Module, begun: Mapping[str, Any], shapes: Shapes) -> dict[str, Tensor]:
        """The tensors of `fill`, NaN where nothing fills them. begun: their values before."""
        kept, values = (module._parameters, module._buffers), {}
        for key, shape in shapes.items():
            values[key] = torch.full(shape, torch.nan)
            if key in begun and begun[key].shape == shape:
                values[key].copy_(begun[key])
        try:
            module._parameters, module._buffers = (some | {n: values[n] for n in some if n in values} for some in kept)
            # From the inside out, as in transformers: modules that have others inside may fill these again.
            for name in reversed(["", *itertools.accumulate(path.split("."), "{}.{}".format)]):
                self.build()._init_weights(self.build().get_submodule(name))
            return values
        finally:
            module._parameters, module._buffers = kept


def construct_tensors(module: nn.Module) -> dict[str, Any]:
    """The own parameters and buffers of a module as its constructor makes them, NaN where it leaves them empty. None
    where its attributes do not have the constructor's arguments."""
    arguments = {"dtype": torch.float32} | vars(module)
    given = {name: arguments[name] for name in inspect.signature(type(module)).parameters if name in arguments}
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # fills empty tensors with NaN
    try:
        fresh = type(module)(**given)
    except TypeError:
        return {}
    finally:
        torch.set_deterministic_debug_mode(before)
    return {**fresh._parameters, **fresh._buffers}
