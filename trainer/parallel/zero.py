"""ZeRO stages 0 to 3 as one knob on FSDP2 (Rajbhandari et al., arXiv 1910.02054).

| stage | parameters between steps | gathered | gradients are reduced |
|---|---|---|---|
| 0 | whole on every rank | never | once a step (all-reduce) |
| 1 | sharded fp32 masters | once a step, kept to the last backward | once a step (reduce-scatter) |
| 2 | as 1 | as 1 | every micro-batch, kept sharded |
| 3 | as 1 | for each layer's forward and backward | every micro-batch, kept sharded |

With fewer shards than data-parallel ranks (HSDP) the shards are all-reduced over the replicas, once a step.
"""
from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainer.parallel.mesh import World
from trainer.parallel.plan import Plan


def shard(model: nn.Module, plan: Plan, world: World, compute: torch.dtype, reduce: torch.dtype) -> None:
    """Wraps each layer and then the model itself (embedding, final norm, head) as one unit of gathering and reduction.

    Parameters stay fp32; forward and backward see them in `compute`, gradients are reduced in `reduce`.
    """
    names = ("replicate", "shard") if plan.replicate > 1 else ("shard",)
    policy = MixedPrecisionPolicy(param_dtype=None if compute is torch.float32 else compute, reduce_dtype=reduce,
                                  cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if plan.offload else OffloadPolicy()
    for module in [*model.layers.values(), model]:
        fully_shard(module, mesh=world.mesh[names], mp_policy=policy, offload_policy=offload,
                    reshard_after_forward=plan.stage == 3 and module is not model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are already divided by the global count of valid tokens: gradients are sums.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def prepare_micro_batch(model: FSDPModule, plan: Plan, last: bool) -> None:
    """Says before each micro-batch whether it is the optimizer step's last, so that communication happens when the stage
    wants it and gathered parameters are dropped when they are about to change."""
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last or plan.stage >= 2)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or plan.stage == 3)


def drop_gathered(model: nn.Module) -> None:
    """Frees gathered parameters; the next forward pass gathers again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
