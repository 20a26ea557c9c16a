"""Bytes of error feedback: what quantised gradients have left out, which waits on each rank for the next step.

FSDP passes one message for each unit (each layer, and embedding, final norm and head together), with a row for each
rank that shares states. A hop with error feedback keeps the errors of the blocks that it encodes, twice: those of
earlier steps, and of the step in progress, which count only if it is not skipped. See `parallel/compress/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from trainer.config import Config, GradCommConfig, TypePolicy
from trainer.config.model import ModelSpec
from trainer.parallel.compress.plan import BLOCK, ReductionRoute, enabled_codecs, reduction_routes
from trainer.parallel.pipeline.plan import PipelinePlan
from trainer.planning.cost.memory import MASTER_BYTES
from trainer.planning.cost.parameters import Table, layer_tables, outer_tables
from trainer.planning.cost.updates import UpdateSettings
from trainer.planning.plan import Plan


class ReductionHop(NamedTuple):
    """A hop of a reduction. ranks: that it joins; block: elements that share a scale, None where nothing is encoded;
    feedback: the kind of error feedback."""

    ranks: int
    block: int | None
    feedback: str

    def keeps(self, elements: int) -> int:
        """Bytes of the errors of so many elements, which fill blocks."""
        if self.block is None or self.feedback == "none":
            return 0
        eighths = elements + MASTER_BYTES * (elements // self.block)  # in 8 bits, and the scale of each block
        return 2 * (MASTER_BYTES * elements if self.feedback == "classic" else eighths)


def feedback_bytes(config: Config, spec: ModelSpec, plan: Plan, pipeline: PipelinePlan, node: int) -> list[int]:
    """Of each pipeline rank, on nodes of `node` processes."""
    settings, kept = config.parallel.grad_comm, [0] * plan.pp
    if all(hop.error_feedback == "none" for hop in enabled_codecs(settings).values()):
        return kept
    updates, layers = UpdateSettings.of(config), layer_tables(spec)
    for part, place in zip(pipeline.split, pipeline.schedule.placement, strict=True):
        before, behind = outer_tables(spec, part.start == 0, part.stop == spec.depth)
        units: list[Table] = [{**before, **behind}]
        units += [{f"layers.{index}.{name}": info for name, info in layers[index].items()} for index in part]
        kept[place] += sum(_of_unit(unit, updates.policies(unit), settings, plan, node) for unit in units)
    return kept


def _of_unit(unit: Table, policies: Mapping[str, TypePolicy], settings: GradCommConfig, plan: Plan, node: int) -> int:
    """Of the message of one unit."""
    sizes = {name: info.row(plan.tp, plan.shard) for name, info in unit.items()}
    coded, chunk = [size for name, size in sizes.items() if policies[name].quantise], sum(sizes.values())
    scattered, reduced = (_hops(route, settings) for route in reduction_routes(plan, node))
    total = 0
    if coded and MASTER_BYTES * chunk * plan.shard >= settings.min_size:
        total += _of_path(scattered, coded * plan.shard, plan.shard, scatters=True)
    if coded and MASTER_BYTES * chunk >= settings.min_size:
        total += _of_path(reduced, coded, plan.replicate, scatters=False)
    return total


def _hops(route: ReductionRoute | None, settings: GradCommConfig) -> list[ReductionHop]:
    found = []
    for kind, ranks in route.hops if route else ():
        hop = getattr(settings, kind)
        block = None if hop.codec == "none" else hop.block or BLOCK[hop.codec]
        found.append(ReductionHop(ranks, block, hop.error_feedback))
    return found


def _of_path(hops: Sequence[ReductionHop], segments: Sequence[int], rows: int, scatters: bool) -> int:
    """Of a reduce-scatter of `rows` rows over hops, and unless it only `scatters`, of the all-gather on the way back,
    which the last hop that has a codec encodes. segments: elements of the parameters, each of which fills blocks."""
    blocks = [hop.block for hop in hops if hop.block is not None]
    if not blocks:
        return 0
    grain = max(blocks)
    length = -(-sum(-(-size // grain) for size in segments) // rows) * grain  # elements of a row
    left, total = rows, 0
    for hop in hops:
        total += hop.keeps(left * length)
        left //= hop.ranks
    if not scatters:
        encoder = max(place for place, hop in enumerate(hops) if hop.block is not None)
        behind = prod(hop.ranks for hop in hops[encoder + 1 :])
        total += hops[encoder].keeps(left * behind * length)
    return total
