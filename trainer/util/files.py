"""Folders that one process locks, and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from trainer.config import ConfigError

SETTING = tuple(
    getattr(errno, name)
    for name in "EACCES EPERM EROFS ENOTDIR EISDIR ELOOP ENAMETOOLONG EEXIST ENOTEMPTY ENOENT EXDEV".split()
)
"""Errors of files that another folder or other rights mend. The rest (no space, a lost mount, a broken disk) are faults
of the machine, which the same command may survive later."""


class FolderError(RuntimeError):
    """A fault of the machine, such as a full disk, keeps a start from preparing its folder."""


@contextlib.contextmanager
def explain_errors(setting: str, folder: Path) -> Iterator[None]:
    """Around what a start does with the folder that `setting` names. An `OSError` becomes a `ConfigError` where the
    folder or its rights are the cause, and else a `FolderError`."""
    try:
        yield
    except OSError as error:
        where = error.filename2 or error.filename
        what = f"{error.strerror or error}" + (f": {where}" if where else "")
        if error.errno in SETTING:
            raise ConfigError(
                f"{setting}={folder} cannot be prepared for this start ({what}); mend that, or set another {setting}"
            ) from None
        raise FolderError(
            f"{setting}={folder} cannot be prepared for this start ({what}); nothing is lost: once that is mended, the "
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


def write_atomic(path: str | os.PathLike, content: str | bytes, sync: bool = False) -> None:
    """Writes a file so that readers, and a crash, meet the old content or the new one, never a part of it.

    sync: the content is on the disk before it takes the name, so that it also survives a power cut.
    """
    with replace_file(path) as part:
        with open(part, "xb") as file:
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
