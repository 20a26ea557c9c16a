"""Text files in chunks of whole lines."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from trainer.config import ConfigError

CHUNK_BYTES = 64 << 10
"""Longer files are cut at line ends into chunks, so that a part of a single file can be held out or be a shard."""

LINE = 32 << 20
"""Bytes of the longest line: several times the longest book, and far below what a process can hold parsed."""


class Document(NamedTuple):
    """A text, and whether a document ends with it (long files come in several chunks)."""

    text: str
    final: bool = True


class TextFiles:
    """Text files, one document each; `len` and `read` count chunks of at most about `CHUNK_BYTES`."""

    def __init__(self, name: str, paths: list[str], strict: bool):
        self.name, self.paths, self.strict = name, paths, strict
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

    def read(self, first: int, last: int) -> Iterator[Document]:
        """The texts of some chunks. Raises `ConfigError` naming the file."""
        for chunk in range(first, last):
            file, number = self.locate(chunk)
            start, data = self.lines(file, number)
            try:
                text = data.decode("utf-8", "strict" if self.strict else "replace")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"data.sources.{self.name}.path: {self.paths[file]} is not UTF-8 text ({error}); convert it, or "
                    "leave it out with a glob such as 'folder/**/*.txt'"
                ) from error
            if text:
                yield Document(text, start + len(data) >= self.sizes[file])

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
            raise ConfigError(f"data.sources.{self.name}.path: {path} cannot be read: {error.strerror}") from error

    def _line(self, handle: BinaryIO) -> bytes:
        """The rest of a line."""
        line = handle.readline(LINE)
        if len(line) == LINE and not line.endswith(b"\n"):
            raise ConfigError(
                f"data.sources.{self.name}.path: {handle.name} has a line of more than {LINE} bytes; break it into "
                "several, or leave the file out"
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
