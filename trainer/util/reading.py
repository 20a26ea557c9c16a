"""What stands in a file is data: it is read up to a limit and parsed into plain values, and nothing of it is run.

Anyone may have written a file: other users of a shared cache, a node that died in the middle, strangers. What is read
here ends in a value, in `OSError` where the file system refuses, or in `Malformed`, which names the file, what is wrong
and the way out. docs/architecture.md says what is done with each kind of file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path, PurePath
from types import NoneType
from typing import Any, TypeAlias

import yaml

from trainer.config import ConfigError
from trainer.config.fields import BYTES, LOADER, check_yaml, yaml_fault

LIMIT = 64 << 20
"""Bytes of a file that is read whole, unless its kind has a limit of its own: far above what the project writes in one
piece (a schedule of 4,096 ranks takes 32 MiB), and parsed it still fits the memory of a laptop."""

Shape: TypeAlias = "type | tuple[type, ...] | list[Any] | dict[Any, Any]"
"""What a parsed value has to look like: a type or several, `[shape]` a list, `{"key": shape}` a mapping with these
keys, `{str: shape}` a mapping with any. Types are exact, so that true is no number. A key that is absent counts as
None."""


NUMBER = (int, float)
MAYBE_NUMBER = (*NUMBER, NoneType)
"""Shapes of a number, and of one that may be absent."""


class Malformed(ConfigError):
    """A file does not hold what its kind holds."""


def read_bytes(path: str | os.PathLike, limit: int = LIMIT, start: int = 0) -> bytes:
    """The content of a regular file from byte `start` on. Raises `OSError`, and `Malformed` where it is no file or that
    is longer than `limit`.

    A pipe or a device is refused before it is opened: reading it might never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Malformed(f"{path} is not a regular file; put a file there, or name another one")
    with open(path, "rb") as file:
        file.seek(start)
        content = file.read(limit + 1)
    if len(content) > limit:
        raise Malformed(f"{path} has more than {limit} bytes, the most of a file of its kind; look at what it holds")
    return content


SURROGATES = re.compile("[\ud800-\udfff]")
"""Halves of characters, which JSON and YAML can spell out alone, and no file or terminal can hold."""


def parse_json(text: str | bytes, exact: bool = False) -> Any:
    """The value of a JSON text, in which U+FFFD stands for each half of a character unless it has to be `exact`. Raises
    `ValueError` for whatever is wrong with it, too deep a nesting included."""
    try:
        value = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
        escaped = b"\\u" in text if isinstance(text, bytes) else "\\u" in text or not text.isascii()
        return whole_characters(value) if escaped and not exact else value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def whole_characters(value: Any) -> Any:
    """A parsed value, in whose texts U+FFFD stands for each half of a character."""
    if isinstance(value, str):
        return SURROGATES.sub("\ufffd", value)
    if isinstance(value, dict):
        return {whole_characters(key): whole_characters(item) for key, item in value.items()}
    return [whole_characters(item) for item in value] if isinstance(value, list) else value


def read_yaml(path: str | os.PathLike) -> Any:
    """The value in a YAML file of plain data. Raises `OSError` and `Malformed`."""
    content = read_bytes(path, BYTES)
    try:
        check_yaml(content)
        return whole_characters(yaml.load(content, LOADER))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Malformed(f"{path} is not YAML: {shorten_foreign(error)}; write it anew") from None


def read_json(path: str | os.PathLike, shape: Shape, way_out: str, limit: int = LIMIT) -> Any:
    """The value in a JSON file. Raises `OSError`, and `Malformed` unless it has the `shape`; `way_out` ends the
    message."""
    content = read_bytes(path, limit)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise Malformed(f"{path} is not JSON ({shorten_foreign(error)}); {way_out}") from None
    if wrong := find_mismatch(value, shape):
        raise Malformed(f"{path} is not what it should be: {wrong}; {way_out}")
    return value


