"""Token files, the sequences packed out of them, and the progress of their preparation."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from trainer.config import ConfigError, CorpusConfig
from trainer.util.reading import shorten_foreign, temporary_name

SCAN = 1 << 20
"""Tokens looked at together in search of an end mark."""


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
    each token (`chat.LEARNED`, `chat.FIRST`). open: whether the last document goes on in the next run; if not, the next
    run starts with a document."""

    path: str
    dtype: str
    offset: int
    length: int
    marks: str | None = None
    open: bool = False

    def cut(self, at: int) -> tuple[TokenRun, TokenRun]:
        """The first `at` tokens, and the rest."""
        rest = self.offset + at * np.dtype(self.dtype).itemsize
        return TokenRun(self.path, self.dtype, self.offset, at), TokenRun(self.path, self.dtype, rest, self.length - at)

    def map(self) -> np.ndarray:
        """The tokens, memory-mapped. Raises `DataError` if the file vanished or shrank."""
        return self._map(self.path, self.dtype)

    def map_marks(self) -> np.ndarray:
        """The marks of the tokens, in the same way."""
        assert self.marks is not None
        return self._map(self.marks, "u1")

    def _map(self, path: str, dtype: str) -> np.ndarray:
        try:
            return np.memmap(path, dtype, "r", self.offset, (self.length,))
        except (OSError, ValueError) as error:
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
        self._maps: dict[int, np.ndarray] = {}
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
            part = self._map(number)[first : first + self.size + 1 - filled]
            starts[filled] = number == 0 or not self.runs[number - 1].open
            tokens[filled : filled + len(part)] = part
            filled, number = filled + len(part), number + 1
        check_vocabulary(tokens, self.vocab_size, f"{self.name}:{index} in {self.runs[number - 1].path}")
        return TokenSample(tokens, number_documents(tokens, self.end_id, starts))

    def _map(self, number: int) -> np.ndarray:
        if number not in self._maps:
            self._maps[number] = self.runs[number].map()
        return self._maps[number]


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


def open_token_file(setting: str, source: CorpusConfig, path: str, vocab_size: int) -> TokenRun:
    """A ready-made file as one run: raw little-endian (.bin), or .npy with integers. Raises `ConfigError`."""
    named = f"{setting}.path: {path}"
    if path.endswith(".npy"):
        try:
            array = np.lib.format.open_memmap(path, "r")  # as np.load, which would open archives and pickles too
        except (OSError, ValueError, TypeError, OverflowError, MemoryError, SyntaxError) as error:
            raise ConfigError(
                f"{named} is no .npy array of numbers: {shorten_foreign(error)}; write it anew"
            ) from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ConfigError(
                f"{named} holds {array.dtype} of shape {array.shape}; legal: one dimension of whole numbers"
            )
        return TokenRun(path, array.dtype.str, array.offset, len(array))
    dtype = np.dtype(token_dtype(vocab_size) if source.dtype == "auto" else source.dtype).newbyteorder("<")
    size = os.path.getsize(path)
    if size % dtype.itemsize:
        raise ConfigError(
            f"{named} has {size} bytes, no multiple of {dtype.name}'s {dtype.itemsize}; set {setting}.dtype"
        )
    return TokenRun(path, dtype.str, 0, size // dtype.itemsize)


def hold_out_tail(run: TokenRun, fraction: float, end_id: int) -> tuple[TokenRun, TokenRun]:
    """Splits a ready-made file into a training part and a held-out part.

    The held-out part is about the last `fraction` of the tokens; it begins where a document begins. A file that holds
    one document is trained on whole.
    """
    if not fraction or not run.length:
        return run.cut(run.length)
    tokens, wish = run.map(), run.length - round(run.length * fraction)
    for start in range(max(0, wish - 1), run.length, SCAN):
        found = np.flatnonzero(tokens[start : min(start + SCAN, run.length - 1)] == end_id)
        if len(found):
            return run.cut(start + int(found[0]) + 1)
    for stop in range(min(wish, run.length - 1), 0, -SCAN):
        start = max(0, stop - SCAN)
        found = np.flatnonzero(tokens[start:stop] == end_id)
        if len(found):
            return run.cut(start + int(found[-1]) + 1)
    return run.cut(run.length)


def file_digest(run: TokenRun) -> str:
    """Identifies a ready-made file by its length and 64 samples, so that a terabyte costs no more than a megabyte."""
    tokens = run.map() if run.length else np.empty(0)
    seen = hashlib.blake2b(str(run.length).encode(), digest_size=16)
    for start in np.linspace(0, max(0, run.length - 4096), 64, dtype=np.int64):
        seen.update(np.ascontiguousarray(tokens[start : start + 4096]).tobytes())
    return seen.hexdigest()


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


# Progress of data preparation: one line that is drawn anew where a machine's first process has a terminal, elsewhere
# lines now and then.


EVERY, REDRAWN = 10.0, 0.2
"""Seconds between plain lines, and between two drawings of the line on a terminal."""


def print_notice(text: str) -> None:
    """Prints a notice to stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether to draw: only on a terminal, and only in one process of a machine."""
    return sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"


@contextlib.contextmanager
def start_progress(label: str, kept: int) -> Iterator[Callable[[int, int, float], None]]:
    """Shows how far the tokenising of a source is, how fast it is, and how long the rest takes.

    kept: bytes of text that an earlier start has tokenised. Gives a function to call with the bytes of text and the
    tokens that were made since this start, and the bytes of text expected in all.
    """
    from trainer.util.tables import format_count, format_duration

    begin = last = time.monotonic()
    done, rate, live = 0, "", on_terminal()

    def draw(line: str) -> None:
        room = shutil.get_terminal_size().columns - 1
        line = line if len(line) <= room else f"...{line[len(line) - room + 3 :]}"
        print(f"\r{line:<{room}}", end="", file=sys.stderr, flush=True)

    def report(size: int, tokens: int, total: float) -> None:
        nonlocal done, rate, last
        seconds, done = max(time.monotonic() - begin, 1e-3), size
        rate = f"{done / seconds / 1e6:.1f} MB/s, {format_count(tokens / seconds)} tokens/s"
        if time.monotonic() - last > (REDRAWN if live else EVERY):
            last = time.monotonic()
            share = 100 * (kept + done) // max(1, total)
            rest = format_duration(seconds * (total - kept - done) / done if done else None)
            (draw if live else print_notice)(f"{label}: {share:.0f}%, {rate}, ETA {rest}")

    print_notice(f"{label} ...")
    try:
        yield report
    except BaseException:
        if live:
            print_notice("")  # what is said next begins on a line of its own
        raise
    line = f"{label}: done in {time.monotonic() - begin:.1f} s{', ' * bool(rate)}{rate}"
    if live:
        draw("")
        line = f"\r{line}"
    print_notice(line)
