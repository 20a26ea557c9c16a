"""Seconds of a step by term: the units' times, run through the schedule, and the update."""

from __future__ import annotations

from dataclasses import replace

from trainer.config import Config
from trainer.planning.cost.flops import muon_flops
from trainer.planning.cost.memory import MASTER_BYTES, held_parameters
from trainer.planning.cost.updates import Updates, moments
from trainer.planning.estimate.pace import Pace
from trainer.planning.estimate.timing import TERMS, Timing
from trainer.planning.resolve import Layout
from trainer.planning.schedules.simulate import Simulation, simulate


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
