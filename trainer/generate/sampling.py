"""Autoregressive generation from a trained model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.generate.sharded_model import ShardedModel
from trainer.model.cache import KVCache
from trainer.model.initial import name_seed
from trainer.model.stage import capture_graph

# Passes of one token a row as CUDA graphs: without them a small batch waits for the host, which starts some hundred
# kernels a token.


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


DRAWN = 256
"""Tokens of which the draws go to the device at once."""


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen. temperature: divides the logits, 0 takes the most likely token; top_k: among this many
    most likely tokens, 0 means all; top_p: among the fewest most likely ones of which the probabilities add up to this;
    seed: of the choice. What a prompt draws does not depend on the other prompts."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def draws(self, rows: int, count: int, device: torch.device) -> Iterator[Tensor]:
        """For each of `count` tokens, a number between 0 and 1 for each row that decides it: fp64 [rows]."""
        generators = [torch.Generator().manual_seed(name_seed(self.seed, f"prompt {row}")) for row in range(rows)]
        for begin in range(0, count, DRAWN):
            size = min(DRAWN, count - begin)
            numbers = [torch.rand(size, generator=generator, dtype=torch.float64) for generator in generators]
            yield from torch.stack(numbers, 1).to(device)

    def choose(self, logits: Tensor, draw: Tensor) -> Tensor:
        """Token ids [rows] of logits [rows, vocab] and a draw of each row: the first token with which the probabilities
        add up to more than the draw says. The host does not wait for them.

        Tokens are taken from the likeliest to the least likely only where that says which are left out: to sort a
        vocabulary takes a hundred times as long as to add it up."""
        if self.temperature == 0:
            return logits.argmax(-1)
        values, ids = logits.float(), None
        if self.top_p < 1 or 0 < self.top_k < values.shape[-1]:
            values, ids = values.topk(min(self.top_k or values.shape[-1], values.shape[-1]))
        # However small the temperature is, and its inverse, by which GPUs multiply.
        below = values - values.amax(-1, keepdim=True)
        probabilities = torch.softmax(below / max(self.temperature, torch.finfo(below.dtype).tiny), -1)
        sums = running_sums(probabilities)
        total = sums[:, -1:]
        if self.top_p < 1:
            kept = (sums - probabilities < self.top_p).sum(-1, keepdim=True)
            total = sums.gather(-1, (kept - 1).clamp(min=0))
        place = torch.searchsorted(sums, draw[:, None] * total, right=True)
        place = place.clamp(max=values.shape[-1] - 1)  # where a model's logits are no numbers
        return (place if ids is None else ids.gather(-1, place)).squeeze(-1)


def running_sums(x: Tensor) -> Tensor:
    """Along the last dimension, in fp64. torch refuses this on GPUs under `run.deterministic`; what may differ here is
    the last bit of a sum, and all ranks take the tokens of one."""
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return x.cumsum(-1, dtype=torch.float64)
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)


class TokenGenerator:
    """Continues prompts, one token of each at a time.

    The context is the last tokens, as many as the model's longest sequence has. Keys and values of the context are
    kept; it is computed anew for every token from there on where it slides, and once where a sequence outgrows the
    frequencies of its positions.

    tokens: of each prompt, with what has been generated; it is never empty. running: which still go on.
    """

    def __init__(
        self,
        model: ShardedModel,
        prompts: Sequence[Sequence[int]],
        count: int,
        sampling: SamplingOptions,
        stop_ids: Collection[int] = (),
    ):
        self.model, self.count, self.sampling, self.stop_ids = model, count, sampling, stop_ids
        self.tokens, self.running = [list(prompt) for prompt in prompts], [True] * len(prompts)
        self.longest, self.reach = model.spec.max_length, model.reach
        capacity = min(self.longest, max(map(len, self.tokens)) + count)
        self.cache = model.cache(len(prompts), capacity)
        self.newest = torch.zeros(self.cache.rows, 1, dtype=torch.int64, device=model.device)
        self.active = torch.zeros(self.cache.rows, dtype=torch.int64, device=model.device)
        self.started = False
        self.graphs = DecodeGraphs(model, self.cache, self.newest) if model.recordable else None

    def __iter__(self) -> Iterator[list[int | None]]:
        """The next token of each prompt, None where it has ended: after `count` tokens, before one of `stop_ids`, or by
        `stop`. All ranks ask together, within `model.inference()`."""
        rows, device = len(self.tokens), self.model.device
        for draw in self.sampling.draws(rows, self.count, device):
            logits = self.forward()
            chosen = torch.empty(rows, dtype=torch.int64, device=device)
            if logits is not None:
                chosen.copy_(self.sampling.choose(logits[:rows], draw))
            self.newest[:rows, 0] = self.model.agree(chosen)
            found = chosen.tolist()  # the one place where the host waits
            for row, token in enumerate(found):
                if token in self.stop_ids:
                    self.stop(row)
                if self.running[row]:
                    self.tokens[row].append(token)
            yield [token if going else None for token, going in zip(found, self.running)]
            if not any(self.running):
                return

    def stop(self, row: int) -> None:
        """Ends one prompt, whose newest token was the last."""
        self.running[row] = False
        self.active[row] = 0

    def forward(self) -> Tensor | None:
        """The logits of the next tokens [rows of the cache, vocab], where this rank has the last stage."""
        if self.outgrown():
            return self.forward_contexts()
        self.cache.look(max(min(len(tokens), self.longest) for tokens in self.tokens))
        logits = self.graphs.logits() if self.graphs else self.model.logits(self.newest, self.cache)
        self.cache.lengths += self.active
        return logits

    def outgrown(self) -> bool:
        """Whether what is kept is of no use for the next token of some prompt."""
        lengths = [len(tokens) for tokens, going in zip(self.tokens, self.running) if going]
        new = (length > self.longest or length == self.reach + 1 for length in lengths)
        return not self.started or not self.cache.keeps or any(new)

    def forward_contexts(self) -> Tensor | None:
        contexts = [tokens[-self.longest :] for tokens in self.tokens]
        lengths = [len(context) for context in contexts]
        length, rows = self.model.context(max(lengths)), len(contexts)
        padded = [context + [0] * (length - len(context)) for context in contexts]
        self.cache.lengths[:rows] = torch.tensor(lengths, device=self.model.device)
        self.active[:rows] = torch.tensor(self.running, dtype=torch.int64, device=self.model.device)
        self.started = True
        return self.model.logits(torch.tensor(padded, device=self.model.device), self.cache)
