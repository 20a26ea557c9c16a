"""Memory of a device over one step, by category: the schedule's program is replayed, action by action, layer by layer.

States that stay (parameters, optimizer) are those of `planning/states.py`, activations those of
`planning/layer.py`. Between them a step has what comes and goes: gathered parameters, gradients, which grow while
activations shrink, buffers of reductions and transfers, and what a layer's backward pass needs at once.

FSDP reduces on a stream of its own, and the caching allocator keeps a pool for each stream: memory that activations
have left is not given to reduced gradients. So more is reserved than is ever allocated at once (`MemoryPeak.pools`).
Gradients of whole shards, which no ranks share, are added up where they are computed, and have no pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import zip_longest
from math import prod

from trainer.config import Config
from trainer.config.model import AttentionSpec, ModelSpec
from trainer.parallel.compress.plan import reduces_at_step_end
from trainer.parallel.context.plan import attention_kernel, gathered_elements
from trainer.parallel.pipeline.plan import estimated_costs
from trainer.planning.documents import mask_bytes
from trainer.planning.float8 import float8_elements, gathered_in_float8
from trainer.planning.layer import Program, has_experts, head_program, model_programs, trains_head
from trainer.planning.parameters import UpdateSettings, head_rows, layer_specs, layer_tables
from trainer.planning.plan import Plan
from trainer.planning.recompute import RecomputeEffect, left_by_recompute
from trainer.planning.resolve import Layout
from trainer.planning.schedules.ir import COMPUTE, Action, Schedule, split_overlaps
from trainer.planning.schedules.lower import lower_all
from trainer.planning.states import (
    ELEMENT_BYTES,
    MASTER_BYTES,
    MAX_IN_FLIGHT,
    LocalParameters,
    StateBytes,
    feedback_bytes,
    frozen_bytes,
    local_parameters,
    rank_states,
    shared_experts,
    shares_frozen,
    summed_gemms,
    sums_in_head,
    sums_on_device,
    symmetric_buffer_bytes,
)

# Bytes that attention takes beside what a layer saves: keys that ranks gather, and masks.


PLACE = 8
"""Bytes of a place in a sequence."""


def gathered_keys(layout: Layout, element: int) -> list[float]:
    """Bytes of the gathered keys and values of each layer. Its backward pass has those of a group of heads and of the
    next one; gradients, before and behind their way into the ranks' order; and of two groups those that all ranks have
    sent, until they are added up."""
    size, layers = element * layout.batch.micro_size, layer_specs(layout.spec)
    if layout.context is None:
        return [0.0] * layout.spec.depth
    length, tp = layout.batch.sequence_length, layout.plan.tp
    return [size * gathered_elements(layer.attention, layout.context, length, tp) for layer in layers]


def groups_of_heads(layout: Layout) -> list[int]:
    """In how many groups of heads each layer attends."""
    context, tp = layout.context, layout.plan.tp
    return [1 if context is None else context.parts(layer.attention, tp) for layer in layer_specs(layout.spec)]


def mask_bytes_by_layer(layout: Layout, masked: bool) -> list[float]:
    """Bytes of the masks of a micro-batch on a GPU, at the first layer of a stage that takes each: layers with one
    window share theirs, apart from those with a soft cap or sinks. masked: whether documents are."""
    layers, found = [layer.attention for layer in layer_specs(layout.spec)], [0.0] * layout.spec.depth
    for stage in layout.pipeline.split:
        kinds = {(layers[index].window, layers[index].changes_softmax): index for index in reversed(stage)}
        for index in kinds.values():
            found[index] = mask_of(layout, layers[index], masked)
    return found


def mask_of(layout: Layout, attention: AttentionSpec, masked: bool) -> float:
    """Bytes of what `model.context.ContextGroup.build_mask`, or `model.attention.build_mask`, returns on a GPU."""
    context, length = layout.context, layout.batch.sequence_length
    batch, tables = (
        layout.batch.micro_size if masked else 1,
        attention_kernel(attention, context, length, masked) == "block_mask",
    )
    if context is None:
        return mask_bytes(batch, length, length) * tables
    order = 2.0 * PLACE * length  # of tokens over ranks, there and back
    return order + mask_bytes(batch, length // context.outer, length) * tables


# What a device holds, replayed over a step.


CATEGORIES = (
    "parameters",
    "optimizer",
    "average of weights",
    "gradients",
    "gathered parameters",
    "activations",
    "logits and loss",
    "backward of a layer",
    "communication buffers",
    "error feedback",
)


MOMENTARY = ("backward of a layer", "gradients", "communication buffers", "gathered parameters")
"""Categories of what is held for a moment within an action, in the order of `MemoryReplay.look`."""

FRAGMENTS = 0.03
"""What the allocator cannot use between blocks, as a share of the most that is allocated: fitted to reserved memory of
bench/results/2026-11-h200-h100.md."""
PUT_OFF = 0.15
"""The same of a split backward, which frees in another order than it allocates, as a share of the most that activations
take."""


@dataclass(frozen=True)
class MemoryPeak:
    """The fullest moment of a rank. All sizes in bytes.

    rank: in the pipeline. where: the action, its place among the rank's actions, and the unit in it. categories: what
    is allocated. pools: what the allocator holds beside, in pools of other streams and of freed blocks. host: the most
    that inputs of recomputed layers take in host memory, at any moment.
    """

    rank: int
    where: str
    categories: dict[str, float]
    pools: float
    host: float = 0.0

    @cached_property
    def allocated(self) -> float:
        return sum(self.categories.values())

    @property
    def reserved(self) -> float:
        return self.allocated + self.pools

    def rows(self) -> list[tuple[str, float]]:
        """Labels and bytes for a table; terms of zero are left out."""
        rows = [*self.categories.items(), ("allocator's pools", self.pools), ("sum", self.reserved)]
        return [(label, size) for label, size in rows if size >= 1]


def decoded_at_once(spec: ModelSpec, tp: int) -> list[float]:
    """Of each layer, elements of the frozen matrices in fp8 that are decoded at a time: at most two large ones, which
    share their input (gate and up)."""
    sizes = ([prod(info.multiplied(tp)) for info in table.values() if info.float8] for table in layer_tables(spec))
    return [float(sum(sorted(some)[-2:])) for some in sizes]


def count_turns(layer: Program, left: RecomputeEffect, compiled: bool) -> tuple[int, int]:
    """How often each pass of a layer gives the turn to the pass that it overlaps with: at every exchange of
    `model.dispatch.AllToAll`. Recompute sends rows and weights again, and eager layers send rows back again too."""
    if not layer.experts:
        return 0, 0
    return 4, 3 + (2 if compiled else 3) * (not layer.experts.isdisjoint(left.again))


def find_peaks(config: Config, layout: Layout, lowered: bool = True, node: int | None = None) -> list[MemoryPeak]:
    """The fullest moment of each pipeline rank.

    lowered: whether transfers are replayed too, and not computation alone, which is quicker.
    node: processes of a machine, all of them if None.
    """
    model = ModelBytes(config, layout, node or layout.plan.world)
    schedule = layout.pipeline.schedule
    overlaps = layout.plan.overlaps
    if lowered:
        programs = programs_of(schedule, overlaps)
    else:
        programs = tuple(order if overlaps else tuple(split_overlaps(order)) for order in schedule.orders)
    return [MemoryReplay(model, rank, programs[rank]).peak() for rank in range(schedule.ranks)]


def can_replay(plan: Plan) -> bool:
    """Whether `find_peaks` counts what the plan's engine holds: DeepSpeed reduces in buffers of its own."""
    return plan.engine == "torch"


