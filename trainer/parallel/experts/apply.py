"""Expert parallelism applied to a model: who holds which experts, and how tokens reach them."""

from __future__ import annotations

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.mesh import World
from trainer.model.dispatch import AllGather, AllToAll, SharedDispatch, SharedMemory
from trainer.model.experts import RoutedExperts
from trainer.model.initial import DeclaredModule
from trainer.model.layers import ExpertUnit
from trainer.model.stage import Stage
from trainer.parallel.experts.plan import choose_dispatch
from trainer.parallel.tensor.apply import shard_parameter
from trainer.planning.plan import OVERLAPPED, Plan

DISPATCH: dict[str, type[SharedDispatch]] = {
    "alltoall": AllToAll,
    OVERLAPPED: AllToAll,
    "allgather": AllGather,
    "shared_memory": SharedMemory,
}
"""`parallel.ep_dispatch` -> its implementation."""


def share_experts(model: Stage, config: Config, spec: ModelSpec, plan: Plan, world: World) -> None:
    """Deals the experts of a model on the meta device out to the ranks of `parallel.ep`, in equal runs. All ranks of a
    group call it together."""
    if world.experts is None:
        return
    mesh = world.dimensions["ep"]
    group = TensorGroup(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())
    dispatch = DISPATCH[choose_dispatch(config, spec, plan)](group, config.parallel.ep_capacity)
    for layer in model.layers.values():
        for experts in [module for module in layer.modules() if isinstance(module, RoutedExperts)]:
            for module in [one for one in experts.modules() if isinstance(one, DeclaredModule)]:
                for name in module.declared:
                    setattr(module, name, shard_parameter(getattr(module, name), 0, mesh))
            experts.dispatch, layer.expert_unit = dispatch, ExpertUnit(layer, experts)
