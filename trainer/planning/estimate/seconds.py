"""Seconds of a step by term: the units' times, run through the schedule, and the update."""

from __future__ import annotations

from dataclasses import replace

from trainer.config import Config
from trainer.planning.cost.memory import MASTER_BYTES, local_parameters
from trainer.planning.cost.updates import UpdateSettings, moment_count, muon_flops
from trainer.planning.estimate.throughput import DeviceRates
from trainer.planning.estimate.timing import AXES, TERMS, ModelTiming
from trainer.planning.resolve import Layout
from trainer.planning.schedules.simulate import Simulation, simulate_schedule


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
    held = local_parameters(layout.spec, plan.tp)
    ranks = [pipeline.stages(rank).values() for rank in range(plan.pp)]
    most = max(sum(sum(held.units(layers)) for layers in stages) for stages in ranks)
    return most / (plan.shard if plan.stage else 1)


def communication_seconds(layout: Layout, timing: ModelTiming) -> dict[str, float]:
    """Seconds of all communication of a step by axis, as the mean over pipeline ranks."""
    microbatches, plan = layout.pipeline.schedule.microbatches, layout.plan
    total = {axis: seconds / plan.pp for axis, seconds in timing.collectives(microbatches).items()}
    placement = layout.pipeline.schedule.placement
    hops = sum(one != other for one, other in zip(placement, placement[1:]))
    total["pipeline"] = 2 * hops * microbatches * timing.costs.transfer / plan.pp
    return total
