"""DeepSpeed's configuration from ours."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from trainer.config import Config, ParallelConfig

if TYPE_CHECKING:
    import torch


def _zero(parallel: ParallelConfig) -> dict[str, Any]:
    """DeepSpeed's section on ZeRO, but for what is given."""
    zero = parallel.zero
    section: dict[str, Any] = {"stage": zero.stage}
    place = (
        {"device": "nvme", "nvme_path": zero.nvme}
        if zero.nvme is not None
        else {"device": "cpu"}
        if zero.offload
        else None
    )
    if place:
        section["offload_optimizer"] = place
        if zero.stage == 3:
            section["offload_param"] = place
    return section


def generate_config(config: Config, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's configuration for a run on `device`."""
    precision, own = config.precision, config.parallel.zero.deepspeed
    zero = {
        "reduce_bucket_size": 100_000_000,
        "overlap_comm": config.parallel.zero.stage == 3,
        "memory_efficient_linear": False,
    }
    zero |= _zero(config.parallel)
    for name, value in own.get("zero_optimization", {}).items():
        zero[name] = zero.get(name, {}) | value if isinstance(value, dict) else value
    for name in zero.keys() & {"offload_optimizer", "offload_param"}:
        zero[name] = {"pin_memory": device.type == "cuda"} | zero[name]
    return (
        {"steps_per_print": 10**9}
        | own
        | {
            "zero_optimization": zero,
            # Our runtime says when a step is complete, and a micro-batch is whatever it makes of one.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": config.optimizer.clip_norm,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # the updates are ours, on CPUs too
            "data_types": {} if config.parallel.zero.stage == 1 else {"grad_accum_dtype": "fp32"},
            "communication_data_type": precision.reduce,
            "gradient_allreduce_op": "mean" if config.parallel.zero.stage == 3 else "sum",  # stage 3 knows no sum
            "bf16": {"enabled": precision.compute == "bf16"},
            "fp16": {
                "enabled": precision.compute == "fp16",
                "initial_scale_power": max(0, round(math.log2(precision.loss_scale))),
                "loss_scale_window": precision.growth_interval,
                "hysteresis": 1,
            },
        }
    )
