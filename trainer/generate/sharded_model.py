"""A model as it lies over the ranks, asked for logits: in a run under its plan, or opened from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.checkpointing.loading import SavedModel
from trainer.config import Config, ConfigError
from trainer.config.model import ModelSpec
from trainer.distributed.mesh import World, join_world
from trainer.distributed.p2p import PipelineChannels
from trainer.model.cache import BLOCK, KVCache
from trainer.model.experts import cast_model
from trainer.model.initial import fill_parameters
from trainer.model.stage import Stage, keep_here
from trainer.parallel.parallelize import keep_buffers, make_stage, parallelize
from trainer.parallel.zero.fsdp import FSDP
from trainer.planning.features import resolve_plan
from trainer.planning.parameters import router_shapes
from trainer.precision.products import DTYPES

PADDED = {"cuda": BLOCK, "cpu": 8}
"""To multiples of so many tokens contexts are padded: GPUs have kernels compiled for few lengths."""


@dataclass(frozen=True)
class ShardedModel:
    """The stages of a model on this rank, and how to go through all of them. All ranks call its methods together, with
    the same tokens.

    stages: number of a pipeline stage -> what is called for it. dtype: of hidden states. tensor_ranks: those that share
    layers. placement: the pipeline rank of each stage; channels: between them. world: of several processes. sequence:
    the ranks that share the slots of a cache.
    """

    spec: ModelSpec
    stages: Mapping[int, nn.Module]
    device: torch.device
    dtype: torch.dtype
    tensor_ranks: int = 1
    placement: Sequence[int] = (0,)
    channels: PipelineChannels | None = None
    world: World | None = None

    @property
    def layers(self) -> list[Any]:
        return [module for stage in self.stages.values() for module in stage.modules() if hasattr(module, "run_body")]

    @property
    def recordable(self) -> bool:
        """Whether passes can be CUDA graphs: on a GPU, without what an engine does around layers."""
        return self.device.type == "cuda" and self.world is None

    @property
    def reach(self) -> float:
        """The length behind which rotated positions are others: what is kept of shorter sequences is then of no use."""
        modules = (module for stage in self.stages.values() for module in stage.modules())
        return min((module.reach for module in modules if hasattr(module, "reach")), default=math.inf)

    def cache(self, rows: int, capacity: int) -> KVCache:
        """For so many sequences, with rows that tensor-parallel ranks can share."""
        rows, keeps = self.padded(rows, 1), all(layer.caches for layer in self.layers)
        return KVCache(rows, capacity, self.device, keeps)

    def padded(self, count: int, multiple: int) -> int:
        """The next multiple that tensor-parallel ranks can share."""
        multiple = math.lcm(multiple, self.tensor_ranks)
        return -(-count // multiple) * multiple

    def context(self, length: int) -> int:
        """The tokens of a context of a length with its padding."""
        return self.padded(length, PADDED[self.device.type])

    def logits(self, tokens: Tensor, cache: KVCache) -> Tensor | None:
        """`Transformer.extend` of all stages; None on ranks without the last one."""
        hidden, last = None, len(self.placement) - 1
        shape = torch.Size((tokens.numel() // self.tensor_ranks, self.spec.width))
        for number, rank in enumerate(self.placement):
            if number not in self.stages:
                continue
            if number and self.placement[number - 1] != rank:
                hidden = self.channels.recv(shape, self.dtype, self.placement[number - 1]).wait()
            hidden = self.stages[number](tokens, hidden=hidden, cache=cache)
            if number < last and self.placement[number + 1] != rank:
                self.channels.send(hidden, self.placement[number + 1])
        if self.channels is not None:
            self.channels.flush()
        return hidden if last in self.stages else None

    def agree(self, tokens: Tensor) -> Tensor:
        """What the first rank with the last stage has chosen, on every rank. tokens: int64 [rows]."""
        if self.world is not None and self.world.size > 1:
            dist.broadcast(tokens, self.world.mesh.mesh[self.placement[-1]].flatten()[0].item())
        return tokens

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Has the model compute as generation wants it meanwhile: without gradients, recompute and compiled layers,
        which would be compiled for every shape."""
        modes = {stage: stage.training for stage in self.stages.values()}
        runs = {layer: (layer.run, layer.run_tile, layer.recompute, layer.keep) for layer in self.layers}
        try:
            for stage in modes:
                stage.eval()
            for layer in runs:
                layer.run, layer.run_tile, layer.recompute, layer.keep = layer.run_body, layer.feed, None, keep_here
            with torch.no_grad():
                yield
        finally:
            for layer, kept in runs.items():
                layer.run, layer.run_tile, layer.recompute, layer.keep = kept
            for stage, training in modes.items():
                stage.train(training)


def place_saved(saved: SavedModel, device: torch.device, dtype: str, tp: int = 1, processes: int = 1) -> ShardedModel:
    """The model of a checkpoint, in the type that it computes in, on one process or over `processes`. Of these, `tp`
    share each layer; the others share parameters, which each layer gathers when it computes (ZeRO-3). Parameters are
    read one at a time. Raises `ConfigError` where so many processes cannot share the model."""

    def value(name: str, info: object) -> Tensor:
        return saved.tensor(name)

    compute = DTYPES[dtype]
    if processes == tp == 1:
        with torch.device("meta"):
            model = make_stage(saved.spec)
        cast_model(model, compute)
        model.to_empty(device=device)
        keep_buffers(model, device)
        fill_parameters(model, value)
        fill_routers(model, saved)
        return ShardedModel(saved.spec, {0: model.eval()}, device, compute)
    config = Config()
    config.parallel.tp, config.precision.compute = tp, dtype
    config.parallel.zero.stage, config.parallel.shard = 3, max(1, processes // tp)
    try:
        plan = resolve_plan(config.parallel, processes, saved.spec)
    except ConfigError as error:
        raise ConfigError([problem.replace("parallel.tp", "tp") for problem in error.problems]) from None
    world = join_world(plan, device)
    model = parallelize(config, saved.spec, range(saved.spec.depth), plan, world, FrozenEngine(config, plan, world))
    fill_parameters(model, value)
    fill_routers(model, saved)
    return ShardedModel(saved.spec, {0: model.eval()}, device, compute, tp, world=world)


def fill_routers(model: Stage, saved: SavedModel) -> None:
    """Sets what the routers of experts keep besides parameters."""
    kept = router_shapes(saved.spec)
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.copy_(saved.tensor(name))


class FrozenEngine(FSDP):
    """Parameters that are never trained: in the compute type, and no engine around layers that no ranks share."""

    def shard(self, model: Stage) -> None:
        cast_model(model, DTYPES[self.config.precision.compute])
        model.requires_grad_(False)  # else FSDP wants one type of all parameters of a layer
        if self.plan.shard > 1:
            super().shard(model)
