"""Files in the folder of a checkpoint: read only where they lie inside of it, and hashed while they are written."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from trainer.config import ConfigError

SLICE = 2**22
"""Bytes that are hashed and then written while a cache may still hold them."""

LARGEST = 2**63 - 1
"""Numbers of bytes and of elements are at most that."""

WAY_OUT = "set checkpoint.resume to another checkpoint, or to none"


class DamagedCheckpoint(ConfigError):
    """A folder that is not a whole checkpoint; the message says what is wrong, naming the file."""


def open_inside(folder: Path, name: str) -> BinaryIO:
    """The file `name` of the folder, opened for reading.

    DamagedCheckpoint if it is missing, unreadable or no regular file, or if a link leads out of the folder."""
    path = folder / name
    try:
        if os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder):
            raise DamagedCheckpoint(f"{path} leads out of its folder")
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise DamagedCheckpoint(f"{path} is no regular file")
        return open(path, "rb")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        raise DamagedCheckpoint(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


class HashingFile:
    """A new binary file. It hashes what is meant to be written; `with` syncs it to the disk at the end."""

    def __init__(self, path: Path):
        self.size, self.sha256 = 0, hashlib.sha256()
        self.file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by `__exit__`

    def write(self, data: memoryview) -> None:
        for first in range(0, len(data), SLICE):
            part = data[first : first + SLICE]
            self.sha256.update(part)
            self.size += len(part)
            while part:
                part = part[self.file.write(part) :]

    def __enter__(self) -> HashingFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self.file:
            if error is None:
                os.fsync(self.file.fileno())


def check_count(value: Any) -> int:
    """`value`, if it is a whole number that can count bytes or elements."""
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ValueError(f"{format_foreign(value)} is no number of bytes or elements")
    return value


def format_foreign(value: Any) -> str:
    """A value of unknown origin as short, printable text."""
    text = ascii(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
