"""Seconds of each unit of the model (embedding, layers, head) by pass and term, for one micro-batch under a plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import hypot, prod

from trainer.config import Config
from trainer.config.hardware import HardwareConfig
from trainer.config.model import AttentionSpec, ExpertsSpec, LayerSpec
from trainer.parallel.compress.plan import reduces_at_step_end
from trainer.parallel.context.plan import PassElements, computed_share, context_traffic
from trainer.parallel.experts.plan import DispatchTimes, choose_dispatch, dispatch_times
from trainer.parallel.pipeline.plan import estimated_costs
from trainer.planning.documents import documents_of
from trainer.planning.estimate.rates import (
    OVERLAP_MODELS,
    CollectiveOverlap,
    DeviceRates,
    RingTimes,
    TensorGroupLink,
    layer_passes,
    wire_formats,
)
from trainer.planning.float8 import BLOCKS, WIDE, float8_linears, gathered_in_float8
from trainer.planning.layer import (
    ATTENTION_BACKWARD,
    UNFUSED,
    Op,
    Program,
    embedding_program,
    find_frozen_gemms,
    head_program,
    measure_adapters,
    model_programs,
    trains_head,
)
from trainer.planning.parameters import UpdateSettings, layer_specs, moment_count, muon_flops
from trainer.planning.recompute import EagerExtra, RecomputeEffect, left_by_recompute
from trainer.planning.resolve import Layout
from trainer.planning.schedules.costs import LayerCosts
from trainer.planning.schedules.simulate import Simulation, simulate_schedule
from trainer.planning.states import (
    ELEMENT_BYTES,
    MASTER_BYTES,
    of_states,
    sent_parameters,
    shares_frozen,
    state_bytes,
    summed_gemms,
    sums_in_head,
)

TERMS = (
    "matrix products",
    "attention",
    "memory-bound kernels",
    "recompute",
    "launching",
    "tensor collectives",
    "context collectives",
    "expert collectives",
    "sharding collectives",
    "replica collectives",
    "sharding copies",
)
"""What a pass of a unit takes time for; collectives as far as they are exposed."""

AXES = {
    "tensor": "tensor collectives",
    "context": "context collectives",
    "experts": "expert collectives",
    "shard": "sharding collectives",
    "replicate": "replica collectives",
    "pipeline": "pipeline transfers",
}
"""Axes of the mesh along which ranks communicate, and the term that has what is exposed of it."""

Terms = Mapping[str, float]

KERNELS = {True: 6, False: 25}
"""Memory-bound kernels of a layer's forward pass, by whether it is compiled."""

HOST = {True: 1.0, False: 5.0}
"""How many times `launch` a kernel takes the host of a GPU, by whether the layer is compiled: modules, dispatch and
autograd. Fitted, as `REPEATED` is, to steps of a 1.1B model in micro-batches of 1 and 2 on an H200: `bench/tune.py`."""

REPEATED = {False: 3.9, True: 6.0}
"""How many forward passes of an eager layer the host takes to repeat one, by whether some operators' results are kept:
each tensor goes through hooks of `torch.utils.checkpoint`, and then each operator through Python. Compiled: one."""

MASTER = 4

WIDE_BYTES = 4
"""Of a number in fp32, in which routers multiply."""

TILE = 128
"""Rows of a tile of the grouped GEMM. A tile holds rows of one expert."""

BLOCKS_RATE = 0.82
"""Of GEMMs with a scale for each block, beside other GEMMs in fp8: measured on an H200."""

HIDDEN_BY_OTHER_PASS = 0.25
"""Share of what experts send that overlapped passes hide: the time that they saved over the time that was exposed, in
steps of two H200 (bench/results/2026-11-h200-h100.md). Kernels of both passes share the multiprocessors."""

