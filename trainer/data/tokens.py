"""Token files, the sequences packed out of them, and the progress of their preparation."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from trainer.util.reading import temporary_name

LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MAPS = 256 if LIMIT == resource.RLIM_INFINITY else max(8, min(256, LIMIT // 8))
"""Files that stay mapped in a process, each of which is an open file too. How many a corpus has does not matter."""

TOKEN_DTYPES = ("<u2", "<u4")
"""Types of the token files that are written here, little-endian."""


class DataError(RuntimeError):
    """A corpus cannot be read any more, although it could when the run started."""


class TokenSample(NamedTuple):
    """A sequence: arrays [sequence_length + 1] of tokens (int64), of each token's document as a number within the
    sequence (int32), and of whether it is learned (bool; None where all are)."""

    tokens: np.ndarray
    documents: np.ndarray
    learned: np.ndarray | None = None


class TokenSequences(Protocol):
    """Sequences of one source; `length` is None for a stream, whose end is unknown."""

    name: str
    length: int | None

    def get(self, index: int) -> TokenSample:
        """One sequence, from 0."""


@dataclass(frozen=True)
class TokenRun:
    """`length` consecutive tokens of a file, from byte `offset` on. marks: of conversations, a file with a byte for
    each token (`text.LEARNED`, `text.FIRST`). open: whether the last document goes on in the next run; if not, the next
    run starts with a document. starts: a file of the tokens with which documents start, rising, int64, counted as the
    file's tokens are, of which this run's first is number `first`."""

    path: str
    dtype: str
    offset: int
    length: int
    marks: str | None = None
    open: bool = False
    starts: str | None = None
    first: int = 0

    def cut(self, at: int) -> tuple[TokenRun, TokenRun]:
        """The first `at` tokens, and the rest, of a run without marks."""
        rest = self.offset + at * np.dtype(self.dtype).itemsize
        return replace(self, length=at), replace(self, offset=rest, length=self.length - at, first=self.first + at)

    def map(self) -> np.ndarray:
        """The tokens, memory-mapped. Raises `DataError` if the file vanished or shrank."""
        return self._map(self.path, self.dtype, self.offset, self.length)

    def map_marks(self) -> np.ndarray:
        """The marks of the tokens, in the same way."""
        assert self.marks is not None
        return self._map(self.marks, "u1", self.offset, self.length)

    def map_starts(self) -> np.ndarray:
        """The tokens of the whole file with which documents start, in the same way."""
        assert self.starts is not None
        return self._map(self.starts, "<i8", 0, None)

    def _map(self, path: str, dtype: str, offset: int, length: int | None) -> np.ndarray:
        try:
            return np.memmap(path, dtype, "r", offset, length)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise DataError(
                    f"token file {path} cannot be opened: {error.strerror}; this process, or the machine, has too many "
                    "files open (ulimit -n) or too little memory"
                ) from error
            raise DataError(
                f"token file {path} vanished or changed since the run started ({error}); start the run again, it "
                "resumes and prepares what is missing"
            ) from error


class PackedSequences:
    """The tokens of several runs one after the other, cut into sequences with random access.

    Sequence i is tokens [i x length, (i + 1) x length], ends included: the last token, which only serves as a target,
    is the first of the next sequence."""

    def __init__(self, name: str, runs: list[TokenRun], end_id: int, vocab_size: int, sequence_length: int):
        self.name, self.runs, self.end_id = name, runs, end_id
        self.vocab_size, self.size = vocab_size, sequence_length
        self._ends = np.cumsum([run.length for run in runs], dtype=np.int64)
        self.tokens = sum(run.length for run in runs)
        self.length = max(0, self.tokens - 1) // sequence_length

    def get(self, index: int) -> TokenSample:
        """See `TokenSequences`. Raises `DataError` for a file that vanished or holds ids beyond the vocabulary."""
        if not 0 <= index < self.length:
            raise IndexError(f"{self.name} has {self.length} sequences, not {index}")
        tokens, starts, filled = np.empty(self.size + 1, np.int64), np.zeros(self.size + 1, bool), 0
        number = int(np.searchsorted(self._ends, index * self.size, "right"))
        while filled <= self.size:
            first = index * self.size + filled - int(self._ends[number]) + self.runs[number].length
            run = self.runs[number]
            part = shared_map(self, run, "tokens")[first : first + self.size + 1 - filled]
            starts[filled] = number == 0 or not self.runs[number - 1].open
            if run.starts:
                known, place = shared_map(self, run, "starts"), run.first + first
                low, high = np.searchsorted(known, [place, place + len(part)])
                starts[known[low:high] - place + filled] = True
            tokens[filled : filled + len(part)] = part
            filled, number = filled + len(part), number + 1
        check_vocabulary(tokens, self.vocab_size, f"{self.name}:{index} in {self.runs[number - 1].path}")
        return TokenSample(tokens, number_documents(tokens, self.end_id, starts))


@lru_cache(MAPS)
def shared_map(owner: object, run: TokenRun, what: str) -> np.ndarray:
    """What `TokenRun.map`, `map_marks` (what="marks") or `map_starts` ("starts") returns, kept while it is among the
    last `MAPS` that were used. owner: who reads it, because another may find another file under the same name."""
    return {"tokens": run.map, "marks": run.map_marks, "starts": run.map_starts}[what]()


def check_vocabulary(tokens: np.ndarray, vocab_size: int, place: str) -> None:
    """Raises `DataError` for tokens that no tokenizer of this size makes."""
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise DataError(
            f"{place} holds token {tokens.max()}, beyond the tokenizer's {vocab_size}; data.tokenizer is not the one "
            "the file was made with, or the dtype of its source is wrong"
        )


def number_documents(tokens: np.ndarray, end_id: int, starts: np.ndarray | None = None) -> np.ndarray:
    """The number of each token's document, from 0, int32; an end mark belongs to the document that it ends.

    starts: bool as `tokens`, further places where a document is known to start.
    """
    first = np.zeros(len(tokens), bool) if starts is None else starts
    first[1:] |= tokens[:-1] == end_id
    first[0] = False
    return np.cumsum(first, dtype=np.int32)


def token_dtype(vocab_size: int) -> str:
    """The smallest type of token files that holds all ids, little-endian."""
    return TOKEN_DTYPES[vocab_size > 1 << 16]


def content_digest(path: str) -> str:
    """The digest that `TokenWriter` notes of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class TokenWriter:
    """Appends tokens to a file that appears under its name only when it is complete and on disk; with `marked`, a mark
    for each to a file of the same name that ends in .marks."""

    def __init__(self, path: str, dtype: str, marked: bool = False):
        self.path, self.dtype, self.count, self._digest = path, dtype, 0, hashlib.blake2b(digest_size=16)
        self._marks = TokenWriter(f"{path}.marks", "u1") if marked else None
        self._part = temporary_name(path)
        self._handle = open(self._part, "wb")

    def append(self, ids: list[int], marks: np.ndarray | None = None) -> None:
        if self._marks is not None:
            self._marks.append(marks)
        data = np.asarray(ids, self.dtype).tobytes()
        self._digest.update(data)
        self._handle.write(data)
        self.count += len(ids)

    def finish(self) -> dict[str, object]:
        """Renames the file into place and describes it: file name, tokens, digest, and the name of its marks."""
        with self._handle:
            self._handle.flush()
            os.fsync(self._handle.fileno())
        os.replace(self._part, self.path)
        described = {"file": os.path.basename(self.path), "tokens": self.count, "digest": self._digest.hexdigest()}
        if self._marks is None:
            return described
        marks = self._marks.finish()
        return described | {"marks": marks["file"], "digest": f"{described['digest']} {marks['digest']}"}

    def discard(self) -> None:
        """Leaves nothing behind; harmless after `finish`."""
        if self._marks is not None:
            self._marks.discard()
        self._handle.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._part)


# Progress of data preparation: a bar where a machine's first process has a terminal, elsewhere lines now and then.


EVERY = 10.0
"""Seconds between plain lines."""


def print_notice(text: str) -> None:
    """Prints a notice to stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether to draw bars: only on a terminal, and only in one process of a machine."""
    return sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"


@contextlib.contextmanager
def start_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with each amount of work done; the amounts add up to `total`."""
    if on_terminal():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda amount: bar.advance(task, amount)
        return
    done, start = 0, time.monotonic()
    last = start
    print_notice(f"{label} ...")

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        if time.monotonic() - last > EVERY:
            last = time.monotonic()
            print_notice(f"{label}: {100 * done // max(1, total)}%")

    yield advance
    print_notice(f"{label}: done in {time.monotonic() - start:.1f} s")
