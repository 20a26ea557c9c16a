"""How long the documents of a corpus are, measured for predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer.config import Config, ConfigError
from trainer.data.corpus import CorpusSide, open_corpus
from trainer.data.tokens import DataError, TokenSequences
from trainer.planning.documents import DocumentLengths, are_unknown, fit_documents, with_documents

READ = 1 << 20
"""Tokens that are looked at of each source."""


def with_lengths(config: Config) -> Config:
    """The configuration with the measured lengths of its documents, where they are masked, it does not give them, and
    its corpus is at hand, tokenised; nothing is prepared, or fetched."""
    streams = any(source.streaming or source.kind == "hub" for source in config.data.sources.values())
    if not are_unknown(config.data) or streams:
        return config
    try:
        trained = replace(config, eval=replace(config.eval, every=0))
        return with_documents(config, documents_in(open_corpus(trained, prepare=False).train))
    except (ConfigError, DataError, OSError):  # a run says what is wrong with its corpus; here it is not needed
        return config


def documents_in(samples: CorpusSide) -> DocumentLengths | None:
    """The documents of sources, mixed by their weights; None where one is a stream, which is read once, or empty."""
    if samples.endless or not all(source.length for source in samples.sources):
        return None
    shares = [weight / sum(samples.weights) for weight in samples.weights]
    found = [count_middle(source) for source in samples.sources]
    starts, keys = (sum(share * one[place] for share, one in zip(shares, found)) for place in (0, 1))
    return fit_documents(1 / starts, keys, len(samples.get(0).tokens) - 1)


def count_middle(source: TokenSequences) -> tuple[float, float]:
    """In the middle of a source: documents that begin and keys that are seen, both for each token."""
    tokens, starts, pairs, goes_on = 0, 0, 0.0, False
    for index in middle_neighbours(source.length or 0, READ // max(1, len(source.get(0).tokens) - 1)):
        sample = source.get(index)
        numbers = sample.documents[:-1]
        sizes = np.diff(np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))).astype(float)
        tokens, starts = tokens + len(numbers), starts + len(sizes) - goes_on
        pairs += (sizes * (sizes + 1)).sum() / 2
        # The last token is the first of the next sequence; conversations are packed whole.
        goes_on = sample.learned is None and sample.documents[-1] == numbers[-1]
    return max(1, starts) / tokens, pairs / tokens


def middle_neighbours(length: int, wanted: int) -> Sequence[int]:
    """At most so many neighbours, at least one, from the middle of `length`."""
    count = min(length, max(1, wanted))
    return range((length - count) // 2, (length + count) // 2)
