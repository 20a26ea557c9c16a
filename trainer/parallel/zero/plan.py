"""Sharding of states (ZeRO) as it is planned: what is possible on which ranks, and what DeepSpeed's engine cannot
run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from trainer.config import Config, ParallelConfig
from trainer.config.fields import list_divisors
from trainer.config.model import ModelSpec
from trainer.planning.parameters import UpdateSettings, declare_parameters, float8_setting
from trainer.planning.plan import Feature, Plan

# What DeepSpeed's engine cannot run.


FLAG, COUNT, SIZE, NAMES = "true or false", "a whole number from 0 on", "a whole number from 1 on", "a list of names"

STAGE_3, OFFLOAD, NVME = "parallel.zero.stage=3", "parallel.zero.offload=true", "parallel.zero.nvme=FOLDER"


class DeepSpeedKey(NamedTuple):
    """What may be given for a key of DeepSpeed's configuration, and the settings without which it does nothing."""

    value: str | dict[str, DeepSpeedKey]
    needs: tuple[str, ...] = ()


OWN = DeepSpeedKey(
    {
        "zero_optimization": DeepSpeedKey(
            {
                "reduce_bucket_size": DeepSpeedKey(SIZE),
                "contiguous_gradients": DeepSpeedKey(FLAG),
                "overlap_comm": DeepSpeedKey(FLAG, (STAGE_3,)),
                "sub_group_size": DeepSpeedKey(SIZE, (STAGE_3,)),
                "zero_hpz_partition_size": DeepSpeedKey(COUNT, (STAGE_3,)),
                "zero_quantized_weights": DeepSpeedKey(FLAG, (STAGE_3,)),
                **{
                    f"stage3_{name}": DeepSpeedKey(COUNT, (STAGE_3,))
                    for name in (
                        "prefetch_bucket_size",
                        "param_persistence_threshold",
                        "model_persistence_threshold",
                        "max_live_parameters",
                        "max_reuse_distance",
                        "module_granularity_threshold",
                    )
                },
                **{
                    f"stage3_{name}": DeepSpeedKey(FLAG, (STAGE_3,))
                    for name in ("use_all_reduce_for_fetch_params", "allgather_sequential")
                },
                "offload_optimizer": DeepSpeedKey(
                    {
                        "pin_memory": DeepSpeedKey(FLAG),
                        "buffer_count": DeepSpeedKey(SIZE, (NVME,)),
                        "pipeline_read": DeepSpeedKey(FLAG, (NVME,)),
                        "pipeline_write": DeepSpeedKey(FLAG, (NVME,)),
                    },
                    (OFFLOAD,),
                ),
                "offload_param": DeepSpeedKey(
                    {
                        "pin_memory": DeepSpeedKey(FLAG),
                        **{name: DeepSpeedKey(SIZE, (NVME,)) for name in ("buffer_count", "buffer_size", "max_in_cpu")},
                    },
                    (STAGE_3, OFFLOAD),
                ),
            }
        ),
        "aio": DeepSpeedKey(
            {
                "block_size": DeepSpeedKey(SIZE),
                "queue_depth": DeepSpeedKey(SIZE),
                "intra_op_parallelism": DeepSpeedKey(SIZE),
                "single_submit": DeepSpeedKey(FLAG),
                "overlap_events": DeepSpeedKey(FLAG),
            },
            (NVME,),
        ),
        "comms_logger": DeepSpeedKey(
            {
                "enabled": DeepSpeedKey(FLAG),
                "prof_all": DeepSpeedKey(FLAG),
                "prof_ops": DeepSpeedKey(NAMES),
                "verbose": DeepSpeedKey(FLAG),
                "debug": DeepSpeedKey(FLAG),
            }
        ),
        "wall_clock_breakdown": DeepSpeedKey(FLAG),
        "memory_breakdown": DeepSpeedKey(FLAG),
        "steps_per_print": DeepSpeedKey(SIZE),
    }
)
"""What may be added to DeepSpeed's configuration. The rest follows from our settings, has no effect here, or trains
something else; of unknown sections DeepSpeed itself would say nothing."""

