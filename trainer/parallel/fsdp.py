"""ZeRO stages 0 to 3 as one knob on FSDP2 (Rajbhandari et al., arXiv 1910.02054).

| stage | parameters between steps | gathered | gradients are reduced |
|---|---|---|---|
| 0 | whole on every rank | never | once a step (all-reduce) |
| 1 | sharded fp32 masters | once a step, kept to the last backward | once a step (reduce-scatter) |
| 2 | as 1 | as 1 | every micro-batch, kept sharded |
| 3 | as 1 | for each layer's forward and backward | every micro-batch, kept sharded |

With fewer shards than data-parallel ranks (HSDP) the shards are all-reduced over the replicas, once a step.

Offloaded gradients that are reduced every micro-batch are added up on the device, and copied to host memory once a
step: FSDP keeps partial sums there where replicas follow, so one replica makes it do so. By itself it would copy each
to memory that is not page-locked, wait for it, and add on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainer.distributed.world import World
from trainer.model.stage import Stage
from trainer.parallel.fsdp_internals import drop_gathered, fill_missing, parameter_groups
from trainer.planning.cost.memory import sums_on_device
from trainer.planning.plan import Plan

if TYPE_CHECKING:
    from trainer.parallel.compress.reduction import Compression


def shard(model: Stage, plan: Plan, world: World, compute: torch.dtype, reduce: torch.dtype, hsdp: bool = True) -> None:
    """Wraps each layer and then the model (or pipeline stage) itself, with embedding, final norm and head, as one unit
    of gathering and reduction.

    Parameters stay fp32; forward and backward see them in `compute`, gradients are reduced in `reduce`. Without `hsdp`
    they are reduced within the shard group alone, and something else adds up replicas."""
    names = (
        ("replicate", "shard")
        if hsdp and (plan.replicate > 1 or sums_on_device(plan, reduce is torch.float32))
        else ("shard",)
    )
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute is torch.float32 else compute, reduce_dtype=reduce, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if plan.offload else OffloadPolicy()
    for module in [*model.layers.values(), model]:
        fully_shard(
            module,
            mesh=world.mesh[names],
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=plan.stage == 3 and module is not model,
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are already divided by the global count of valid tokens: gradients are sums.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


class Sharding:
    """What the schedule asks of FSDP for each stage of this rank: when gradients are reduced and what stays gathered.

    stages: number -> stage, each a unit of its own with its layers inside; reductions: of each stage in a step.
    """

    def __init__(
        self, stages: dict[int, FSDPModule], plan: Plan, reductions: int, compression: Compression | None = None
    ):
        self.stages, self.gather_again = stages, plan.stage == 3
        self.partial_sums = (
            plan.replicate > 1 or plan.offload
        )  # FSDP may keep those of a unit's reductions until the last
        self.reductions, self.compression = reductions, compression
        self.left = dict.fromkeys(stages, 0)

    def begin(self, stage: int) -> None:
        """Before a stage's first action of a step: nothing is reduced, and what is gathered is kept as the plan wants
        it."""
        self.left[stage] = self.reductions
        self.stages[stage].set_is_last_backward(False)
        self._reduce_next(stage, False)

    def unshard(self, stage: int) -> None:
        """Starts gathering what the stage's next pass needs first, while something else is still running."""
        model = self.stages[stage]
        if model._get_fsdp_state()._is_root:  # not before the first pass: FSDP has not set itself up
            for module in [model, next(iter(model.layers.values()))]:
                module.unshard(async_op=True)

    def accumulate(self, stage: int) -> None:
        """Takes over weight gradients that were computed outside of backward, in the type they are reduced in."""
        for group in parameter_groups(self.stages[stage]):
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is None or whole.grad is None:
                    continue
                gradient, whole.grad = whole.grad, None
                if parameter.unsharded_accumulated_grad is None:
                    parameter.unsharded_accumulated_grad = gradient.to(parameter.reduce_dtype or gradient.dtype)
                else:
                    parameter.unsharded_accumulated_grad += gradient

    def reducing(self, stage: int) -> None:
        """Before a full backward after which gradients are due: FSDP reduces those of each layer while the next
        runs."""
        self._reduce_next(stage, True)

    def reduced(self, stage: int) -> None:
        """After that backward."""
        self.left[stage] -= 1
        self._reduce_next(stage, False)

    def reduce(self, stage: int) -> None:
        """Reduces what has been accumulated, where the last gradients came from outside of backward."""
        self.accumulate(stage)
        self._reduce_next(stage, True)
        for group in reversed(parameter_groups(self.stages[stage])):
            if self.partial_sums:
                fill_missing(group, last=self.left[stage] == 1)
            group.post_backward()
        self.reduced(stage)

    def reshard(self, stage: int) -> None:
        """After the stage's last use in a step: its gathered parameters are about to change."""
        drop_gathered(self.stages[stage])

    def end(self, stage: int) -> None:
        """After the rank's last action of a step: the gradients are there when its next kernel runs."""
        self.stages[stage].set_is_last_backward(True)
        self.stages[stage]._get_fsdp_state()._root_post_backward_final_callback()

    def _reduce_next(self, stage: int, wanted: bool) -> None:
        model, last = self.stages[stage], wanted and self.left[stage] == 1
        if self.compression is not None:
            self.compression.last = last
        model.set_requires_gradient_sync(wanted)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or self.gather_again)
