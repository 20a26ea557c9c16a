"""What is legal and may still be a mistake: said at the start of a run and by an estimate, and refused by neither."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.planning.context import ContextPlan
from trainer.planning.context_choice import (
    BETWEEN_NODES,
    ContextRequest,
    build_context,
    context_cost,
    length_multiple,
    request_of,
)
from trainer.planning.cost.parameters import layer_specs
from trainer.planning.resolve import Layout


def collect_warnings(config: Config, layout: Layout, node: int) -> list[str]:
    """Sentences on a run with nodes of `node` processes."""
    found = list(_positions(layout.spec, layout.batch.sequence_length))
    if layout.context is not None:
        request = request_of(config, layout.spec, layout.plan, node)
        found += [*_between_nodes(request, layout.context), *_not_dealt(request, layout.context)]
    return found


def _positions(spec: ModelSpec, length: int) -> Iterator[str]:
    """Rotary positions beyond those that a model is built for; `dynamic` scaling follows the sequence by itself."""
    rotary = [layer.attention for layer in layer_specs(spec) if layer.attention.positions == "rope"]
    if length > spec.max_length and any(attention.rope.scaling != "dynamic" for attention in rotary):
        rope, factor = spec.attention.rope, length / spec.max_length
        extend = f"{{max_length: {length}, scaling: yarn, factor: {factor:g}, original_length: {spec.max_length}}}"
        if rope.scaling != "none":  # the frequencies that the model knows are scaled already, and go on from there
            extend = f"{{max_length: {length}, factor: {rope.factor * factor:g}}}"
        yield (
            f"batch.sequence_length={length} exceeds model.max_length={spec.max_length}, beyond which rotary positions "
            f"are new to the model; for one that is read set model.extend={extend}, and for one that is trained from "
            f"its beginning model.max_length={length}"
        )


def _between_nodes(request: ContextRequest, context: ContextPlan) -> Iterator[str]:
    if context.inner > 1 and request.inside % context.inner:
        within = [n for n in request.legal if 1 < n < request.plan.cp and request.inside % n == 0]
        other = f"both parallel.context.inner={within[-1]}" if within else "gather"
        yield (
            f"heads are exchanged over {context.inner} ranks on several nodes of {request.node} processes, between "
            f"which a byte takes some {BETWEEN_NODES:g} times as long; parallel.context.method={other} exchanges none "
            "between them"
        )


def _not_dealt(request: ContextRequest, context: ContextPlan) -> Iterator[str]:
    """Blocks that `order=auto` would take if they divided the length."""
    blocks = length_multiple(replace(context, order="blocks"), request.plan)
    if request.asked.order != "auto" or context.order != "zigzag" or request.length % blocks == 0:
        return
    below = request.length // blocks * blocks
    near = [request.set({"batch.sequence_length": length}) for length in (below, below + blocks) if length]
    slower = f"{context_cost(near[-1], context) / context_cost(near[-1], build_context(near[-1], context.inner)):.1f}"
    if slower != "1.0":
        yield (
            f"batch.sequence_length={request.length} cannot be dealt out in blocks of {context.block}: in zigzag order "
            f"attention takes about {slower} times as long on GPUs; "
            f"batch.sequence_length={' or '.join(str(one.length) for one in near)} can"
        )
