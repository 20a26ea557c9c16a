"""Files of a folder that others write, read again when they have changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import ConfigError
from trainer.util.lines import read_lines
from trainer.util.reading import Shape, find_mismatch, parse_json, shorten_foreign


class FoundFile(NamedTuple):
    """What a file was when it was looked at: a stamp that grows with it, None where there is none; its value, None
    where there is none or it is damaged; and the problem with it."""

    stamp: tuple[int, ...] | None = None
    value: Any = None
    problem: str | None = None


class WatchedFiles:
    """Some files of a folder. sources: by name what reads one. `read` looks again at what has changed since."""

    def __init__(self, folder: Path, sources: dict[str, Callable[[Path], Any]]):
        self.folder, self._sources = folder, sources
        self._found = dict.fromkeys(sources, FoundFile())

    def read(self) -> bool:
        """Reads the files that have changed since the last call, and says whether any has."""
        before = self._found
        self._found = {name: self._look(name, before[name]) for name in self._sources}
        return any(self._found[name] is not before[name] for name in before)

    def _look(self, name: str, before: FoundFile) -> FoundFile:
        path, stamp = self.folder / name, None
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            return before if stamp == before.stamp else FoundFile(stamp, self._sources[name](path))
        except FileNotFoundError:
            return FoundFile() if before.stamp else before
        except (OSError, ConfigError, ValueError) as error:
            return FoundFile(stamp, None, f"{name}: {shorten_foreign(error)}")

    @property
    def problems(self) -> list[str]:
        """What is damaged, and left out."""
        return [found.problem for found in self._found.values() if found.problem]


def json_lines(path: Path, shape: Shape, most: int) -> list[dict[str, Any]]:
    """The last `most` lines of a file that are JSON of a shape; others are passed over."""
    found = deque[dict[str, Any]](maxlen=most)
    for text in read_lines(path, rest=True):
        try:
            line = parse_json(text)
        except ValueError:
            continue
        if not find_mismatch(line, shape):
            found.append(line)
    return [*found]
