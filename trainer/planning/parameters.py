"""The parameters of a model as a table: names, shapes, axes and roles follow from the `ModelSpec`, without modules.

The blocks of `trainer/model/` declare the same parameters; a test compares both for every shipped model. A new kind of
block is one function here and one line in `ATTENTION` or `FEED_FORWARD`. By name and role it also follows how each is
updated, and which matrices multiply in fp8.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache, wraps
from math import ceil, prod
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from trainer.config import Config, Float8Config, OptimizerConfig, ParameterTypes, PrecisionConfig, TypePolicy, registry
from trainer.config.model import (
    EXPERT_ALIGNMENT,
    AdapterSpec,
    AttentionSpec,
    CodeLayerSpec,
    CodeSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
)
from trainer.config.registry import OPTIMIZERS

TENSOR_AXES = ("heads", "kv_heads", "mlp", "vocab")
"""Axes that tensor parallelism cuts; parameters without one are whole on each of its ranks.

Experts have none (`experts`, `inner`, `embed`): between blocks each tensor-parallel rank has tokens of its own, which
it routes through whole experts.
"""

RANK = "rank"
"""The axis that the two matrices of an adapter share."""

ADAPTER_NAMES = DOWN, UP = "lora_a", "lora_b"
"""The parameters of an adapter, within its linear layer: A [rank, inputs] and B [outputs, rank]."""

ROLES = ("embedding", "norm", "bias", "head", "matrix")

CACHED = 256
"""Results that each function of `by_value` keeps."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ParameterInfo:
    """What holds of a parameter under every plan.

    shape: of the whole parameter. axes: the meaning of each dimension. role: one of `ROLES`.
    residual: whether it writes to the residual stream (which initialisation scales with depth).
    units: into how many parts the first dimension can be cut at most: heads, where it is made of heads; 0 means rows.
    active: share of the elements that one token is multiplied with; below 1 where a token sees some of several experts.
    trained: whether it gets gradients; False for the parameters that adapters stand beside.
    float8: whether it is held in fp8 and not in the compute type (`model.adapter.weights`).
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    role: str
    residual: bool = False
    units: int = 0
    active: float = 1.0
    trained: bool = True
    float8: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes) or self.role not in ROLES:
            raise ValueError(
                f"shape {self.shape} with axes {self.axes} and role {self.role}; roles are {', '.join(ROLES)}"
            )
        for name in ("shape", "axes"):  # lists, where they were read from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "units", self.units or self.shape[0])

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def element_bytes(self, compute: int) -> int:
        """Bytes of an element as forward and backward read it. compute: of an element of the compute type."""
        return 1 if self.float8 else compute

    @property
    def stacked(self) -> bool:
        """Whether it is a matrix for each expert, [experts, outputs, inputs], or a bias for each, [experts,
        outputs]."""
        return self.axes[0] == "experts" and len(self.shape) == (2 if self.role == "bias" else 3)

    @property
    def adapter(self) -> bool:
        """Whether it is one of the two matrices of an adapter."""
        return RANK in self.axes

    @property
    def cut(self) -> int | None:
        """The dimension with an axis that tensor parallelism cuts, if there is one."""
        return next((dimension for dimension, axis in enumerate(self.axes) if axis in TENSOR_AXES), None)

    def tensor_dimension(self, ranks: int) -> int | None:
        """The dimension that `ranks` tensor-parallel ranks cut, or None where each holds the whole: there is no such
        axis, or there are fewer key-value heads than ranks."""
        return None if self.cut == 0 and self.axes[0] == "kv_heads" and self.units % ranks else self.cut

    def held(self, ranks: int, ep: int = 1) -> int:
        """Elements that one of `ranks` tensor-parallel ranks holds, rounded up; of a stack of experts, one of `ep`."""
        size = self.size // ep if self.stacked else self.size
        return size if self.tensor_dimension(ranks) is None else -(-size // ranks)

    def row(self, ranks: int, shards: int, ep: int = 1) -> int:
        """Elements that the first of `ranks` tensor-parallel ranks holds of it, shared by `shards` ranks: cut evenly,
        padding included. ep: ranks that experts are dealt out to before."""
        shape, cut = list(self.shape), self.tensor_dimension(ranks)
        if cut is not None:
            shape[cut] = -(-shape[cut] // ranks)
        shared = self.sharded_dimension(shards, ep)
        if self.stacked:
            shape[0] //= ep
        shape[shared] = -(-shape[shared] // shards)
        return prod(shape)

    def sharded_dimension(self, shards: int, ep: int = 1) -> int:
        """The dimension that `shards` ranks cut: rows. Experts that cannot be dealt out evenly are cut inside, where
        that needs no padding: 8 experts on 64 ranks would be padded to 64. ep: ranks that experts are dealt out to
        before."""
        return int(self.stacked and self.shape[0] % (shards * ep) > 0 and self.shape[1] % shards == 0)

    def multiplied(self, ranks: int) -> tuple[float, ...]:
        """The shape that one of `ranks` tensor-parallel ranks computes with, on average. Where ranks share key-value
        heads, each holds all of them and computes with one."""
        shape = list(map(float, self.shape))
        if self.cut is not None:
            parts = self.units if self.cut == 0 else self.shape[self.cut]
            shape[self.cut] = self.shape[self.cut] * max(parts / ranks, 1) / parts
        return tuple(shape)


Table = Mapping[str, ParameterInfo]
"""Name -> facts, in the order in which the modules register their parameters."""

Block = Callable[[LayerSpec, int], Table]
"""(layer, width of the residual stream) -> the table of one of the layer's blocks, by names within the block."""


