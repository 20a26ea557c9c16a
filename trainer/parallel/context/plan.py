"""How sequences are shared, decided: what settings ask for, what `auto` takes, what is refused, and with which way out.

A way out is itself resolved before it is named, so that none leads into the next refusal.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from statistics import mean
from typing import Any, NamedTuple

from trainer.config import Config, ConfigError, ContextConfig, ParallelConfig
from trainer.config.fields import list_divisors
from trainer.config.hardware import AchievedConfig
from trainer.config.model import AttentionSpec, ModelSpec
from trainer.config.registry import ATTENTION
from trainer.config.schema import BatchConfig
from trainer.parallel.tensor.plan import divides_heads
from trainer.planning.documents import USUAL, DocumentLengths, block_size, computed_keys, draw_documents
from trainer.planning.layer import ATTENTION_BACKWARD, attention_flops, registered_blocks, seen_keys
from trainer.planning.parameters import layer_specs
from trainer.planning.plan import Feature, Plan, check_degrees, check_mesh, resolve_batch

# Context parallelism, decided: which ranks exchange heads and which gather keys, who holds which tokens, what is
# sent. Of cp ranks, runs of `inner` neighbours exchange heads (DeepSpeed-Ulysses, arXiv 2309.14509), after which each
# has some heads of all their tokens; the `outer` ranks with one place in their runs gather keys and values (Llama 3,
# arXiv 2407.21783, 3.3.2). `gather` is inner=1, `heads` is outer=1. Pure: needs neither torch nor processes.


DRAWS = 8
"""How often documents are drawn, where an order's balance depends on them."""

BLOCK = 128
"""Tokens of a run in order of blocks, where they divide the sequence."""

GROUPS = 4
"""Groups of key-value heads that are gathered one after the other, at most: one while attention runs on the one
before."""


