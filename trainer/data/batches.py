"""Batches of one rank: the training loader, which reads ahead in a thread, and the batches of an evaluation."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trainer.data.tokens import Points, TokenSample
from trainer.model.loss import IGNORE
from trainer.planning.plan import BatchPlan

if TYPE_CHECKING:
    from trainer.data.corpus import CorpusSide
    from trainer.data.mixture import Mixture

# The order of samples: a pure function of the seed, the mixture and the sample's number in the run. Sample g of the run
# is sample n of one source, as the mixture says, and each epoch of a source has a random order of its own. Only g and
# the mixture have to be stored, and the order does not depend on the number of ranks.


ROUNDS = 6
GOLDEN = 0x9E3779B97F4A7C15

POINTS = 1024
"""Latest steps of which it is known where streams stood after them: a checkpoint may be of a step before the latest."""


class SampleOrder:
    """Maps sample numbers of the run to samples of the sources.

    lengths: sequences of each source, None for a stream, which is read in its own order. names: seed the order of each
    source, so that it is the same whatever other sources there are.
    """

    def __init__(self, names: list[str], lengths: list[int | None], mixture: Mixture, seed: int):
        self.names, self.lengths, self.mixture = names, lengths, mixture
        digests = [hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest() for name in names]
        self.keys = [int.from_bytes(digest, "little") for digest in digests]

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """numbers: int64 [n], from 0. Returns the source of each and its index there, both int64 [n]."""
        source, index = self.mixture.locate(numbers, self.names)
        for number, length in enumerate(self.lengths):
            mine = source == number
            if length is not None and mine.any():
                epoch, within = np.divmod(index[mine], length)
                key = scramble_bits(np.uint64(self.keys[number]) + epoch.astype(np.uint64) * np.uint64(GOLDEN))
                index[mine] = permute_index(within, length, key)
        return source, index


def permute_index(index: np.ndarray, length: int, key: np.ndarray) -> np.ndarray:
    """A pseudo-random permutation of range(length), evaluated at `index`: a Feistel network, walked along its cycle
    until it falls into the range (Black and Rogaway, "Ciphers with arbitrary finite domains").

    index: int64 [n]; key: uint64 [n], chooses the permutation. Returns int64 [n].
    """
    half = np.uint64(max(1, (int(length - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    result, outside = index.astype(np.uint64), np.arange(len(index))
    while len(outside):
        left, right = result[outside] >> half, result[outside] & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (scramble_bits(right + key[outside] + np.uint64(turn * GOLDEN % 2**64)) & mask)
        result[outside] = (left << half) | right
        outside = outside[result[outside] >= length]
    return result.astype(np.int64)


def scramble_bits(z: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014). uint64, as the result."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def assign_ranks(homes: np.ndarray, ranks: int) -> np.ndarray:
    """The rank that takes each sample of a micro-batch of all ranks, int64 [n]; each takes the same number of samples.
    A sample goes to its home while that has room, else to the first rank that has.

    homes: int64 [n], the rank that had better take a sample; -1 where it is all the same."""
    room = np.full(ranks, len(homes) // ranks)
    taken = np.full(len(homes), -1)
    for place in np.flatnonzero(homes >= 0):
        if room[homes[place]]:
            taken[place] = homes[place]
            room[homes[place]] -= 1
    taken[taken < 0] = np.repeat(np.arange(ranks), room)
    return taken


@dataclass
class MicroBatch:
    """One micro-batch.

    tokens, targets: int64 [micro, length]; a target is `IGNORE` where there is none. documents: int32 [micro, length],
    each token's document as a number within the sequence, or None where attention is not masked by documents. ids: of
    each sequence, "source:index"; `source_of` takes them apart."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None
    ids: list[str]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin(self) -> MicroBatch:
        """In page-locked memory, from which copies to a GPU need not block."""
        return self._each(Tensor.pin_memory)

    def clone(self) -> MicroBatch:
        return self._each(Tensor.clone)

    def copy_(self, other: MicroBatch) -> None:
        """Takes over the numbers of a batch of the same shapes, which may be on another device, in place."""
        for name in ("tokens", "targets", "documents"):
            if (mine := getattr(self, name)) is not None:
                mine.copy_(getattr(other, name), non_blocking=True)

    def _each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        documents = None if self.documents is None else change(self.documents)
        return MicroBatch(change(self.tokens), change(self.targets), documents, self.ids)