ROUTING_KERNELS = 30
"""Small kernels that choose experts and order the rows of a layer, of which a sort has 13."""


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of a unit in each pass of a micro-batch, and once a step.

    forward, input, weight: of F, I and W. gather, reduce: what the first forward and the last backward pass of a step
    take longer, where parameters are gathered and gradients reduced once a step; copies, shards, replicas: their parts
    in copies, and in collectives among the ranks that share states and among replicas. collectives: seconds of all
    communication of a micro-batch by axis, exposed or hidden. once: the same once a step.
    """

    forward: Terms
    input: Terms
    weight: Terms
    gather: float
    reduce: float
    copies: float
    shards: float
    replicas: float
    collectives: Terms
    once: Terms


@dataclass(frozen=True)
class ModelTiming:
    """All units of a model under a layout, and the costs that schedules are simulated with."""

    units: tuple[UnitTimes, ...]
    costs: LayerCosts

    @cached_property
    def terms(self) -> dict[str, float]:
        """Seconds of one micro-batch by term, over all units and passes."""
        total: dict[str, float] = defaultdict(float)
        for unit, count in self.counted:
            for terms in (unit.forward, unit.input, unit.weight):
                for name, seconds in terms.items():
                    total[name] += count * seconds
        return total

    @cached_property
    def counted(self) -> list[tuple[UnitTimes, int]]:
        """Units, and how many are the same."""
        counts = Counter(map(id, self.units))
        return [(unit, counts[place]) for place, unit in {id(unit): unit for unit in self.units}.items()]

    def collectives(self, microbatches: int) -> dict[str, float]:
        """Seconds of communication of a step by axis over all units, exposed and hidden."""
        total: dict[str, float] = defaultdict(float)
        for unit, count in self.counted:
            for times, moved in ((microbatches, unit.collectives), (1, unit.once)):
                for axis, seconds in moved.items():
                    total[axis] += count * times * seconds
        return total


def time_units(config: Config, layout: Layout, hardware: HardwareConfig) -> ModelTiming:
    """The timing of a layout on a kind of machine."""
    return _Timer(config, layout, hardware).timing()


class _Timer:
    def __init__(self, config: Config, layout: Layout, hardware: HardwareConfig):
        self.config, self.plan, self.spec, self.batch = config, layout.plan, layout.spec, layout.batch
        self.pace, self.on_cpu = DeviceRates.of(hardware, config.precision), hardware.device == "CPU"
        self.documents = documents_of(config.data)
        self.element = ELEMENT_BYTES[config.precision.compute]
        self.tokens = layout.tokens
        self.context, first = layout.context, self.plan.first_group("cp")
        if self.context is not None:
            self.neighbours = RingTimes.among(hardware, first[: self.context.inner])
            self.gatherers = RingTimes.among(hardware, first[:: self.context.inner])
        axes = "tp", "shard", "replicate", "pp", "ep", "expert_shard", "expert_replicate"
        self.rings = {name: RingTimes.of(hardware, self.plan, name) for name in axes}
        self.launch, self.repeated, recompute = self.pace.launch, 1.0, config.activation
        if not self.on_cpu:
            self.launch *= HOST[config.compile]
        if not self.on_cpu and not config.compile:
            self.repeated = REPEATED[recompute.mode == "selective" and bool(recompute.save)]
        # Elsewhere, and in other types, a loop multiplies one expert after the other.
        self.grouped = not self.on_cpu and config.precision.compute == "bf16"
        if self.plan.ep > 1:
            self.dispatch = choose_dispatch(config, self.spec, self.plan, hardware, layout.tokens / self.plan.tp)
        schedule = layout.pipeline.schedule
        pairs = sum(bool(action.parts) for order in schedule.orders for action in order)
        # The share of passes that run in turns with another one.
        self.paired = self.plan.overlaps * pairs / (schedule.microbatches * schedule.stages)
        self.lookup, scatter = embedding_program(self.spec, self.plan.tp, self.element).ops
        self.stream = self.tokens * self.lookup.result  # bytes of a rank's part of the hidden states
        self.ways = cache(partial(self._ways, hardware))
        self.way, self.off = self.ways(scatter.sends)
        self.apart = any(action.kind == "W" for order in layout.pipeline.schedule.orders for action in order)
        self.transfer = self.rings["pp"].transfer(self.stream) if self.plan.pp > 1 else 0.0
        ranks = self.plan.tp, self.plan.shard
        self.sent = sent_parameters(self.spec, *ranks, ep=self.plan.ep)
        # Bytes of frozen parameters that are gathered with the others.
        shared = shares_frozen(self.plan)
        self.fixed = sent_parameters(self.spec, *ranks, ep=self.plan.ep, frozen=self.element) if shared else None
        folded = self.plan.tp, self.plan.expert_mesh["expert_shard"]
        self.sent_experts = sent_parameters(self.spec, *folded, experts=True, ep=self.plan.ep)
        node = min(self.plan.world, hardware.devices)
        self.scattered, self.summed = wire_formats(
            config, self.plan, node, float(ELEMENT_BYTES[config.precision.reduce])
        )
        self.reduces_once = reduces_at_step_end(config.parallel.grad_comm, self.plan, node)

    def _ways(self, hardware: HardwareConfig, sends: float) -> tuple[CollectiveOverlap, CollectiveOverlap]:
        """How GEMMs and collectives of tensor-parallel ranks run. sends: bytes of a token in each collective."""
        ring, near, sent = self.rings["tp"], hardware.node.bandwidth * 1e9, self.tokens * sends
        copies = near * (hardware.achieved.copies or hardware.node.achieved)
        link = TensorGroupLink(
            ranks=ring.ranks,
            collective=ring.seconds(sent),
            copied=(ring.ranks - 1) * sent / ring.ranks / copies,
            call=hardware.signal * 1e-6,
            adding=(1 + 1 / ring.ranks) * sent / self.pace.memory,
            hidden=self.pace.hidden,
        )
        return OVERLAP_MODELS[self.config.parallel.tp_overlap](link), CollectiveOverlap(link)

    def timing(self) -> ModelTiming:
        spec, plan, batch = self.spec, self.plan, self.batch
        costs = estimated_costs(self.config, spec, plan, batch, self.element)
        programs = model_programs(spec, batch.sequence_length, plan.tp, self.element, self.config.parallel.tp_overlap)
        left = left_by_recompute(programs, self.config.activation, self.config.compile)
        known: dict[tuple, UnitTimes] = {}
        layers, float8 = [], float8_linears(self.config.precision, spec)
        travelling = gathered_in_float8(self.config, spec, plan)
        fixed, added = find_frozen_gemms(spec), measure_adapters(spec, plan.tp)
        summed = summed_gemms(self.config, spec, plan, batch.accumulation, programs)
        for index, (program, remaining, layer) in enumerate(zip(programs, left, layer_specs(spec))):
            places = {name: f"layers.{index}.{name}" for name in program.gemms}
            narrow = frozenset((name, float8[place].recipe) for name, place in places.items() if place in float8)
            # Of layers that are equal, keep the same and have the same adapters.
            key = id(program), id(remaining), narrow, fixed[index], added[index]
            if key not in known:
                sent = self.sent.layers[index], self.sent_experts.layers[index]
                frozen = self.fixed.layers[index] if self.fixed else 0
                known[key] = self._layer(
                    program,
                    remaining,
                    layer,
                    narrow,
                    (*sent, frozen),
                    travelling[index],
                    fixed[index],
                    added[index],
                    summed[index],
                )
            layers.append(known[key])
        units = (self._embedding(), *layers, self._head())
        return ModelTiming(
            units,
            replace(
                costs,
                f=tuple(sum(unit.forward.values()) for unit in units),
                i=tuple(sum(unit.input.values()) for unit in units),
                w=tuple(sum(unit.weight.values()) for unit in units),
                b=tuple(sum(unit.input.values()) + sum(unit.weight.values()) for unit in units),
                unshard=tuple(unit.gather for unit in units),
                reduce=tuple(unit.reduce for unit in units),
                transfer=self.transfer,
                latency=self.rings["pp"].latency,
            ),
        )

    def _product(self, gemm: Op, recipe: str = "none", sums: bool = False) -> float:
        """recipe: in which it multiplies in fp8. What the casts of its operands take is in `_casts`. sums: whether it
        adds a weight gradient to the sum of others."""
        (outputs, inputs), flops, pace = gemm.shape, self.tokens * gemm.flops, self.pace
        rows, matrices, calls = self.tokens * gemm.rows, 1.0, 1.0
        if gemm.matrices > 1:  # of this rank's experts; the last tile of rows of each is half empty on average
            matrices = gemm.matrices / self.plan.ep
            flops *= 1 + matrices * TILE / 2 / rows
            calls = 1.0 if self.grouped else matrices
        elements = rows * (outputs + inputs) + matrices * outputs * inputs
        if gemm.wide and self.element < WIDE_BYTES:
            # The input is read, written in fp32, and read again; so are, in backward, gradients of its size.
            moved = rows * ((2 * WIDE_BYTES + self.element) * inputs + WIDE_BYTES * outputs)
            return hypot(flops / pace.wide, moved / pace.memory) + 2 * pace.kernel
        if recipe == "none" or pace.float8 is None:
            moved = self.element * elements + (2 * MASTER - self.element) * outputs * inputs * sums
            return hypot(flops / pace.products, moved / pace.memory) + calls * pace.kernel
        moved = elements / 3 * (self.element + 2)
        rate = pace.float8 * (BLOCKS_RATE if recipe == BLOCKS else 1.0)
        return hypot(flops / rate, moved / pace.memory) + pace.kernel

    def _memory_traffic(self, program: Program, left: RecomputeEffect) -> tuple[float, float, float]:
        """Bytes of a token that the memory-bound kernels of a layer move: forward, backward, and where backward repeats
        them. Permutations are counted as they are moved. Compiled, kernels are fused until they move what is saved."""
        if self.config.compile:
            held = program.saved - program.total("saved", "permute")
            return held, 2 * held, max(0.0, held - left.saved - left.host)
        repeated = program if left.attends else program.second_half
        again = repeated.total("traffic") * bool(left.attends or left.again)
        return program.total("traffic"), program.total("back_traffic"), again

    def _casts(self, program: Program, recipes: Mapping[str, str], again: Mapping[str, float]) -> tuple[float, float]:
        """Seconds of the casts to fp8 in the forward and in the backward pass of a layer: each operand is read for its
        scale, read again and written. GEMMs that read one operand share its cast: those of one gathered input, and the
        two that read a gradient. Micro-batches share the casts of weights that a step casts once. recipes: by the
        names of the projections that multiply in fp8; again: the share of each projection that backward computes
        again."""
        if self.pace.float8 is None:
            return 0.0, 0.0
        forward = backward = 0.0
        shared = [op.gemms for op in program.gathers]
        alone = [(name,) for name in program.gemms if not any(name in names for names in shared)]
        for names in (*shared, *alone):
            narrow = [name for name in names if name in recipes]
            if not narrow:
                continue
            gemms = [program.gemms[name] for name in narrow]
            inputs = self.tokens * gemms[0].rows * gemms[0].shape[1]
            weights = sum(prod(gemm.shape) for gemm in gemms)
            if self.plan.casts_once:
                forward, weights = forward + 2 * weights / self.batch.accumulation, 0
            forward += inputs + weights
            backward += max(again.get(name, 0.0) for name in narrow) * (inputs + weights)
            # The gradient and the weight for the input's gradient, and the input for the weight's.
            backward += sum(self.tokens * gemm.rows * gemm.shape[0] for gemm in gemms) + weights
            backward += inputs * any(recipes[name] != WIDE for name in narrow)
        moved = (1.0 if self.config.compile else UNFUSED) * (2 * self.element + 1) / self.pace.memory
        return forward * moved, backward * moved

    def _attention(self, program: Program, attention: AttentionSpec) -> float:
        """The forward pass of attention, on the rank that has most of it."""
        shape = self.context, self.batch.sequence_length, self.batch.micro_size
        by, share = computed_share(attention, *shape, self.documents, self.on_cpu)
        return self.tokens * program.total("flops", "attention") / self.pace.attention[by] * share

    def _shared(self, attention: AttentionSpec, behind: float, again: float) -> tuple[Terms, Terms, float]:
        """What ranks that share sequences add to a layer's forward and backward pass, exposed, and all of it. Keys but
        those of the first heads are gathered behind attention, which takes `behind` in the forward pass; again: how
        often backward repeats its block."""
        if self.context is None:
            return {}, {}, 0.0
        length, tp = self.batch.sequence_length, self.plan.tp
        moved = context_traffic(attention, self.context, length, tp, again, self.config.compile)
        size, parts = self.element * self.batch.micro_size, self.context.parts(attention, tp)
        exchanged = _transfer_seconds(self.neighbours, moved.inner, size, 2)
        fetched = _transfer_seconds(self.gatherers, moved.outer, size, parts)
        terms = []
        for near, far, computed in zip(exchanged, fetched, (behind, (ATTENTION_BACKWARD + again) * behind)):
            hidden = self.pace.exposed(far * (1 - 1 / parts), computed * (1 - 1 / parts))
            terms.append({"context collectives": near + far / parts + hidden})
        return terms[0], terms[1], exchanged.both + fetched.both

    def _layer(
        self,
        program: Program,
        left: RecomputeEffect,
        layer: LayerSpec,
        float8: frozenset[tuple[str, str]],
        parameters: tuple[int, int, int],
        narrow: float,
        fixed: frozenset[str],
        added: tuple[float, float, float, float],
        summed: Mapping[str, Op],
    ) -> UnitTimes:
        """float8: the projections that multiply in fp8, and their recipes; parameters: see `_sharded`; narrow: of the
        parameters, those that are gathered in fp8; fixed: the projections that are frozen; added: see
        `measure_adapters`; summed: see `summed_gemms`."""
        spec = layer.attention
        tokens, pace = self.tokens, self.pace

        def products_of(narrow: Mapping[str, str]) -> dict[str, float]:
            return {name: self._product(gemm, narrow.get(name, "none")) for name, gemm in program.gemms.items()}

        products = products_of(dict(float8))
        for_weights = products_of({name: recipe for name, recipe in float8 if recipe != WIDE})
        for_weights |= {name: self._product(gemm, sums=True) for name, gemm in summed.items()}
        for_weights = {name: 0.0 if name in fixed else seconds for name, seconds in for_weights.items()}
        took = layer_passes(lambda sends: self.ways(sends)[0], program, products, for_weights, left.again, self.apart)
        attention = self._attention(program, spec)
        cast = self._casts(program, dict(float8), left.again)
        kernels = KERNELS[self.config.compile]
        bound, back_bound, repeated = (tokens * size / pace.memory for size in self._memory_traffic(program, left))
        experts, routed = layer.feed_forward.experts, self._dispatch(layer.feed_forward.experts)
        permutes = tokens * program.total("moved") / pace.memory + routed.copies
        routing = ROUTING_KERNELS * bool(experts.count)
        unread = EagerExtra() if self.config.compile else left.eager
        sent = sum(self.ways(sends)[0].moving for sends in unread.sends)
        again = took.again.products + sum(products[name] for name in unread.again)
        again += left.again.get("attention", 0.0) * attention
        again += repeated
        # Recompute sends tokens to their experts again, and eager layers also the results back. Nothing hides it.
        repeats = 0.5 if self.config.compile else 1.0
        repeats *= not program.experts.isdisjoint(left.again)
        again += repeats * permutes
        # Each pass reads matrices in fp8 and writes them in the compute type.
        decoded = added[2] * (1 + self.element) / pace.memory
        to_weights = sum(for_weights.values())
        low = [self.element * tokens * elements / pace.memory for elements in added[:2]]
        forward = {
            "matrix products": took.forward.products,
            "attention": attention + pace.kernel,
            "memory-bound kernels": bound + permutes + (kernels + routing) * pace.kernel + low[0] + cast[0] + decoded,
            "tensor collectives": took.forward.exposed,
        }
        backward = {
            "matrix products": took.backward.products - to_weights,
            "attention": ATTENTION_BACKWARD * attention + pace.kernel,
            "memory-bound kernels": back_bound + 2 * kernels * pace.kernel + permutes + low[1] + cast[1] + decoded,
            "recompute": again + decoded * bool(left.again),
            "tensor collectives": took.backward.exposed + took.again.exposed + sent,
        }
        shared_forward, shared_backward, shared = self._shared(spec, attention, left.attends)
        forward, backward = {**forward, **shared_forward}, {**backward, **shared_backward}
        travel, repeated = routed.link, routed.link * repeats
        computed = sum(forward.values()), sum(backward.values())
        for terms, rows, other in ((forward, travel, computed[1]), (backward, travel + repeated, computed[0])):
            terms["expert collectives"] = rows - self.paired * HIDDEN_BY_OTHER_PASS * min(rows, other)
        launches = (len(products) + kernels + routing + 1) * self.launch
        forward["launching"] = max(0.0, launches - sum(forward.values()))
        if routed.link:  # the host waits for sizes, and the device then for the host
            forward["launching"] += (1 - self.paired) * (pace.kernel + self.launch)
        launches *= 2 + self.repeated * bool(left.again)
        backward["launching"] = max(0.0, launches - sum(backward.values()) - to_weights)
        weight = {"matrix products": to_weights}
        moved = {"tensor": took.moved + sent, "context": shared, "experts": 2 * travel + repeated}
        in_gemms = sum(prod(gemm.shape) for gemm in summed.values())
        return self._sharded(parameters, forward, backward, weight, moved, narrow, in_gemms)

    def _dispatch(self, experts: ExpertsSpec) -> DispatchTimes:
        """What a micro-batch's tokens take to the experts of a layer on other ranks and back, with balanced loads."""
        if self.plan.ep == 1 or not experts.count:
            return DispatchTimes(0.0, 0.0)
        ring, tokens = self.rings["ep"], self.tokens / self.plan.tp
        return dispatch_times(self.dispatch, experts.top_k, tokens, self.stream / tokens, ring, self.pace.memory)

    def _embedding(self) -> UnitTimes:
        """The look-up, and the gradient of the whole table, most of which is zero."""
        stream, table = self.stream, prod(self.lookup.shape)
        collective = self.off.moving
        forward = {"memory-bound kernels": 3 * stream / self.pace.memory, "tensor collectives": collective}
        weight = {
            "memory-bound kernels": (3 * stream + self.element * table) / self.pace.memory,
            "tensor collectives": collective,
        }
        frozen = self.fixed.outer[True, False] if self.fixed else 0
        size = self.sent.outer[True, False], 0, frozen
        return self._sharded(size, forward, {}, weight, {"tensor": 2 * collective}, outer=True)

    def _head(self) -> UnitTimes:
        """Norm, logits and loss, whose compiled chunks read the logits twice and write their gradient over them."""
        program = head_program(self.spec, self.plan.tp, self.element)
        head = program.gemms["head"]
        product = self._product(head)
        loss = 3 * head.result if self.config.compile else program.total("traffic")
        loss *= self.tokens / self.pace.memory
        first, back, collective = self.way.gathered(product), self.off.columns(product, product), self.off.moving
        forward = {"matrix products": first.products, "memory-bound kernels": loss, "tensor collectives": first.exposed}
        backward = {"matrix products": product, "tensor collectives": back.exposed}
        trained = trains_head(self.spec)
        sums = sums_in_head(self.config, self.spec, self.plan, self.batch.accumulation)
        weight = {"matrix products": self._product(head, sums=sums) * trained}
        if self.config.loss.tile:  # gradients are computed in the forward pass
            forward["matrix products"] += (1 + trained) * product
            forward["tensor collectives"] += collective
            backward, weight = {}, {}
        # Of one stage what is left of the unit that it shares with the embedding: no tied head.
        size, alone = self.sent.outer[self.plan.pp == 1, True], self.plan.pp > 1
        size -= 0 if alone else self.sent.outer[True, False]
        frozen = self.fixed.outer[self.plan.pp == 1, True] if self.fixed else 0
        frozen -= self.fixed.outer[True, False] if self.fixed and not alone else 0
        moved = {"tensor": self.way.moving + 2 * collective}
        # Of a tied head, the embedding's gradient is added too.
        summed = min(prod(head.shape) * sums, size)
        return self._sharded((size, 0, frozen), forward, backward, weight, moved, summed=summed, outer=True)

    def _sharded(
        self,
        parameters: tuple[int, int, int],
        forward: dict,
        backward: dict,
        weight: dict,
        axes: Terms,
        narrow: float = 0.0,
        summed: float = 0.0,
        outer: bool = False,
    ) -> UnitTimes:
        """A unit with what data-parallel ranks do around its passes: gathers, reductions, and copies in and out of flat
        buffers. parameters: of the unit that are trained, of its experts where ranks share them, and bytes of those
        that are gathered only; axes: seconds of what other ranks communicate in a micro-batch; narrow: elements that
        are gathered in fp8; summed: of the parameters, those whose gradients GEMMs sum; outer: see `of_states`."""
        plan, pace, shards, size = self.plan, self.pace, self.rings["shard"], parameters[0]
        copied = self.config.parallel.zero.collectives == "copy_engine"  # in the type in which gradients were computed
        fixed, scattered = parameters[2], self.element if copied else self.scattered.width
        widths = self.element * (size - narrow) + narrow + fixed, scattered * size
        moved = of_states(plan, *widths, outer, self.reduces_once)
        folded, apart = self.rings["expert_shard"], parameters[1]
        gather, reduce = (shards.seconds(moved[kind].size) for kind in ("gather", "scatter"))
        own = size / shards.ranks
        replicas = 2 * self.rings["replicate"].seconds(self.summed.width * own)
        if apart:
            gather += folded.seconds(self.element * apart)
            reduce += folded.seconds(self.scattered.width * apart)
            replicas += 2 * self.rings["expert_replicate"].seconds(self.summed.width * apart / folded.ranks)
        coding = self.scattered.scatter(size) / pace.memory, self.summed.reduce(own) / pace.memory
        # A rank whose shards are whole casts them where they are used, without a flat buffer. Of experts that was not
        # measured.
        rate = pace.copy if self.on_cpu or shards.ranks > 1 else max(pace.copy, pace.memory)
        parts = (shards.ranks, size / rate), (folded.ranks, apart / pace.copy)
        size += apart  # which all passes of copies read and write
        if not self.on_cpu:  # on a stream beside the computation
            reduce, replicas, coding = reduce + coding[0], replicas + coding[1], (0.0, 0.0)
        copy_in = sum(
            ((MASTER + self.element) / ranks + 2 * self.element * (ranks > 1)) * seconds for ranks, seconds in parts
        )
        copy_in += 2 * fixed * (1 / shards.ranks + (shards.ranks > 1)) / pace.copy
        # Read for the scale and again, written, and cast back.
        copy_in += ((2 * self.element + 1) / shards.ranks + self.element + 1) * narrow / pace.copy
        copy_out = (self.element + MASTER) * sum(seconds for _, seconds in parts) + coding[0]
        if copied:  # what is cast to two places, and added up, takes from the products beside it what it needs
            copy_in = ((MASTER + 2 * self.element) * size + 3 * fixed) / shards.ranks / pace.copy
            copy_out = (MASTER / shards.ranks + self.element) * size / pace.copy
        f, b = sum(forward.values()), sum(backward.values()) + sum(weight.values())
        gathers, scatters = moved["gather"], moved["scatter"]
        first = pace.exposed(gather * gathers.once, f)
        copies, last_copy = 0.0 if gathers.each else copy_in, copy_out + coding[1]
        each = {"shard": gathers.each * gather + scatters.each * reduce}
        once = {"shard": gathers.once * gather + scatters.once * reduce, "replicate": replicas}
        if gathers.each:
            forward = _and(forward, pace.exposed(gather, f), copy_in)
        if gathers.each > 1:
            backward = _and(backward, pace.exposed(gather, b), copy_in)
        if scatters.each:
            backward, last_copy = _and(backward, pace.exposed(reduce, b), copy_out), coding[1]
        elif self.batch.accumulation > 1:  # added to the sums in fp32 by kernels that do nothing else
            backward = _and(backward, 0.0, (2 * MASTER + self.element) * (size - summed) / pace.optimizer)
        late = scatters.once * reduce + replicas  # communication behind the last backward pass
        exposed = pace.exposed(late, b)
        summed = exposed * (replicas / late) if late else 0.0
        return UnitTimes(
            forward,
            backward,
            weight,
            gather=first + copies,
            reduce=exposed + last_copy,
            copies=copies + last_copy,
            shards=first + exposed - summed,
            replicas=summed,
            collectives={**axes, **each},
            once=once,
        )


