"""Folders that belong to one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from trainer.config import ConfigError


def claim(setting: str, folder: Path, kind: str, ways: str) -> int:
    """Makes the folder that `setting` names, and keeps others of its `kind` (run, sweep) out of it until what is
    returned is closed.

    ways: settings by which another folder can be had. Raises `ConfigError`.
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
        pass  # a file system without locks: it goes on unguarded
    return descriptor
