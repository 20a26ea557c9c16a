"""Text files in chunks of whole lines, and conversations as text."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from trainer.config import ConfigError
from trainer.data.tokens import TokenRun, TokenSample, check_vocabulary
from trainer.hf.tokenizer import MARKERS, render_chat
from trainer.util.reading import read_bytes, shorten_foreign

CHUNK_BYTES = 64 << 10
"""Longer files are cut at line ends into chunks, so that a part of a single file can be held out or be a shard."""

LINE = 32 << 20
"""Bytes of the longest line: several times the longest book, and far below what a process can hold parsed."""


class TextDocument(NamedTuple):
    """A text, and whether a document ends with it (long files come in several chunks; the last is empty where all of
    its lines were left out). spans: of a conversation, the characters that are learned."""

    text: str
    final: bool = True
    spans: tuple[tuple[int, int], ...] | None = None


def plain_text(value: Any) -> str:
    """A value, if it is text. Raises `ValueError`."""
    if not isinstance(value, str):
        raise ValueError(f"holds {shorten_foreign(value)} instead of text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no text,") from None
    return value


def is_text(data: bytes) -> bool:
    """Whether `data` is UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclass
class RowTally:
    """The rows of a source (lines, where it has no rows) that were read, and those of them that were left out as
    damaged. first: what was wrong with the first of these."""

    rows: int = 0
    damaged: int = 0
    first: str = ""

    def __add__(self, other: RowTally) -> RowTally:
        return RowTally(self.rows + other.rows, self.damaged + other.damaged, self.first or other.first)


class DamagedRows:
    """What a reader of rows does with one that cannot be read: it ends the reading (data.on_error=stop), or is left out
    and counted in `tally` (skip)."""

    def __init__(self, skip: bool):
        self.skip, self.tally = skip, RowTally()

    def take_tally(self) -> RowTally:
        """What was counted since the last call."""
        taken, self.tally = self.tally, RowTally()
        return taken

    def begins_inside(self, number: int) -> bool:
        """Whether what `read` counts as document `number` begins inside of a document."""
        return False

    def leave_out(self, problem: ConfigError, rows: int = 1) -> None:
        """Raises `problem`, unless damaged rows are skipped."""
        if not self.skip:
            raise problem
        self.tally += RowTally(0, rows, str(problem))


class TextFiles(DamagedRows):
    """Text files, one document each; `len` and `read` count chunks of at most about `CHUNK_BYTES`.

    setting: the source's own, such as data.sources.NAME."""

    def __init__(self, setting: str, paths: list[str], strict: bool, skip: bool = False):
        super().__init__(skip)
        self.setting, self.paths, self.strict = setting, paths, strict
        self._measure([os.path.getsize(path) for path in paths])

    def _measure(self, sizes: list[int]) -> None:
        self.sizes, self.bytes = sizes, sum(sizes)
        self._ends = np.cumsum([max(1, math.ceil(size / CHUNK_BYTES)) for size in sizes])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, chunk: int) -> tuple[int, int]:
        """The file of a chunk, and the chunk's number within it."""
        file = int(np.searchsorted(self._ends, chunk, "right"))
        return file, chunk - (int(self._ends[file - 1]) if file else 0)

    def begins_inside(self, number: int) -> bool:
        return self.locate(number)[1] > 0

    def read(self, first: int, last: int) -> Iterator[TextDocument]:
        """The texts of some chunks. Raises `ConfigError` naming the file, unless what is not UTF-8 is skipped."""
        for chunk in range(first, last):
            file, number = self.locate(chunk)
            start, data = self.lines(file, number)
            text, final = self._decoded(data, self.paths[file]), start + len(data) >= self.sizes[file]
            if text or final and data:
                yield TextDocument(text, final)

    def _decoded(self, data: bytes, path: str) -> str:
        self.tally.rows += data.count(b"\n")
        try:
            return data.decode("utf-8", "strict" if self.strict else "replace")
        except UnicodeDecodeError as error:
            problem = ConfigError(
                f"{self.setting}.path: {path} is not UTF-8 text ({error}); convert it, leave it out with a glob such "
                "as 'folder/**/*.txt', or leave out its damaged lines with data.on_error=skip"
            )
        lines = data.splitlines(keepends=True)
        kept = list(filter(is_text, lines))
        self.leave_out(problem, len(lines) - len(kept))
        return b"".join(kept).decode()

    def lines(self, file: int, number: int) -> tuple[int, bytes]:
        """Where the lines begin that start within the chunk's bytes, and these lines: cuts never fall into a line, and
        so never into a character."""
        path, start = self.paths[file], number * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, self.sizes[file])
        try:
            with open(path, "rb") as handle:
                if start:
                    handle.seek(start - 1)
                    self._line(handle)
                start = handle.tell()
                data = handle.read(max(0, end - start))
                if data and not data.endswith(b"\n"):
                    data += self._line(handle)
                return start, data
        except OSError as error:
            raise ConfigError(f"{self.setting}.path: {path} cannot be read: {error.strerror}") from error

    def _line(self, handle: BinaryIO) -> bytes:
        """The rest of a line."""
        line = handle.readline(LINE)
        if len(line) == LINE and not line.endswith(b"\n"):
            raise ConfigError(
                f"{self.setting}.path: {handle.name} has a line of more than {LINE} bytes; break it into several, or "
                "leave the file out"
            )
        return line

    def keep_lines(self, count: int) -> None:
        """Keeps the first lines, blank ones not counted, and leaves out what comes behind them."""
        for chunk in range(len(self)):
            file, number = self.locate(chunk)
            offset, data = self.lines(file, number)
            for line in data.split(b"\n"):
                offset, count = offset + len(line) + 1, count - bool(line.strip())
                if not count:
                    self.paths = self.paths[: file + 1]
                    return self._measure([*self.sizes[:file], min(offset, self.sizes[file])])