def find_mismatch(value: Any, shape: Shape, place: str = "") -> str | None:
    """The first thing in which a value differs from a shape, or None."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return _wrong(value, "a mapping", place)
        pairs = [(key, item, shape[str]) for key, item in value.items()] if str in shape else []
        pairs += [(key, value.get(key), item) for key, item in shape.items() if key is not str]
        inner = ((item, wanted, f"{place}.{key}" if place else str(key)) for key, item, wanted in pairs)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return _wrong(value, "a list", place)
        inner = ((item, shape[0], f"{place}[{index}]") for index, item in enumerate(value))
    else:
        kinds = shape if isinstance(shape, tuple) else (shape,)
        return None if type(value) in kinds else _wrong(value, " or ".join(kind.__name__ for kind in kinds), place)
    return next((wrong for item in inner if (wrong := find_mismatch(*item))), None)


def pick_fields(kind: type, value: dict[str, Any]) -> dict[str, Any]:
    """What a parsed mapping has for each field of a dataclass, None where it has nothing; other keys are left out."""
    return {field.name: value.get(field.name) for field in fields(kind)}


def _wrong(value: Any, wanted: str, place: str) -> str:
    return f"{place or 'it'} is {shorten_foreign(value)} instead of {wanted}"


WORD = re.compile(r"[\w.+*/@<>=|-]{1,40}")
"""What a message may quote of a file that somebody else wrote: one short word. The file may be another one than was
meant, such as one with passwords, and messages end in logs."""

QUOTE = re.compile(r"""(['"`])(.*?)\1""", re.DOTALL)


def shorten_foreign(value: object) -> str:
    """A foreign value in a message: a short word or number as it is, all else by its kind and length. Of an error, its
    message on one line, in which what it quotes is shown so."""
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return value if WORD.fullmatch(value) else f"a text of {len(value)} characters"
    if isinstance(value, yaml.YAMLError):
        return yaml_fault(value)
    if isinstance(value, BaseException):
        text = str(value)[:2000]
        if not isinstance(value, ConfigError):  # whose texts keep the rule
            text = QUOTE.sub(
                lambda quote: f"{quote[1]}{quote[2]}{quote[1]}" if WORD.fullmatch(quote[2]) else "...", text
            )
        return on_one_line(text)
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def on_one_line(text: str) -> str:
    """Names that stand in a file, such as those of files and columns: on one line, short, without control
    characters."""
    text = " ".join(make_printable(text[:1000]).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def make_printable(text: str) -> str:
    """A foreign text for a terminal, which control characters could make show something else."""
    return "".join(character if character.isprintable() else " " for character in text)


def path_inside(folder: Path, name: str) -> Path:
    """The path of a file that a list in `folder` names. Raises `ValueError` for a name that leads elsewhere, be it by
    a symbolic link."""
    path = PurePath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{ascii(name[:200])} is no name of a file in its folder")
    if leads_out(folder, folder / path):
        raise ValueError(f"{ascii(name[:200])} is a link out of its folder")
    return folder / path


def leads_out(folder: str | os.PathLike, path: str | os.PathLike) -> bool:
    """Whether a path in a folder ends outside of it, because symbolic links are followed.

    The cache of the hub is laid out with such links: what lies in `models--NAME/snapshots/REVISION` may end in `blobs`
    of the same `models--NAME`."""
    home, end = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    for parent in home.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith(("models--", "datasets--")):
            return not (end.is_relative_to(home) or end.is_relative_to(parent.parent / "blobs"))
    return not end.is_relative_to(home)


def check_links(folder: Path) -> None:
    """Raises `Malformed` for a symbolic link in a stranger's folder that leads out of it: what it leads to belongs to
    the user, and would be copied into runs and exports. Raises `OSError` where the folder cannot be listed."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and leads_out(folder, path):
            raise Malformed(
                f"{make_printable(str(path))} is a link out of its folder; remove it, or put the file itself there"
            )


# Folders that one process locks, and files that appear whole or not at all.


SETTING = tuple(
    getattr(errno, name)
    for name in "EACCES EPERM EROFS ENOTDIR EISDIR ELOOP ENAMETOOLONG EEXIST ENOTEMPTY ENOENT EXDEV".split()
)
"""Errors of files that another folder or other rights mend. The rest (no space, a lost mount, a broken disk) are faults
of the machine, which the same command may survive later."""


class FolderError(RuntimeError):
    """A fault of the machine, such as a full disk, keeps a start from preparing its folder."""


@contextlib.contextmanager
def explain_errors(folder: Path) -> Iterator[None]:
    """Around what a start does with the folder of a run. An `OSError` becomes a `ConfigError` where the
    folder or its rights are the cause, and else a `FolderError`."""
    try:
        yield
    except OSError as error:
        where = error.filename2 or error.filename
        what = f"{error.strerror or error}" + (f": {where}" if where else "")
        if error.errno in SETTING:
            raise ConfigError(
                f"run.dir={folder} cannot be prepared for this start ({what}); mend that, or set another run.dir"
            ) from None
        raise FolderError(
            f"run.dir={folder} cannot be prepared for this start ({what}); nothing is lost: once that is mended, the "
            "same command goes on"
        ) from error


def lock_folder(setting: str, folder: Path, kind: str, ways: str) -> int:
    """Creates the folder that `setting` names and locks it against other processes.

    Returns a file descriptor; closing it releases the lock. For messages, `kind` is what uses the folder (run, sweep)
    and `ways` the settings that name another one. Raises `ConfigError` where the folder cannot be made, written or
    locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(
            f"{setting}={folder} cannot be made a folder ({error.strerror}); set another {setting}"
        ) from None
    if not os.access(folder, os.W_OK):
        os.close(descriptor)
        raise ConfigError(f"{setting}={folder} cannot be written; set another {setting}")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"{setting}={folder} is in use by another {kind}; wait for it, or set another {ways}"
        ) from None
    except OSError:
        pass  # the file system has no locks: the run goes on without one
    return descriptor


def temporary_name(path: str | os.PathLike) -> str:
    """A name beside `path` that no other thread, process or machine uses."""
    return f"{path}.{secrets.token_hex(4)}.part"


@contextlib.contextmanager
def replace_file(path: str | os.PathLike) -> Iterator[str]:
    """Gives a temporary name beside `path`; the file written there replaces `path` at the end of the block.

    Where the block raises, the temporary file is removed and `path` stays as it was.
    """
    part = temporary_name(path)
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def write_atomic(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a file so that readers, and a crash, meet the old content or the new one, never a part of it."""
    with replace_file(path) as part:
        with open(part, "xb") as file:
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
