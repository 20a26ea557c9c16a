"""Every document ends with one end mark, wherever shards and chunks of files are cut."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import config

from trainer.config import SourceConfig
from trainer.data import shards, text
from trainer.data.corpus import Corpus, CorpusSide, open_corpus

END = 256
"""The end mark of the tokenizer of bytes."""


def opened(folder: Path, contents: list[bytes], chunk: int, shard: int, **data: object) -> Corpus:
    """The corpus of text files, prepared with these sizes of chunks and shards in bytes, in sequences of 1 token."""
    for number, content in enumerate(contents):
        (folder / f"{number:03d}.txt").write_bytes(content)
    one = config(folder, length=1, corpus=SourceConfig("text", str(folder / "*.txt")))
    one.data.eval_fraction, one.data.tokenizer, one.data.mask_documents = 0.0, "bytes", True
    for name, value in data.items():
        setattr(one.data, name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "CHUNK_BYTES", chunk)
        patch.setattr(shards, "SHARD_BYTES", shard)
        return open_corpus(one)


def tokens_of(samples: CorpusSide) -> list[int]:
    """All tokens, and that sequences of two see a border of documents behind end marks alone."""
    found = [samples.get(index) for index in range(len(samples))]
    for sample in found:
        assert (sample.documents[1] > 0) == (sample.tokens[0] == END)
    assert all(one.tokens[-1] == other.tokens[0] for one, other in pairwise(found))
    return [int(sample.tokens[0]) for sample in found] + [
        int(token) for sample in found[-1:] for token in sample.tokens[1:]
    ]


LINES = st.lists(st.integers(0, 40), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(st.lists(LINES, min_size=1, max_size=4), st.integers(4, 64), st.integers(1, 400), st.booleans())
def test_a_document_has_one_end_mark(files: list[list[int]], chunk: int, shard: int, newline: bool) -> None:
    contents = ["\n".join("abcdefgh"[number % 8] * size for number, size in enumerate(lines)) for lines in files]
    contents = [(content + "\n" * newline).encode() for content in contents]
    if sum(map(len, contents)) < 3:
        return
    with tempfile.TemporaryDirectory() as folder:
        tokens = tokens_of(opened(Path(folder), contents, chunk, shard).train)
    expected = [token for content in contents if content for token in [*content, END]]
    assert tokens == expected


@settings(max_examples=60, deadline=None)
@given(LINES, st.integers(4, 64), st.integers(1, 400), st.floats(0.05, 0.9))
def test_a_document_on_both_sides_of_the_split_ends_where_its_text_ends(lines, chunk, shard, fraction) -> None:
    """The shards change nothing: end marks are where the side changes, and at the end."""
    content = "\n".join("abcdefgh"[number % 8] * (size + 4) for number, size in enumerate(lines)).encode()
    found = []
    for size in (shard, 1 << 20):
        with tempfile.TemporaryDirectory() as folder:
            corpus = opened(Path(folder), [content, content[::-1]], chunk, size, eval_fraction=fraction)
            found.append([tokens_of(side) for side in (corpus.train, corpus.eval) if len(side)])
    assert found[0] == found[1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=30), st.integers(4, 40), st.integers(1, 100))
def test_the_mark_stays_where_the_last_lines_are_left_out(damaged: list[bool], chunk: int, shard: int) -> None:
    lines = [b"\xff bad\n" if bad else b"good line\n" for bad in damaged]
    kept = b"".join(line for line in lines if b"\xff" not in line)
    if not kept:
        return
    options = {"on_error": "skip", "max_damaged": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        corpus = opened(Path(folder), [b"".join(lines), b"another\n"], chunk, shard, **options)
        assert tokens_of(corpus.train) == [*kept, END, *b"another\n", END]
        assert corpus.damaged == sum(damaged)


def test_a_text_of_nineteen_megabytes_is_one_document(tmp_path: Path) -> None:
    content = b"".join(b"line %d of a long text\n" % number for number in range(760_000))
    assert len(content) > 19e6
    corpus = opened(tmp_path, [content], text.CHUNK_BYTES, shards.SHARD_BYTES)
    (source,) = corpus.train.sources
    assert len(source.runs) == 3 and [run.open for run in source.runs] == [True, True, False]
    tokens = np.concatenate([run.map() for run in source.runs])
    assert (tokens == END).sum() == 1 and tokens[-1] == END and len(tokens) == len(content) + 1
    border = source.runs[0].length
    assert source.get(border - 1).documents.tolist() == [0, 0]