# Conversations: rendered to text by a chat template, of which the assistant's part is learned, and packed whole.


LEARNED, FIRST = 1, 2
"""Bits of a token's mark: the assistant says it; a conversation begins with it."""

TEMPLATE = 1 << 20
"""Bytes of a template; the longest that are published have some 20 KiB."""

ROLES = {"human": "user", "gpt": "assistant"}
"""Roles in conversations that are lists of {from, value}, where they differ."""

PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def read_template(path: str) -> str:
    """The text of a template's file. Raises `ConfigError`."""
    named = f"data.chat_template={path}"
    try:
        return read_bytes(Path(path).expanduser(), TEMPLATE).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{named} cannot be read: {shorten_foreign(error)}; name the file of a Jinja template"
        ) from None


class ChatTemplate:
    """Makes documents of conversations. text: the template; special: the tokenizer's special tokens by name.

    Raises `ConfigError` for a template that cannot render two messages."""

    def __init__(self, text: str, special: dict[str, str], named: str):
        self.text, self.special, self.named = text, special, named
        self.digest = hashlib.blake2b(json.dumps([text, special], sort_keys=True).encode(), digest_size=12).hexdigest()
        try:
            self.document(PROBE)
        except ValueError as error:
            raise ConfigError(
                f"{named} cannot be used: {shorten_foreign(error)}; name another by data.chat_template"
            ) from None

    def document(self, value: Any) -> TextDocument:
        """The text of a conversation, and where in it the assistant speaks. Raises `ValueError` for what is none."""
        messages = parse_conversation(value)
        if MARKERS.search(self.text):
            text, spans = render_chat(self.text, messages, self.special)
        else:
            text, spans = self._by_prefixes(messages)
        if not spans:
            raise ValueError("holds nothing that the assistant says")
        return TextDocument(plain_text(text), spans=tuple(spans))

    def _by_prefixes(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """What comes behind the prompt for each of the assistant's messages, up to the end of that message."""
        whole, _ = render_chat(self.text, messages, self.special)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before, _ = render_chat(self.text, messages[:number], self.special, prompt=True)
                through, _ = render_chat(self.text, messages[: number + 1], self.special)
                if not (through.startswith(before) and whole.startswith(through)):
                    raise ConfigError(
                        f"{self.named} renders the beginning of a conversation otherwise than the whole of it, so that "
                        "the assistant's part cannot be told; name one with {% generation %} markers by "
                        "data.chat_template"
                    )
                spans.append((len(before), len(through)))
        return whole, spans


def parse_conversation(value: Any) -> list[dict[str, Any]]:
    """The messages in a row, as templates know them: {role, content, ...}, or made such of {from, value}. Raises
    `ValueError` with what is wrong."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"holds {shorten_foreign(value)} instead of a list of messages")
    messages = []
    for message in value:
        given = {key: part for key, part in message.items() if part is not None}
        if "from" in given and "role" not in given:
            role = given.pop("from")
            role = ROLES.get(role, role) if isinstance(role, str) else role
            given = {"role": role, "content": given.pop("value", None), **given}
        if not isinstance(given.get("role"), str):
            raise ValueError(f"holds a message whose role is {shorten_foreign(given.get('role'))}")
        if not isinstance(given.get("content"), str) and not given.get("tool_calls"):
            raise ValueError(
                f"holds a message whose content is {shorten_foreign(given.get('content'))} instead of text"
            )
        messages.append(given)
    return messages


class PackedConversations:
    """The conversations of several runs, packed whole into sequences with random access; see `Sequences`.

    A conversation is a document of its own. What it has beyond a sequence is cut off; `cut` counts those. What is left
    of a sequence is filled up with end marks, which are not learned. share: of the tokens of all sequences, those that
    are learned."""

    def __init__(self, name: str, runs: list[TokenRun], end_id: int, vocab_size: int, sequence_length: int):
        self.name, self.runs, self.end_id = name, runs, end_id
        self.vocab_size, self.size = vocab_size, sequence_length
        self.tokens = sum(run.length for run in runs)
        starts = [np.flatnonzero(run.map_marks() & FIRST) for run in runs]
        lengths = [np.diff(first, append=run.length) for first, run in zip(starts, runs)]
        self._run = np.repeat(np.arange(len(runs)), [len(first) for first in starts])
        self._start, whole = (np.concatenate([np.empty(0, np.int64), *parts]) for parts in (starts, lengths))
        self.cut = int((whole > sequence_length + 1).sum())
        self._length = np.minimum(whole, sequence_length + 1)
        self._order, self._ends = pack_lengths(self._length, sequence_length + 1)
        self.length = len(self._ends)
        learned = sum(
            count_learned(run.map_marks(), first, np.minimum(length, sequence_length + 1))
            for run, first, length in zip(runs, starts, lengths)
        )
        self.share = learned / (self.length * sequence_length) if self.length else 0.0
        self._maps: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def get(self, index: int) -> TokenSample:
        """See `Sequences`. Raises `DataError` for a file that vanished or holds ids beyond the vocabulary."""
        if not 0 <= index < self.length:
            raise IndexError(f"{self.name} has {self.length} sequences, not {index}")
        members = self._order[self._ends[index - 1] if index else 0 : self._ends[index]]
        tokens, learned = np.full(self.size + 1, self.end_id, np.int64), np.zeros(self.size + 1, bool)
        documents, filled = np.full(self.size + 1, len(members), np.int32), 0
        for number, member in enumerate(members):
            run, start, length = int(self._run[member]), int(self._start[member]), int(self._length[member])
            if run not in self._maps:
                self._maps[run] = self.runs[run].map(), self.runs[run].map_marks()
            ids, marks = (part[start : start + length] for part in self._maps[run])
            place = slice(filled, filled := filled + length)
            tokens[place], learned[place], documents[place] = ids, marks & LEARNED > 0, number
        check_vocabulary(tokens, self.vocab_size, f"{self.name}:{index}")
        return TokenSample(tokens, documents, learned)


def count_learned(marks: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> int:
    """The number of learned tokens of conversations that begin at `starts` and are cut off after `lengths` tokens. The
    first token of a conversation follows nothing, so it is not learned."""
    learned = np.append(marks & LEARNED > 0, False)
    bounds = np.stack([starts + 1, starts + lengths], 1)[lengths > 1]
    return int(np.add.reduceat(learned, bounds.ravel(), dtype=np.int64)[::2].sum()) if len(bounds) else 0


def pack_lengths(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Which pieces of `lengths` (at most `room` each) share a sequence of `room`: the longest first, each where it
    leaves the least (best fit decreasing; Johnson 1973, which needs at most 11/9 of the fewest sequences).

    Returns the pieces' numbers, sequence by sequence, and where among them each sequence ends; int64."""
    sequences: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]
    rooms = 0  # bit r: whether a sequence has room for r
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        if fitting := rooms >> length:
            found = length + (fitting & -fitting).bit_length() - 1
            sequence = with_room[found].pop()
            rooms ^= (not with_room[found]) << found
        else:
            found, sequence = room, len(sequences)
            sequences.append([])
        sequences[sequence].append(piece)
        if left := found - length:
            with_room[left].append(sequence)
            rooms |= 1 << left
    order = np.array([piece for sequence in sequences for piece in sequence], np.int64)
    return order, np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64)
