"""Files of lines that grow with a run: read as a stream, appended to by one process, cut at their end. And the names of
all that lies in the folder of a run.

The time is linear in what is read, and the memory is that of the longest line."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.util.reading import LIMIT, Malformed, Shape, find_mismatch, make_printable, parse_json, read_json

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


def read_json_lines(path: str | os.PathLike, shape: Shape) -> Iterator[Any]:
    """The lines of a file that are JSON of a shape; others are passed over. Raises the errors of `read_lines`."""
    for text in read_lines(path, rest=True):
        with contextlib.suppress(ValueError):
            if not find_mismatch(line := parse_json(text), shape):
                yield line


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


# The names of what lies in the folder of a run, where links may not lead out of it, and which runs are meant where
# folders are named.


METRICS_FILE, REPLACED, STATUS, LOG = "metrics.jsonl", "metrics-replaced.jsonl", "status.json", "console.log"
STARTS, SETTINGS, EARLIER = "starts.jsonl", "config.yaml", "earlier"
PART = ".part"
"""Ends the names of files and folders that are not complete yet."""
DIAGNOSIS, REPORT, SHORTAGE = "diagnosis.json", "report.html", "out_of_memory.json"
SAMPLES, ACCOUNTS, CHECKPOINTS = "samples.jsonl", "accounts.jsonl", "checkpoints"
RECORD = (METRICS_FILE, REPLACED, SAMPLES, STATUS, SETTINGS, STARTS, LOG, ACCOUNTS, "tokenizer", "schedule")
"""What a run leaves beside its checkpoints, without which nobody knows what they are."""
TRACES = (CHECKPOINTS, *RECORD, DIAGNOSIS, REPORT, SHORTAGE, "traces", "tensorboard", "wandb", "wandb-id")
"""All that a run writes itself. What a launcher writes (slurm, torchrun, flight) tells of every start, and stays."""
RUN_FILES = (METRICS_FILE, STATUS, STARTS)
"""Any of these makes a folder that of a run."""
RESULTS, TRIAL = "results.jsonl", "trial.json"
"""Of a sweep: what became of its trials, and of each, what it was started with."""
TRIALS, SEARCH, BEST = "trials.jsonl", "search.json", "config/best.yaml"
"""Of a search (`trainer tune`): what became of its trials, what is foretold of its plans, the fastest as a recipe."""
WRITTEN = (*TRACES, EARLIER, "flight", "slurm", "torchrun", "preflight", "log.txt", TRIAL)
"""All that is written into a run's folder before and while it trains: by the run, its launcher, and its sweep."""
MANY = (CHECKPOINTS, EARLIER, "wandb")
"""Folders whose own folders are made anew, under names of their own, and never written to again."""


def read_status(folder: Path, **keys: Shape) -> dict[str, Any]:
    """What status.json of a run says; empty where there is none, or one without these keys."""
    with contextlib.suppress(OSError, Malformed):
        return read_json(folder / STATUS, {"status": str, **keys}, "")
    return {}


def refuse_links(folder: Path) -> None:
    """Raises `ConfigError` where a link in a run's folder would have a start write, move or delete something elsewhere.

    `folder` itself may be a link. So may `checkpoints`, which users put on another disk, where it leads to a folder of
    the user's that is not in the folder of another run. What lies in earlier runs and in checkpoints is not looked
    at. Raises `OSError` where a folder cannot be listed."""
    home, checkpoints = os.path.realpath(folder), os.path.realpath(folder / CHECKPOINTS)
    inside = [home]
    if (folder / CHECKPOINTS).is_symlink() and _may_hold_checkpoints(checkpoints):
        inside.append(checkpoints)
    links = [link for name in WRITTEN for link in _links(folder / name, deep=name not in MANY)]
    problems = [
        f"run.dir={folder} holds {link.relative_to(folder)}, a link to {target} outside of it, where this run would "
        "write: remove the link, or set another run.dir"
        for link, target in zip(links, map(os.path.realpath, links))
        if not any(os.path.commonpath([target, place]) == place for place in inside)
    ]
    if problems:
        raise ConfigError(problems[:5])


def _may_hold_checkpoints(target: str) -> bool:
    """Whether `checkpoints` of a run may be a link to this place."""
    try:
        mine = os.stat(target).st_uid == os.geteuid() or os.geteuid() == 0  # root uses folders of all users
    except OSError:
        return False
    around = [Path(target), *Path(target).parents[:2]]
    return mine and os.path.isdir(target) and not any((place / name).exists() for place in around for name in RUN_FILES)


def _links(path: Path, deep: bool) -> Iterator[Path]:
    """The symbolic links at a path and below. Not deep: of the folders in a folder only those that were being written
    when a start ended."""
    if path.is_symlink():
        yield path
    elif path.is_dir():
        found = list[Path]()
        with contextlib.suppress(FileNotFoundError):  # another node has removed it meanwhile
            found = sorted(path.iterdir())
        for inner in found:
            if inner.is_symlink() or deep or inner.suffix == PART:
                yield from _links(inner, True)


def label_runs(folders: Sequence[Path]) -> list[str]:
    """A short name for each run: the fewest trailing parts of the paths that make all names different."""
    paths = [(folder.parent if folder.is_file() else folder).resolve() for folder in folders]
    parts = [tuple(map(make_printable, path.parts)) for path in paths]
    for length in range(1, max(map(len, parts))):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def holds_trials(folder: Path) -> bool:
    """Whether a folder is that of a sweep or a search, which may have begun just now."""
    return any((folder / name).exists() for name in (RESULTS, TRIALS, SEARCH)) or any(folder.glob(f"*/{TRIAL}"))


def of_sweeps(folders: Sequence[Path], wrote: Sequence[str] = (METRICS_FILE,)) -> list[Path]:
    """The folders, with the trials that have written one of these files in place of those of sweeps and searches."""
    trials = {
        folder: sorted({path.parent for name in wrote for path in folder.glob(f"*/{name}")})
        for folder in folders
        if holds_trials(folder)
    }
    return [run for folder in folders for run in trials.get(folder) or [folder]]
