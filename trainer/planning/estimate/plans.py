"""All plans of a model on a number of devices, the best of them by predicted time, within their memory.

Every plan has a bound that is quick: its step is no shorter than the mean work of its ranks without a bubble. Plans are
simulated in the order of their bounds, until the bound of the next is longer than the slowest of the wanted ones: no
plan that is left out can be among them. Plans whose states and activations are far above the memory are not simulated.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter

from trainer.config import Config, ConfigError, ContextConfig, ParallelConfig
from trainer.config.fields import list_divisors
from trainer.config.hardware import HardwareConfig
from trainer.parallel.compress.plan import enabled_codecs
from trainer.parallel.context.plan import ContextPlan, resolve_context
from trainer.parallel.experts.plan import list_mixtures
from trainer.parallel.pipeline.plan import PipelinePlan, check_pipeline, estimated_costs, resolve_split
from trainer.planning.decide import MEASURED_COPIES, MemoryLimit, decide, memory_choices
from trainer.planning.estimate.rates import DeviceRates
from trainer.planning.estimate.recompute import with_uniform_save
from trainer.planning.estimate.step import GIB, StepEstimate, estimate_within
from trainer.planning.estimate.timing import ModelTiming, time_units, update_bytes
from trainer.planning.features import check_plan
from trainer.planning.float8 import can_cast_once
from trainer.planning.layer import parameter_counts
from trainer.planning.neighbours import RECOMPUTE, SCHEDULES, TILE, override_key
from trainer.planning.parameters import UpdateSettings, float8_settings
from trainer.planning.plan import BatchPlan, Plan, build_plan
from trainer.planning.resolve import Layout, check_under_plan, check_varied_settings
from trainer.planning.schedules.ir import Schedule
from trainer.planning.states import ELEMENT_BYTES, state_bytes

IN_FLIGHT = {"v_half": 1 / 2, "v_min": 1 / 3}
"""Activations that a rank holds, over those of one micro-batch in the whole model, where they are fewer."""

DEGREES = (
    "parallel.dp",
    "parallel.tp",
    "parallel.pp",
    "parallel.cp",
    "parallel.ep",
    "parallel.shard",
    "parallel.zero.stage",
    "parallel.tp_overlap",
    "parallel.zero.collectives",
    "batch.micro_size",
    "batch.accumulation",
    "activation.mode",
)
PIPELINE = ("parallel.pipeline.schedule", "parallel.pipeline.chunks")
"""Settings of which several values are tried: of every plan, and of plans with a pipeline."""

NAMED = {"gpipe", *(name for name, _ in SCHEDULES)}
"""Schedules that can be kept."""

REPLACED = {"parallel.pipeline.split": "balanced", "parallel.pipeline.memory_cap": None}
"""Settings that plans have alike, whatever the configuration says."""

SHARED = 8192
"""Tokens of a sequence that a rank holds at least, in plans that are tried."""

MOST_MICRO_BATCHES = 256
"""Of a rank, in plans that are tried: more make nothing faster, and take long to simulate."""

MOST_ACTIONS = 8192
"""Stages times micro-batches of an interleaved schedule that is tried: more take long to simulate."""


@dataclass(frozen=True)
class PlanCandidate:
    """A legal plan. bound: seconds that its step takes at least; least: bytes that its fullest rank holds at least;
    config: of a run under it."""

    bound: float
    least: float
    config: Config
    plan: Plan
    batch: BatchPlan


@dataclass(frozen=True)
class PlanRanking:
    """best: estimates of plans that fit or may fit, fastest first; where it is asked for, and none of the `fastest`
    fits for sure, the fastest that does comes last. legal, fitting: numbers of plans that are legal, and of those whose
    states and least activations fit."""

    best: tuple[StepEstimate, ...]
    fastest: int
    legal: int
    fitting: int


def rank_plans(
    config: Config,
    hardware: HardwareConfig,
    world: int,
    global_size: int,
    most: int = 10,
    kept: Collection[str] = (),
    sure: bool = False,
) -> PlanRanking:
    """The fastest `most` plans on `world` devices for a step of `global_size` sequences.

    config: what all plans share; its own plan, recompute and micro-batches are replaced, but for the settings `kept`
    (see `given_settings`). sure: whether the fastest that fits for sure is wanted too. Raises `ConfigError` where no
    plan is legal, none fits, or a setting cannot be kept.
    """
    for name in sorted(kept):
        given = attrgetter(name)(config)
        if given not in NAMED if name == PIPELINE[0] else name in REPLACED and given != REPLACED[name]:
            raise ConfigError(
                f"{name}={given} cannot be kept in a search of plans, which tries others; leave it out, or name plans "
                "with plans=[...]"
            )
    search = _Search(config, hardware, world, global_size, kept)
    candidates = sorted(search.candidates(), key=attrgetter("bound"))
    if not search.legal:
        reasons = (search.list_missing() if kept else search.reasons) or ["there are too many micro-batches"]
        raise ConfigError(f"no plan of {world} processes can be run: {reasons[0]}")
    best = more = search.fastest(candidates, most, ("yes", "perhaps"))
    if not best:
        raise ConfigError(
            f"no plan of {world} processes fits {hardware.memory:g} GiB a device; set a smaller "
            "batch.sequence_length, more nodes, or parallel.zero.offload=true"
        )
    if sure and all(one.fits != "yes" for one in best):
        limit = (1 - hardware.memory_band) * hardware.memory * GIB
        small = [candidate for candidate in candidates if candidate.least <= limit]
        more = [*best, *search.fastest(small, 1, ("yes",))]
    return PlanRanking(tuple(more), len(best), search.legal, len(candidates))


def given_settings(overrides: Iterable[str]) -> set[str]:
    """The settings of plans that overrides give, by themselves or with their section or group."""
    keys = [f"{override_key(override)}." for override in overrides]
    return {name for name in (*DEGREES, *PIPELINE, *REPLACED) if any(f"{name}.".startswith(key) for key in keys)}


class _Search:
    def __init__(
        self, config: Config, hardware: HardwareConfig, world: int, global_size: int, kept: Collection[str] = ()
    ):
        self.base, self.spec, self.hardware = config, config.model, hardware
        auto = config.parallel.zero.collectives == "auto"  # which leaves it open
        self.kept = {*kept} - {"parallel.zero.collectives"} if auto else kept
        self.world, self.global_size, self.node = world, global_size, min(world, hardware.devices)
        self.pace = DeviceRates.of(hardware, config.precision)
        self.element, self.updates = ELEMENT_BYTES[config.precision.compute], UpdateSettings.of(config)
        self.legal, self.reasons = 0, list[str]()
        self.splits: dict[tuple, tuple[range, ...]] = {}
        self.orders: dict[tuple, tuple[tuple[int, ...], Schedule | None]] = {}

    def fastest(self, candidates: Sequence[PlanCandidate], most: int, fits: Collection[str]) -> list[StepEstimate]:
        """Of candidates in the order of their bounds the `most` that take least time and whose memory is as `fits`
        says, fastest first."""
        best: list[StepEstimate] = []
        names = set[tuple[object, ...]]()
        for candidate in candidates:
            limit = best[-1].seconds if len(best) == most else inf
            if candidate.bound >= limit:
                break
            found = self.estimate(limit, candidate)
            if found is not None and found.fits in fits and identify_plan(found) not in names:
                names.add(identify_plan(found))
                best = sorted([*best, found], key=attrgetter("seconds"))[:most]
        return best

    def candidates(self) -> Iterator[PlanCandidate]:
        """All legal plans whose states and activations of one micro-batch may fit."""
        for parallel in self.parallels():
            plan = build_plan(parallel, self.world)
            for micro in list_divisors(self.global_size // plan.dp):
                accumulation = self.global_size // plan.dp // micro
                if accumulation > MOST_MICRO_BATCHES or accumulation < plan.pp:
                    continue
                auto = self.base.activation.mode == "auto"
                for mode in ("auto",) if auto else RECOMPUTE:
                    config = self.config(parallel, micro, accumulation, mode)
                    # For the bound: where memory decides on recompute, it decides on casts too.
                    plan = replace(plan, casts_once=auto and can_cast_once(config, self.spec, plan, accumulation))
                    # With one micro-batch ZeRO-2 does what ZeRO-1 does.
                    same = accumulation == 1 and plan.stage == 2 and "parallel.zero.stage" not in self.kept
                    if same or not self.keeps(config, DEGREES):
                        continue
                    tokens = config.batch.sequence_length * micro / plan.token_ranks
                    for chosen in (
                        memory_choices(config, self.spec, tokens) if tokens > TILE and not auto else (config,)
                    ):
                        problems = [*check_varied_settings(chosen)]
                        problems += check_under_plan(chosen, self.spec, plan, self.node)
                        self.reasons += problems
                        if not problems:
                            yield from self.with_schedules(chosen, plan, micro, accumulation)

    def parallels(self) -> Iterator[ParallelConfig]:
        """Degrees, ZeRO stages and shard sizes."""
        length = self.base.batch.sequence_length
        for tp in list_divisors(self.world):
            for pp, cp in itertools.product(list_divisors(self.world // tp), self.shares()):
                dp, rest = divmod(self.world // tp // pp, cp)  # dp x cp ranks hold the same part of the model
                given = self.base.parallel.dp if "parallel.dp" in self.kept else -1
                if rest or length % (cp * tp) or given not in (-1, dp):
                    continue
                uneven = f"batch.global_size={self.global_size} is no multiple of parallel.dp={dp}; set one that is"
                context = self.base.parallel.context if cp > 1 else ContextConfig()
                whole = replace(self.base.parallel, dp=given, tp=tp, pp=pp, cp=cp, context=context)
                whole = with_backends(whole, "off", "nccl")
                apart = whole.zero.offload or whole.zero.engine != "torch"  # which no plan without stages has
                for stage in range(apart, 4 if apart or dp * cp > 1 or "parallel.zero.stage" in self.kept else 1):
                    staged = replace(whole, ep=1, shard=-1, ep_dispatch="auto", zero=replace(whole.zero, stage=stage))
                    problems = check_plan(staged, self.world, self.spec, self.node) or self.unshared(staged)
                    problems = [uneven] if self.global_size % dp else problems
                    self.reasons += problems
                    # Also ranks of a group that stays within a node.
                    sizes = set() if problems else {-1, self.node // tp, self.base.parallel.shard} if stage else {-1}
                    most = dp * cp - ("parallel.shard" not in self.kept)  # of all ranks: the same as -1
                    for shard in sorted(n for n in sizes if n == -1 or 1 < n <= most and dp * cp % n == 0):
                        for ep in self.shared_experts(dp * cp * tp):
                            dispatch = self.base.parallel.ep_dispatch if ep > 1 else "auto"
                            dealt = replace(staged, shard=shard, ep=ep, ep_dispatch=dispatch)
                            yield from self.ways(dealt)

    def ways(self, parallel: ParallelConfig) -> Iterator[ParallelConfig]:
        """A plan by collectives, by copies between the GPUs of a node, and as the settings say, where that is legal."""
        base, copies = self.base, ["copy_engine"] * (self.hardware.device != "CPU")  # where copies take no core's time
        shard = build_plan(parallel, self.world).shard
        overlaps = [base.parallel.tp_overlap, *(copies if parallel.tp <= MEASURED_COPIES else [])]
        given = base.parallel.zero.collectives
        backends = [*[given] * (given != "auto"), *(copies if shard <= MEASURED_COPIES else [])]
        if parallel.tp == 1 or float8_settings(base.precision):  # in fp8 none has run on GPUs
            overlaps = []
        if base.precision.float8.gather or enabled_codecs(parallel.grad_comm) or parallel.ep > 1 or shard == 1:
            backends = []
        pairs = itertools.product(dict.fromkeys(["off", *overlaps]), dict.fromkeys(["nccl", *backends]))
        for tp_overlap, collectives in pairs:
            way = with_backends(parallel, tp_overlap, collectives)
            if not check_plan(way, self.world, self.spec, self.node):
                yield way

    def with_schedules(self, config: Config, plan: Plan, micro: int, accumulation: int) -> Iterator[PlanCandidate]:
        own = self.base.parallel.pipeline
        named = [(own.schedule, own.chunks or 1)] * (own.schedule == "gpipe" or own.chunks is not None)
        deeper = deeper_interleaving(self.spec.depth, plan.pp, accumulation)
        schedules = [
            self.scheduled(config, name, chunks)
            for name, chunks in dict.fromkeys((*SCHEDULES, *deeper, *named))
            if plan.pp * chunks <= self.spec.depth
        ]
        schedules = [one for one in schedules if self.keeps(one, PIPELINE)] if plan.pp > 1 else schedules[:1]
        self.legal += len(schedules)
        batch = BatchPlan(config.batch.sequence_length, self.global_size, micro, accumulation)
        timing = self.timing(config, plan, batch)
        work = sum(timing.terms.values())
        sharded = parameter_counts(self.spec)["total"] / (plan.tp * plan.pp * plan.shard)
        bound = accumulation * work / plan.pp
        bound += update_bytes(config) * sharded / self.pace.optimizer
        least = timing
        if config.activation.mode == "auto":  # timed as if nothing were recomputed, it may recompute all
            least = self.timing(with_uniform_save(config, ()), plan, batch)
        for chosen in schedules:
            schedule = chosen.parallel.pipeline.schedule
            held = self.rough_memory(plan, batch, least, schedule)
            if held <= self.hardware.memory * GIB:
                yield PlanCandidate(bound, held, chosen, plan, batch)

    def list_missing(self) -> list[str]:
        """For each setting that is to be kept as no plan has it: its value, and those that plans have."""
        whole = _Search(self.base, self.hardware, self.world, self.global_size)
        parallels = list(whole.parallels())
        if not parallels:
            return whole.reasons
        found = []
        for name in sorted(self.kept):
            if name.startswith("parallel.") and name not in PIPELINE:
                read = attrgetter(name.removeprefix("parallel."))
                given, tried = read(self.base.parallel), {read(one) for one in parallels}
                if name == "parallel.dp":
                    tried |= {build_plan(one, self.world).dp for one in parallels}
                if given not in tried:
                    found.append(f"{name}={given} is in none; legal: {', '.join(map(str, sorted(tried)))}")
        kept = ((name, attrgetter(name)(self.base)) for name in sorted(self.kept))
        given = " and ".join(f"{name}={value}" for name, value in kept if value is not None)
        return found or [f"none that is tried has {given} together; leave one out"]

    def keeps(self, config: Config, names: Collection[str]) -> bool:
        """Whether what is to be kept of these settings is as it was given. None leaves it open."""
        given = {name: attrgetter(name)(self.base) for name in names if name in self.kept}
        return all(value in (None, attrgetter(name)(config)) for name, value in given.items())

    def scheduled(self, config: Config, name: str, chunks: int) -> Config:
        chosen = copy.copy(config)
        pipeline = replace(
            config.parallel.pipeline,
            schedule=name,
            chunks=chunks if name == "interleaved" else None,
            split="balanced",
            memory_cap=None,
        )
        chosen.parallel = replace(config.parallel, pipeline=pipeline)
        return chosen

    def config(self, parallel: ParallelConfig, micro: int, accumulation: int, mode: str) -> Config:
        config = copy.copy(self.base)
        config.parallel = parallel
        config.activation = replace(self.base.activation, mode=mode)
        config.batch = replace(
            self.base.batch,
            global_size=self.global_size,
            global_tokens=None,
            micro_size=micro,
            accumulation=accumulation,
        )
        return config

    def shares(self) -> list[int]:
        """Ranks that share a sequence: as many as the settings say, and where it is long, other numbers too."""
        given, length = self.base.parallel.cp, self.base.batch.sequence_length
        return sorted({given, *(n for n in list_divisors(self.world) if length // n >= SHARED)})

    def shared_experts(self, ranks: int) -> list[int]:
        """Of so many ranks of a pipeline stage, those that may share experts: within a node, in equal runs."""
        counts = [count for count, _ in list_mixtures(self.spec)]
        sizes = [n for n in list_divisors(ranks) if n <= self.node and not any(count % n for count in counts)]
        return sizes if counts and not enabled_codecs(self.base.parallel.grad_comm) else [1]

    def unshared(self, parallel: ParallelConfig) -> list[str]:
        """Why ranks cannot share sequences as asked."""
        config = copy.copy(self.base)
        config.parallel = parallel
        try:
            self.context(config, build_plan(parallel, self.world))
        except ConfigError as error:
            return error.problems
        return []

    def context(self, config: Config, plan: Plan) -> ContextPlan | None:
        return resolve_context(config, self.spec, plan, self.node)

    def timing(self, config: Config, plan: Plan, batch: BatchPlan) -> ModelTiming:
        """The timing of units depends on no schedule and on no split."""
        unused = PipelinePlan(Schedule("", ((),), (0,), batch.accumulation), (range(self.spec.depth),))
        return time_units(config, Layout(self.spec, plan, batch, unused, self.context(config, plan)), self.hardware)

    def estimate(self, seconds: float, candidate: PlanCandidate) -> StepEstimate | None:
        """The estimate of a candidate that takes no longer than `seconds`, or None."""
        config, layout = candidate.config, self.layout(candidate)
        found = estimate_within(seconds, config, layout, self.hardware, lowered=False)
        if found is None or config.activation.mode != "auto":
            return found
        room = MemoryLimit(self.hardware.memory * GIB, inf)
        config, layout, *_ = decide(config, layout, room, self.node, self.hardware)
        return estimate_within(seconds, config, layout, self.hardware, False)

    def layout(self, candidate: PlanCandidate) -> Layout:
        """The layout that `resolve` gives; splits and schedules that other candidates have too are made once."""
        config, plan, batch = candidate.config, candidate.plan, candidate.batch
        pipeline = config.parallel.pipeline
        order = plan.pp, pipeline.schedule, pipeline.chunks, batch.accumulation
        if order not in self.orders:
            self.orders[order] = check_pipeline(config, self.spec.depth, plan, batch)
        placement, schedule = self.orders[order]
        activation = config.activation
        cut = placement, plan.tp, activation.mode, activation.tile, activation.offload, config.loss.tile
        if cut not in self.splits:
            self.splits[cut] = resolve_split("balanced", estimated_costs(config, self.spec, plan, batch), placement)
        assert schedule is not None  # greedy is not among SCHEDULES
        return Layout(self.spec, plan, batch, PipelinePlan(schedule, self.splits[cut]), self.context(config, plan))

    def rough_memory(self, plan: Plan, batch: BatchPlan, timing: ModelTiming, schedule: str) -> float:
        """Less than what the fullest rank holds: the mean of states, and four fifths of the activations in flight."""
        states = state_bytes(self.spec, plan, self.element, updates=self.updates)
        held = 0 if states.offloaded else states.parameters + states.optimizer + states.average
        held += states.gathered if plan.stage < 3 else 0
        held += states.gradients if batch.accumulation > 1 and not states.offloaded else 0
        return held / plan.pp + 0.8 * IN_FLIGHT.get(schedule, 1.0) * sum(timing.costs.activation[:-1])


def deeper_interleaving(depth: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    """Interleaved schedules with more stages a rank than those of `SCHEDULES`, up to one layer a stage."""
    most = max(chunks for _, chunks in SCHEDULES)
    deepest = depth // ranks
    wanted = {deepest, *(2**power for power in range(1, deepest.bit_length()))}
    return [
        ("interleaved", chunks)
        for chunks in sorted(wanted)
        if chunks > most and ranks * chunks * microbatches <= MOST_ACTIONS
    ]


def identify_plan(one: StepEstimate) -> tuple[object, ...]:
    """What two names of one plan have in common: degrees, batch, time and memory."""
    plan, numbers = one.layout.plan, (f"{number:.9e}" for number in (one.seconds, one.memory))
    return *plan.degrees.items(), one.layout.batch, *numbers


def with_backends(parallel: ParallelConfig, tp_overlap: str, collectives: str) -> ParallelConfig:
    """The plan whose ranks communicate so."""
    return replace(parallel, tp_overlap=tp_overlap, zero=replace(parallel.zero, collectives=collectives))