def by_value(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Caches a pure function by the values of its arguments, which need not be hashable, as specs and settings are not.

    The key is a snapshot of the arguments, and the function computes from the snapshot: an argument that is changed
    later is another key. Results are shared and must not be changed.
    """

    @lru_cache(CACHED)
    def of_snapshot(snapshot: bytes) -> Result:
        arguments, named = pickle.loads(snapshot)
        return function(*arguments, **named)

    @wraps(function)
    def cached(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        return of_snapshot(pickle.dumps((arguments, named)))

    return cached


def declare_parameters(spec: ModelSpec, layers: range | None = None) -> dict[str, ParameterInfo]:
    """Global name -> facts of every parameter of the pipeline stage with `layers`, or of the whole model.

    A tied head is the embedding's parameter and appears as that alone, on the first stage and on the last.
    """
    layers = range(spec.depth) if layers is None else layers
    before, behind = outer_tables(spec, layers.start == 0, layers.stop == spec.depth)
    blocks = named_tables(spec)
    inner = {name: info for index in layers for name, info in blocks[index].items()}
    return {**before, **inner, **behind}


def router_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Global name -> shape of every fp32 tensor of the whole model that routers of experts keep besides parameters, or
    that transformers' code keeps so."""
    kept = {
        f"layers.{index}.{name}": tuple(shape)
        for index, layer in enumerate(layer_specs(spec))
        if isinstance(layer, CodeLayerSpec)
        for name, shape in layer.code["buffers"].items()
    }
    blocks = [(index, layer.feed_forward.experts) for index, layer in enumerate(layer_specs(spec))]
    return kept | {
        f"layers.{index}.feed_forward.router.{name}": (experts.count,)
        for index, experts in blocks
        if experts.count
        for name in experts.buffers
    }


@by_value
def layer_tables(spec: ModelSpec) -> tuple[Table, ...]:
    """The table of each layer with its adapters, by names within the layer."""
    return tuple(
        adapt_table(spec.adapter, layer_table(layer, spec.width), f"layers.{index}.")
        for index, layer in enumerate(layer_specs(spec))
    )


def named_tables(spec: ModelSpec) -> list[dict[str, ParameterInfo]]:
    """The same by global names."""
    tables = enumerate(layer_tables(spec))
    return [{f"layers.{index}.{name}": info for name, info in table.items()} for index, table in tables]


@by_value
def layer_specs(spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """The resolved blocks of each layer."""
    return tuple(spec.layer(index) for index in range(spec.depth))


@by_value
def layer_table(layer: LayerSpec, width: int) -> Table:
    """The table of one layer, without adapters. width: of the residual stream, as in the functions of the blocks
    below."""
    if isinstance(layer, CodeLayerSpec):
        return MappingProxyType(read_table(layer.code["parameters"]))
    pre, post = layer.norm.placement in ("pre", "both"), layer.norm.placement in ("post", "both")
    blocks = [
        ("attention", block_table(layer.attention, registry.ATTENTION, ATTENTION, layer, width)),
        ("feed_forward", block_table(layer.feed_forward, registry.FEED_FORWARD, FEED_FORWARD, layer, width)),
        *((f"{block}_norm", norm_table(width, layer.norm)) for block in ("attention", "feed_forward") if pre),
        *((f"{block}_post_norm", norm_table(width, layer.norm)) for block in ("attention", "feed_forward") if post),
    ]
    return MappingProxyType(join_tables(blocks))


def block_table(
    spec: AttentionSpec | FeedForwardSpec,
    kinds: registry.KindRegistry,
    ours: Mapping[str, Block],
    layer: LayerSpec,
    width: int,
) -> Table:
    """The table of a block, whether its kind is one of `ours` or registered."""
    if entry := kinds.registered.get(spec.kind):
        return entry.facts["parameters"](entry.chosen(spec.settings), spec, width)
    return ours[spec.kind](layer, width)


def outer_tables(spec: ModelSpec, first: bool, last: bool) -> tuple[Table, Table]:
    """What a pipeline stage holds before its layers and behind them.

    first, last: whether it is the model's first or last stage.
    """
    tokens = ParameterInfo((spec.vocab_size, spec.width), ("vocab", "embed"), "embedding")
    positions = ParameterInfo((spec.max_length, spec.width), ("seq", "embed"), "embedding")
    before = {"embedding.weight": tokens} if first or (last and spec.tied) else {}
    before |= {"positions.weight": positions} if first and spec.learned_positions else {}
    biased = False
    if isinstance(spec, CodeSpec):
        tables, biased = spec.transformers["outer_tables"], spec.transformers["outer"]["head_bias"]
        before |= read_table(tables["before"]) if first else {}
        behind = read_table(tables["behind"]) if last else {}
    else:
        behind = join_tables([("norm", norm_table(spec.width, spec.norm))]) if last else {}
    behind |= {"head.weight": head_matrix(spec)} if last and not spec.tied else {}
    behind |= {"head.bias": head_bias(spec)} if last and biased else {}
    return adapt_table(spec.adapter, before), adapt_table(spec.adapter, behind)


def head_matrix(spec: ModelSpec) -> ParameterInfo:
    """The matrix that hidden states are multiplied with for logits; where it is tied, the embedding's."""
    return ParameterInfo((spec.vocab_size, spec.width), ("vocab", "embed"), "head")


def head_bias(spec: ModelSpec) -> ParameterInfo:
    """What is added to logits."""
    return ParameterInfo((spec.vocab_size,), ("vocab",), "bias")


def read_table(facts: Mapping[str, Sequence[Any]]) -> dict[str, ParameterInfo]:
    """A table from plain values, as a `CodeSpec` has it."""
    return {name: ParameterInfo(*one) for name, one in facts.items()}


HEAD_ROWS, FEW_ROWS = 64, 1024
"""Of which a head's rows are made a multiple, and how many stay as they are."""


def head_rows(rows: float) -> float:
    """Rows of the head that products take of a rank's `rows`, zeros behind them: logits then begin where matrix units
    read them fast. With GPT-2's 50,257 the three products take 61 ms of 32,768 tokens on an H200, with 50,304 11 ms.
    Few rows stay as they are."""
    return ceil(rows / HEAD_ROWS) * HEAD_ROWS if rows > FEW_ROWS else rows


def join_tables(modules: Iterable[tuple[str, Table]]) -> dict[str, ParameterInfo]:
    """The tables of several modules as one, each name behind its module's."""
    return {f"{module}.{name}": info for module, table in modules for name, info in table.items()}


def linear_table(
    inputs: int, outputs: int, axes: tuple[str, str], bias: bool, residual: bool = False, units: int = 0
) -> dict[str, ParameterInfo]:
    """A matrix [outputs, inputs] and its bias. axes: of (outputs, inputs)."""
    table = {"weight": ParameterInfo((outputs, inputs), axes, "matrix", residual, units)}
    return {**table, "bias": ParameterInfo((outputs,), axes[:1], "bias", units=units)} if bias else table


def norm_table(width: int, spec: NormSpec, axis: str = "embed", units: int = 0) -> dict[str, ParameterInfo]:
    """The weight of an RMSNorm or LayerNorm over `width` elements, and the bias of the latter."""
    names = ("weight", "bias") if spec.kind == "layer" else ("weight",)
    return {name: ParameterInfo((width,), (axis,), "norm", units=units) for name in names}


def softmax_attention(layer: LayerSpec, width: int) -> dict[str, ParameterInfo]:
    """Projections of queries, keys, values and the output, sinks, and the norms of queries and keys."""
    a = layer.attention
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    modules = [
        ("q", linear_table(width, queries, ("heads", "embed"), a.bias, units=a.heads)),
        ("k", linear_table(width, keys, ("kv_heads", "embed"), a.bias, units=a.kv_heads)),
        ("v", linear_table(width, keys, ("kv_heads", "embed"), a.bias, units=a.kv_heads)),
        ("o", linear_table(queries, width, ("embed", "heads"), a.output_bias, residual=True)),
    ]
    if a.sinks:
        modules.append(("sinks", {"weight": ParameterInfo((a.heads,), ("heads",), "bias")}))
    if a.qk_norm == "head":
        modules += [(name, norm_table(a.head_dim, layer.norm, "head_dim")) for name in ("q_norm", "k_norm")]
    elif a.qk_norm == "full":
        modules += [
            ("q_norm", norm_table(queries, layer.norm, "heads", a.heads)),
            ("k_norm", norm_table(keys, layer.norm, "kv_heads", a.kv_heads)),
        ]
    return join_tables(modules)


def latent_attention(layer: LayerSpec, width: int) -> dict[str, ParameterInfo]:
    """Projections to latent vectors and from there to heads, the output's, and the norms of the latent vectors."""
    a, latent, heads = layer.attention, layer.attention.latent, layer.attention.heads
    down, up, rank = ("latent", "embed"), ("heads", "latent"), latent.q_rank
    kv_outputs = latent.kv_rank + latent.rope_dim
    modules = [
        ("kv_a", linear_table(width, kv_outputs, down, a.bias)),
        ("kv_b", linear_table(latent.kv_rank, heads * (latent.nope_dim + latent.value_dim), up, False, units=heads)),
        ("o", linear_table(heads * latent.value_dim, width, ("embed", "heads"), a.output_bias, residual=True)),
    ]
    queries = heads * a.head_dim
    if rank:
        modules[:0] = [
            ("q_a", linear_table(width, rank, down, a.bias)),
            ("q_b", linear_table(rank, queries, up, False, units=heads)),
        ]
        modules.append(("q_norm", norm_table(rank, layer.norm, "latent")))
    else:
        modules.insert(0, ("q", linear_table(width, queries, ("heads", "embed"), False, units=heads)))
    return join_tables([*modules, ("kv_norm", norm_table(latent.kv_rank, layer.norm, "latent"))])


def plain_feed_forward(layer: LayerSpec, width: int) -> dict[str, ParameterInfo]:
    """down(act(up(x)))."""
    inner, bias = layer.feed_forward.width, layer.feed_forward.bias
    up = linear_table(width, inner, ("mlp", "embed"), bias)
    return join_tables([("up", up), ("down", linear_table(inner, width, ("embed", "mlp"), bias, residual=True))])


def mixture_feed_forward(layer: LayerSpec, width: int) -> dict[str, ParameterInfo]:
    """Router, experts, and what every token passes through besides."""
    experts, inner = layer.feed_forward.experts, layer.feed_forward.width
    active = experts.top_k / experts.count

    def stack(outputs: int, inputs: int, axes: tuple[str, str], residual: bool = False) -> Table:
        shape, named = (experts.count, outputs, inputs), ("experts", *axes)
        table = {"weight": ParameterInfo(shape, named, "matrix", residual, active=active)}
        bias = {"bias": ParameterInfo(shape[:2], named[:2], "bias", active=active)}
        return table | bias if layer.feed_forward.bias else table

    into = stack(inner, width, ("inner", "embed"))
    modules = [
        ("router", linear_table(width, experts.count, ("experts", "embed"), experts.router_bias)),
        *(("experts.gate", into), ("experts.up", into)),
        ("experts.down", stack(width, inner, ("embed", "inner"), True)),
    ]
    if experts.shared_width:
        block = FeedForwardSpec(width=experts.shared_width, bias=layer.feed_forward.bias)
        modules.append(("shared", gated_feed_forward(replace(layer, feed_forward=block), width)))
    if experts.shared_gate:
        modules.append(("shared_gate", linear_table(width, 1, ("experts", "embed"), False)))
    return join_tables(modules)


def gated_feed_forward(layer: LayerSpec, width: int) -> dict[str, ParameterInfo]:
    """down(act(gate(x)) * up(x)), or experts of that form."""
    if layer.feed_forward.experts.count:
        return mixture_feed_forward(layer, width)
    gate = linear_table(width, layer.feed_forward.width, ("mlp", "embed"), layer.feed_forward.bias)
    return {**join_tables([("gate", gate)]), **plain_feed_forward(layer, width)}


ATTENTION: dict[str, Block] = {"softmax": softmax_attention, "latent": latent_attention}
FEED_FORWARD: dict[str, Block] = {"gated": gated_feed_forward, "plain": plain_feed_forward}


# Adapters: which parameters there are beside those of the model, and which are trained.


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def declare_adapter(weight: ParameterInfo, rank: int) -> dict[str, ParameterInfo]:
    """A [rank, inputs] and B [outputs, rank] of the adapter of a matrix, with the axes of the matrix. A stack gets a
    pair for each of its matrices."""
    (*experts, outputs, inputs), (*stack, to, of) = weight.shape, weight.axes
    return {
        DOWN: ParameterInfo((*experts, rank, inputs), (*stack, RANK, of), "matrix", active=weight.active),
        UP: ParameterInfo(
            (*experts, outputs, rank), (*stack, to, RANK), "matrix", units=weight.units, active=weight.active
        ),
    }


def adapt_table(adapter: AdapterSpec, table: Table, prefix: str = "") -> Table:
    """A table with the adapters of its matrices, in which what `adapter.trained` does not name is frozen. prefix: of
    the global names. Routers get no adapters."""
    if not adapter.rank:
        return table
    modules: dict[str, dict[str, ParameterInfo]] = {}
    for name, info in table.items():
        module, _, own = name.rpartition(".")
        trained = matches_any(prefix + name, adapter.trained)
        modules.setdefault(module, {})[own] = info if trained else freeze_parameter(info, own, adapter)
    for module, infos in modules.items():
        weight = infos.get("weight")
        if weight is not None and can_adapt(weight) and matches_any(prefix + module, adapter.targets):
            infos |= declare_adapter(weight, adapter.rank)
    return MappingProxyType(join_tables(modules.items()))


def freeze_parameter(info: ParameterInfo, own: str, adapter: AdapterSpec) -> ParameterInfo:
    """A parameter that is not trained. own: its name within its module."""
    narrow = adapter.weights == "fp8" and own == "weight" and can_adapt(info) and not info.stacked
    return replace(info, trained=False, float8=narrow)


def can_adapt(weight: ParameterInfo) -> bool:
    """Whether an adapter can stand beside a weight: that of a linear layer, or of one for each expert, but of no
    router."""
    return weight.role == "matrix" and (weight.stacked or len(weight.shape) == 2 and weight.axes[0] != "experts")


def find_adapter_problems(spec: ModelSpec) -> Iterator[str]:
    """What is wrong with `model.adapter` for the model, one sentence each."""
    adapter, plain = spec.adapter, declare_parameters(replace(spec, adapter=AdapterSpec()))
    given = {"targets": adapter.targets, "trained": adapter.trained}
    if not adapter.rank:
        usual = AdapterSpec()
        for name in ("alpha", "scale", "targets", "trained", "weights"):
            if getattr(adapter, name) != getattr(usual, name):
                yield (
                    f"model.adapter.{name}={getattr(adapter, name)} has no effect with model.adapter.rank=0; set "
                    "model.adapter.rank, such as 16, or leave it out"
                )
        return
    linears = {name.removesuffix(".weight"): info for name, info in plain.items() if info.role == "matrix"}
    chosen = {name: info for name, info in linears.items() if matches_any(name, adapter.targets)}
    foreign = isinstance(spec, CodeSpec)
    fixed = [name for name, info in linears.items() if not can_adapt(info) or (foreign and info.stacked)]
    if any(name in chosen for name in fixed):
        ends = [f"*.{name.split('.', 2)[2]}" for name in linears if name not in fixed]
        blocks = {end: f"{end.rpartition('.')[0]}.*" for end in ends}
        # A dense layer's block has the name of the block that a router is in.
        free = (end if any(fnmatchcase(one, block) for one in fixed) else block for end, block in blocks.items())
        first = next(name for name in fixed if name in chosen)
        kind = "experts of transformers' code" if linears[first].stacked else "routers"
        yield (
            f"model.adapter.targets={adapter.targets} match {first}: {kind} get no adapters; set "
            f"model.adapter.targets=[{','.join(dict.fromkeys(free))}] or a part of it"
        )
    stacks = [name for name, info in chosen.items() if info.stacked and name not in fixed]
    if stacks and adapter.rank % EXPERT_ALIGNMENT:
        yield (
            f"model.adapter.rank={adapter.rank} must be a multiple of {EXPERT_ALIGNMENT} for the grouped GEMM of "
            f"{stacks[0]}; set model.adapter.rank={-(-adapter.rank // EXPERT_ALIGNMENT) * EXPERT_ALIGNMENT}, or other "
            "model.adapter.targets"
        )
    names = {"targets": [name for name in linears if name not in fixed], "trained": list(plain)}
    for setting, patterns in given.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in [*names[setting], *fixed * (setting == "targets")]):
                what = "linear layer" if setting == "targets" else "parameter"
                tied = " (the head is tied to embedding.weight)" * (spec.tied and pattern.startswith("head"))
                near = ", ".join(get_close_matches(pattern, names[setting], 2, 0.0) or names[setting][:2])
                yield f"model.adapter.{setting}: '{pattern}' matches no {what}{tied}; names look like {near}"
    if not adapter.targets:
        yield "model.adapter.targets=[] gives no layer an adapter; name some, such as [*], or set model.adapter.rank=0"


# How each parameter is updated: its optimizer and what that keeps of it, by role and name (`precision.types`).


MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "sgd": ("momentum",), "muon": ("momentum_buffer",)}
"""What each optimizer of ours keeps of a parameter beside it, by the names in checkpoints."""


