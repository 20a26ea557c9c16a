"""From a spec and a plan to a parallel model: `parallelize` applies the plan's features in their one valid order."""

from __future__ import annotations

import logging
import os
import shutil
from typing import Any

import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import nn

from trainer.config import Config, ConfigError, PrecisionConfig
from trainer.config.model import CodeSpec, ModelSpec
from trainer.distributed.mesh import World
from trainer.model.experts import WideLinear
from trainer.model.initial import DeclaredModule, parameter_infos
from trainer.model.linear import DeferredGrads
from trainer.model.loss import loss_terms
from trainer.model.stage import Make, Stage, compile_function
from trainer.model.transformer import Transformer
from trainer.parallel.context.apply import share_sequences
from trainer.parallel.experts.apply import share_experts
from trainer.parallel.recompute import apply_recompute, check_recompute, recomputes_attention
from trainer.parallel.tensor.apply import BACKENDS, shard_model
from trainer.parallel.zero.fsdp import Engine
from trainer.parallel.zero.fsdp_internals import hold_operands, sum_in_gemms
from trainer.planning.float8 import float8_linears
from trainer.planning.parameters import declare_parameters
from trainer.planning.plan import Plan
from trainer.precision.products import DTYPES, E4M3, Float8Multiply, Quantise, check_device, quantise_operand


def make_stage(spec: ModelSpec, layers: range | None = None) -> Stage:
    """The pipeline stage with `layers` (None: all of them), in this project's modules or in transformers' own."""
    if isinstance(spec, CodeSpec):
        from trainer.hf.code import CodeStage  # imports transformers, which takes seconds

        return CodeStage(spec, layers)
    return Transformer(spec, layers)


def check_compiler(config: Config, device: torch.device) -> None:
    """Raises `ConfigError` where `compile=true` finds no compiler on this machine. torch.compile needs a C++ compiler
    for CPU code, and a C compiler for the launchers of GPU kernels."""
    variable, names = ("CC", ("gcc", "clang", "cc")) if device.type == "cuda" else ("CXX", ("g++", "clang++"))
    if config.compile and not any(shutil.which(name) for name in (os.environ.get(variable, ""), *names)):
        raise ConfigError(
            f"compile=true needs a compiler, and this machine has none of {', '.join(names)}; install one, point "
            f"{variable} at it, or set compile=false"
        )


def check_model(config: Config, spec: ModelSpec, device: torch.device) -> None:
    """Checks that need the modules of the model, before any process group exists. Raises `ConfigError`."""
    with torch.device("meta"):
        model = make_stage(spec)
    check_declared(model, spec)
    check_device(config.precision, device, config.compile and spec.adapter.weights == "fp8")
    check_recompute(model, config.activation)
    if (
        config.compile
        and max(config.parallel.tp, config.parallel.ep) > 1
        and device.type == "cpu"
        and recomputes_attention(model, config.activation)
    ):
        check_compiled_recompute(config)


def check_declared(model: Stage, spec: ModelSpec) -> None:
    """Raises `ConfigError` where a registered block declares other parameters than its function `parameters` does.
    Memory, FLOPs and checkpoints follow from the latter, without modules."""
    expected, declared = declare_parameters(spec), parameter_infos(model)
    wrong = [name for name in {**expected, **declared} if expected.get(name) != declared.get(name)]
    if wrong or list(expected) != list(declared):
        name = next(iter(wrong), "their order")
        raise ConfigError(
            f"{name}: a registered block declares {declared.get(name)}, and the function `parameters` with which it is "
            f"registered says {expected.get(name)}; make both equal"
        )


def check_compiled_recompute(config: Config) -> None:
    """Raises `ConfigError` on versions of torch that cannot recompute attention in a compiled layer under tensor or
    expert parallelism on CPUs.

    The compiler takes attention for a random function, so recompute saves the generator's state. On CPUs that state is
    stored behind the DeviceMesh of DTensors (`functionalize_rng_ops`), where torch versions that save meshes take the
    mesh for a tensor.
    """
    ranks = "tp" if config.parallel.tp > 1 else "ep"
    if torch.__version__ >= "2.13":
        raise ConfigError(
            f"compile=true: torch {torch.__version__} cannot recompute attention in a compiled layer "
            f"(activation.mode={config.activation.mode}) under parallel.{ranks}={getattr(config.parallel, ranks)} on "
            "CPUs; set "
            "activation.mode=selective with attention in activation.save, activation.mode=none, or compile=false"
        )


