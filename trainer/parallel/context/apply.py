"""Context parallelism applied to a model: which process groups exchange heads and which gather keys."""

from __future__ import annotations

import torch.distributed as dist

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.mesh import World
from trainer.model.context_attention import ContextGroup
from trainer.model.stage import Stage
from trainer.parallel.context.plan import resolve_context
from trainer.planning.plan import Plan, node_size


def share_sequences(model: Stage, config: Config, spec: ModelSpec, plan: Plan, world: World) -> None:
    """Lets a model compute only this rank's part of each sequence, where the plan has ranks that share sequences."""
    context = resolve_context(config, spec, plan, node_size(world.size))
    if context is None:
        return
    assert world.context is not None and world.context.size() == plan.cp, "the mesh was made for another plan"
    # Runs of `inner` neighbours exchange heads; the ranks with the same place in their runs gather keys. With one of
    # the two sizes at 1, the whole context group does the other, and no further process group is needed.
    heads, keys = None, None
    if context.outer == 1:
        heads = world.context.get_group()
    elif context.inner == 1:
        keys = world.context.get_group()
    else:
        heads, keys = world.split_context(context.inner)
    model.context = ContextGroup(context, world.context.get_local_rank(), make_member(heads), make_member(keys))


def make_member(group: dist.ProcessGroup | None) -> TensorGroup | None:
    """This rank as a member of a process group, None without one."""
    return None if group is None else TensorGroup(group.group_name, dist.get_rank(group), dist.get_world_size(group))
