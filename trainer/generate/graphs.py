"""Passes of one token a row as CUDA graphs: without them a small batch waits for the host, which starts some hundred
kernels a token."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from trainer.generate.placed import ShardedModel
from trainer.model.cache import KVCache
from trainer.model.compiled import capture_graph

log = logging.getLogger(__name__)


class DecodeGraphs:
    """Passes over `tokens` [rows, 1] of a cache, in place: who runs them writes the tokens and the cache's lengths.

    The first pass at each extent of the cache is computed as it comes, the second is recorded, further ones are
    replayed; one that cannot be recorded, since it waits for the device, goes on as it came. What is recorded shares
    one pool of memory: the logits of a pass are overwritten by the next.
    """

    def __init__(self, model: ShardedModel, cache: KVCache, tokens: Tensor):
        self.model, self.cache, self.tokens = model, cache, tokens
        self.recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.seen: set[int] = set()
        self.records = True
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(model.device)

    def logits(self) -> Tensor:
        extent = self.cache.extent
        if self.records and extent in self.seen and extent not in self.recorded:
            self.record(extent)
        self.seen.add(extent)
        if extent not in self.recorded:
            return self.model.logits(self.tokens, self.cache)
        graph, logits = self.recorded[extent]
        graph.replay()
        return logits

    def record(self, extent: int) -> None:
        try:
            self.recorded[extent] = capture_graph(
                lambda: self.model.logits(self.tokens, self.cache), self.stream, self.pool
            )
        except RuntimeError as error:
            self.records = False
            log.warning("tokens are generated without CUDA graphs: %s", str(error).splitlines()[0])
