"""The private names of torch, DeepSpeed and Hydra that the project uses: where, why, and whether the installed versions
have them.

A name that starts with an underscore may go with the next release. So may the fields of FSDP's and DeepSpeed's own
objects, which no document promises.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed

PACKAGE = Path(__file__).parents[1] / "trainer"

C10D = ("distributed/c10d_internals.py",)
FSDP = ("parallel/zero/fsdp_internals.py",)
DEEPSPEED = ("parallel/zero/deepspeed_base.py", "parallel/zero/deepspeed_engine.py")
FULLY_SHARD = "torch/distributed/fsdp/_fully_shard"
ZERO = "deepspeed/runtime"


class Private(NamedTuple):
    """names: of one kind, for one reason, with | between those of different versions; files: those that may use them;
    at: the object that has them, or the folder of a package in whose source they stand; why: what for, since public
    names do not give it."""

    names: str
    files: tuple[str, ...]
    at: str
    why: str


PRIVATE = [
    Private(
        "_internal",
        ("config/compose.py", "config/compose.py"),
        "hydra",
        "Hydra's own reader of files, behind a look at what they hold; its loader, without Hydra's own settings",
    ),
    Private(
        "_parse_overrides_and_create_caching_repo _compose_config_from_defaults_list _apply_overrides_to_config",
        ("config/compose.py",),
        "hydra._internal.config_loader_impl.ConfigLoaderImpl",
        "a composition without Hydra's own settings",
    ),
    Private(
        "_trailing_error",
        ("data/tables.py",),
        "_compression.DecompressReader",
        "bz2.open and lzma.open pass over all that follows a stream whose successor has a damaged header",
    ),
    Private("_profiler", ("training/profiling.py",), "torch._C", "the way to the next name"),
    Private(
        "_ExperimentalConfig",
        ("training/profiling.py",),
        "torch._C._profiler",
        "threads beside the one that begins a profile",
    ),
    Private("_get_default_store", C10D, "torch.distributed.distributed_c10d", "a store of one's own, without ports"),
    Private("_set_pg_timeout", C10D, "torch.distributed.distributed_c10d", "groups that a mesh made have 10 minutes"),
    Private("_world", C10D, "torch.distributed.distributed_c10d", "ranks of groups, which gloo's recorder leaves out"),
    Private("_C", (*C10D, "training/profiling.py"), "torch", "where the flight recorder is, and the profiler"),
    Private("_distributed_c10d", C10D, "torch._C", "the same"),
    Private("_dump_fr_trace", C10D, "torch._C._distributed_c10d", "the flight recorder, other backends than NCCL"),
    Private("_dump_nccl_trace", C10D, "NCCL", "the flight recorder of NCCL"),
    Private("_timeout", C10D, "torch/_C", "the time limit of an NCCL communicator made by hand"),
    Private(
        "_Options", C10D, "torch._C._distributed_c10d.ProcessGroupGloo", "gloo's two threads write one unlocked string"
    ),
    Private("_threads _devices", C10D, "torch._C._distributed_c10d.ProcessGroupGloo._Options", "the same"),
    Private(
        "_c10d_functional",
        ("distributed/collectives.py", "parallel/recompute.py"),
        "torch.ops",
        "collectives that the compiler sees",
    ),
    Private(
        "_init_weights",
        ("hf/code.py", "hf/code_weights.py"),
        "transformers.modeling_utils.PreTrainedModel",
        "initial weights and buffers of one module of a model that runs by transformers' code",
    ),
    Private(
        "_apply_gate",
        ("hf/code.py",),
        "transformers/integrations/moe.py",
        "what experts of transformers compute between their two products",
    ),
    Private(
        "_python_dispatch",
        ("parallel/recompute.py",),
        "torch.utils",
        "the mode in which recompute saves what foreign routers choose",
    ),
    Private("_parameters", ("hf/code.py",), "torch/nn/modules", "a module's tensors, replaced in a shallow copy"),
    Private(
        "_make_subclass",
        ("model/attention.py",),
        "torch.Tensor",
        "a CausalBias without its memory, which its own constructor takes",
    ),
    Private(
        "_symmetric_memory",
        ("distributed/symmetric_memory.py",),
        "torch.distributed",
        "memory that GPUs read and write directly",
    ),
    Private(
        "_flatten", ("distributed/mesh.py", DEEPSPEED[1]), "torch.distributed.device_mesh.DeviceMesh", "joint axes"
    ),
    Private(
        "_StridedShard",
        ("distributed/tensors.py",),
        "torch.distributed.tensor.placement_types",
        "what FSDP makes of a parameter that tensor parallelism has cut along the same dimension",
    ),
    Private("_get_fsdp_state", FSDP, "torch.distributed.fsdp.FSDPModule", "the way to all the other names of FSDP"),
    Private("_training_state _state_ctx", FSDP, FULLY_SHARD, "in which pass a unit is, where two passes run in turns"),
    Private(
        "_fsdp_param_group fsdp_params unsharded_accumulated_grad _unsharded_param unsharded_param reduce_dtype",
        FSDP,
        FULLY_SHARD,
        "gradients computed outside of backward",
    ),
    Private(
        "_module_info shared_modules accumulate_unsharded_grad_if_needed to_accumulated_grad_if_needed",
        FSDP,
        FULLY_SHARD,
        "gradients that products add to where FSDP accumulates them",
    ),
    Private(
        "_setattr_on_modules sharded_param",
        FSDP,
        FULLY_SHARD,
        "weights that are cast to fp8 once, when they are gathered",
    ),
    Private("_is_root post_backward", FSDP, FULLY_SHARD, "reducing outside of backward, once FSDP is set up"),
    Private("_is_hsdp", FSDP, FULLY_SHARD, "whether replicas add up gradients before they are accumulated"),
    Private(
        "_orig_dtype",
        FSDP,
        FULLY_SHARD,
        "whether parameters keep the result of a reduction, or FSDP adds or casts it on a stream of its own",
    ),
    Private(
        "_partial_reduce_output _all_reduce_state comm_ctx all_gather_state reduce_scatter_states|reduce_scatter_state",
        FSDP,
        FULLY_SHARD,
        "what a unit has in memory in the middle of a step",
    ),
    Private("_root_post_backward_final_callback", FSDP, FULLY_SHARD, "the wait for the reductions of a step"),
    Private("sharded_param padded_sharded_param_size", FSDP, FULLY_SHARD, "where parameters lie in a reduce-scatter"),
    Private("_fully_shard", FSDP, "torch.distributed.fsdp", "the way to the next three"),
    Private("_fsdp_collectives", FSDP, FULLY_SHARD, "copies into flat buffers, which copies between GPUs replace"),
    Private(
        "_sharded_param_data init_all_gather_outputs alloc_all_gather_outputs all_gather_outputs param_dtype "
        "orig_dtype foreach_all_gather foreach_all_gather_copy_out foreach_reduce_scatter_copy_in",
        FSDP,
        FULLY_SHARD,
        "where a shard is, where it is gathered to, and who does it",
    ),
    Private(
        "_all_gather_result wait_for_unshard init_unsharded_param _to_unsharded",
        FSDP,
        FULLY_SHARD,
        "parameters of one rank, each of which FSDP casts and then copies",
    ),
    Private(
        "_unsafe_preserve_version_counter", FSDP, "torch.autograd", "parameters that are gathered again for backward"
    ),
    Private("_apply", ("model/transformer.py",), "torch.nn.Module", "buffers that stay fp32 when a model is cast"),
    Private("_fused_adamw_", ("optim/optimizer.py",), "torch", "AdamW without state that is not ours"),
    Private("_amp_update_scale_", ("precision/scaler.py",), "torch", "a loss scale that stays on the device"),
    Private("_grouped_mm", ("model/experts.py",), "torch", "the grouped GEMM, public in later versions alone"),
    Private(
        "_scaled_mm", ("precision/products.py", "diagnosis/traces.py"), "torch", "products in fp8, as torchao has them"
    ),
    Private(
        "_scaled_dot_product_flash_attention",
        ("model/attention.py",),
        "torch",
        "causal attention from the lower right in what is compiled",
    ),
    Private(
        "_foreach_copy_",
        ("parallel/tensor/apply.py", "parallel/zero/copy_engine.py"),
        "torch",
        "one kernel for many tensors",
    ),
    Private(
        "_functorch _inductor _dynamo",
        ("parallel/parallelize.py", "parallel/recompute.py", "model/stage.py"),
        "torch",
        "settings of the compiler",
    ),
    Private(
        "_profiler_enabled",
        ("distributed/symmetric_memory.py", "parallel/pipeline/runtime.py"),
        "torch.autograd",
        "names only where one looks",
    ),
    Private("__compatible_ops__", DEEPSPEED, "deepspeed/ops", "an operator that DeepSpeed builds, where it need not"),
    Private(
        "_release_process_group_references _get_zero_param_intra_parallel_group",
        DEEPSPEED,
        "deepspeed/utils",
        "groups of an engine before, and of this one",
    ),
    Private("_update_scale check_grad_overflow local_overflow", DEEPSPEED, ZERO, "the project's own loss scale"),
    Private(
        "_hp_mapping lp_fragment_address hp_fragment_address ds_pipe_replicated",
        DEEPSPEED,
        "deepspeed",
        "which part of a parameter lies where in DeepSpeed's flat buffers",
    ),
    Private(
        "_gradient_averaging_world_size _wait_for_offload_copies averaged_gradients norm_for_param_grads "
        "grad_position get_param_id params_in_partition use_grad_accum_attribute process_gradients setup_buckets "
        "overlapping_partition_gradients_reduce_epilogue grad_partitions_flat_buffer gradient_accumulation_dtype "
        "get_fp32_grad_partitions finalize_gradient_accumulation_boundary set_gradient_accumulation_boundary",
        DEEPSPEED,
        ZERO,
        "gradients: that they are sums, where they are, and when DeepSpeed reduces them",
    ),
    Private(
        "_swappable_optimizer_subgroup _optimizer_states_and_gradient_swap_in _partition_all_parameters "
        "swap_optimizer _optimizer_states_and_gradient_swap_out _reassign_or_swap_out_partitioned_parameters "
        "_post_step fp16_groups fp32_partitioned_groups_flat single_partition_of_fp32_groups update_lp_params",
        DEEPSPEED,
        ZERO,
        "an update group by group, with states on a disk",
    ),
]

KNOWN = {name: entry for entry in PRIVATE for name in entry.names.replace("|", " ").split()}
PUBLIC = ("os", "sys", "__future__", "_typeshed")
"""Modules whose underscored names are documented, and types that exist for type checkers only."""


@cache
def trees() -> dict[str, ast.Module]:
    """File -> its syntax tree, of the whole package."""
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def private(name: str) -> bool:
    """`_replace` is public: the names that named tuples document begin so, for the sake of their fields' names."""
    return (
        name.startswith("_")
        and not (name.startswith("__") and name.endswith("__"))
        and name not in ("_", "_replace", "_asdict")
    )