def _transfer_seconds(ring: RingTimes, elements: PassElements, size: float, messages: int) -> PassElements:
    """Seconds in which elements of `size` bytes arrive. messages: rounds of the ring in the forward pass."""
    if not elements.forward:
        return PassElements(0.0, 0.0)
    forward = size * elements.forward / ring.bandwidth + messages * (ring.ranks - 1) * ring.latency
    return PassElements(forward, forward * elements.backward / elements.forward)


def _and(terms: Terms, exposed: float, copies: float) -> dict[str, float]:
    added = {"sharding collectives": exposed, "sharding copies": copies}
    return {name: terms.get(name, 0.0) + added.get(name, 0.0) for name in {**terms, **added}}


# Seconds of a step by term: the units' times, run through the schedule, and the update.


def step_seconds(config: Config, layout: Layout, timing: ModelTiming, pace: DeviceRates) -> tuple[Simulation, float]:
    """The simulated step, and its seconds with the update."""
    simulation = simulate_schedule(layout.pipeline.schedule, timing.costs.stage(layout.pipeline.split))
    return simulation, simulation.makespan + update_seconds(config, layout, pace)


def step_terms(
    config: Config, layout: Layout, timing: ModelTiming, pace: DeviceRates, simulation: Simulation
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a simulated step by term, as the mean over pipeline ranks; they add up to the step. And those of
    communication that is hidden, by axis.

    What gathers and reductions once a step, and then transfers, make longer is what the simulation without them takes
    less; what is left beside the work of the ranks is the bubble of the schedule itself."""
    pipeline, plan, costs = layout.pipeline, layout.plan, simulation.costs
    alone = replace(costs, unshard=(), reduce=()) if any(costs.unshard) or any(costs.reduce) else costs
    plain = simulation if alone is costs else simulate_schedule(pipeline.schedule, alone)
    still = simulate_schedule(pipeline.schedule, replace(alone, transfer=0.0, latency=0.0)) if alone.transfer else plain
    microbatches = pipeline.schedule.microbatches
    terms = {name: microbatches * timing.terms.get(name, 0.0) / plan.pp for name in TERMS}
    bubble = still.makespan - sum(terms.values())
    for name, seconds in end_of_step_times(timing, simulation.makespan - plain.makespan, plan.pp).items():
        terms[name] += seconds
    terms["pipeline transfers"] = plain.makespan - still.makespan
    terms["bubble"] = max(0.0, bubble)
    terms["optimizer"] = update_seconds(config, layout, pace)
    moved = communication_seconds(layout, timing)
    return terms, {axis: max(0.0, moved.get(axis, 0.0) - terms[term]) for axis, term in AXES.items()}


def end_of_step_times(timing: ModelTiming, longer: float, ranks: int) -> dict[str, float]:
    """What makes a step longer that gathers and reduces once: copies first, then collectives, each axis by its share.
    ranks: of the pipeline."""
    copies, shards, replicas = (
        sum(count * getattr(unit, name) for unit, count in timing.counted) for name in ("copies", "shards", "replicas")
    )
    copies = min(longer, copies / ranks)
    summed = (longer - copies) * (replicas / (shards + replicas) if replicas else 0.0)
    return {"sharding copies": copies, "sharding collectives": longer - copies - summed, "replica collectives": summed}


def update_seconds(config: Config, layout: Layout, pace: DeviceRates) -> float:
    """Of the update on the rank that has most of it."""
    moved = update_bytes(config) * largest_update(layout)
    return moved / pace.optimizer + orthogonalised_by_fullest(config, layout) / pace.products


def update_bytes(config: Config) -> int:
    """Bytes that the update of one parameter moves: the gradient's norm; then gradient, master and moments read, master
    and moments written; then master and average read, and the average written."""
    averaged = 3 if config.optimizer.ema.decay else 0
    return MASTER_BYTES * (1 + 3 + 2 * len(moment_count(config.optimizer.name)) + averaged)


def orthogonalised_by_fullest(config: Config, layout: Layout) -> float:
    """FLOPs of Muon on a rank of the pipeline rank with most of them, whose ranks share its matrices out."""
    plan, pipeline = layout.plan, layout.pipeline
    layers = muon_flops(layout.spec, UpdateSettings.of(config))
    ranks = [pipeline.stages(rank).values() for rank in range(plan.pp)]
    most = max(sum(sum(layers[part.start : part.stop]) for part in stages) for stages in ranks)
    return most / (plan.world // plan.pp)


def largest_update(layout: Layout) -> float:
    """Parameters that the rank with most of them updates."""
    plan, pipeline = layout.plan, layout.pipeline
    ranks = [list(pipeline.stages(rank).values()) for rank in range(plan.pp)]
    return max(state_bytes(layout.spec, plan, 0, stages).parameters for stages in ranks) / MASTER_BYTES


def communication_seconds(layout: Layout, timing: ModelTiming) -> dict[str, float]:
    """Seconds of all communication of a step by axis, as the mean over pipeline ranks."""
    microbatches, plan = layout.pipeline.schedule.microbatches, layout.plan
    total = {axis: seconds / plan.pp for axis, seconds in timing.collectives(microbatches).items()}
    placement = layout.pipeline.schedule.placement
    hops = sum(one != other for one, other in zip(placement, placement[1:]))
    total["pipeline"] = 2 * hops * microbatches * timing.costs.transfer / plan.pp
    return total
