"""A checkpoint on disk: a folder `step-00000100` with a `manifest.json` that describes every other file in it.

The manifest is JSON. It holds where the values of each tensor lie, all other state of the run, the size and SHA-256 of
each file as it was meant to be written, and a checksum of itself. The checksums detect damage, not intent: whoever
writes the folder can write them too. What is read from a manifest is therefore checked before use. Folders with other
names (`.tmp` while they are written or deleted) are never taken for checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from trainer.config import ConfigError

# Files in the folder of a checkpoint: read only where they lie inside of it, and hashed while they are written.


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


# The manifest, which describes all files of a checkpoint.


FORMAT = 2
"""Version of the format. Format 1, torch's distributed checkpoint, was written by version 0.1.0 only."""
MANIFEST = "manifest.json"
MOST_BYTES = 2**30
"""Upper limit of a manifest's size in bytes. A million chunks take a tenth of it."""
FILE_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")
CLAIMED = re.compile(rb'"sha256": "([0-9a-f]{64})"\s*\}\s*$')
OWN_KEYS = ("format", "saved", "step", "torch", "files", "tensors", "sha256")


def step_folder(folder: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`. folder: that of the run's checkpoints."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints in `folder` by step, complete or not, the one of the latest step first.

    A start sets later steps of an earlier run aside before it saves anything, so the newest checkpoint is found without
    comparing times. A checkpoint that is being replaced (`.replaced`) counts until the new one has its name.
    """
    found = {}
    # Sorting in reverse visits step-00000100.replaced before step-00000100, so the latter wins where both exist.
    for path in sorted(folder.glob("step-*"), reverse=True):
        if match := re.fullmatch(r"step-(\d{8,})(\.replaced)?", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items(), reverse=True))


def read_digest(path: Path) -> str:
    """The checksum that the manifest of the checkpoint folder `path` claims, empty if it has none. It distinguishes two
    checkpoints of the same step. Only the end of the manifest is read."""
    try:
        with open_inside(path, MANIFEST) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200))
            found = CLAIMED.search(file.read())
    except (DamagedCheckpoint, OSError):
        return ""
    return found[1].decode() if found else ""


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Writes the manifest of the folder `path`: `content` (JSON data), the format, the time and a checksum, with one
    key on each line."""
    content = {"format": FORMAT, "saved": time.time(), **content}
    # Last in the file, where `read_digest` finds it without parsing the manifest.
    content["sha256"] = _digest(content)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    with open(path / MANIFEST, "w", encoding="utf-8") as file:
        file.write("{\n" + lines + "\n}\n")
        file.flush()
        # The manifest must be on disk before the folder is renamed, or a crash could leave a checkpoint without one.
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint folder `path`.

    Keys: what the run saved about itself, and `step`, `format`, `saved` (seconds since 1970), `torch` (version),
    `files` (name -> bytes, sha256), `tensors` (name -> shape, dtype, chunks). Raises DamagedCheckpoint if it is
    missing, unreadable, altered, of a later format, or if its files are not names of files in the folder.
    """
    with open_inside(path, MANIFEST) as file:
        try:
            # Before parsing: a huge file would take all memory.
            if (size := file.seek(0, os.SEEK_END)) > MOST_BYTES:
                raise ValueError(f"it has {size} bytes")
            file.seek(0)
            content = json.load(file)
            version = _typed(content, dict)["format"]
            if _typed(version, int) > FORMAT:
                raise DamagedCheckpoint(
                    f"{path / MANIFEST} has format {format_foreign(version)}, this version reads up to {FORMAT}"
                )
            if version == 1:
                raise DamagedCheckpoint(
                    f"{path / MANIFEST} has format 1, which only version 0.1.0 reads; resume or export it with that one"
                )
            claimed = content.pop("sha256")
            if claimed != _digest(content):
                raise DamagedCheckpoint(f"{path / MANIFEST} does not match its own checksum")
            _check(content)
        except (ValueError, LookupError, RecursionError, MemoryError) as error:
            raise DamagedCheckpoint(f"{path / MANIFEST} is not a manifest: {format_foreign(str(error))}") from None
        except OSError as error:
            raise DamagedCheckpoint(f"{path / MANIFEST} cannot be read: {error.strerror}") from None
    return content


def _check(content: dict[str, Any]) -> None:
    """Raises ValueError or KeyError where something that every manifest has is missing or of another kind."""
    if content["format"] < 1:
        raise ValueError(f"there is no format {format_foreign(content['format'])}")
    check_count(content["step"])
    _typed(content["tensors"], dict)
    for name, file in _typed(content["files"], dict).items():
        # A name with a slash could lead out of the folder.
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{format_foreign(name)} is no name of a file in the folder")
        check_count(_typed(file, dict)["bytes"])
        _typed(file["sha256"], str)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{format_foreign(value)} where a {kind.__name__} belongs")
    return value


def verify_checkpoint(path: Path, checksums: bool) -> dict[str, Any]:
    """Compares the sizes and, with `checksums`, the SHA-256 of the files in the folder `path` with its manifest.
    Returns the manifest.

    Raises DamagedCheckpoint, which names the first file that is missing or differs.
    """
    manifest = read_manifest(path)
    for name, file in manifest["files"].items():
        with open_inside(path, name) as opened:
            size = opened.seek(0, os.SEEK_END)
        if size != file["bytes"]:
            raise DamagedCheckpoint(f"{path / name} has {size} bytes instead of {file['bytes']}")
    if checksums:
        verify_checksums(path, manifest["files"])
    return manifest


def verify_checksums(path: Path, files: dict[str, dict[str, Any]]) -> None:
    """Reads `files` of the folder `path` and compares their SHA-256, in several threads, since hashing releases the
    GIL."""

    def digest(name: str) -> str:
        with open_inside(path, name) as file:
            try:
                return hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise DamagedCheckpoint(f"{path / name} cannot be read: {error.strerror}") from None

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for name, found in zip(files, pool.map(digest, files)):
            if found != files[name]["sha256"]:
                raise DamagedCheckpoint(f"{path / name} does not match its checksum")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
