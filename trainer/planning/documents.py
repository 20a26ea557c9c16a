"""How long packed documents are, and what attention computes of them. Documents are masked if
`data.mask_documents` says so, in which case a token sees its own only."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import count
from statistics import NormalDist
from typing import NamedTuple

from trainer.config import Config, ConfigError
from trainer.config.schema import DataConfig, DocumentsConfig

QUANTILES = 4096
"""Lengths of documents that stand for all."""

LEAST, SEQUENCES = 8, 2048
"""Sequences of them that are looked at, at least and at most."""


class DocumentLengths(NamedTuple):
    """Tokens of a document: their mean, and their median, which is no larger. Lengths are lognormal."""

    mean: float
    median: float

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of the length."""
        return math.sqrt(2 * math.log(self.mean / self.median))


USUAL = DocumentLengths(18900.0, 8100.0)
"""What documents are taken for of which nothing is known: as long as those for which sequences are shared."""


def documents_of(data: DataConfig) -> DocumentLengths | None:
    """The documents that are masked; None if none are. Raises `ConfigError` for lengths without a meaning."""
    if wrong := list(length_problems(data)):
        raise ConfigError(wrong)
    if not data.mask_documents:
        return None
    given = data.documents
    if given.mean is None:
        return USUAL
    return DocumentLengths(given.mean, given.median or given.mean * USUAL.median / USUAL.mean)


def are_unknown(data: DataConfig) -> bool:
    """Whether documents are masked, and nothing is known of their length."""
    return data.mask_documents and data.documents.mean is None


def with_documents(config: Config, found: DocumentLengths | None) -> Config:
    """The configuration with lengths that were measured, where it says nothing of masked ones."""
    if found is None or not are_unknown(config.data):
        return config
    documents = DocumentsConfig(mean=found.mean, median=found.median)
    return replace(config, data=replace(config.data, documents=documents))


def length_problems(data: DataConfig) -> Iterator[str]:
    """What is wrong with the lengths that are given."""
    mean, median = data.documents.mean, data.documents.median
    given = f"data.documents.mean={mean:g}" if mean is not None else f"data.documents.median={median}"
    if (mean, median) != (None, None) and not data.mask_documents:
        yield (
            f"{given} is for documents that do not see each other; set data.mask_documents=true, or leave it out (null)"
        )
    elif median is not None and mean is None:
        yield f"{given} needs a mean beside it; set data.documents.mean"
    elif median is not None and mean is not None and median > mean:
        yield f"data.documents.median={median:g} must not be above {given}"


def draw_documents(documents: DocumentLengths, length: int, seed: int) -> list[int]:
    """First places of the documents of a sequence, drawn."""
    generator, starts = random.Random(seed), [0]
    middle, spread = math.log(documents.median), documents.spread
    while (place := starts[-1] + 1 + int(generator.lognormvariate(middle, spread))) < length:
        starts.append(place)
    return starts


def document_ranges(documents: DocumentLengths, length: int) -> Iterator[tuple[int, int]]:
    """First and last place (exclusive) of documents in sequences of `length` tokens, which they fill without a gap, cut
    at the ends: of lengths that are evenly drawn, in some order, each equally often, in `LEAST` to `SEQUENCES`
    sequences."""
    normal = NormalDist(math.log(documents.median), documents.spread or 1e-9)
    sizes = [max(1, round(math.exp(normal.inv_cdf((one + 0.5) / QUANTILES)))) for one in range(QUANTILES)]
    random.Random(0).shuffle(sizes)
    whole = sum(sizes)
    place, until = 0, min(whole * -(-LEAST * length // whole), SEQUENCES * length) // length * length
    for number in count():
        left = sizes[number % QUANTILES]
        while left:
            start = place % length
            taken = min(left, length - start)
            yield start, start + taken
            place, left = place + taken, left - taken
            if place == until:
                return


@lru_cache(1024)
def computed_keys(length: int, window: int, documents: DocumentLengths | None, block: int) -> float:
    """Keys that attention computes for a token, on average over the places of a sequence, in a kernel that leaves out
    blocks of `block` queries and keys of which no query sees a key, and takes others whole (FlexAttention). window: of
    the layer, 0 for none; documents: that are masked."""
    reach = -(-(window - 1) // block) if 0 < window < length else length
    parts = document_ranges(documents, length) if documents else [(0, length)]
    blocks = tokens = 0.0
    for start, end in parts:
        tokens += end - start
        # Blocks of queries that begin in this document, and see blocks from its first one on, within the window.
        first, last, low = -(-start // block), (end - 1) // block, start // block
        near = min(last - first + 1, max(0, reach - (first - low)))
        if last >= first:
            blocks += near * (first - low + 1 + (near - 1) / 2) + (last - first + 1 - near) * (reach + 1)
    return blocks * block * block / tokens


def fit_documents(mean: float, keys: float, length: int) -> DocumentLengths:
    """Documents of this mean, of which a token sees so many keys on average in sequences of `length`; as near as comes,
    with lengths between all the same and a median of a thousandth."""

    def seen(median: float) -> float:
        return computed_keys(length, 0, DocumentLengths(mean, median), 1)

    low, high = mean / 1000, mean
    if seen(high) >= keys:
        return DocumentLengths(mean, high)
    for _ in range(16):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seen(middle) > keys else (low, middle)
    return DocumentLengths(mean, math.sqrt(low * high))


# How large block masks of FlexAttention are: `model/attention.py` makes them.


BLOCK = 128
"""Tokens of a block: what FlexAttention's kernels are written for."""

TABLES = 2**27
"""Bytes that the tables of a mask may take before its blocks become larger."""

INDEX = 4
"""Bytes of a number in a table."""


def block_size(batch: int, queries: int, keys: int) -> int:
    """Tokens of a block: `BLOCK`, doubled until four tables of a number for each pair of blocks fit into `TABLES`."""
    size = BLOCK
    while 4 * INDEX * batch * -(-queries // size) * -(-keys // size) > TABLES:
        size *= 2
    return size


def mask_bytes(batch: int, queries: int, keys: int) -> float:
    """Bytes of a mask: the tables of both sides, each with how many of its numbers count, and of each query its place
    and its first key."""
    size = block_size(batch, queries, keys)
    rows, columns = -(-queries // size), -(-keys // size)
    return INDEX * (batch * (4 * rows * columns + 2 * rows + 2 * columns) + (1 + batch) * queries)