@dataclass(frozen=True)
class ContextPlan:
    """How the ranks of a group share sequences. inner x outer: see above. order: of tokens over the outer ranks, zigzag
    or blocks; whole for one of them."""

    inner: int
    outer: int
    order: str

    def rows(self, length: int) -> int:
        """Runs of tokens that an outer rank holds of a sequence. Row i of the sequence's runs is dealt out from the
        first rank to the last for even i, and back for odd i."""
        return length // (self.outer * self.run(length))

    def run(self, length: int) -> int:
        """Tokens of a run."""
        if self.outer == 1:
            return length
        half = length // (2 * self.outer)
        return math.gcd(BLOCK, half) if self.order == "blocks" else half

    def parts(self, attention: AttentionSpec, tp: int) -> int:
        """Groups of heads for which attention runs one after the other, on one of `tp` tensor-parallel ranks: several
        where their keys are gathered."""
        if self.outer == 1:
            return 1
        return divide_heads(max(max(attention.kv_heads // tp, 1) // self.inner, 1))

    def describe(self) -> str:
        if self.outer == 1:
            return f"heads exchanged over {self.inner} ranks"
        exchanged = f"heads exchanged over {self.inner}, " if self.inner > 1 else ""
        return f"{exchanged}keys gathered over {self.outer} ranks, {self.order} order"


def divide_heads(heads: int) -> int:
    """Into how many equal groups heads are divided: as many as go, and at most `GROUPS`."""
    return max(count for count in range(1, GROUPS + 1) if heads % count == 0)


class PassElements(NamedTuple):
    """Elements that a rank receives for one sequence in a layer's forward pass, and in its backward pass."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


class ContextTraffic(NamedTuple):
    """What a rank receives among the inner and among the outer ranks."""

    inner: PassElements
    outer: PassElements

    @property
    def all(self) -> float:
        return self.inner.both + self.outer.both


def context_traffic(
    attention: AttentionSpec, context: ContextPlan, length: int, tp: int, again: float, compiled: bool = False
) -> ContextTraffic:
    """What a layer sends. length: of the whole sequence; tp: tensor-parallel ranks; again: how often the backward pass
    runs attention's block again, and with it all that is sent in the forward pass (`Remaining.attends`).

    Where it does not, an eager layer gathers keys again all the same, and a compiled one has kept them."""
    inner, outer, size = context.inner, context.outer, attention.head_dim
    own, heads, keys = length / (inner * outer), attention.heads / tp, max(attention.kv_heads / tp, 1)
    exchanged = (2 * heads + 2 * max(keys, inner)) * size * own * (inner - 1) / inner
    among_inner = PassElements(exchanged, (1 + again) * exchanged)
    token = 2 * max(keys / inner, 1) * size  # keys and values
    gathered = token * own * inner * (outer - 1)
    # Gradients are summed over ranks.
    return ContextTraffic(among_inner, PassElements(gathered, (1 + (again if compiled else 1)) * gathered))


KERNELS = ("attention", "last_queries", "block_mask")


def attention_kernel(attention: AttentionSpec, context: ContextPlan | None, length: int, masked: bool) -> str:
    """What computes a layer's attention on a GPU: `attention` for whole sequences, `last_queries` for queries that are
    not the first of their keys, `block_mask` for any mask. What they reach: `AchievedConfig.of_attention`. masked:
    whether documents are."""
    if masked or 0 < attention.window < length or attention.changes_softmax:
        return "block_mask"
    if context is None or context.outer == 1:
        return "attention"
    return "block_mask" if context.order == "blocks" else "last_queries"


@lru_cache(1024)
def load_imbalance(context: ContextPlan | None, length: int, window: int, documents: DocumentLengths | None) -> float:
    """Keys that the queries of the busiest rank see in a layer with this window (0: none), over the mean of all ranks.
    documents: that are masked, of which some are drawn."""
    if context is None or context.outer == 1:
        return 1.0
    drawn = [draw_documents(documents, length, draw) for draw in range(DRAWS)] if documents else [[0]]
    work = [_work(context, length, window or length, starts) for starts in drawn]
    return mean(max(ranks) * context.outer / sum(ranks) for ranks in work)


def _work(context: ContextPlan, length: int, window: int, starts: list[int]) -> list[float]:
    """Keys that the queries of each outer rank see. starts: first places of documents."""

    def own(queries: int) -> float:  # of the first queries of a document
        short = min(queries, window)
        return short * (short + 1) / 2 + (queries - short) * window

    sums = [0.0, *accumulate(own(stop - start) for start, stop in zip(starts, starts[1:]))]

    def seen(place: int) -> float:
        number = bisect_right(starts, place) - 1
        return sums[number] + own(place - starts[number])

    size, outer = context.run(length), context.outer
    ends = [seen(place) for place in range(0, length + 1, size)]
    runs = [end - start for start, end in zip(ends, ends[1:])]
    rows = [runs[start : start + outer] for start in range(0, len(runs), outer)]
    return [sum(parts) for parts in zip(*(row[::-1] if number % 2 else row for number, row in enumerate(rows)))]


def computed_share(
    attention: AttentionSpec,
    context: ContextPlan | None,
    length: int,
    micro_size: int,
    documents: DocumentLengths | None,
    on_cpu: bool = False,
) -> tuple[str, float]:
    """The kernel that computes a layer's attention, and what it computes on the rank with most, over what each would if
    a sequence were one document and all were left out that is not seen. documents: that are masked; on_cpu: where a
    mask leaves out no key."""
    window = attention.window
    by, seen = attention_kernel(attention, context, length, documents is not None), seen_keys(length, window)
    if by != "block_mask":
        return by, load_imbalance(context, length, window, None)
    if on_cpu:
        return by, length / seen
    rows = length // context.outer if context else length
    size = block_size(micro_size if documents else 1, rows, length)
    return by, computed_keys(length, window, documents, size) / seen * load_imbalance(
        context, length, window, documents
    )


def gathered_elements(attention: AttentionSpec, context: ContextPlan, length: int, tp: int) -> float:
    """Elements of the keys and values that one rank has before it at once, of one sequence; 0 where none travel."""
    if context.outer == 1:
        return 0.0
    return 2 * max(max(attention.kv_heads / tp, 1) / context.inner, 1) * attention.head_dim * length


# What settings ask for, what `auto` takes, and what is refused with which way out.


BETWEEN_NODES = 8.0
"""What a byte between nodes costs over one inside a node where no hardware is named: 370 over 45 GB/s, H200 with
NVLink and 400 Gbit/s a GPU."""

ELEMENT = 4200.0
"""FLOPs of attention that take as long as an element in bf16 takes to arrive from the same node, where no hardware is
named: 475 TFLOP/s and 225 GB/s, of an H200."""

SECTION = "parallel.context"
UNSET = {name.name: getattr(ContextConfig(), name.name) for name in fields(ContextConfig)}

Way = dict[str, Any]
"""Settings by name."""


class ContextRequest(NamedTuple):
    """What is asked, and what it depends on. masked: whether documents are; node: processes of a machine."""

    parallel: ParallelConfig
    batch: BatchConfig
    masked: bool
    layers: tuple[AttentionSpec, ...]
    plan: Plan
    node: int

    @property
    def asked(self) -> ContextConfig:
        return self.parallel.context

    @property
    def length(self) -> int:
        return self.batch.sequence_length

    @property
    def legal(self) -> list[int]:
        """Numbers of ranks that can exchange heads."""
        ranks = list_divisors(self.plan.cp)
        return [n for n in ranks if all(divides_heads(a.heads, a.kv_heads, self.plan.tp * n) for a in self.layers)]

    @property
    def inside(self) -> int:
        """Neighbours of a sequence on one node."""
        return math.gcd(self.plan.cp, max(self.node // self.plan.tp, 1))

    def set(self, way: Way) -> ContextRequest:
        """The same with other settings."""
        asked = {name.removeprefix(f"{SECTION}."): value for name, value in way.items() if name.startswith(SECTION)}
        cp, length = way.get("parallel.cp", self.plan.cp), way.get("batch.sequence_length", self.length)
        return self._replace(
            parallel=replace(self.parallel, cp=cp, context=replace(self.asked, **asked)),
            batch=replace(self.batch, sequence_length=length),
            plan=replace(self.plan, cp=cp),
        )

    @property
    def possible(self) -> bool:
        """Whether plan and batch are, however sequences are shared."""
        plan = self.plan
        if check_degrees(self.parallel, plan.world) or check_mesh(self.parallel, plan.world, self.node):
            return False
        try:
            resolve_batch(self.batch, plan.dp, plan.tp, plan.pp, plan.cp)
        except ConfigError:
            return False
        return True


class ContextFault(NamedTuple):
    """What is wrong, and ways out: of each group the first that is legal is named. unused: settings that have no
    meaning beside the others, at their defaults."""

    text: str
    ways: list[list[Way]]
    unused: Way = {}


def resolve_context(config: Config, spec: ModelSpec, plan: Plan, node: int) -> ContextPlan | None:
    """How sequences are shared under a plan on nodes of `node` processes; None where they are not. Raises `ConfigError`
    with the way out."""
    request = request_of(config, spec, plan, node)
    chosen = choose_context(request)
    if found := list(find_faults(request, chosen)):
        raise ConfigError([explain_fault(request, fault) for fault in found])
    return chosen if plan.cp > 1 else None


def request_of(config: Config, spec: ModelSpec, plan: Plan, node: int) -> ContextRequest:
    layers = tuple(layer.attention for layer in layer_specs(spec))
    return ContextRequest(config.parallel, config.batch, config.data.mask_documents, layers, plan, node)


def choose_context(request: ContextRequest) -> ContextPlan:
    """What is asked for, or the best of what `auto` allows."""
    asked, cp = request.asked, request.plan.cp
    match asked.method:
        case "allgather":
            return build_context(request, 1)
        case "ulysses":
            return build_context(request, cp)
        case "hybrid":
            return build_context(request, max(inner_ranks(request), default=1))  # 1 is refused
    ways = [n for n in request.legal if request.inside % n == 0 and (n < cp or n == 1 or asked.order == "auto")]
    return fastest_order(request, [build_context(request, n) for n in ways])


def inner_ranks(request: ContextRequest) -> list[int]:
    """Numbers of neighbours on a node that can exchange heads, where others gather keys."""
    return [n for n in request.legal if 1 < n < request.plan.cp and request.inside % n == 0]


def fastest_order(request: ContextRequest, ways: list[ContextPlan]) -> ContextPlan:
    dealt = [one for one in ways if request.length % length_multiple(one, request.plan) == 0] or ways[:1]
    return min(dealt, key=lambda one: context_cost(request, one)) if len(dealt) > 1 else dealt[0]


def build_context(request: ContextRequest, inner: int) -> ContextPlan:
    """Sequences shared as asked, with heads exchanged among `inner` ranks. order=auto: the faster of zigzag and blocks,
    where blocks divide the length; for documents blocks, which stand any lengths."""
    order, outer = request.asked.order, request.plan.cp // inner
    if outer == 1 or order != "auto":
        return ContextPlan(inner, outer, "whole" if outer == 1 else order)
    zigzag, blocks = (ContextPlan(inner, outer, order) for order in ("zigzag", "blocks"))
    if request.length % (2 * BLOCK * outer):
        return zigzag
    return blocks if request.masked else fastest_order(request, [zigzag, blocks])


def length_multiple(context: ContextPlan, plan: Plan) -> int:
    """What the length of a sequence must be a multiple of."""
    return math.lcm(1 if context.outer == 1 else 2 * context.outer, plan.cp * plan.tp)


def context_cost(request: ContextRequest, context: ContextPlan) -> float:
    """What attention of all layers and what is sent for it take, in FLOPs of attention of whole sequences. As if
    all were recomputed: what is, may be decided later, by what fits. Masked documents are as long as usual, so that a
    run shares its sequences in one way, whether or not their lengths are known yet."""
    length, plan, again = request.length, request.plan, 1.0
    far = BETWEEN_NODES if plan.cp * plan.tp > request.node else 1.0
    total, reached, documents = 0.0, AchievedConfig(), USUAL if request.masked else None
    for layer in request.layers:
        computed = attention_flops(layer, seen_keys(length, layer.window), plan.tp) * length / plan.cp
        by, share = computed_share(layer, context, length, request.batch.micro_size or 1, documents)
        computed *= share / reached.of_attention(by)
        sent = context_traffic(layer, context, length, plan.tp, again)
        total += (1 + again + ATTENTION_BACKWARD) * computed + ELEMENT * (sent.inner.both + far * sent.outer.both)
    return total


def explain_fault(request: ContextRequest, fault: ContextFault) -> str:
    """The fault, and its ways out that are legal; settings that a way leaves without a meaning are reset by it."""
    gathering = [GATHER | way for way in ({}, *_list_lengths(request, 2 * request.plan.cp))]
    named = [way for group in fault.ways if (way := _first(request, group))] or [_first(request, gathering)]
    ways = (" ".join(f"{name}={'null' if value is None else value}" for name, value in way.items()) for way in named)
    return f"{fault.text}; set {', or '.join(ways)}"


def _first(request: ContextRequest, ways: Iterable[Way]) -> Way:
    """The first that is legal; empty for none."""
    return next((found for way in ways if (found := _legal(request, way))), {})


def _legal(request: ContextRequest, way: Way) -> Way | None:
    for _ in range(2):
        changed = request.set(way)
        if {"parallel.cp", "batch.sequence_length"} & way.keys() and not changed.possible:
            return None
        left = list(find_faults(changed, choose_context(changed)))
        if not left:
            return way
        if not all(fault.unused for fault in left):
            return None
        way = way | {name: value for fault in left for name, value in fault.unused.items()}
    return None


def find_faults(request: ContextRequest, chosen: ContextPlan) -> Iterator[ContextFault]:
    """What is wrong with a request, for which `chosen` was found."""
    if request.plan.cp == 1:
        yield from _alone(request.asked)
        return
    yield from _unused(request.asked, chosen)
    yield from list(_heads(request, chosen)) or _dealing(request, chosen)


def _way(**values: Any) -> Way:
    return {f"{SECTION}.{name}": value for name, value in values.items()}


def _smaller(request: ContextRequest) -> list[Way]:
    return [{"parallel.cp": n} for n in reversed(list_divisors(request.plan.cp)[:-1])]


def _list_lengths(request: ContextRequest, multiple: int) -> list[Way]:
    """The nearest lengths of a sequence that can be dealt out."""
    whole = math.lcm(multiple, request.plan.cp * request.plan.tp)
    below = request.length // whole * whole
    return [{"batch.sequence_length": length} for length in (below, below + whole) if length]


GATHER = _way(method="allgather")


def _alone(asked: ContextConfig) -> Iterator[ContextFault]:
    given = {name: value for name in UNSET if (value := getattr(asked, name)) != UNSET[name]}
    if given:
        names = ", ".join(f"{SECTION}.{name}={value}" for name, value in given.items())
        unset = _way(**{name: UNSET[name] for name in given})
        text = f"{names}: for ranks that share sequences, and parallel.cp=1 has none"
        yield ContextFault(text, [[unset], [{"parallel.cp": 2}]], unset)


def _unused(asked: ContextConfig, chosen: ContextPlan) -> Iterator[ContextFault]:
    """Settings that what was chosen has no use for."""
    if chosen.outer == 1 and asked.order != "auto":
        reset = _way(order="auto")
        text = (
            f"{SECTION}.order={asked.order} has no meaning with {SECTION}.method={asked.method}, where every rank has "
            "whole sequences"
        )
        yield ContextFault(text, [[reset], [GATHER]], reset)


def _heads(request: ContextRequest, chosen: ContextPlan) -> Iterator[ContextFault]:
    asked, plan, layer = request.asked, request.plan, request.layers[0]
    name = f"{SECTION}.method={asked.method}"
    heads = f"heads={layer.heads}, kv_heads={layer.kv_heads}" + f" and parallel.tp={plan.tp}" * (plan.tp > 1)
    if asked.method == "ulysses" and plan.cp not in request.legal:
        text = f"{name} cannot share {heads} over parallel.cp={plan.cp} ranks"
        yield ContextFault(text, [_smaller(request), [GATHER]])
    if asked.method == "hybrid" and chosen.inner == 1:
        text = f"{name} needs some of parallel.cp={plan.cp} ranks on a node to share {heads}"
        yield ContextFault(text, [[GATHER], [_way(method="ulysses")]])


def _dealing(request: ContextRequest, chosen: ContextPlan) -> Iterator[ContextFault]:
    length, plan, whole = request.length, request.plan, length_multiple(chosen, request.plan)
    if length % whole == 0:
        return
    text = f"batch.sequence_length={length} cannot be dealt out to parallel.cp={plan.cp} ranks in {chosen.order} order"
    yield ContextFault(text, [*([way] for way in _list_lengths(request, whole)), _smaller(request)])


# What planning asks of every feature (`planning/features.py`).


def check_blocks(parallel: ParallelConfig, spec: ModelSpec | None, world: int, node: int) -> list[str]:
    """Registered kinds of attention, which cannot share sequences."""
    if spec is None or parallel.cp == 1:
        return []
    return [
        f"parallel.cp={parallel.cp}: the attention block '{entry.name}' ({entry.home}) sees the tokens of its own rank "
        "alone; set parallel.cp=1"
        for kinds, entry in registered_blocks(spec)
        if kinds is ATTENTION
    ]


def warn_of_context(config: Config, spec: ModelSpec, plan: Plan, node: int) -> list[str]:
    """What is legal and slow, on nodes of `node` processes."""
    context = resolve_context(config, spec, plan, node)
    if context is None:
        return []
    request = request_of(config, spec, plan, node)
    return [*_between_nodes(request, context), *_not_dealt(request, context)]


def _between_nodes(request: ContextRequest, context: ContextPlan) -> Iterator[str]:
    if context.inner > 1 and request.inside % context.inner:
        other = "hybrid" if inner_ranks(request) else "allgather"
        yield (
            f"heads are exchanged over {context.inner} ranks on several nodes of {request.node} processes, between "
            f"which a byte takes some {BETWEEN_NODES:g} times as long; parallel.context.method={other} exchanges none "
            "between them"
        )


def _not_dealt(request: ContextRequest, context: ContextPlan) -> Iterator[str]:
    """Blocks that `order=auto` would take if they divided the length."""
    blocks = math.lcm(2 * BLOCK * context.outer, request.plan.cp * request.plan.tp)
    if request.asked.order != "auto" or context.order != "zigzag" or request.length % blocks == 0:
        return
    below = request.length // blocks * blocks
    near = [request.set({"batch.sequence_length": length}) for length in (below, below + blocks) if length]
    slower = f"{context_cost(near[-1], context) / context_cost(near[-1], build_context(near[-1], context.inner)):.1f}"
    if slower != "1.0":
        yield (
            f"batch.sequence_length={request.length} cannot be dealt out in blocks of {BLOCK}: in zigzag order "
            f"attention takes about {slower} times as long on GPUs; "
            f"batch.sequence_length={' or '.join(str(one.length) for one in near)} can"
        )


FEATURE = Feature("context", check_model=check_blocks, collect_warnings=warn_of_context)