@lru_cache(64)
def programs_of(schedule: Schedule, overlaps: bool) -> tuple[tuple[Action, ...], ...]:
    """What all ranks execute, transfers included."""
    return lower_all(schedule, overlaps=overlaps)


class ModelBytes:
    """Bytes of each unit of the model (embedding, layers, head) on a tensor-parallel rank."""

    def __init__(self, config: Config, layout: Layout, node: int):
        self.layout, self.plan = layout, layout.plan
        spec, plan, batch = layout.spec, layout.plan, layout.batch
        self.feedback = feedback_bytes(config, spec, plan, layout.pipeline, node)
        once = reduces_at_step_end(config.parallel.grad_comm, plan, node)
        self.element = ELEMENT_BYTES[config.precision.compute]
        self.tokens = layout.tokens
        self.stream = self.element * self.tokens * spec.width / plan.tp
        costs = estimated_costs(config, spec, plan, batch, self.element)
        self.activation = costs.activation
        tp_overlap, room = config.parallel.tp_overlap, config.parallel.ep_capacity
        programs = model_programs(spec, batch.sequence_length, plan.tp, self.element, tp_overlap, room=room)
        tiled = bool(config.activation.tile)
        # What a layer holds from I to W.
        self.deferred = [
            self.tokens * (program.deferred - program.second_half.deferred * tiled) * (not spec.adapter.rank)
            for program in programs
        ]
        # Parameters of a layer whose gradients never exist beside their sums.
        self.summed = [
            sum(prod(gemm.shape) for gemm in gemms.values())
            for gemms in summed_gemms(config, spec, plan, batch.accumulation, programs)
        ]
        left, keys = left_by_recompute(programs, config.activation, config.compile), gathered_keys(layout, self.element)
        more = [self.tokens * rest.eager.saved for rest in left]
        if config.compile:  # which keeps gathered keys instead of the rank's own, where nothing is recomputed
            more = [
                (size * (1 - 1 / plan.cp) - self.tokens * program.total("fused")) * (rest.saved == program.saved)
                for size, rest, program in zip(keys, left, programs)
            ]
        masked = mask_bytes_by_layer(layout, config.data.mask_documents)
        self.activation = tuple(map(sum, zip(self.activation, [0.0, *more, 0.0], [0.0, *masked, 0.0])))
        self.tile = min(config.activation.tile or 0, self.tokens / plan.tp)
        self.working = tuple(
            self.of_layer(program, rest, size * (3 + (count > 1) + min(2, count)) / count, count) + self.element * held
            for program, rest, size, count, held in zip(
                programs, left, keys, groups_of_heads(layout), decoded_at_once(spec, plan.tp)
            )
        )
        self.host = tuple(self.tokens * rest.host for rest in left)
        self.turns = [count_turns(program, rest, config.compile) for program, rest in zip(programs, left)]
        # What a layer computes forward and does not keep.
        self.dropped = [self.tokens * (program.saved - rest.saved - rest.host) for program, rest in zip(programs, left)]
        # The newest input that went to the host, and the one that is coming back.
        self.passing = 2 * self.stream * any(self.host)
        head = head_program(spec, plan.tp, self.element)
        own, columns = head.gemms["head"].shape
        rows = head_rows(own)
        aligned = self.element * rows * columns * (rows > own)  # the copy of the head that products take
        at_once = min((config.loss.tile or self.tokens) * plan.tp, self.tokens)
        chunk = min(config.loss.chunk or at_once, at_once)
        # Four fp32 tensors: scores, exponentials, gradients, and those where there is a target. Compiled: none.
        self.loss = max(aligned, 0.0 if config.compile else 4.0 * MASTER_BYTES * chunk * own)
        self.logits = self.tokens * head.total("saved", "loss")
        if config.loss.tile:  # what is left of a tile is added to gradients in fp32
            self.loss += self.element * at_once * rows + self.stream + aligned
            self.logits = MASTER_BYTES * rows * columns
        # Of the head: parameters whose gradient never exists beside its sum, and bytes of one that does.
        sums = sums_in_head(config, spec, plan, batch.accumulation)
        self.head_summed = own * columns * sums
        self.head_gradient = self.element * rows * columns * trains_head(spec) * (not sums)
        self.held: LocalParameters = local_parameters(spec, plan.tp, plan.ep)
        self.experts: LocalParameters = shared_experts(spec, plan.ep)
        self.frozen: LocalParameters = frozen_bytes(spec, plan.tp, plan.ep, self.element)
        sums = batch.accumulation > 1 and sums_on_device(plan, config.precision.reduce == "fp32")
        placement = layout.pipeline.schedule.placement
        self.states: list[StateBytes] = rank_states(
            spec, plan, self.element, layout.pipeline.split, placement, once, sums, UpdateSettings.of(config)
        )
        self.shard = plan.shard
        self.every = plan.reduces_each_micro_batch and not once
        self.copied = config.parallel.zero.collectives == "copy_engine"
        self.boxes = symmetric_buffer_bytes(config.parallel.tp_overlap, self.stream * plan.tp)
        if config.parallel.ep_dispatch == "shared_memory" and has_experts(spec):  # tokens, and sums from each rank
            self.boxes += 2 * (1 + plan.ep) * self.stream
        # Of a layer's weights that a step casts once: an element has a byte for each of two products.
        self.operands = [2 * plan.casts_once * size for size in float8_elements(config, spec, plan)]
        # Bytes of a layer in fp8 on their way.
        self.narrow = max(gathered_in_float8(config, spec, plan), default=0.0)

    def of_layer(self, layer: Program, left: RecomputeEffect, keys: float, groups: int) -> float:
        """What the backward pass of a layer holds besides: what it computes again, gradients of the hidden states and
        of the widest GEMMs, and the whole tokens where ranks share them. With tiles: the more of that of both halves.
        In any case no less than while attention's kernel runs. keys: bytes of gathered keys and their gradients;
        groups: of heads, one after the other."""
        whole = self.plan.tp if self.plan.tp > 1 else 0
        stream, second = layer.input.result, layer.second_half
        attending = layer.saved - second.saved - left.saved - left.host + (1 + whole) * stream
        attending += self.of_attention(layer, groups)
        first = {name: op.result for name, op in layer.computed.items() if not (self.tile and name in second.gemms)}
        saved = layer.saved - second.saved * bool(self.tile)
        computed = saved - left.saved - left.host + (2 + whole) * stream + 2 * max(first.values())
        working = self.tokens * max(computed, attending) + keys
        if not self.tile:
            return working
        widest = max((gemm.result for gemm in second.gemms.values()), default=0.0)  # a registered block may have none
        tile = self.tile * self.plan.tp * (second.saved + (2 + whole) * stream + 2 * widest)
        weights = sum(prod(gemm.shape) for gemm in second.gemms.values())
        return max(working, 2 * self.stream + tile + MASTER_BYTES * weights)

    def of_attention(self, layer: Program, groups: int) -> float:
        """Bytes of a token in the backward kernel of attention: the gradients of its output and of its inputs, and what
        cuDNN and FlashAttention-2 take to add them up, of a group of heads: those of the queries in fp32, and those of
        shared keys and values for each head that reads them."""
        results = {name.removeprefix("attention."): gemm.result for name, gemm in layer.gemms.items()}
        queries = results.get("q", results.get("q_b", 0.0))  # 0 for a registered block
        # Latent attention has as many keys as queries, and values of at most their size.
        keys, values = (results.get(name, queries) for name in "kv")
        added_up = (MASTER_BYTES / self.element + 2 * (keys < queries)) * queries
        return 2 * queries + keys + values + added_up / groups


