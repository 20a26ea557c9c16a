"""Text files in chunks of whole lines."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from trainer.config import ConfigError
from trainer.util.reading import shorten_foreign

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