WHY = {
    **dict.fromkeys(("stage", "device", "nvme_path"), "follows from the other settings of parallel.zero; leave it out"),
    **dict.fromkeys(("cpu_offload", "cpu_offload_param"), f"is an old name; leave it out, and set {OFFLOAD}"),
    "cpu_offload_use_pin_memory": "is an old name; set offload_optimizer: {pin_memory: ...} instead",
    "allgather_bucket_size": "has no effect, as all is gathered in one call; leave it out",
    **dict.fromkeys(
        ("round_robin_gradients", "parameter_alignment"),
        "moves parameters inside DeepSpeed's flat tensors, where this trainer finds them by their order; leave it out",
    ),
    "compute_grad_norm": "takes away the norm by which gradients are clipped and judged; leave it out "
    "(optimizer.clip_norm=0 does not clip)",
    "zero_quantized_gradients": "sums over ranks but averages over nodes, so gradients would be scaled wrongly; leave "
    "it out, or set parallel.grad_comm with parallel.zero.engine=torch, which quantises "
    "gradients too",
    "zero_quantized_nontrainable_weights": "rounds frozen parameters; leave it out, or set model.adapter.weights=fp8",
}
"""Of keys that are refused whatever their value: what they would do, and the way out."""

TORCH = "parallel.zero.engine=torch"


def check_parallel(parallel: ParallelConfig, dp: int, nodes: int) -> list[str]:
    """Everything in the plan that the engine cannot do, one sentence each. dp: data-parallel ranks."""
    zero = parallel.zero
    if zero.engine == "torch":
        given = [
            f"parallel.zero.{name}={value}"
            for name, value in (("nvme", zero.nvme), ("deepspeed", zero.deepspeed))
            if value
        ]
        return [f"{setting} is for DeepSpeed; set parallel.zero.engine=deepspeed" for setting in given]
    if zero.stage == 0:
        return [
            "parallel.zero.engine=deepspeed has nothing to share at parallel.zero.stage=0; set parallel.zero.stage=1, "
            f"or {TORCH}"
        ]
    problems, stage = [], f"parallel.zero.stage={zero.stage}"
    if parallel.cp > 1:
        problems.append(
            f"parallel.zero.engine=deepspeed has never shared states among parallel.cp={parallel.cp} ranks of a "
            f"sequence; set {TORCH}, which runs this plan, or parallel.cp=1"
        )
    if parallel.tp_overlap != "off":
        problems.append(
            f"parallel.zero.engine=deepspeed has never run beside parallel.tp_overlap={parallel.tp_overlap}; set "
            f"parallel.tp_overlap=off, or {TORCH}"
        )
    if zero.collectives == "copy_engine":
        problems.append(
            f"parallel.zero.collectives={zero.collectives} is for FSDP; set parallel.zero.collectives=nccl, or {TORCH}"
        )
    for name, size in (("pp", parallel.pp), ("tp", parallel.tp)):
        if zero.stage > 1 and size > 1:
            why = (
                "reduces gradients after every backward pass and gathers by hooks that know no pipeline"
                if name == "pp"
                else "knows no parameters that other ranks hold parts of"
            )
            problems.append(
                f"parallel.zero.engine=deepspeed: {stage} {why}, so it cannot run with parallel.{name}={size}; set "
                f"parallel.zero.stage=1, or {TORCH}, which runs {stage} under this plan"
            )
    if parallel.shard not in (-1, dp):
        problems.append(
            f"parallel.zero.engine=deepspeed shares over all {dp} data-parallel ranks, not over "
            f"parallel.shard={parallel.shard}; set parallel.shard=-1, or {TORCH}, which runs this plan"
        )
    if zero.nvme is not None and zero.stage < 3:
        problems.append(
            f"parallel.zero.nvme={zero.nvme}: DeepSpeed keeps state on a disk in stage 3 only, not with {stage}; set "
            "parallel.zero.stage=3, or parallel.zero.offload=true for host memory"
        )
    problems += [
        f"parallel.grad_comm.{name}.codec={codec}: DeepSpeed reduces gradients by itself; set codec=none, or {TORCH}"
        for name in ("inner", "outer")
        if (codec := getattr(parallel.grad_comm, name).codec) != "none"
    ]
    return problems + list(_check_own(parallel, dp, nodes))


