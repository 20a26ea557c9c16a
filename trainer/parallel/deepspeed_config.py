"""parallel.zero.engine=deepspeed: what it cannot run, DeepSpeed's configuration from ours, and its import.

Imports neither torch nor DeepSpeed but in `load`, so that refusals come before any process group.
"""
from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainer.config import Config, ConfigError, ParallelConfig

if TYPE_CHECKING:
    import torch

ZEROPP = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
"""ZeRO++ (arXiv 2306.10209): what saves traffic between nodes, in stage 3."""

OWN = {"zero_optimization", "aio", "comms_logger", "wall_clock_breakdown", "memory_breakdown", "steps_per_print"}
"""Sections of DeepSpeed's configuration that may be added to. What else there is follows from our settings or has no effect
here; of unknown sections DeepSpeed itself would say nothing."""

TORCH = "parallel.zero.engine=torch"


def check_parallel(parallel: ParallelConfig, dp: int, nodes: int) -> list[str]:
    """Everything in the plan that the engine cannot do, one sentence each. dp: data-parallel ranks."""
    zero = parallel.zero
    if zero.engine == "torch":
        given = [f"parallel.zero.{name}={value}" for name, value in (("nvme", zero.nvme), ("deepspeed", zero.deepspeed)) if value]
        return [f"{setting} is for DeepSpeed; set parallel.zero.engine=deepspeed" for setting in given]
    if zero.stage == 0:
        return [f"parallel.zero.engine=deepspeed has nothing to share at parallel.zero.stage=0; set parallel.zero.stage=1, or {TORCH}"]
    problems, stage = [], f"parallel.zero.stage={zero.stage}"
    for name, size in (("pp", parallel.pp), ("tp", parallel.tp)):
        if zero.stage > 1 and size > 1:
            why = ("reduces gradients after every backward pass and gathers by hooks that know no pipeline" if name == "pp" else
                   "knows no parameters that other ranks hold parts of")
            problems.append(f"parallel.zero.engine=deepspeed: {stage} {why}, so it cannot run with parallel.{name}={size}; set "
                            f"parallel.zero.stage=1, or {TORCH}, which runs {stage} under this plan")
    if parallel.shard not in (-1, dp):
        problems.append(f"parallel.zero.engine=deepspeed shares over all {dp} data-parallel ranks, not over parallel.shard={parallel.shard}; set "
                        f"parallel.shard=-1, or {TORCH}, which runs this plan")
    if zero.nvme is not None and zero.stage < 3:
        problems.append(f"parallel.zero.nvme={zero.nvme}: DeepSpeed keeps state on a disk in stage 3 only, not with {stage}; set "
                        "parallel.zero.stage=3, or parallel.zero.offload=true for host memory")
    problems += [f"parallel.grad_comm.{name}.codec={codec}: DeepSpeed reduces gradients by itself; set codec=none, or {TORCH}"
                 for name in ("inner", "outer") if (codec := getattr(parallel.grad_comm, name).codec) != "none"]
    return problems + list(_check_own(parallel, nodes))


def _check_own(parallel: ParallelConfig, nodes: int) -> Iterator[str]:
    own = parallel.zero.deepspeed
    for name in own.keys() - OWN:
        yield (f"parallel.zero.deepspeed.{name} would contradict the other settings or have no effect; what can be added is in "
               f"{', '.join(sorted(OWN))}")
    section = own.get("zero_optimization", {})
    if not isinstance(section, dict):
        yield f"parallel.zero.deepspeed.zero_optimization={section} must be a mapping, such as {{sub_group_size: 1e8}}"
        return
    for name in sorted(section.keys() & _zero(parallel).keys()):
        if not (isinstance(section[name], dict) and name.startswith("offload_")):
            yield f"parallel.zero.deepspeed.zero_optimization.{name} follows from the other settings of parallel.zero; leave it out"
    for name in ZEROPP:
        if section.get(name, 0) in (0, 1, False) and section.get(name) is not True:
            continue
        if parallel.zero.stage < 3:
            yield f"parallel.zero.deepspeed.zero_optimization.{name} acts in stage 3 only; leave it out, or set parallel.zero.stage=3"
        elif nodes < 2:
            yield (f"parallel.zero.deepspeed.zero_optimization.{name} saves traffic between nodes, and all processes run on one; leave it out "
                   "there")


