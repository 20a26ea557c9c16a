"""Token files, written here or ready-made, the sequences packed out of them, and the progress of their preparation."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from trainer.config import ConfigError, CorpusConfig
from trainer.util.reading import Shape, find_mismatch, shorten_foreign, temporary_name

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
    """Sequences of one source; `length` is None for a stream, whose end is unknown. share: of the tokens, those that
    are learned: below 1 in conversations."""

    name: str
    length: int | None
    share: float

    def get(self, index: int) -> TokenSample:
        """One sequence, from 0."""


class LanePoint(NamedTuple):
    """Where a lane of a stream stands, see `corpus.Lane`. next: the number of its next sequence. turn, state: where
    reading goes on, see `documents.LocalStream.read_lane`. piece: texts to train on that are then passed over. used:
    tokens that are passed over after these, because earlier sequences hold them."""

    next: int = 0
    turn: int = 0
    state: dict[str, Any] | None = None
    piece: int = 0
    used: int = 0


Points: TypeAlias = dict[str, dict[int, LanePoint]]
"""Where the lanes of streams stand: by the name of the source, by lane."""

POINT: Shape = {"next": int, "turn": int, "state": (dict, NoneType), "piece": int, "used": int}


def merge_points(parts: Iterable[Points]) -> Points:
    """The furthest point of each lane, of what several ranks know."""
    merged: Points = {}
    for part in parts:
        for name, points in part.items():
            known = merged.setdefault(name, {})
            for lane, point in points.items():
                known[lane] = max(known.get(lane, point), point, key=lambda one: one.next)
    return merged


def parse_points(saved: Any) -> Points:
    """The points of streams in the manifest of a checkpoint, where a lane is a text and a point a list. Raises
    `ValueError` with what is wrong."""
    if wrong := find_mismatch(saved, {str: {str: list}}):
        raise ValueError(wrong)
    try:
        found = {name: {int(lane): LanePoint(*point) for lane, point in lanes.items()} for name, lanes in saved.items()}
    except TypeError:
        raise ValueError("a point has more entries than it should") from None
    for point in (point for lanes in found.values() for point in lanes.values()):
        if wrong := find_mismatch(point._asdict(), POINT):
            raise ValueError(f"a point's {wrong}")
        if min(point.next, point.turn, point.piece, point.used) < 0:
            raise ValueError("a point has an entry below 0")
    return found


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

    share, cut = 1.0, 0

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
        return self._get(index)

    def _get(self, index: int) -> TokenSample:
        tokens, starts, filled = np.empty(self.size + 1, np.int64), np.zeros(self.size + 1, bool), 0
        number, first = locate_index(self._ends, index * self.size)
        while filled <= self.size:
            run = self.runs[number]
            part = shared_map(self, run, "tokens")[first : first + self.size + 1 - filled]
            starts[filled] = number == 0 or not self.runs[number - 1].open
            if run.starts:
                known, place = shared_map(self, run, "starts"), run.first + first
                low, high = np.searchsorted(known, [place, place + len(part)])
                starts[known[low:high] - place + filled] = True
            tokens[filled : filled + len(part)] = part
            filled, number, first = filled + len(part), number + 1, 0
        check_vocabulary(tokens, self.vocab_size, f"{self.name}:{index} in {self.runs[number - 1].path}")
        return TokenSample(tokens, number_documents(tokens, self.end_id, starts))


def locate_index(ends: np.ndarray, index: int) -> tuple[int, int]:
    """The part, of parts that end at `ends`, in which an index lies, and its number within that part."""
    part = int(np.searchsorted(ends, index, "right"))
    return part, index - (int(ends[part - 1]) if part else 0)


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


def number_documents(tokens: np.ndarray, end_id: int, starts: np.ndarray | None) -> np.ndarray:
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


# Ready-made token files: which format they have by their content, their element type and where documents start.
#
# Formats: raw little-endian tokens (nanoGPT, and the .npy files of dolma and OLMo, which have no header), NumPy arrays,
# llm.c and modded-nanogpt (a header of 256 int32), Megatron (.bin with .idx), datatrove (.ds with .ds.index).


SCAN = 1 << 20
"""Tokens looked at together in search of an end mark."""

PIECE = 1 << 24
"""Tokens that a thread checks at a time."""

HEADER = 256 * 4
"""Bytes of the header of llm.c's files: magic number, version and number of tokens, int32, then zeros."""

LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Element type by magic number and version (karpathy/llm.c, dev/data/data_common.py)."""

NO_TOKENS = {20240326: "a model of llm.c", 20240522: "an evaluation set of llm.c"}

MEGATRON, OLD_MEGATRON = b"MMIDIDX\0\0", b"TNTIDX\0\0"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the element type, number of sequences, number of documents + 1."""

MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Element types by code (NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py); 6 and 7 are floats."""

SAMPLES, SAMPLE = 16, 1 << 15
"""Parts of a file, and 16-bit words of each, that tell its element type."""

FEWEST = 32
"""16-bit words below which a file is too short to tell."""

MOSTLY = 0.9
"""Share of small words at a place of wider elements; of text in 16-bit tokens far fewer are small."""


@dataclass(frozen=True)
class TokenCheck:
    """What a file was found to hold. smallest, largest: of its ids. ends: how many end marks. documents, starts: how
    many there are, and a digest of the places where they start, as an index says; None without an index."""

    smallest: int
    largest: int
    ends: int
    documents: int | None
    starts: str | None


def open_token_file(setting: str, source: CorpusConfig, path: str, vocab_size: int) -> TokenRun:
    """A ready-made file as one run; its documents' starts are not read yet. Raises `ConfigError` for a file whose
    header or index is damaged, or whose element type is not the one that `source.dtype` names."""
    named = f"{setting}.path: {path}"
    try:
        with open(path, "rb") as file:
            head = file.read(HEADER)
        size = os.path.getsize(path)
        if head.startswith(np.lib.format.MAGIC_PREFIX):
            run = _open_npy(named, path)
        elif head.startswith((MEGATRON, OLD_MEGATRON)):
            raise ConfigError(f"{named} is the index of a token file; name the .bin file beside it")
        elif index := index_of(path):
            dtype = _megatron_header(named, index)[0] if path.endswith(".bin") else _datatrove_dtype(named, path, size)
            run = TokenRun(path, dtype, 0, size // np.dtype(dtype).itemsize)
        else:
            run = _open_llm_c(named, path, head, size) or _open_raw(named, setting, source, path, size, vocab_size)
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {error.strerror}") from error
    width = np.dtype(run.dtype).itemsize
    if source.dtype != "auto" and np.dtype(source.dtype).itemsize != width:
        raise ConfigError(
            f"{named} holds tokens of {8 * width} bits, and {setting}.dtype={source.dtype}; set {setting}.dtype=auto"
        )
    return run


def index_of(path: str) -> str | None:
    """The file beside a token file that says where documents start, if there is one."""
    index = path.removesuffix(".bin") + ".idx" if path.endswith(".bin") else path + ".index"
    return index if path.endswith((".bin", ".ds")) and os.path.isfile(index) else None


def _open_npy(named: str, path: str) -> TokenRun:
    try:
        array = np.lib.format.open_memmap(path, "r")  # as np.load, which would open archives and pickles too
    except (OSError, ValueError, TypeError, OverflowError, MemoryError, SyntaxError) as error:
        raise ConfigError(f"{named} is no .npy array of numbers: {shorten_foreign(error)}; write it anew") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{named} holds {array.dtype} of shape {array.shape}; legal: one dimension of whole numbers")
    return TokenRun(path, array.dtype.str, array.offset, len(array))


def _open_llm_c(named: str, path: str, head: bytes, size: int) -> TokenRun | None:
    magic, version, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    if magic in NO_TOKENS:
        raise ConfigError(f"{named} is {NO_TOKENS[magic]}, which holds no tokens to train on; leave it out by a glob")
    if magic not in {known for known, _ in LLM_C}:
        return None
    dtype = LLM_C.get((magic, version))
    if dtype is None:
        raise ConfigError(f"{named} has the header of llm.c in version {version}, which is not known; write it raw")
    if count < 0 or size != HEADER + count * np.dtype(dtype).itemsize:
        raise ConfigError(f"{named} has {size} bytes, not those of the {count} tokens of its header; write it anew")
    return TokenRun(path, dtype, HEADER, count)


def _open_raw(named: str, setting: str, source: CorpusConfig, path: str, size: int, vocab_size: int) -> TokenRun:
    found = infer_dtype(sample_words(path, size), vocab_size)
    if found and found.startswith(">"):
        raise ConfigError(f"{named} holds tokens in big-endian byte order; write it in little-endian order")
    configured = token_dtype(vocab_size) if source.dtype == "auto" else np.dtype(source.dtype).newbyteorder("<").str
    dtype = np.dtype(found or configured)
    if size % dtype.itemsize:
        raise ConfigError(
            f"{named} has {size} bytes, no multiple of {dtype.name}'s {dtype.itemsize}; set {setting}.dtype"
        )
    return TokenRun(path, dtype.str, 0, size // dtype.itemsize)


def sample_words(path: str, size: int) -> np.ndarray:
    """Parts of a file in 16-bit words, four of which begin at a multiple of 8 bytes: uint16 [n, 4]."""
    parts = []
    with open(path, "rb") as file:
        for start in np.linspace(0, max(0, size - 2 * SAMPLE), SAMPLES, dtype=np.int64).tolist():
            file.seek(start - start % 8)
            data = file.read(2 * SAMPLE)
            parts.append(np.frombuffer(data[: len(data) // 8 * 8], "<u2").reshape(-1, 4))
            if size <= 2 * SAMPLE:
                break
    return np.concatenate(parts)


def infer_dtype(words: np.ndarray, vocab_size: int) -> str | None:
    """The element type of raw tokens; None where the words do not tell. words: uint16 [n, 4].

    Wider elements have small words at the same places, the upper halves of ids: 0, or somewhat more where the
    vocabulary, or that of another tokenizer, is large."""
    if words.size < FEWEST:
        return None
    for most in (0, 3, vocab_size - 1 >> 16):
        for order, upper in (("<", words), (">", words.byteswap()[:, ::-1])):
            places = tuple((upper <= most).mean(axis=0) >= MOSTLY)
            if width := {(False, True, False, True): 4, (False, True, True, True): 8}.get(places):
                return f"{order}u{width}"
    small = (words <= vocab_size - 1 >> 16).mean(axis=0) >= MOSTLY
    return None if small.any() else "<u2"


def _megatron_header(named: str, index: str) -> tuple[str, int, int]:
    """Element type, sequences and documents of an index, whose size fits them."""
    size = os.path.getsize(index)
    with open(index, "rb") as file:
        head = file.read(MEGATRON_HEADER.size)
    wrong = None
    if not head.startswith(MEGATRON) or len(head) < MEGATRON_HEADER.size:
        wrong = "an old format" if head.startswith(OLD_MEGATRON) else "no index of Megatron"
    else:
        _, version, code, sequences, documents = MEGATRON_HEADER.unpack(head)
        whole = MEGATRON_HEADER.size + 12 * sequences + 8 * documents
        if version != 1 or code not in MEGATRON_DTYPES:
            wrong = f"version {version} with element type {code}, which is not known"
        elif size == whole + sequences:
            wrong = "an index of several modes, which are not read"
        elif size != whole or not documents:
            wrong = f"{size} bytes, not those of {sequences} sequences and {documents} borders of documents"
    if wrong:
        raise ConfigError(f"{named}: {index} beside it is or has {wrong}; write both anew, or move the index away")
    return MEGATRON_DTYPES[code], sequences, documents


def _megatron_starts(named: str, index: str, run: TokenRun) -> np.ndarray:
    dtype, sequences, documents = _megatron_header(named, index)
    file, width = np.memmap(index, np.uint8, "r", MEGATRON_HEADER.size), np.dtype(dtype).itemsize
    lengths, pointers, borders = np.split(file, [4 * sequences, 12 * sequences])
    ends = np.cumsum(lengths.view("<i4"), dtype=np.int64)
    starts, borders = np.concatenate([[0], ends]), borders.view("<i8")
    if not (
        starts[-1] == run.length
        and np.array_equal(pointers.view("<i8"), starts[:-1] * width)
        and (np.diff(starts) >= 0).all()
        and borders[0] == 0
        and borders[-1] <= sequences
        and (np.diff(borders) >= 0).all()
    ):
        raise ConfigError(f"{named} is not the file that {index} describes; write both anew, or move the index away")
    return starts[borders]


def _datatrove_dtype(named: str, path: str, size: int) -> str:
    with open(f"{path}.index", "rb") as file:
        file.seek(max(0, os.path.getsize(file.name) - 8))
        last = int.from_bytes(file.read(8), "little")
    dtype = {2 * last: "<u2", 4 * last: "<u4"}.get(size)
    if dtype is None:
        raise ConfigError(
            f"{named} has {size} bytes, not those of the {last} tokens of {path}.index; write both anew, or move the "
            "index away"
        )
    return dtype


def _datatrove_starts(named: str, index: str, run: TokenRun) -> np.ndarray:
    size = os.path.getsize(index)
    ends = np.fromfile(index, "<u8").astype(np.int64)
    if size % 8 or (np.diff(ends, prepend=0) < 0).any():
        raise ConfigError(f"{named}: {index} holds no rising ends of documents; write both anew")
    return np.concatenate([[0], ends])


def read_starts(setting: str, run: TokenRun) -> np.ndarray | None:
    """The tokens of a file with which documents start, rising, int64, as its index says; None without an index. Raises
    `ConfigError` for an index that does not fit the file."""
    named = f"{setting}.path: {run.path}"
    if os.path.exists(f"{run.path}.loss") and run.path.endswith(".ds"):
        raise ConfigError(
            f"{named}: {run.path}.loss says which tokens are learned, and is not read; move it away to learn all tokens"
        )
    index = index_of(run.path)
    if index is None:
        return None
    read = _megatron_starts if run.path.endswith(".bin") else _datatrove_starts
    starts = np.unique(read(named, index, run))
    return starts[starts < run.length]


def check_token_files(
    setting: str, runs: list[TokenRun], end_id: int, starts_file: Callable[[int], str], advance: Callable[[int], None]
) -> list[TokenCheck]:
    """Reads all tokens of the files, and writes the starts of the documents of file n to `starts_file(n)`.

    advance: called with numbers of tokens read."""
    found = []
    for number, run in enumerate(runs):
        documents = digest = None
        if (starts := read_starts(setting, run)) is not None:
            documents, digest = len(starts), hashlib.blake2b(starts.tobytes(), digest_size=16).hexdigest()
            starts.astype("<i8").tofile(starts_file(number))
        found.append(TokenCheck(0, 0, 0, documents, digest))
    pieces = [(number, start) for number, run in enumerate(runs) for start in range(0, run.length, PIECE)]

    def scan(piece: tuple[int, int]) -> tuple[int, int, int]:
        number, start = piece
        rest = runs[number].cut(start)[1]
        tokens = rest.cut(min(PIECE, rest.length))[0].map()
        return int(tokens.min()), int(tokens.max()), int(np.count_nonzero(tokens == end_id))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # NumPy releases the interpreter's lock
        for (number, start), seen in zip(pieces, pool.map(scan, pieces)):
            one, (smallest, largest, ends) = found[number], seen
            found[number] = replace(
                one, smallest=min(one.smallest, smallest), largest=max(one.largest, largest), ends=one.ends + ends
            )
            advance(min(PIECE, runs[number].length - start))
    return found


def file_states(path: str) -> list[Any]:
    """Sizes and times of a token file and of the files that describe it."""
    states = [os.stat(one) for one in (path, index_of(path), f"{path}.loss") if one and os.path.exists(one)]
    return [(state.st_size, state.st_mtime_ns) for state in states]


def hold_out_tail(run: TokenRun, fraction: float, end_id: int) -> tuple[TokenRun, TokenRun]:
    """Splits a ready-made file into a training part and a held-out part.

    The held-out part is about the last `fraction` of the tokens; it begins where a document begins. A file that holds
    one document is trained on whole.
    """
    if not fraction or not run.length:
        return run.cut(run.length)
    wish = run.length - round(run.length * fraction)
    if run.starts:
        starts = run.map_starts()
        near = int(np.searchsorted(starts, max(1, wish)))
        return run.cut(int(starts[near]) if near < len(starts) else int(starts[-1]) or run.length)
    tokens = run.map()
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