def _check_own(parallel: ParallelConfig, dp: int, nodes: int) -> Iterator[str]:
    zero, path = parallel.zero, "parallel.zero.deepspeed"
    present = {
        f"parallel.zero.stage={zero.stage}",
        *([OFFLOAD] if zero.offload or zero.nvme is not None else []),
        *([NVME] if zero.nvme is not None else []),
    }
    problems = list(_check_key(zero.deepspeed, OWN, present, path))
    yield from problems
    section = {} if problems else zero.deepspeed.get("zero_optimization", {})
    size, path = section.get("zero_hpz_partition_size", 1), f"{path}.zero_optimization"
    between = {
        f"{path}.zero_hpz_partition_size={size}": size > 1,
        f"{path}.zero_quantized_weights=true": section.get("zero_quantized_weights"),
    }
    for name in (name for name, given in between.items() if given and nodes < 2):
        yield f"{name} saves traffic between nodes, and all processes run on one; leave it out there"
    if size <= 1 or nodes < 2:
        return
    path += f".zero_hpz_partition_size={size}"
    if zero.nvme is not None:
        yield (
            f"{path} keeps second copies of parameters in memory, and DeepSpeed has none of what is on a disk; leave "
            "it out, or parallel.zero.nvme"
        )
    elif (node := dp // nodes) % size:
        yield (
            f"{path} does not divide the {node} processes of a node; legal: {', '.join(map(str, list_divisors(node)))}"
        )


def _check_key(given: Any, key: DeepSpeedKey, present: set[str], path: str) -> Iterator[str]:
    """present: settings that keys may need."""
    if missing := [setting for setting in key.needs if setting not in present]:
        yield f"{path} acts with {' and '.join(missing)} only; leave it out, or set that"
    elif isinstance(key.value, str):
        if not _fits(given, key.value):
            yield f"{path}={_format_yaml(given)} must be {key.value}"
    elif not isinstance(given, dict):
        yield f"{path}={_format_yaml(given)} must be a mapping with some of {', '.join(key.value)}"
    else:
        for name, value in given.items():
            if name in key.value:
                yield from _check_key(value, key.value[name], present, f"{path}.{name}")
            else:
                yield f"{path}.{name} " + WHY.get(
                    name,
                    "contradicts other settings, has no effect here or has never been tried; leave it out. What can "
                    f"be given is {', '.join(key.value)}",
                )


def _fits(value: Any, kind: str) -> bool:
    if kind == FLAG:
        return isinstance(value, bool)
    if kind == NAMES:
        return isinstance(value, list) and all(isinstance(name, str) for name in value)
    return type(value) in (int, float) and value % 1 == 0 and value >= (kind == SIZE)


def _format_yaml(value: Any) -> str:
    """As in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_settings(config: Config) -> Iterator[str]:
    """Other settings that the engine contradicts, one sentence each."""
    zero, precision = config.parallel.zero, config.precision
    if zero.engine == "torch":
        return
    narrow, plain = float8_setting(precision)
    if narrow:
        yield f"{narrow}: DeepSpeed's engine multiplies in precision.compute alone; set {TORCH}, or {plain}"
    if "muon" in UpdateSettings.of(config).names():
        yield (
            "optimizer muon needs whole matrices, and DeepSpeed shares parameters out without regard to rows; set "
            f"{TORCH}, or optimizer=adamw (in precision.types too)"
        )
    if config.optimizer.ema.decay:
        yield (
            f"optimizer.ema.decay={config.optimizer.ema.decay:g}: DeepSpeed's states are its own, and it keeps no "
            f"average of weights; set optimizer.ema.decay=0, or {TORCH}"
        )
    if config.compile and zero.stage == 3:
        yield (
            "compile=true: DeepSpeed's stage 3 swaps the memory of parameters under the compiled code; set "
            f"compile=false, parallel.zero.stage=1 or 2, or {TORCH}"
        )
    if config.activation.tile and zero.stage == 3:
        yield (
            f"activation.tile={config.activation.tile}: DeepSpeed's stage 3 gathers parameters for each module's pass, "
            f"and tiles have passes of their own; set activation.tile=0, parallel.zero.stage=1 or 2, or {TORCH}"
        )
    if config.activation.mode == "auto":
        yield (
            "activation.mode=auto: the memory of DeepSpeed's engine is not predicted; set activation=selective or "
            f"activation=full, or {TORCH}"
        )
    if config.parallel.pipeline.schedule == "auto" and config.parallel.pp > 1:
        yield (
            "parallel.pipeline.schedule=auto may cut the model anew, which DeepSpeed cannot; name a schedule (a run "
            f"with {TORCH} finds one), such as interleaved"
        )


# What sharding needs of ranks, whatever the engine.


def check_zero(parallel: ParallelConfig, ranks: int, world: int, node: int) -> list[str]:
    """What keeps `ranks` that hold the same part of the model from sharing its states."""
    problems, stage = [], parallel.zero.stage
    if parallel.shard != -1 and parallel.shard not in list_divisors(ranks):
        kinds = "data- and context-parallel" if parallel.cp > 1 else "data-parallel"
        problems.append(
            f"parallel.shard={parallel.shard} does not divide the {ranks} {kinds} ranks; legal: "
            f"{', '.join(map(str, list_divisors(ranks)))}, or -1 for all"
        )
    if stage == 0 and parallel.shard not in (-1, 1):
        problems.append(
            f"parallel.shard={parallel.shard} has nothing to share at parallel.zero.stage=0; set "
            "parallel.zero.stage=1, 2 or 3, or parallel.shard=-1"
        )
    if stage == 0 and parallel.zero.offload:
        problems.append(
            "parallel.zero.offload=true keeps sharded state in host memory, and parallel.zero.stage=0 shards none; "
            "set parallel.zero.stage=1, 2 or 3"
        )
    return problems + check_transport(parallel, ranks, node) + check_parallel(parallel, ranks, world // node)


def check_transport(parallel: ParallelConfig, dp: int, node: int) -> list[str]:
    """What `parallel.zero.collectives` cannot go with. dp: ranks that hold the same part of the model; node: processes
    on a machine."""
    zero, setting = parallel.zero, f"parallel.zero.collectives={parallel.zero.collectives}"
    if zero.collectives != "copy_engine":
        return []
    if zero.stage == 0:
        return [
            f"{setting} is for what ranks share, and parallel.zero.stage=0 shares nothing; set "
            "parallel.zero.stage=1, 2 or 3, or parallel.zero.collectives=nccl"
        ]
    if zero.offload:
        return [
            f"{setting} copies between GPUs, and parallel.zero.offload=true keeps parameters and gradients in host "
            "memory; set parallel.zero.collectives=nccl, or parallel.zero.offload=false"
        ]
    shard, within = parallel.shard, [n for n in list_divisors(dp) if node % (n * parallel.tp) == 0]
    if within and (dp if shard == -1 else shard) not in within:
        return [
            f"{setting} needs ranks that share memory, and the {dp if shard == -1 else shard} ranks that share states"
            + f", of parallel.tp={parallel.tp} each," * (parallel.tp > 1)
            + f" span nodes of {node} processes; set parallel.shard={within[-1]}, which keeps replicas on other nodes, "
            "or parallel.zero.collectives=nccl"
        ]
    return []


def describe_zero(config: Config, spec: ModelSpec, plan: Plan) -> list[tuple[str, str]]:
    """What ranks that share states communicate by, and what has no effect where none do."""
    setting = f"parallel.zero.collectives={config.parallel.zero.collectives}"
    if config.parallel.zero.collectives != "copy_engine":
        return []
    return [("shared states", setting) if plan.shard > 1 else ("without effect", f"{setting}: no ranks share states")]


def check_model(config: Config, spec: ModelSpec | None, plan: Plan, node: int) -> Iterator[str]:
    """What of the model the engine cannot train."""
    zero = config.parallel.zero
    if spec is None or not spec.adapter.rank or zero.engine == "torch":
        return
    setting = f"model.adapter.rank={spec.adapter.rank}"
    if zero.nvme is not None:
        yield (
            f"{setting} with parallel.zero.nvme={zero.nvme}: frozen parameters are no state of the optimizer, and only "
            f"that is kept on a disk; set parallel.zero.offload=true instead, or {TORCH}"
        )
    size = zero.deepspeed.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    if size > 1:
        yield (
            f"{setting} with parallel.zero.deepspeed.zero_optimization.zero_hpz_partition_size={size}: DeepSpeed "
            f"renews a node's second copies of trained parameters alone; leave it out, or set {TORCH}"
        )
    if zero.stage == 3 and spec.adapter.weights == "fp8":
        yield (
            "model.adapter.weights=fp8: DeepSpeed's stage 3 shares parameters in precision.compute; set "
            f"model.adapter.weights=compute, parallel.zero.stage=1 or 2, or {TORCH}"
        )
    trained = {
        name.split(".")[1] for name, info in declare_parameters(spec).items() if info.trained and "layers." in name
    }
    if plan.pp > 1 and len(trained) < spec.depth:
        yield (
            f"{setting} gives no adapters to {spec.depth - len(trained)} of {spec.depth} layers: DeepSpeed has no "
            f"optimizer for a pipeline rank that trains nothing; set model.adapter.targets for all layers, or {TORCH}"
        )


FEATURE = Feature("zero", check_ranks=check_zero, check_plan=check_model, describe=describe_zero)
