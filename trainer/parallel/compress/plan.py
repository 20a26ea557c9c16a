"""Which hops gradients take under a plan, and which settings of them are legal. Pure: needs neither torch nor
processes."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import GradCommConfig, HopConfig, ParameterTypes
from trainer.planning.plan import Feature, Plan

BLOCK = {"int8": 256, "int4": 128}
"""Elements that share a scale (measured with small models: int4 loses with blocks of thousands)."""


@dataclass(frozen=True)
class ReductionRoute:
    """How a reduction over one kind of group goes. Ranks [nodes, ranks on each node] of every group of that kind in the
    world.

    hops: (kind, ranks that it joins), first to last: within the nodes, then between them.
    """

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    hops: tuple[tuple[str, int], ...]


def reduction_routes(plan: Plan, node: int) -> tuple[ReductionRoute | None, ReductionRoute | None]:
    """The routes of the reduce-scatter within the shard groups and of the all-reduce over replicas, on nodes of `node`
    ranks; None where such groups have one rank. Raises `ValueError` where a group lies unevenly on nodes."""
    return (
        _route(plan.groups("shard"), node, "parallel.shard", "inner") if plan.shard > 1 else None,
        _route(plan.groups("replicate"), node, "the number of replicas", "outer") if plan.replicate > 1 else None,
    )


def _route(groups: list[list[int]], node: int, what: str, within: str) -> ReductionRoute:
    laid = [
        [[rank for rank in group if rank // node == place] for place in dict.fromkeys(rank // node for rank in group)]
        for group in groups
    ]
    shapes = {(len(group), len(group[0])) for group in laid if len({len(part) for part in group}) == 1}
    if len(shapes) != 1 or any(len({len(part) for part in group}) != 1 for group in laid):
        raise ValueError(f"{what}={len(groups[0])} puts unequal numbers of ranks on nodes of {node} processes")
    nodes, local = shapes.pop()
    hops = (
        ((within, local),)
        if nodes == 1
        else (("outer", nodes),)
        if local == 1
        else (("inner", local), ("outer", nodes))
    )
    return ReductionRoute(tuple(tuple(map(tuple, group)) for group in laid), hops)


def enabled_codecs(settings: GradCommConfig) -> dict[str, HopConfig]:
    """The kinds of hops that have a codec."""
    return {name: hop for name in ("inner", "outer") if (hop := getattr(settings, name)).codec != "none"}


def reduces_at_step_end(settings: GradCommConfig, plan: Plan, node: int) -> bool:
    """Whether gradients are reduced once a step whatever the ZeRO stage, since their reduce-scatter is quantised."""
    coded = enabled_codecs(settings)
    scattered = reduction_routes(plan, node)[0] if coded else None
    return scattered is not None and any(kind in coded for kind, _ in scattered.hops)


def describe_codecs(settings: GradCommConfig) -> str:
    """The form of the gradients on their way, for people; empty where nothing is quantised."""
    return ", ".join(
        f"{hop.codec} {name}" + " (error feedback)" * (hop.error_feedback != "none")
        for name, hop in enabled_codecs(settings).items()
    )


def check_grad_comm(settings: GradCommConfig, types: ParameterTypes, plan: Plan, node: int) -> list[str]:
    """Everything that makes the settings impossible under the plan, or with what `types` lets be quantised, one
    sentence each."""
    problems = [
        f"parallel.grad_comm.{name}.error_feedback={hop.error_feedback} has no effect with "
        f"parallel.grad_comm.{name}.codec=none; set codec=int8 or int4, or leave it out"
        for name in ("inner", "outer")
        if (hop := getattr(settings, name)).codec == "none" and hop.error_feedback != "none"
    ]
    if not enabled_codecs(settings):
        return problems
    try:
        there = {kind for route in reduction_routes(plan, node) if route for kind, _ in route.hops}
    except ValueError as error:
        return [
            *problems,
            f"parallel.grad_comm: {error}, and quantised gradients would cross the network several times over; set "
            "parallel.shard, or the processes on each node, such that a group has as many on every node, or codec=none",
        ]
    for name, hop in enabled_codecs(settings).items():
        if name not in there:
            other = "outer" if name == "inner" else "inner"
            way = (
                f"set parallel.grad_comm.{other}.codec={hop.codec} instead"
                if other in there
                else "set codec=none, or start more processes"
            )
            lacks = (
                "no ranks that share the sharded state within a node"
                if name == "inner"
                else "neither replicas nor several nodes"
            )
            problems.append(
                f"parallel.grad_comm.{name}.codec={hop.codec}: this plan ({plan.describe()}) has {lacks}; {way}"
            )
    rules = [
        rule
        for policy in vars(types).values()
        for rule in (policy.values() if isinstance(policy, dict) else [vars(policy)])
    ]
    if not any(rule.get("quantise") for rule in rules):
        name, hop = next(iter(enabled_codecs(settings).items()))
        problems.append(
            f"parallel.grad_comm.{name}.codec={hop.codec}: precision.types lets no parameter's gradients be "
            "quantised; set precision.types.matrix.quantise=true, or codec=none"
        )
    return problems


FEATURE = Feature(
    "compress",
    check_plan=lambda config, spec, plan, node: check_grad_comm(
        config.parallel.grad_comm, config.precision.types, plan, node
    ),
)