DECAYS = {
    "adamw": ("optimizer.beta1", "optimizer.beta2"),
    "lion": ("optimizer.beta2",),
    "sgd": ("optimizer.beta1",),
    "muon": (),  # 0.95
}
"""The settings by which the moments of each optimizer of ours decay."""

SLOWEST_IN_BF16 = 0.99
"""The largest decay of a moment in bf16, which holds 8 binary digits.

A step changes a moment by at most its share of 1 - decay. Where that is below half of the last digit, the moment is
rounded back to what it was. After gradients fell tenfold, AdamW's steps are smaller than with a second moment in fp32
by 0.3% with beta2=0.95, 1.7% with 0.99, 25% with 0.995, and 88% with 0.998 and above (root mean square, gradients whose
noise is 0.1 of their mean or more; without any noise 2.8%, 17%, 46%, 88%)."""


def moment_count(optimizer: str) -> tuple[str, ...]:
    """The same of any optimizer."""
    entry = OPTIMIZERS.registered.get(optimizer)
    return entry.facts["moments"] if entry else MOMENTS[optimizer]


@dataclass(frozen=True)
class UpdateSettings:
    """The settings from which every parameter's update follows."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    types: ParameterTypes = field(default_factory=ParameterTypes)

    @classmethod
    def of(cls, config: Config) -> UpdateSettings:
        return cls(config.optimizer, config.precision.types)

    def policies(self, infos: Mapping[str, ParameterInfo]) -> dict[str, TypePolicy]:
        """Global name of each trained parameter -> policy, with nothing left open: the settings of its role, changed by
        every rule whose pattern matches, in order. Muon by default is for hidden matrices; the others get AdamW."""
        found = {}
        for name, info in infos.items():
            if not info.trained:
                continue
            policy = self.chosen(name, info)
            usual = self.optimizer.name if self.optimizer.name != "muon" or hidden_matrix(info) else "adamw"
            decay = self.optimizer.weight_decay if policy.weight_decay is None else float(policy.weight_decay)
            found[name] = replace(policy, optimizer=policy.optimizer or usual, weight_decay=decay)
        return found

    def problems(self, infos: Mapping[str, ParameterInfo]) -> list[str]:
        """What is wrong with them for a model of such parameters, one sentence each."""
        names = [
            name
            for name, info in infos.items()
            if info.trained and not hidden_matrix(info) and self.chosen(name, info).optimizer == "muon"
        ]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        misplaced = [
            f"precision.types gives {name}{more} optimizer=muon, which is for hidden matrices; leave it out there and "
            "set optimizer=muon, which leaves other parameters to AdamW, or name the matrices alone, such as "
            "precision.types.matrix.optimizer=muon in a model without experts"
            for name in names[:1]
        ]
        return misplaced + self._too_slow(infos)

    def _too_slow(self, infos: Mapping[str, ParameterInfo]) -> list[str]:
        """Moments in bf16 that decay so slowly that they do not: one sentence for each setting and role."""
        found = {}
        for name, policy in self.policies(infos).items():
            for setting in DECAYS.get(policy.optimizer or "", ()) if policy.state_dtype == "bf16" else ():
                decay = attrgetter(setting.removeprefix("optimizer."))(self.optimizer)
                if decay > SLOWEST_IN_BF16:
                    role = infos[name].role
                    found[setting, role] = (
                        f"{setting}={decay} is too near to 1 for moments in bf16, which round away what a step takes "
                        f"from them: those of {name} would not decay; set {setting} to at most {SLOWEST_IN_BF16}, or "
                        f"state_dtype=fp32 in precision.types.{role} or in the rule that gives it bf16"
                    )
        return list(found.values())

    def names(self) -> set[str]:
        """Every optimizer that a setting names."""
        rules = rule_values(self.types).values()
        given = [getattr(self.types, role).optimizer for role in ROLES] + [rule.get("optimizer") for rule in rules]
        return {self.optimizer.name, *filter(None, given)}

    def chosen(self, name: str, info: ParameterInfo) -> TypePolicy:
        """The settings of a parameter as they were given: of its role, changed by every rule that matches, in order."""
        chosen = asdict(getattr(self.types, info.role))
        for pattern, changes in rule_values(self.types).items():
            chosen |= changes if fnmatchcase(name, pattern) else {}
        return TypePolicy(**chosen)


def rule_values(types: ParameterTypes) -> dict[str, dict[str, Any]]:
    """What each rule of `precision.types` changes, by its pattern."""
    return {pattern: rule if isinstance(rule, dict) else asdict(rule) for pattern, rule in types.rules.items()}


def hidden_matrix(info: ParameterInfo) -> bool:
    """Whether a parameter is a matrix between hidden states, or one for each expert: neither embedding, head, router
    nor a matrix of an adapter."""
    return can_adapt(info) and not info.adapter


NEWTON_SCHULZ_STEPS = 5
"""Of Muon's iteration, as published (Jordan et al. 2024)."""


