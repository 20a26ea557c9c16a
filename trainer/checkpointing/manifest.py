"""What a checkpoint is on disk: a folder `step-00000100` whose `manifest.json` vouches for every other file in it.

torch's distributed checkpoint format has no checksums: a flipped byte would load without an error. The manifest
therefore holds the size and SHA-256 of each file as it was meant to be written, and a checksum of itself. Folders with
other names (`.tmp` while being written or deleted) are never taken for checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.config import ConfigError

FORMAT = 1
MANIFEST = "manifest.json"
SAVED = re.compile(rb'"saved": ([0-9]+[.][0-9]+)')
OWN_KEYS = ("format", "saved", "step", "torch", "files", "tensors", "sha256")


class DamagedCheckpoint(ConfigError):
    """A folder that is not a whole checkpoint; the message says what is wrong, naming the file."""


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies in the folder of a run's checkpoints."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints in `folder` by step, whole or not, the one that was saved last first.

    The time of saving counts, not the step: a run that began anew, or resumed an early checkpoint, may have later steps
    of an earlier run beside it. A checkpoint that is being replaced (`.replaced`) counts until the new one has the
    name."""
    found = {}
    for path in sorted(folder.glob("step-*"), reverse=True):  # step-00000100.replaced before step-00000100
        if match := re.fullmatch(r"step-(\d{8,})(\.replaced)?", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items(), key=lambda item: (saved_at(item[1]), item[0]), reverse=True))


def saved_at(path: Path) -> float:
    """When a checkpoint was written, in seconds since 1970.

    0 where the manifest has no time (an older version wrote it); the folder's own time where there is no manifest."""
    try:
        with open(path / MANIFEST, "rb") as file:
            head = file.read(200)
    except OSError:
        head = b""
    if saved := SAVED.search(head):
        return float(saved[1])
    return 0.0 if b'"format"' in head else path.stat().st_mtime


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` (JSON data), the format, the time and a checksum as the manifest of the folder `path`, one key a
    line."""
    content = {"format": FORMAT, "saved": time.time(), **content}
    content["sha256"] = _digest(content)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    with open(path / MANIFEST, "w", encoding="utf-8") as file:
        file.write("{\n" + lines + "\n}\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint folder `path`.

    Keys: what the run saved about itself, and `step`, `format`, `saved` (seconds since 1970), `torch` (version),
    `files` (name -> bytes, sha256), `tensors` (name -> shape, dtype). DamagedCheckpoint if it is missing, unreadable,
    altered, or of a later format."""
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        claimed = content.pop("sha256")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path / MANIFEST} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path / MANIFEST} cannot be read: {error}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedCheckpoint(f"{path / MANIFEST} is not a manifest: {error!r}") from None
    if claimed != _digest(content):
        raise DamagedCheckpoint(f"{path / MANIFEST} does not match its own checksum")
    if content["format"] > FORMAT:
        raise DamagedCheckpoint(f"{path / MANIFEST} has format {content['format']}, this version reads up to {FORMAT}")
    return content


def verify(path: Path, checksums: bool) -> dict[str, Any]:
    """Compares sizes and, if asked, checksums of the files in the folder `path` with its manifest, which it returns.

    Raises DamagedCheckpoint that names the first file that is missing or differs.
    """
    manifest = read_manifest(path)
    for name, file in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{path / name} is missing or unreadable: {error.strerror}") from None
        if size != file["bytes"]:
            raise DamagedCheckpoint(f"{path / name} has {size} bytes instead of {file['bytes']}")
    if checksums:
        verify_checksums(path, manifest["files"])
    return manifest


def verify_checksums(path: Path, files: dict[str, dict[str, Any]]) -> None:
    """Reads `files` of the folder `path` and compares SHA-256; in threads, since hashing releases the GIL."""

    def digest(name: str) -> str:
        try:
            with open(path / name, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DamagedCheckpoint(f"{path / name} cannot be read: {error.strerror}") from None

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for name, found in zip(files, pool.map(digest, files)):
            if found != files[name]["sha256"]:
                raise DamagedCheckpoint(f"{path / name} does not match its checksum")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
