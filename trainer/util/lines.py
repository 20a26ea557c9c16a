"""Files of lines that grow with a run: read as a stream, appended to by one process, cut at their end.

The time is linear in what is read, and the memory is that of the longest line."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from trainer.config import ConfigError
from trainer.util.reading import LIMIT, Malformed

CHUNK = 1 << 20


def read_lines(path: str | os.PathLike, start: int = 0, rest: bool = False) -> Iterator[bytes]:
    """The lines of a regular file from byte `start` on, without their line ends. Text behind the last line end is left
    out, unless `rest` asks for it: a process that was killed, or writes at this moment, leaves half a line.

    Raises `OSError`, and `Malformed` for what is no regular file and for a line of more than `LIMIT` bytes. The length
    of the file has no limit."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Malformed(f"{path} is not a regular file; put a file there, or name another one")
    with open(path, "rb") as file:
        file.seek(start)
        while (line := file.readline(LIMIT + 1)).endswith(b"\n"):
            yield line[:-1]
    if len(line) > LIMIT:
        raise _too_long(path)
    if line and rest:
        yield line


def count_lines(path: str | os.PathLike) -> int:
    """The number of lines of a regular file. Raises the errors of `read_lines`."""
    return sum(1 for _ in read_lines(path))


def open_to_append(path: str | os.PathLike) -> int:
    """A descriptor that reads a file and appends to it; the file is made where there is none.

    Raises `OSError`, and `ConfigError` where the name is a symbolic link, is one of several names of a file, or is no
    regular file: an append would change a file elsewhere."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a symbolic link, and is not written to; remove the link") from None
        if error.errno == errno.ENXIO:
            raise ConfigError(f"{path} is no regular file, and is not written to; remove it") from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is no regular file, and is not written to; remove it")
    raise ConfigError(
        f"{path} is a hard link: the same file has {status.st_nlink} names, and an append would change it under all of "
        f"them; give this name a copy of its own: mv '{path}' '{path}.linked' && cp '{path}.linked' '{path}'"
    )


class LineFile:
    """A file of lines that this process alone appends to. It holds whole lines only: half a line, which a process
    leaves that is killed, is dropped when the file is opened. Raises the errors of `open_to_append`."""

    descriptor = -1

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.descriptor = open_to_append(path)
        try:
            self.cut(self._end_of_lines())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends the writing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self.descriptor).st_size

    def append(self, lines: str | bytes) -> None:
        """Writes whole lines in one piece. Raises `OSError`; the file is then as it was before."""
        end = self.size
        try:
            self._write(lines.encode(errors="backslashreplace") if isinstance(lines, str) else lines)
        except OSError:
            os.ftruncate(self.descriptor, end)
            raise

    def append_from(self, other: LineFile, start: int) -> None:
        """Appends the lines of another file from byte `start` on, and syncs them to the disk. Raises `OSError`; the
        file is then as it was before."""
        end = self.size
        try:
            while data := os.pread(other.descriptor, CHUNK, start):
                self._write(data)
                start += len(data)
            os.fsync(self.descriptor)
        except OSError:
            os.ftruncate(self.descriptor, end)
            raise

    def ends_with(self, other: LineFile, start: int, end: int) -> bool:
        """Whether this file ends with the bytes `start` to `end` of another one."""
        place = self.size - (end - start)
        return place >= 0 and all(
            os.pread(self.descriptor, length, place + at - start) == os.pread(other.descriptor, length, at)
            for at in range(start, end, CHUNK)
            for length in [min(CHUNK, end - at)]
        )

    def cut(self, end: int) -> None:
        """Drops what stands behind byte `end`."""
        if end < self.size:
            os.ftruncate(self.descriptor, end)

    def backwards(self) -> Iterator[tuple[int, bytes]]:
        """The lines from the last to the first, each with the byte at which it begins. Raises `Malformed` for a line of
        more than `LIMIT` bytes."""
        end, pieces, length = self.size - 1, list[bytes](), 0  # without the last line end
        if end < 0:
            return
        while end > 0:
            begin = max(0, end - CHUNK)
            first, *rest = os.pread(self.descriptor, end - begin, begin).split(b"\n")
            for text in reversed(rest):
                end -= len(text) + 1
                yield end + 1, b"".join([text, *reversed(pieces)])
                pieces, length = [], 0
            end, length = begin, length + len(first)
            pieces.append(first)
            if length > LIMIT:
                raise _too_long(self.path)
        yield 0, b"".join(reversed(pieces))

    def _end_of_lines(self) -> int:
        """The byte behind the last line end."""
        end = self.size
        while end > 0:
            begin = max(0, end - CHUNK)
            if (found := os.pread(self.descriptor, end - begin, begin).rfind(b"\n")) >= 0:
                return begin + found + 1
            end = begin
        return 0

    def _write(self, data: bytes) -> None:
        if os.write(self.descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def _too_long(path: str | os.PathLike) -> Malformed:
    return Malformed(f"{path} has a line of more than {LIMIT} bytes; look at what it holds")