def parallelize(
    config: Config,
    spec: ModelSpec,
    layers: range,
    plan: Plan,
    world: World,
    engine: Engine,
    deferred: DeferredGrads | None = None,
    make: Make = make_stage,
    sums: bool = False,
) -> Stage:
    """The pipeline stage that holds `layers`, split over the ranks and with storage. The values of its weights are
    undefined.

    deferred: where linear layers leave weight gradients, if the schedule computes them separately, else None. make:
    creates the modules of the stage. sums: see `sums_in_gemms`.
    """
    # On the meta device a stage takes no memory, so a model that fits only when sharded is never whole on one rank.
    with torch.device("meta"):
        model = make(spec, layers)
        cast_frozen(model, DTYPES[config.precision.compute])
    loss = config.loss
    model.set_loss(loss.z_loss, loss.chunk, config.compile, loss.tile or 0, loss_terms(loss))
    backend = BACKENDS[config.parallel.tp_overlap]
    # Before compilation, because the compiler has to see which operators are recomputed.
    apply_recompute(model, config.activation, backend)
    if deferred is not None:
        model.defer(deferred)
    # Inside of a custom operator (deferred weight gradients, fused products) the compiler sees nothing. There, casts to
    # fp8 are compiled by themselves.
    inside = deferred is not None or config.parallel.tp_overlap != "off"
    casts = compile_function(quantise_operand) if config.compile and inside else quantise_operand
    multiply_in_float8(model, spec, config.precision, casts)
    if config.compile:
        compile_layers(model, deferred is not None)
    # Compilation is lazy: layers are traced in the first step, when everything below has been applied.
    shard_model(model, world.dimensions["tp"], backend)
    share_sequences(model, config, spec, plan, world)
    share_experts(model, config, spec, plan, world)
    # After the split over `tp`, so that FSDP shards DTensors further and knows both dimensions. Storage comes last, for
    # this rank's shards only.
    engine.shard(model)
    engine.materialize(model)
    if sums:
        sum_in_gemms(model)
    if plan.casts_once:
        hold_operands(model, config.compile)
    keep_buffers(model, world.device)
    return model


def cast_frozen(model: Stage, dtype: torch.dtype) -> None:
    """Puts frozen parameters into the compute type, in which they are used: no update needs more digits. Those of
    `WideLinear` are used in fp32. Matrices that are to be in fp8 get a scale for each row."""
    for module in model.modules():
        if isinstance(module, DeclaredModule) and not isinstance(module, WideLinear):
            for name in [name for name, info in module.declared.items() if not info.trained]:
                held = E4M3 if module.declared[name].float8 else dtype
                setattr(module, name, nn.Parameter(getattr(module, name).to(held), requires_grad=False))
                if held is E4M3:
                    scale = torch.empty(module.weight.shape[0], 1)
                    del module.row_scale
                    module.register_buffer("row_scale", scale, persistent=False)
    model.tie()


def multiply_in_float8(
    model: nn.Module, spec: ModelSpec, precision: PrecisionConfig, casts: Quantise = quantise_operand
) -> None:
    """Makes the linear layers that the settings name multiply in fp8. casts: `quantise_operand` or its compiled
    form."""
    chosen = float8_linears(precision, spec)
    if chosen:
        inductor.inductor_choices_class = choose_fusions
    by_recipe = {recipe: Float8Multiply(recipe, casts) for recipe in {one.recipe for one in chosen.values()}}
    for name, module in model.named_modules():
        if name in chosen and hasattr(module, "multiply"):
            module.multiply = by_recipe[chosen[name].recipe]


def choose_fusions() -> Any:
    """Returns inductor's rules of which operations are fused into one kernel, with one more: a kernel that writes a
    transposed fp8 operand writes nothing wider. A kernel of such operands works on tiles. In a reduction kernel, such
    as that of a norm's backward pass, single bytes would be written that lie a whole row apart, which took 8% of a step
    of Llama-3 8B on an H200. And the gradient of a norm's input would be computed in another kernel than the sums that
    it needs, and its operands read twice."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.dependencies import MemoryDep

    def writes(node: Any) -> list[tuple[int, bool]]:
        """Of each result: the bytes of an element, and whether it is transposed."""
        return [
            (one.node.get_dtype().itemsize, isinstance(write, MemoryDep) and not write.stride1_for_last_dim())
            for one in node.get_nodes()
            for write in one.read_writes.writes
        ]

    class SeparateTransposes(InductorChoices):
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            both = writes(node1) + writes(node2)
            if (1, True) in both and any(size > 1 for size, _ in both):
                return False
            return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

        def uuid(self) -> str:
            return "trainer.parallel.parallelize.SeparateTransposes"

    return SeparateTransposes()


def compile_layers(model: Stage, deferring: bool) -> None:
    """Compiles each layer. deferring: whether weight gradients may be deferred."""
    # A deferred product still reads tensors that the compiler takes for dead. It must not reuse their memory.
    inductor.allow_buffer_reuse = inductor.inplace_buffers = functorch.donated_buffer = not deferring
    # torch prints a general warning about in-place operations for every function that is partly recomputed.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for layer in model.layers.values():
        layer.run = compile_function(layer.run)  # layers of one kind share a compiled graph
        if layer.tile:
            layer.run_tile = compile_function(layer.run_tile)


def keep_buffers(model: Stage, device: torch.device) -> None:
    """Puts the buffers of a model onto the device in fp32, and fills them. They stay with the computation when
    parameters are offloaded. In a lower precision rotary frequencies would be rounded, which changes the angles more
    the longer a sequence is; a model that was cast has rounded them already."""
    for module in model.modules():
        if getattr(module, "row_scale", None) is not None:
            module.row_scale = module.row_scale.to(device)
        if hasattr(module, "reset_buffers"):
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device, torch.float32 if buffer.is_floating_point() else None))
            module.reset_buffers()
