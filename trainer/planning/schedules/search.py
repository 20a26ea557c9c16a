"""The schedule, split and number of micro-batches with the shortest step, found by simulation.

The global batch is fixed, so that makespans can be compared directly. Candidates are every template, and the greedy
scheduler under several memory caps, each with every number of chunks, number of micro-batches and split. Candidates
above the memory limit are dropped. The search is deterministic: its length is limited by a count of actions, not by a
clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import yaml

from trainer.config import ConfigError
from trainer.config.fields import list_divisors
from trainer.planning.schedules.costs import (
    LayerCosts,
    Split,
    StageCosts,
    boundary_moves,
    even_split,
    improve_split,
    partition_layers,
)
from trainer.planning.schedules.ir import Schedule
from trainer.planning.schedules.simulate import Simulation, simulate_schedule
from trainer.planning.schedules.templates import TEMPLATES, build_greedy, build_schedule, place_stages

ConstantBytes = Callable[[Split, tuple[int, ...]], Sequence[float]]
"""From a split and its placement, bytes by rank that depend on no schedule: parameters, gradients, optimizer state."""

SAME = 1e-6  # makespans whose relative difference is smaller count as equal: the one with less memory wins
GREEDY_EFFORT = 25  # an action placed by the greedy scheduler takes about as long as simulating this many
BUILD_EFFORT = 5  # the same for an action placed by a template
REFINED = 3  # best candidates whose split is refined on simulated makespans


@dataclass(frozen=True)
class SearchSpace:
    """What a search may choose from.

    schedules: names of templates, and `greedy`. microbatches: numbers of micro-batches, None for all divisors of the
    samples. split: layers of each stage, None to choose them. caps: activations that the greedy scheduler may hold on a
    rank, as multiples of the peak under 1F1B. patience: see `templates.build_greedy`. effort: about how many actions to
    simulate (a million take a second)."""

    schedules: tuple[str, ...] = (*TEMPLATES, "greedy")
    chunks: tuple[int, ...] = (1, 2, 4)
    microbatches: tuple[int, ...] | None = None
    split: Split | None = None
    caps: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0)
    patience: tuple[float, ...] = (0.0, 0.5, 1.0)
    effort: int = 3_000_000


@dataclass(frozen=True)
class CandidateSetup:
    """A candidate without its order of actions: micro-batches, placement and split, with their costs.

    constant: by rank, bytes that depend on no schedule."""

    microbatches: int
    micro_size: int
    chunks: int
    placement: tuple[int, ...]
    split: Split
    layers: LayerCosts
    costs: StageCosts
    constant: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return len(self.constant)


@dataclass(frozen=True)
class SimulatedCandidate:
    """One simulated candidate.

    name: of a template, or of the greedy scheduler with its cap and patience. memory: bytes of the rank that needs
    most, with those that depend on no schedule."""

    name: str
    chunks: int
    microbatches: int
    split: tuple[int, ...]
    makespan: float
    bubble: float
    memory: float


@dataclass(frozen=True)
class ScheduleChoice:
    """The best candidate, and the table that it was chosen from.

    name: the template, or `greedy`. memory: predicted bytes by rank. table: all candidates within the memory limit,
    best first."""

    name: str
    schedule: Schedule
    chunks: int
    split: Split
    microbatches: int
    micro_size: int
    predicted: Simulation
    memory: tuple[float, ...]
    table: tuple[SimulatedCandidate, ...] = field(repr=False)

    def to_yaml(self, csv: str) -> str:
        """The settings that fix this choice as YAML, headed by a comment with the predicted numbers. csv: the file that
        `schedule` is saved in."""
        split = [len(part) for part in self.split]
        settings = {
            "parallel": {"pipeline": {"schedule": csv, "chunks": self.chunks, "split": split}},
            "batch": {"accumulation": self.microbatches, "micro_size": self.micro_size},
        }
        predicted = (
            f"step {self.predicted.makespan:.6g} s, bubble {self.predicted.bubble:.4f}, memory {max(self.memory):.6g} "
            "bytes"
        )
        return f"# predicted: {predicted}\n" + yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)


def search_schedules(
    layers_for: Callable[[int], LayerCosts],
    ranks: int,
    samples_per_rank: int,
    memory_limit_bytes: float | None = None,
    constant_bytes: ConstantBytes | Sequence[float] | None = None,
    space: SearchSpace = SearchSpace(),
) -> ScheduleChoice:
    """The best choice for a step of `samples_per_rank` sequences on each data-parallel rank, over `ranks` pipeline
    ranks.

    layers_for: costs of the layers for a micro-batch of so many sequences.
    Raises `ConfigError` where no candidate can be built, or none fits the memory limit.
    """
    counts = list_divisors(samples_per_rank) if space.microbatches is None else space.microbatches
    illegal = [count for count in counts if count < 1 or samples_per_rank % count]
    if illegal:
        raise ConfigError(
            f"batch.accumulation={illegal[0]} does not divide the {samples_per_rank} sequences of each data-parallel "
            f"rank; legal: {', '.join(map(str, list_divisors(samples_per_rank)))}"
        )
    splits, setups = CandidateSplits(space.split), []
    for count in counts:
        layers = layers_for(samples_per_rank // count)
        for chunks in space.chunks:
            for style in ("loop", "v") if chunks > 1 else ("loop",):
                placement = tuple(place_stages(ranks, chunks, style))
                for split in splits(layers, placement):
                    setups.append(
                        CandidateSetup(
                            count,
                            samples_per_rank // count,
                            chunks,
                            placement,
                            split,
                            layers,
                            layers.stage(split),
                            constant_costs(constant_bytes, split, placement, ranks),
                        )
                    )
    if not setups:
        depth = layers_for(samples_per_rank // counts[0]).depth
        raise ConfigError(
            f"parallel.pp={ranks} with parallel.pipeline.chunks in {list(space.chunks)}: no split of "
            f"model.depth={depth} layers gives every stage a layer; lower parallel.pp"
        )
    return ScheduleSearch(space, memory_limit_bytes, refine=space.split is None, constant=constant_bytes).choose(setups)


def reorder_actions(
    layers: LayerCosts,
    split: Split,
    placement: tuple[int, ...],
    microbatches: int,
    micro_size: int,
    memory_limit_bytes: float | None = None,
    constant_bytes: Sequence[float] | None = None,
) -> ScheduleChoice:
    """The best order of actions, with all else fixed: what can be changed between two steps of a run.

    layers: costs for the micro-batches of `micro_size` sequences that the run has.
    """
    ranks = max(placement) + 1
    chunks = len(placement) // ranks
    setup = CandidateSetup(
        microbatches,
        micro_size,
        chunks,
        tuple(placement),
        split,
        layers,
        layers.stage(split),
        constant_costs(constant_bytes, split, placement, ranks),
    )
    return ScheduleSearch(SearchSpace(), memory_limit_bytes, False, constant_bytes).choose([setup])


def constant_costs(
    given: ConstantBytes | Sequence[float] | None, split: Split, placement: tuple[int, ...], ranks: int
) -> tuple[float, ...]:
    values = (0.0,) * ranks if given is None else given(split, placement) if callable(given) else given
    if len(values) != ranks:
        raise ValueError(f"constant bytes for {len(values)} ranks, there are {ranks}")
    return tuple(values)


class CandidateSplits:
    """Splits worth trying for a placement: balanced over stages, balanced over ranks, even.

    They are computed once for all costs that differ by a factor only."""

    def __init__(self, fixed: Split | None):
        self.fixed = fixed
        self.found: dict[tuple, list[Split]] = {}  # by placement and shape of the costs

    def __call__(self, layers: LayerCosts, placement: tuple[int, ...]) -> list[Split]:
        stages = len(placement)
        if self.fixed is not None:
            return [self.fixed] if len(self.fixed) == stages else []
        if stages > layers.depth:
            return []
        shape = tuple(
            tuple(round(x / (sum(units) or 1), 9) for x in units) for units in (layers.total, layers.activation)
        )
        if (placement, shape) not in self.found:
            candidates = [
                partition_layers(layers, stages),
                partition_layers(layers, stages, placement),
                even_split(layers.depth, stages),
            ]
            self.found[placement, shape] = list(dict.fromkeys(candidates))
        return self.found[placement, shape]


@dataclass
class ScheduleSearch:
    """Simulates candidates, most promising first, until the effort is spent or no bound is below the best makespan."""

    space: SearchSpace
    limit: float | None
    refine: bool
    constant: ConstantBytes | Sequence[float] | None
    spent: int = 0
    smallest: float = float("inf")
    found: list[tuple[SimulatedCandidate, CandidateSetup, Schedule]] = field(default_factory=list)
    built: dict[tuple[str, int, int, int], Schedule | None] = field(default_factory=dict)

    def choose(self, setups: list[CandidateSetup]) -> ScheduleChoice:
        setups = sorted(setups, key=lambda setup: makespan_bound(setup, True))
        for setup in setups:
            for name, schedule in self.templates(setup):
                if self.spent > self.space.effort and self.found:
                    break
                if makespan_bound(setup, TEMPLATES[name].splits) <= self.best * (1 + SAME):
                    self.consider(name, setup, schedule)
        if "greedy" in self.space.schedules:
            variants = [
                (cap, patience) for patience in self.space.patience for cap in sorted(self.space.caps, reverse=True)
            ]
            for setup in setups:  # one variant of every setup, then the other variants, the best setups first
                self.greedy(setup, *variants[0], self.space.effort // 2)
            for setup in sorted(setups, key=self.best_of):
                for variant in variants[1:]:
                    self.greedy(setup, *variant, self.space.effort)
        if not self.found:
            raise ConfigError(self.nothing(setups))
        if self.refine:
            for row, setup, schedule in self.ranked()[:REFINED]:
                self.consider(row.name, self.refined(setup, schedule), schedule)
        ranked = self.ranked()
        row, setup, schedule = ranked[0]
        predicted = simulate_schedule(schedule, setup.costs)
        return ScheduleChoice(
            row.name.split(" ")[0],
            schedule,
            setup.chunks,
            setup.split,
            setup.microbatches,
            setup.micro_size,
            predicted,
            tuple(a + b for a, b in zip(predicted.memory, setup.constant)),
            tuple(row for row, _, _ in ranked),
        )

    @property
    def best(self) -> float:
        return min((row.makespan for row, _, _ in self.found), default=float("inf"))

    def ranked(self) -> list[tuple[SimulatedCandidate, CandidateSetup, Schedule]]:
        best = self.best

        def key(entry: tuple[SimulatedCandidate, CandidateSetup, Schedule]) -> tuple[float, float]:
            row = entry[0]
            return 0.0 if row.makespan <= best * (1 + SAME) else row.makespan, row.memory

        return sorted(self.found, key=key)

    def templates(self, setup: CandidateSetup) -> Iterator[tuple[str, Schedule]]:
        """Schedules of the templates with the setup's placement. Each is built once for all splits."""
        for name in self.space.schedules:
            if name == "greedy":
                continue
            key = (name, setup.ranks, setup.microbatches, setup.chunks)
            if key not in self.built:
                try:
                    built = build_schedule(name, setup.ranks, setup.microbatches, setup.chunks)
                except ConfigError:  # the template does not allow these numbers
                    self.built[key] = None
                else:
                    self.built[key] = built
                    self.spent += BUILD_EFFORT * sum(map(len, built.orders))
            schedule = self.built[key]
            if schedule is not None and schedule.placement == setup.placement:
                yield name, schedule

    def best_of(self, setup: CandidateSetup) -> float:
        return min((row.makespan for row, other, _ in self.found if other is setup), default=float("inf"))

    def greedy(self, setup: CandidateSetup, cap: float, patience: float, effort: int) -> None:
        """Considers a greedy schedule, if the effort allows and the setup can still beat the best. cap: as in
        `SearchSpace.caps`."""
        work = GREEDY_EFFORT * setup.microbatches * len(setup.placement) * 3
        if self.spent + work > effort or makespan_bound(setup, True) >= self.best:
            return
        self.spent += work
        share = setup.costs.share(setup.placement)
        room = float("inf") if self.limit is None else self.limit - max(setup.constant)
        amount = min(cap * setup.ranks * share, room)
        try:
            schedule = build_greedy(setup.costs, setup.placement, setup.microbatches, amount, patience=patience)
        except ConfigError:  # the cap is too low for one micro-batch
            return
        self.consider(
            f"greedy (cap {amount / share if share else cap:.3g} micro-batches, patience {patience:g})", setup, schedule
        )

    def consider(self, name: str, setup: CandidateSetup, schedule: Schedule) -> None:
        """Simulates a candidate and keeps it if it fits."""
        self.spent += sum(map(len, schedule.orders))
        result = simulate_schedule(schedule, setup.costs)
        memory = max(a + b for a, b in zip(result.memory, setup.constant))
        self.smallest = min(self.smallest, memory)
        row = SimulatedCandidate(
            name, setup.chunks, setup.microbatches, tuple(map(len, setup.split)), result.makespan, result.bubble, memory
        )
        if (self.limit is None or memory <= self.limit) and row not in [other for other, _, _ in self.found]:
            self.found.append((row, setup, schedule))

    def refined(self, setup: CandidateSetup, schedule: Schedule) -> CandidateSetup:
        """The setup with layers moved across boundaries, one at a time, while the simulated makespan falls and memory
        allows."""

        def change(split: Split) -> CandidateSetup:
            constant = constant_costs(self.constant, split, setup.placement, setup.ranks)
            return replace(setup, split=split, costs=setup.layers.stage(split), constant=constant)

        def score(split: Split) -> float:
            changed = change(split)
            result = simulate_schedule(schedule, changed.costs)
            fits = self.limit is None or max(a + b for a, b in zip(result.memory, changed.constant)) <= self.limit
            return result.makespan if fits else float("inf")

        actions = sum(map(len, schedule.orders)) * max(2 * (len(setup.split) - 1), 1)
        steps = max(1, self.space.effort // (4 * REFINED * actions))
        return change(improve_split(setup.split, score, boundary_moves, steps))

    def nothing(self, setups: list[CandidateSetup]) -> str:
        if self.smallest == float("inf"):
            tried = sorted({setup.microbatches for setup in setups})
            return (
                f"parallel.pipeline.schedule: none of {', '.join(self.space.schedules)} can be built for "
                f"parallel.pp={setups[0].ranks} and batch.accumulation in {tried}; take more micro-batches: a "
                "multiple of parallel.pp is always legal"
            )
        assert self.limit is not None  # without one, whatever can be built fits
        return (
            f"no schedule fits {self.limit / 2**30:.2f} GiB: the one with the least memory needs "
            f"{self.smallest / 2**30:.2f} GiB on its fullest rank; set activation.mode=full, a smaller "
            "batch.micro_size, or a higher parallel.tp or parallel.pp"
        )


def makespan_bound(setup: CandidateSetup, splits: bool) -> float:
    """A lower bound of the makespan, whatever the order of the setup's actions.

    It is the larger of two. One micro-batch passes through all stages, forward and backward. Each rank does all its
    work after the first micro-batch has reached it and, with full backward passes, before the last one has gone
    back."""
    costs, placement, count = setup.costs, setup.placement, setup.microbatches
    stages = range(costs.stages)
    backward = [min(b, i + w) if splits else b for b, i, w in zip(costs.b, costs.i, costs.w)]
    through = [min(b, i) if splits else b for b, i in zip(costs.b, costs.i)]
    hops = [costs.transfer * (placement[stage] != placement[stage - 1]) for stage in stages[1:]]
    longest = sum(costs.f) + sum(through) + 2 * (sum(hops) + costs.host * costs.stages)
    for rank in range(setup.ranks):
        mine = [stage for stage in stages if placement[stage] == rank]
        work = count * sum(costs.f[stage] + backward[stage] + 2 * costs.host for stage in mine)
        before = sum(costs.f[: mine[0]]) + sum(hops[: mine[0]]) + costs.host * mine[0]
        after = 0.0 if splits else sum(costs.b[: mine[0]]) + sum(hops[: mine[0]]) + costs.host * mine[0]
        longest = max(longest, before + work + after)
    return longest