def own() -> set[str]:
    """Underscored names that the project defines: functions, classes, variables, fields."""
    found = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root(node) in ("self", "cls"):
                found.add(node.attr)
    return found


def root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def foreign(tree: ast.AST, owned: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of what a file uses that is listed, or private and not the project's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in KNOWN or private(node.attr) and node.attr not in owned and root(node) not in PUBLIC:
                yield node.lineno, node.attr
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for name in [module] if module else [alias.name for alias in node.names]:
                if name.split(".")[0] not in ("trainer", *PUBLIC):
                    yield from ((node.lineno, part) for part in name.split(".") if private(part))
            if module and module.split(".")[0] not in ("trainer", *PUBLIC):
                yield from ((node.lineno, alias.name) for alias in node.names if private(alias.name))
        elif isinstance(node, ast.FunctionDef) and node.name in KNOWN:
            yield node.lineno, node.name
        elif isinstance(node, ast.Constant) and node.value in KNOWN and private(str(node.value)):  # getattr(x, "_name")
            yield node.lineno, node.value


@cache
def uses() -> dict[str, dict[str, int]]:
    """Name -> file -> a line of it."""
    owned, found = own(), {}
    for file, tree in trees().items():
        for line, name in foreign(tree, owned):
            found.setdefault(name, {})[file] = line
    return found


@cache
def source(folder: str) -> set[str]:
    """The words of the source in a package's folder, stubs included."""
    package, _, rest = folder.partition("/")
    place = Path(importlib.util.find_spec(package).submodule_search_locations[0], rest)
    files = [path for path in place.rglob("*.py*") if path.suffix in (".py", ".pyi")]
    return {word for path in files for word in re.findall(r"\w+", path.read_text(errors="replace"))}


def exists(name: str, at: str) -> bool:
    if at == "NCCL":
        return not torch.distributed.is_nccl_available() or exists(name, "torch._C._distributed_c10d")
    if "/" in at or at == "deepspeed":
        return name in source(at)
    parts = at.split(".")
    holder = importlib.import_module(parts[0])
    for place, part in enumerate([*parts[1:], name], 2):
        if not hasattr(holder, part):
            try:
                importlib.import_module(".".join([*parts, name][:place]))
            except ImportError:
                return False
        holder = getattr(holder, part)
    return True


def test_private_names_are_listed():
    unlisted = [
        f"trainer/{file}:{line} uses {name}: find a public way, or list it in {Path(__file__).name} with a reason"
        for name, files in uses().items()
        for file, line in files.items()
        if name not in KNOWN
    ]
    assert not unlisted, "\n".join(unlisted)


def test_private_names_stay_in_their_files():
    astray = [
        f"trainer/{file}:{line} uses {name}, which belongs into {' or '.join(KNOWN[name].files)}"
        for name, files in uses().items()
        for file, line in files.items()
        if name in KNOWN and file not in KNOWN[name].files
    ]
    assert not astray, "\n".join(astray)


def test_the_list_names_nothing_that_is_not_used():
    assert not [name for name in KNOWN if name not in uses()]
    unknown = {file for entry in PRIVATE for file in entry.files if file not in trees()}
    assert not unknown, f"no such files: {unknown}"


@pytest.mark.parametrize("package", ["torch", "deepspeed"])
def test_the_installed_version_has_them(package):
    missing = [
        f"{entry.at} has no {name}, used by {', '.join(entry.files)}: {entry.why}"
        for entry in PRIVATE
        if entry.at.split(".")[0].split("/")[0] == package or entry.at == "NCCL" and package == "torch"
        for name in entry.names.split()
        if not any(exists(one, entry.at) for one in name.split("|"))
    ]
    assert not missing, "\n".join(missing)
