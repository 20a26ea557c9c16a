"""The order of samples: a pure function of the seed and the sample's number in the run.

Sample g of the run is sample n of one source. Sources alternate in a fixed pattern that keeps to their weights, and
each epoch of a source has a random order of its own. Only g has to be stored, and the order does not depend on the
number of ranks."""

from __future__ import annotations

import hashlib

import numpy as np

PERIOD = 1 << 16
"""Samples after which the pattern of sources repeats; shares are multiples of one over this."""

ROUNDS = 6
GOLDEN = 0x9E3779B97F4A7C15


class SampleOrder:
    """Maps sample numbers of the run to samples of the sources.

    lengths: sequences of each source, None for a stream, which is read in its own order. weights: shares before
    normalisation. names: seed the order of each source, so that it is the same whatever other sources there are.
    """

    def __init__(self, names: list[str], lengths: list[int | None], weights: list[float], seed: int):
        self.lengths = lengths
        digests = [hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest() for name in names]
        self.keys = [int.from_bytes(digest, "little") for digest in digests]
        self.counts = source_shares(weights)
        self.pattern, self.rank = interleave_sources(self.counts)

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """numbers: int64 [n], from 0. Returns the source of each and its index there, both int64 [n]."""
        period, slot = np.divmod(numbers, PERIOD)
        source = self.pattern[slot]
        index = period * self.counts[source] + self.rank[slot]
        for number, length in enumerate(self.lengths):
            mine = source == number
            if length is not None and mine.any():
                epoch, within = np.divmod(index[mine], length)
                key = scramble_bits(np.uint64(self.keys[number]) + epoch.astype(np.uint64) * np.uint64(GOLDEN))
                index[mine] = permute_index(within, length, key)
        return source, index


def source_shares(weights: list[float]) -> np.ndarray:
    """Samples of each source in a period, int64: by weight, rounded by largest remainder, at least one."""
    exact = np.asarray(weights, np.float64) / sum(weights) * (PERIOD - len(weights))
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: PERIOD - len(weights) - counts.sum()]] += 1
    return counts + 1


def interleave_sources(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By slot of a period, int64: its source (evenly spread), and how many slots before it have the same source."""
    source = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    slots = np.argsort((rank + 0.5) / counts[source], kind="stable")
    return source[slots], rank[slots]


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