class BatchLoader:
    """Iterates over optimizer steps: each item is this rank's list of `batch.accumulation` micro-batches, on `device`.

    The step at position p consumes samples p to p + batch.global_size of the run, whatever the number of ranks and the
    accumulation. Only `position` has to be saved to resume, also with another number of ranks or global size. With
    streams, `points` of all ranks save reading from the start.
    mixture: what the samples are drawn by; of a new run if it is left out. position: samples consumed by the steps
    handed out, over all ranks. wait_seconds: how long the last `next` blocked.
    prefetch: steps that a thread prepares ahead. An error in that thread is raised by `next`; the call may be repeated.
    """

    def __init__(
        self,
        samples: CorpusSide,
        batch: BatchPlan,
        dp_rank: int,
        dp_size: int,
        *,
        seed: int,
        position: int = 0,
        mask_documents: bool = False,
        prefetch: int = 2,
        device: torch.device | str = "cpu",
        mixture: Mixture | None = None,
        points: Points | None = None,
    ):
        assert batch.global_size == batch.micro_size * batch.accumulation * dp_size
        self.samples, self.batch, self.position, self.wait_seconds = samples, batch, position, 0.0
        self.mask_documents, self.prefetch, self.device = mask_documents, prefetch, torch.device(device)
        self.mixture = mixture or samples.plan_mixture()
        self._order = SampleOrder(samples.names, [source.length for source in samples.sources], self.mixture, seed)
        self._rank, self._ranks = dp_rank, dp_size
        self._streams = [number for number, source in enumerate(samples.sources) if source.length is None]
        self._points = deque([(position, points or {})], POINTS)
        self._ahead: deque[Future] = deque()
        self._thread = ThreadPoolExecutor(1, "data", self._enter_thread)
        self._thread.submit(samples.go_to, points or {})

    @property
    def epoch(self) -> float | None:
        """Epochs consumed; None with a stream, whose length is unknown."""
        return None if self.samples.endless else self.position / len(self.samples)

    @property
    def epochs(self) -> dict[str, float]:
        """Passes over each source, by name."""
        return self.samples.count_epochs(self.mixture, self.position)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        start = time.perf_counter()
        self._fill(max(1, self.prefetch))
        try:
            step, points = self._ahead.popleft().result()
        except BaseException:
            self._drop()
            self._thread.submit(self.samples.go_to, self.points_at(self.position))
            raise
        self.position += self.batch.global_size
        self._points.append((self.position, points))
        self._fill(self.prefetch)
        step = [batch.to(self.device, non_blocking=True) for batch in step]
        self.wait_seconds = time.perf_counter() - start
        return step

    def points_at(self, position: int) -> Points:
        """Where the streams that this rank reads stood when it had handed out the samples before `position`, or
        earlier."""
        return next((points for known, points in reversed(self._points) if known <= position), {})

    def close(self) -> None:
        """Ends the thread."""
        self._drop()
        self._thread.shutdown()

    def _fill(self, depth: int) -> None:
        for ahead in range(len(self._ahead), depth):
            self._ahead.append(self._thread.submit(self._step, self.position + ahead * self.batch.global_size))

    def _drop(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _enter_thread(self) -> None:
        if self.device.index is not None:  # without it, pinning would open a CUDA context on the first GPU
            torch.cuda.set_device(self.device)

    def _step(self, position: int) -> tuple[list[MicroBatch], Points]:
        sources, indices = self._order(np.arange(position, position + self.batch.global_size))
        micro_batches = np.split(self._homes(sources, indices), self.batch.accumulation)
        mine = np.concatenate([assign_ranks(homes, self._ranks) for homes in micro_batches]) == self._rank
        sources, indices = sources[mine], indices[mine]
        rows = [_row(self.samples, source, index) for source, index in zip(sources.tolist(), indices.tolist())]
        size = self.batch.micro_size
        batches = [_collate(rows[start : start + size], self.mask_documents) for start in range(0, len(rows), size)]
        batches = [batch.pin() for batch in batches] if self.device.type == "cuda" else batches
        return batches, self.samples.list_points()

    def _homes(self, sources: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """The rank that reads the lane of each sample; -1 where it is of no stream. Ranks are counted up for one stream
        and down for the next: two streams alone then divide every micro-batch evenly."""
        homes = np.full(len(sources), -1)
        for count, number in enumerate(self._streams):
            mine = sources == number
            homes[mine] = (-1 - indices[mine] if count % 2 else indices[mine]) % self._ranks
        return homes


def eval_batches(
    samples: CorpusSide,
    sequences: int,
    micro_size: int,
    dp_rank: int,
    dp_size: int,
    *,
    mask_documents: bool,
    device: torch.device | str = "cpu",
) -> Iterator[MicroBatch]:
    """One rank's batches of an evaluation.

    All ranks together evaluate `sequences` sequences, evenly spaced among those held out: the same ones for any number
    of ranks. Every rank gets the same number of batches; rows beyond the last sequence are padding without targets.
    """
    count = min(sequences, len(samples))
    for start in range(0, count, micro_size * dp_size):
        numbers = range(start + dp_rank * micro_size, start + (dp_rank + 1) * micro_size)
        rows = [_row(samples, *samples.locate(number * len(samples) // count)) for number in numbers if number < count]
        yield _collate(rows + [_padding(samples)] * (micro_size - len(rows)), mask_documents).to(device)


def source_of(sample: str) -> str:
    """The name of the source in a sample's id; empty for padding."""
    return sample.rpartition(":")[0]


Row = tuple[TokenSample, str]
"""A sequence, and its id."""


def _row(samples: CorpusSide, source: int, index: int) -> Row:
    return samples.sources[source].get(index), f"{samples.names[source]}:{index}"


def _padding(samples: CorpusSide) -> Row:
    like = samples.get(0)
    return TokenSample(np.full_like(like.tokens, IGNORE), np.zeros_like(like.documents)), "padding"


def _collate(rows: list[Row], mask_documents: bool) -> MicroBatch:
    samples, ids = zip(*rows)
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    inputs, targets = tokens[:, :-1].clamp(min=0), tokens[:, 1:].contiguous()  # no embedding has padding's IGNORE
    for row, sample in enumerate(samples):
        if sample.learned is not None:
            targets[row, torch.from_numpy(~sample.learned[1:])] = IGNORE
    if not mask_documents:
        return MicroBatch(inputs, targets, None, list(ids))
    documents = torch.from_numpy(np.stack([sample.documents for sample in samples]))
    targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
    return MicroBatch(inputs, targets, documents[:, :-1].contiguous(), list(ids))
