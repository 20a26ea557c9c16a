"""Bytes that attention takes beside what a layer saves: keys that ranks gather, and masks."""

from __future__ import annotations

from trainer.config.model import AttentionSpec
from trainer.parallel.context.plan import attention_kernel, gathered_elements
from trainer.planning.cost.masks import mask_bytes
from trainer.planning.cost.parameters import layer_specs
from trainer.planning.resolve import Layout

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
    context, tp, length = layout.context, layout.plan.tp, layout.batch.sequence_length
    return [1 if context is None else context.parts(layer.attention, tp, length) for layer in layer_specs(layout.spec)]


def mask_bytes_by_layer(layout: Layout, masked: bool) -> list[float]:
    """Bytes of the masks of a micro-batch on a GPU, at the first layer of a stage that takes each: layers with one
    window and soft cap share theirs. masked: whether documents are."""
    layers, found = [layer.attention for layer in layer_specs(layout.spec)], [0.0] * layout.spec.depth
    for stage in layout.pipeline.split:
        kinds = {(layers[index].window, layers[index].soft_cap): index for index in reversed(stage)}
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
    if before := context.fetched(attention.window, length):
        run = context.run(length)
        halo = PLACE * context.rows(length) * (2 * before + run)
        return order + halo + context.rows(length) * mask_bytes(batch, run, before + run)
    return order + mask_bytes(batch, length // context.outer, length) * tables