class MemoryReplay:
    """One rank's program, with the bytes held of each category."""

    def __init__(self, model: ModelBytes, rank: int, program: Sequence[Action]):
        self.model, self.rank, self.program = model, rank, program
        layout, states = model.layout, model.states[rank]
        self.shards = model.shard, model.plan.expert_mesh["expert_shard"]
        # Whether gradients, and those of shared experts, are sent in messages: that of whole shards is what stays.
        self.sends = [ranks > 1 or states.offloaded for ranks in self.shards]
        self.stages = layout.pipeline.stages(rank)
        self.units = {stage: model.held.units(layers) for stage, layers in self.stages.items()}
        # Of each unit, the experts that ranks share: units of their own.
        self.experts = {stage: model.experts.units(layers) for stage, layers in self.stages.items()}
        # Bytes that are gathered of each unit: frozen parameters too, where ranks share them.
        self.gathering = {stage: [model.element * size for size in units] for stage, units in self.units.items()}
        if shares_frozen(model.plan):
            fixed = {stage: model.frozen.units(layers) for stage, layers in self.stages.items()}
            self.gathering = {stage: [*map(sum, zip(units, fixed[stage]))] for stage, units in self.gathering.items()}
        self.placement, self.depth = layout.pipeline.schedule.placement, layout.spec.depth
        self.held, self.total = dict.fromkeys(CATEGORIES, 0.0), 0.0
        self.hold("parameters", states.frozen)
        if not states.offloaded:
            self.hold("parameters", states.parameters)
            self.hold("optimizer", states.optimizer)
            self.hold("average of weights", states.average)
        self.hold("error feedback", model.feedback[rank])
        self.hold("activations", model.passing)
        self.hold("communication buffers", model.boxes)
        if model.copied:
            largest = max(map(max, self.units.values()))
            own = -(-largest // model.shard)
            rows = min(MAX_IN_FLIGHT, own) + min(MAX_IN_FLIGHT, own * (model.shard - 1))
            self.hold("communication buffers", 2.0 * model.element * rows)
        self.host = self.most_host = 0.0
        self.gathered = {stage: self.gathered_bytes(stage) for stage in self.stages}
        self.lowered = any(action.kind == "UNSHARD" for action in program)
        if not self.lowered:
            self.hold("gathered parameters", sum(self.gathered.values()))
        self.ahead = 0.0
        if model.plan.stage == 3:  # the layer that is gathered while one computes
            self.ahead = max(max(units[1:]) for units in self.gathering.values()) + model.narrow
        self.keeps_reduced = not states.offloaded or states.sums > 0
        self.backwards = dict.fromkeys(self.stages, layout.batch.accumulation)  # to come
        self.accumulated: set[int] = set()  # stages that have gradients
        self.sent = dict.fromkeys(self.stages, 0.0)  # of a stage's last reduction
        self.most, self.best = -1.0, MemoryPeak(rank, "", {}, 0.0)
        self.reduced, self.apart, self.rest = 0.0, 0.0, 0.0  # in the pool of reductions; most in it, and in the other
        self.churn = 0.0  # most that activations take
        self.block = 0.0  # of the outer unit's gradients, which is memory of its own

    def peak(self) -> MemoryPeak:
        for place, action in enumerate(self.program):
            self.place, self.action, self.overlaps = place, action, bool(action.parts)
            self.look("start", gathered=self.ahead * (action.kind in COMPUTE))
            match action.kind:
                case "F" | "B" | "I" | "OVERLAP_F_B":
                    for _ in zip_longest(*map(self.go_through, action.computed)):
                        pass
                case "W":
                    self.weights(action.stage)
                case "UNSHARD":
                    self.hold("gathered parameters", self.gathered[action.stage])
                case "RESHARD":
                    self.drop(action.stage, self.gathered[action.stage])
                case "RECV_F" | "RECV_B":
                    self.hold("communication buffers", self.model.stream)
                case "SEND_F" | "SEND_B":
                    self.hold("communication buffers", -self.model.stream)
        flat = self.model.shard > 1 and not self.model.copied
        gather = max(max(units) for units in self.gathering.values()) * flat
        fragments = FRAGMENTS * self.most
        if any(action.kind == "W" for action in self.program):
            fragments = max(fragments, PUT_OFF * self.churn)
        pools = self.rest + self.apart + gather - self.most + fragments
        return replace(self.best, pools=pools, host=self.most_host)

    def hold(self, category: str, size: float) -> None:
        self.held[category] += size
        self.total += size

    def look(
        self, unit: str, working: float = 0.0, gradients: float = 0.0, buffers: float = 0.0, gathered: float = 0.0
    ) -> None:
        """Notes the moment if it is the fullest so far. What is named is held for this moment only."""
        momentary = (working, gradients, buffers, gathered)
        total = self.total + sum(momentary)
        self.rest = max(self.rest, total - self.reduced)
        self.churn = max(self.churn, self.held["activations"])
        if total > self.most:
            self.most = total
            where = f"{self.action}, action {self.place + 1} of {len(self.program)}, {unit}"
            self.best = MemoryPeak(self.rank, where, self.moment(momentary), 0.0)

    def moment(self, momentary: Sequence[float]) -> dict[str, float]:
        """Bytes by category with those of `MOMENTARY`."""
        added = dict(zip(MOMENTARY, momentary))
        return {name: size + added.get(name, 0.0) for name, size in self.held.items()}

    def gathered_bytes(self, stage: int) -> float:
        """Copies of a stage's parameters in the compute type: of all, with what is held of them in fp8, or of
        embedding, head and one layer."""
        units = self.gathering[stage]
        held = sum(self.model.operands[layer] for layer in self.stages[stage])
        return float(units[0] + max(units[1:]) if self.model.plan.stage == 3 else sum(units) + held)

    def drop(self, stage: int, size: float) -> None:
        """Frees gathered parameters of a stage."""
        size = min(size, self.gathered[stage])
        self.gathered[stage] -= size
        self.hold("gathered parameters", -size)

    def exchanges(self, stage: int, other: int) -> bool:
        """Whether hidden states go between two stages on different ranks, in a program with transfers."""
        return self.lowered and 0 <= other < len(self.placement) and self.placement[other] != self.placement[stage]

    def take_turns(self, category: str, size: float, turns: int) -> Iterator[None]:
        """Holds bytes of a layer while the pass beside this one has its turns, if there is one."""
        self.hold(category, size * self.overlaps)
        for _ in range(turns):
            yield
        self.hold(category, -size * self.overlaps)

    def go_through(self, part: Action) -> Iterator[None]:
        """A pass, which yields where it gives the turn to the pass beside it."""
        return self.forward(part.stage) if part.kind == "F" else self.backward(part.stage, part.kind == "B")

    def forward(self, stage: int) -> Iterator[None]:
        model, layers = self.model, self.stages[stage]
        self.forget(stage)
        if layers.start == 0:
            self.hold("activations", model.activation[0])
        for layer in layers:
            self.hold("activations", model.activation[layer + 1])
            self.host += model.host[layer]
            yield from self.take_turns("activations", model.dropped[layer], model.turns[layer][0])
        self.most_host = max(self.most_host, self.host)
        if layers.stop == self.depth:
            self.hold("activations", model.activation[-1] - model.logits)
            self.hold("logits and loss", model.logits)
            self.look("loss", working=model.loss)
        if self.exchanges(stage, stage - 1):  # what was received is the input that is kept
            self.hold("communication buffers", -model.stream)
        if self.exchanges(stage, stage + 1):
            self.hold("communication buffers", model.stream)

    def backward(self, stage: int, whole: bool) -> Iterator[None]:
        """B, or I, which leaves what W needs. Of embedding and head no part is put off."""
        model, layers, units = self.model, self.stages[stage], self.units[stage]
        outer, new = 0.0, stage not in self.accumulated
        if layers.stop == self.depth:
            outer = model.head_gradient + MASTER_BYTES * new * model.head_summed
            self.look("head", working=2 * model.stream, gradients=outer)
            self.hold("logits and loss", -model.logits)
            self.hold("activations", model.logits - model.activation[-1])
        mode, last = self.reduction(stage) if whole else "", whole and self.backwards[stage] == 1
        # Of a parameter in the reduction's input, or of its gradients until they are sent.
        buffer = (model.element if model.copied else MASTER_BYTES) * (mode in ("direct", "last"))
        # Whether every layer only frees.
        steady = not self.overlaps and (not whole or (mode == "sum" and stage in self.accumulated))
        for place in reversed(range(len(layers))):
            layer, size, experts = layers[place], units[1 + place], self.experts[stage][1 + place]
            if not steady or place == len(layers) - 1:
                summed = model.summed[layer]
                gradients = (outer + model.element * (size - summed) + MASTER_BYTES * new * summed) * whole
                # FSDP keeps a layer's message while the next layer computes.
                sent = (size - experts) * self.sends[0] + experts * self.sends[1]
                self.look(f"layer {layer}", model.working[layer], gradients, buffer * sent, self.ahead)
                self.look(f"layer {layer}", 0.0, gradients, buffer * size, self.ahead)
                if mode in ("direct", "last"):
                    self.forget(stage)
            yield from self.take_turns("backward of a layer", model.working[layer], model.turns[layer][1])
            self.hold("activations", (0.0 if whole else model.deferred[layer]) - model.activation[layer + 1])
            self.host -= model.host[layer]
            if whole:
                self.gradients(stage, mode, size, experts)
                if last and model.plan.stage != 3:
                    self.drop(stage, model.element * size)
        if layers.start == 0:
            self.hold("activations", -model.activation[0])
        if whole:
            message = buffer * units[0]
            if not self.sends[0] and message > max(self.block, model.logits, *model.working):
                # One block, larger than any that was freed: new memory, which later micro-batches use again.
                self.rest += message - self.block
                self.block = message
            freed = self.gathering[stage][0] * (last or model.plan.stage == 3)  # before the reduction
            self.look("embedding, norm and head", 0.0, model.element * units[0], message, -freed)
            self.gradients(stage, mode, units[0], 0)
            self.keep(stage, message)
            if last:
                self.drop(stage, self.gathered[stage])
            self.done(stage)
        if self.exchanges(stage, stage + 1):
            self.hold("communication buffers", -model.stream)
        if self.exchanges(stage, stage - 1):
            self.hold("communication buffers", model.stream)

    def weights(self, stage: int) -> None:
        model, layers, units = self.model, self.stages[stage], self.units[stage]
        mode = self.reduction(stage)
        self.look("weight gradients", gradients=model.element * max(units))
        for layer in layers:
            self.hold("activations", -model.deferred[layer])
        if mode != "sum":  # outside of backward all of a stage is accumulated before it is reduced
            accumulated = 0.0 if mode == "last" else MASTER_BYTES * sum(units)
            self.look("reduction", gradients=accumulated, buffers=MASTER_BYTES * max(units))
            self.forget(stage)
        for size, experts in zip(units, self.experts[stage]):
            self.gradients(stage, mode, size, experts)
        self.keep(stage, MASTER_BYTES * units[0] * (mode != "sum"))
        self.done(stage)

    def keep(self, stage: int, size: float) -> None:
        """The message of a backward pass's last reduction, of embedding, norm and head, stays until the stage's next
        pass. That of whole shards is the gradients."""
        self.sent[stage] = size * (self.model.shard > 1)
        self.hold("communication buffers", self.sent[stage])

    def forget(self, stage: int) -> None:
        self.hold("communication buffers", -self.sent[stage])
        self.sent[stage] = 0.0

    def reduction(self, stage: int) -> str:
        """What happens to the gradients of the stage's next full backward pass: they are reduced at once (`direct`),
        added up (`sum`), or added up and reduced (`last`)."""
        if self.model.every:
            return "direct"
        if self.backwards[stage] > 1:
            return "sum"
        return "last" if stage in self.accumulated else "direct"

    def gradients(self, stage: int, mode: str, size: int, experts: int) -> None:
        """The gradients of a unit of `size` parameters have been computed, of which `experts` are those of experts that
        ranks share."""
        new = stage not in self.accumulated
        if mode == "sum":
            self.hold("gradients", MASTER_BYTES * size * new)
            return
        if mode == "last":
            self.hold("gradients", -MASTER_BYTES * size)
        if self.keeps_reduced and (new or mode == "last"):
            for part, shard, sends in zip((size - experts, experts), self.shards, self.sends):
                kept = MASTER_BYTES * part / shard
                self.hold("gradients", kept)
                self.reduced += kept * sends
            self.apart = max(self.apart, self.reduced)

    def done(self, stage: int) -> None:
        self.accumulated.add(stage)
        self.backwards[stage] -= 1
