"""One step of a plan: its seconds by term, what follows from them, and its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from trainer.config import Config
from trainer.config.hardware import HardwareConfig
from trainer.planning.cost.flops import flops_per_token, muon_flops
from trainer.planning.cost.memory import MASTER_BYTES, held_parameters
from trainer.planning.cost.updates import Updates, moments
from trainer.planning.estimate.memory import Peak, peaks
from trainer.planning.estimate.pace import Pace
from trainer.planning.estimate.sequence import Room, settle
from trainer.planning.estimate.timing import TERMS, Timing, time_units
from trainer.planning.gradient_comm import reduces_once
from trainer.planning.resolve import Layout
from trainer.planning.schedules.simulate import Simulation, simulate

GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """What a step will take. All times in seconds.

    terms: of a step, as the mean over pipeline ranks; they add up to `seconds`. communication: by axis, all of it,
    exposed or hidden. ranks: the fullest moment of each pipeline rank.
    """

    config: Config
    layout: Layout
    hardware: HardwareConfig
    terms: dict[str, float]
    communication: dict[str, float]
    simulation: Simulation
    ranks: tuple[Peak, ...]
    peak: float

    @cached_property
    def seconds(self) -> float:
        return sum(self.terms.values())

    @property
    def exposed(self) -> float:
        """Of the step's seconds, those of communication."""
        return sum(self.terms[f"{kind} collectives"] for kind in ("tensor", "context", "sharding"))

    @property
    def tokens_per_second(self) -> float:
        return self.layout.batch.tokens / self.seconds

    def mfu(self, causal: bool) -> float:
        """Model FLOPs over what the devices could do at their peak; attention counted over the keys that are seen, or
        over all."""
        work = flops_per_token(self.layout.spec, self.layout.batch.sequence_length, causal)
        return work * self.tokens_per_second / (self.layout.plan.world * self.peak)

    @property
    def fullest(self) -> Peak:
        return max(self.ranks, key=lambda peak: peak.reserved)

    @property
    def memory(self) -> float:
        """Bytes of the fullest device, with what the allocator does not see."""
        return self.fullest.reserved + self.hardware.fixed * GIB

    @property
    def fits(self) -> str:
        """`yes`, `no`, or `perhaps` where the device's memory lies within the band."""
        used, band = self.memory / (self.hardware.memory * GIB), self.hardware.memory_band
        return "no" if used > 1 + band else "perhaps" if used > 1 - band else "yes"


def estimate(config: Config, layout: Layout, hardware: HardwareConfig) -> Estimate:
    """The step of a layout on a kind of machine, with what `auto` takes there for long sequences. Raises `ConfigError`
    for a device whose peak is not known."""
    node = min(layout.plan.world, hardware.devices)
    config, layout = settle(config, layout, Room(hardware.memory * GIB, inf), node)
    found = estimate_within(inf, config, layout, hardware)
    assert found is not None  # every time is less than infinite
    return found


def estimate_within(
    seconds: float, config: Config, layout: Layout, hardware: HardwareConfig, lowered: bool = True
) -> Estimate | None:
    """The same of a step that takes no longer than `seconds`, or None. lowered: see `memory.peaks`."""
    timing, pace = time_units(config, layout, hardware), Pace.of(hardware, config.precision)
    simulation, terms = step_terms(config, layout, timing, pace)
    if sum(terms.values()) > seconds:
        return None
    once = reduces_once(config.parallel.grad_comm, layout.plan, min(layout.plan.world, hardware.devices))
    ranks, moved = tuple(peaks(config, layout, lowered, once)), communication(layout, timing)
    return Estimate(config, layout, hardware, terms, moved, simulation, ranks, pace.peak)


def step_terms(config: Config, layout: Layout, timing: Timing, pace: Pace) -> tuple[Simulation, dict[str, float]]:
    """The simulated step, and its seconds by term as the mean over pipeline ranks."""
    pipeline, plan = layout.pipeline, layout.plan
    costs = timing.costs.stage(pipeline.split)
    simulation = simulate(pipeline.schedule, costs)
    plain = simulation
    if any(costs.unshard) or any(costs.reduce):
        plain = simulate(pipeline.schedule, replace(costs, unshard=(), reduce=()))
    microbatches = pipeline.schedule.microbatches
    terms = {name: microbatches * timing.terms.get(name, 0.0) / plan.pp for name in TERMS}
    bubble = plain.makespan - sum(terms.values())
    longer = simulation.makespan - plain.makespan
    copies = min(longer, sum(unit.copies for unit in timing.units) / plan.pp)
    terms["sharding copies"] += copies
    terms["sharding collectives"] += longer - copies
    terms["bubble"] = max(0.0, bubble)
    terms["optimizer"] = update_bytes(config) * held_by_fullest(layout) / pace.optimizer
    terms["optimizer"] += orthogonalised_by_fullest(config, layout) / pace.products
    return simulation, terms


def update_bytes(config: Config) -> int:
    """Bytes that the update of one parameter moves: the gradient's norm; then gradient, master and moments read, master
    and moments written; then master and average read, and the average written."""
    averaged = 3 if config.optimizer.ema.decay else 0
    return MASTER_BYTES * (1 + 3 + 2 * len(moments(config.optimizer.name)) + averaged)


def orthogonalised_by_fullest(config: Config, layout: Layout) -> float:
    """FLOPs of Muon on a rank of the pipeline rank with most of them, whose ranks share its matrices out."""
    plan, pipeline = layout.plan, layout.pipeline
    layers = muon_flops(layout.spec, Updates.of(config))
    ranks = [pipeline.stages(rank).values() for rank in range(plan.pp)]
    most = max(sum(sum(layers[part.start : part.stop]) for part in stages) for stages in ranks)
    return most / (plan.world // plan.pp)


def held_by_fullest(layout: Layout) -> float:
    """Parameters that the rank with most of them updates."""
    plan, pipeline = layout.plan, layout.pipeline
    held = held_parameters(layout.spec, plan.tp)
    ranks = [pipeline.stages(rank).values() for rank in range(plan.pp)]
    most = max(sum(sum(held.units(layers)) for layers in stages) for stages in ranks)
    return most / (plan.shard if plan.stage else 1)


def communication(layout: Layout, timing: Timing) -> dict[str, float]:
    """Seconds of all communication of a step by axis, as the mean over pipeline ranks."""
    microbatches, plan = layout.pipeline.schedule.microbatches, layout.plan
    total = {axis: seconds / plan.pp for axis, seconds in timing.collectives(microbatches).items()}
    placement = layout.pipeline.schedule.placement
    hops = sum(one != other for one, other in zip(placement, placement[1:]))
    total["pipeline"] = 2 * hops * microbatches * timing.costs.transfer / plan.pp
    return {axis: seconds for axis, seconds in total.items() if seconds}
