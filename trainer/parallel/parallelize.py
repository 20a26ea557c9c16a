"""A spec and a plan become a parallel model: the pipeline stages of this rank, cut over tensor-parallel ranks,
sharded."""

from __future__ import annotations

import logging
import os
import shutil

import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor

from trainer.checkpointing.activation import apply_recompute, check_recompute
from trainer.config import Config, ConfigError
from trainer.config.model import ModelSpec
from trainer.distributed.world import World
from trainer.model.linear import DeferredGrads
from trainer.model.stage import Make, Stage
from trainer.model.transformer import Transformer
from trainer.parallel import tensor
from trainer.parallel.deepspeed import load
from trainer.parallel.fsdp import shard
from trainer.planning.plan import Plan
from trainer.precision.dtypes import DTYPES

Stages = dict[int, Stage]
"""Number of a pipeline stage -> its part of the model."""


def check_compiler(config: Config, device: torch.device) -> None:
    """torch.compile builds with the machine's own compiler: C++ for a CPU, C for what launches GPU kernels."""
    variable, names = ("CC", ("gcc", "clang", "cc")) if device.type == "cuda" else ("CXX", ("g++", "clang++"))
    if config.compile and not any(shutil.which(name) for name in (os.environ.get(variable, ""), *names)):
        raise ConfigError(
            f"compile=true needs a compiler, and this machine has none of {', '.join(names)}; install one, point "
            f"{variable} "
            "at it, or set compile=false"
        )


def check_engine(config: Config, device: torch.device) -> None:
    """What DeepSpeed itself says of the configuration, and what it needs of the machine, before any process group."""
    if config.parallel.zero.engine == "deepspeed":
        load(device).check(config, device)


def check_model(config: Config, spec: ModelSpec) -> None:
    """What only the modules can tell, before any process group. Raises `ConfigError`."""
    with torch.device("meta"):
        check_recompute(Transformer(spec), config.activation)


def build_stages(
    config: Config,
    spec: ModelSpec,
    layers: dict[int, range],
    plan: Plan,
    world: World,
    deferred: DeferredGrads | None = None,
    hsdp: bool = True,
    make: Make = Transformer,
) -> Stages:
    """The stages of this rank, in storage; their weights are undefined.

    layers: stage -> the layers it holds; deferred: where linear layers leave weight gradients, if the schedule splits
    backward; hsdp: whether FSDP also adds up replicas; make: whose modules they are. The order is: modules on the meta
    device, recompute, compilation, tensor parallelism, sharding, storage."""
    return {
        stage: place(lay_out(config, spec, part, deferred, make), config, plan, world, hsdp)
        for stage, part in layers.items()
    }


def lay_out(
    config: Config, spec: ModelSpec, layers: range, deferred: DeferredGrads | None, make: Make = Transformer
) -> Stage:
    """Modules of one stage on the meta device, with recompute and compilation."""
    with torch.device("meta"):
        model = make(spec, layers)
    model.set_loss(config.loss.z_loss, config.loss.chunk, config.compile)
    if deferred is not None:
        model.defer(deferred)
    apply_recompute(model, config.activation)
    if config.compile:
        # Layers of one kind share a graph. Kinds differ by mask, window and recompute, and again in evaluation; running
        # out of graphs would leave layers uncompiled without a word.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        # What is put off lives on in tensors that the compiler thinks are done with: it must not write over them.
        inductor.allow_buffer_reuse = inductor.inplace_buffers = functorch.donated_buffer = deferred is None
        logging.getLogger("torch._dynamo.variables.higher_order_ops").setLevel(
            logging.ERROR
        )  # selective recompute is experimental there
        for layer in model.layers.values():
            layer.run = torch.compile(layer.run, dynamic=False)
    return model


def place(model: Stage, config: Config, plan: Plan, world: World, hsdp: bool = True) -> Stage:
    """Cuts and shards a stage over the mesh and gives it storage."""
    compute = DTYPES[config.precision.compute]
    if plan.engine == "deepspeed":
        model.to(compute)
        tensor.split(model, world.mesh["tp"])
        load(world.device).materialize(model, config, world)
    else:
        tensor.split(model, world.mesh["tp"])
        shard(model, plan, world, compute, DTYPES[config.precision.reduce], hsdp)
        model.to_empty(device="cpu" if plan.offload else world.device)
    for rotary in model.rotaries:  # buffers stay with the computation when parameters are offloaded, and in fp32
        rotary.to(world.device, torch.float32)
    return model