def check_settings(config: Config) -> Iterator[str]:
    """Other settings that the engine contradicts, one sentence each."""
    zero, precision = config.parallel.zero, config.precision
    if zero.engine == "torch":
        return
    if precision.compute == "fp16" and not math.isclose(precision.scale_growth * precision.scale_backoff, 1):
        yield (f"precision.scale_backoff={precision.scale_backoff}: DeepSpeed's loss scale shrinks by the factor that it grows by; set "
               f"precision.scale_backoff={1 / precision.scale_growth:g}, or {TORCH}")
    if config.compile and zero.stage == 3:
        yield ("compile=true: DeepSpeed's stage 3 swaps the memory of parameters under the compiled code; set compile=false, "
               f"parallel.zero.stage=1 or 2, or {TORCH}")
    if config.parallel.pipeline.schedule == "auto" and config.parallel.pp > 1:
        yield ("parallel.pipeline.schedule=auto may cut the model anew, which DeepSpeed cannot; name a schedule (a run with "
               f"{TORCH} finds one), such as interleaved")


def _zero(parallel: ParallelConfig) -> dict[str, Any]:
    """DeepSpeed's section on ZeRO, but for what is given."""
    zero = parallel.zero
    section: dict[str, Any] = {"stage": zero.stage, "overlap_comm": zero.stage == 3}
    place = {"device": "nvme", "nvme_path": zero.nvme} if zero.nvme is not None else {"device": "cpu"} if zero.offload else None
    if place:
        section["offload_optimizer"] = place
        if zero.stage == 3:
            section["offload_param"] = place
    return section


def generate(config: Config, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's configuration for a run on `device`."""
    precision, own = config.precision, config.parallel.zero.deepspeed
    zero = {"reduce_bucket_size": 100_000_000, "allgather_bucket_size": 500_000_000, "memory_efficient_linear": False} | _zero(config.parallel)
    for name, value in own.get("zero_optimization", {}).items():
        zero[name] = zero.get(name, {}) | value if isinstance(value, dict) else value
    for name in zero.keys() & {"offload_optimizer", "offload_param"}:
        zero[name] = {"pin_memory": device.type == "cuda"} | zero[name]
    return {
        "steps_per_print": 10 ** 9} | own | {
        "zero_optimization": zero,
        # Our runtime says when a step is complete, and a micro-batch is whatever it makes of one.
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.clip_norm,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,  # the updates are ours, on CPUs too
        "data_types": {} if config.parallel.zero.stage == 1 else {"grad_accum_dtype": "fp32"}, "communication_data_type": precision.reduce,
        "gradient_allreduce_op": "mean" if config.parallel.zero.stage == 3 else "sum",  # stage 3 knows no sum
        "bf16": {"enabled": precision.compute == "bf16"},
        "fp16": {"enabled": precision.compute == "fp16", "initial_scale_power": max(0, round(math.log2(precision.loss_scale))),
                 "loss_scale_window": precision.growth_interval, "hysteresis": 1}}


def load(device: torch.device) -> ModuleType:
    """`trainer.parallel.deepspeed`, imported for the kind of the run's device: DeepSpeed settles on one when it is imported, and left
    to itself on a GPU where there is one. Raises `ConfigError` if it has been imported for another."""
    if "deepspeed" not in sys.modules:
        os.environ["DS_ACCELERATOR"] = device.type
    module = importlib.import_module("trainer.parallel.deepspeed")
    if (kind := module.get_accelerator().device_name()) != device.type:
        raise ConfigError([f"run.device={device.type}: DeepSpeed has already been imported in this process, for run.device={kind}; set that, or run "
                           "in a process of its own"])
    return module