def orthogonalisation_flops(shape: Sequence[int], steps: int) -> int:
    """FLOPs of Muon's Newton-Schulz iteration for a matrix, or for each matrix of a stack [experts, rows, columns]: in
    each step, three products with its smaller Gram matrix."""
    small, large = sorted(shape[-2:])
    return 2 * steps * small**2 * (2 * large + small) * prod(shape[:-2])


@by_value
def muon_flops(spec: ModelSpec, updates: UpdateSettings) -> tuple[int, ...]:
    """FLOPs of an update's orthogonalisations in each layer."""
    found = []
    for infos in named_tables(spec):
        policies = updates.policies(infos)
        found.append(
            sum(
                orthogonalisation_flops(info.shape, NEWTON_SCHULZ_STEPS)
                for name, info in infos.items()
                if name in policies and policies[name].optimizer == "muon"
            )
        )
    return tuple(found)


# Which settings ask for products in fp8: `precision.float8.recipe`, and by type and name of parameters
# `precision.types`.


def float8_settings(precision: PrecisionConfig) -> dict[str, str]:
    """Settings that ask for products in fp8 -> their recipes, the most general first."""
    types = precision.types
    named: dict[str, str | None] = {"precision.float8.recipe": precision.float8.recipe}
    named |= {f"precision.types.{role}.float8": getattr(types, role).float8 for role in ROLES}
    for pattern, rule in rule_values(types).items():
        named[f"precision.types.rules.{pattern}.float8"] = rule.get("float8")
    return {name: recipe for name, recipe in named.items() if recipe and recipe != "none"}


def float8_setting(precision: PrecisionConfig) -> tuple[str, str]:
    """The most general of them as it was written, and what would take it back; "" where none is."""
    for name, recipe in float8_settings(precision).items():
        return f"{name}={recipe}", f"{name}=none"
    return "", ""


def without_float8(precision: PrecisionConfig) -> PrecisionConfig:
    """The same numeric types with all products in the compute type."""
    types = precision.types
    plain = {role: replace(getattr(types, role), float8=None) for role in ROLES}
    rules = {
        pattern: {key: value for key, value in rule.items() if key != "float8"}
        if isinstance(rule, dict)
        else replace(rule, float8=None)
        for pattern, rule in types.rules.items()
    }
    return replace(precision, float8=Float8Config(), types=ParameterTypes(**plain, rules=rules))
