"""What this machine has and uses, as Linux reports it: memory, processors, disks, processes and signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup")


def host_memory() -> int:
    """Bytes of memory that the machine has, or that its container may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        total = min(total, int((CGROUP / "memory.max").read_text()))
    return total


def used_memory() -> int:
    """Bytes of it that are in use, without what only caches files."""
    with contextlib.suppress(OSError, ValueError):
        int((CGROUP / "memory.max").read_text())  # a limit, within which the container's own use counts
        cached = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return int((CGROUP / "memory.current").read_text()) - int(cached["inactive_file"])
    found = {name: int(rest.split()[0]) for name, rest in _lines(Path("/proc/meminfo"))}
    return 1024 * (found["MemTotal"] - found["MemAvailable"])


def resident_memory() -> int:
    """Bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def processor_ticks() -> tuple[int, int]:
    """What all processors together have done since the machine's start: ticks of work, and all ticks."""
    ticks = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    idle = ticks[3] + ticks[4]  # idle, and waiting for disks
    return sum(ticks) - idle, sum(ticks)


def _lines(path: Path) -> list[tuple[str, str]]:
    pairs = (line.partition(":") for line in path.read_text().splitlines())
    return [(name, rest) for name, _, rest in pairs]


# Errors that say that memory ran out. They are recognised by their text: libraries raise them as different exception
# types, the errors of other ranks reach torchrun as text, and a pipeline wraps them in an error of its own.


SIGNS = re.compile(
    r"\bOutOfMemoryError\b|\bMemoryError\b|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
    r"CUDNN_STATUS_ALLOC_FAILED|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory"
)
"""Of GPU allocators, cuBLAS and cuDNN, the host's allocator, Python and NumPy, the operating system."""

NOISE = re.compile(
    r"^\w*(?:Error|Exception): |\[enforce fail at [^]]*\] \S* == \S* |^\. | If reserved but unallocated memory.*|"
    r" See documentation.*"
)


def lacks_memory(text: str) -> bool:
    """Whether an error's text says that memory ran out."""
    return SIGNS.search(text) is not None


def missing_memory(error: BaseException | None) -> str | None:
    """What an error, or a cause of it, says of the memory that could not be had, on one line; None where it is another
    error."""
    while error is not None:
        if lacks_memory(text := f"{type(error).__name__}: {error}"):
            return error_reason(text)
        error = error.__cause__
    return None


def error_reason(text: str) -> str:
    """The first line of an error's text, without what is of no use to its reader."""
    first = next(filter(None, map(str.strip, text.splitlines())), "")
    return NOISE.sub("", NOISE.sub("", first)).strip(" .")


# Processes of this machine.


LAUNCH = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets for what it starts: the name of the launch."""


def child_processes(pid: int) -> list[int]:
    """The processes that the main thread of the process `pid` has started; empty where it has ended."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


@dataclass(frozen=True)
class KnownProcess:
    """A process that is not taken for a later one with its number. started: in ticks since the machine's start."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> KnownProcess | None:
        """The process `pid`; None where it has ended."""
        known = _stat(pid)
        return KnownProcess(pid, known[19]) if known and known[0] not in "ZX" else None


def find_launcher() -> KnownProcess | None:
    """The torchrun that has started this process, by way of a script or directly; None if none has.

    That is the nearest ancestor without the launch in its own environment. A process whose shell or notebook ends is
    thus no orphan: those are no torchrun."""
    if LAUNCH not in os.environ:
        return None
    mark, pid = f"{LAUNCH}={os.environ[LAUNCH]}".encode(), os.getppid()
    while pid > 1 and mark in _environment(pid):
        pid = int((_stat(pid) or ["", "0"])[1])
    return KnownProcess.of(pid)


def _environment(pid: int) -> list[bytes]:
    """What a process was started with; empty where that is not to be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on, the parent next; empty where the process has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


# What a process does on signals that would end it, and when the launcher that started it ends. Four kinds of signals
# end a process by default. `STOPPING` are requests: the run saves, and ends with exit code 75. `AT_ONCE` (Ctrl-\\,
# abort) mean that the process is to leave now. `FAULTS` are errors of the process's own instructions; a Python
# handler runs after the instruction, which would fail again, so they keep their default. SIGKILL cannot be handled.


NOT_ENDING = {
    getattr(signal, f"SIG{name}") for name in ("CHLD", "CONT", "URG", "WINCH", "STOP", "TSTP", "TTIN", "TTOU")
}
FAULTS = {getattr(signal, f"SIG{name}") for name in ("ILL", "TRAP", "BUS", "FPE", "SEGV", "SYS")}
AT_ONCE = {signal.SIGQUIT, signal.SIGABRT}
STOPPING = signal.valid_signals() - NOT_ENDING - FAULTS - AT_ONCE - {signal.SIGKILL}
"""Also signals that schedulers and container runtimes send only where they are told to: SIGUSR2, SIGXCPU, SIGPWR,
SIGALRM, real-time signals. Each would end the process anyway, and a run that has saved is the better end."""

ALWAYS = {signal.SIGTERM, signal.SIGUSR1}
"""Handled also where the process that started this one ignored them."""

LAUNCHER_ENDED = "the end of its launcher"

STOPPED_VARIABLE = "TRAINER_STOPPED"
"""Environment variable by which our launcher tells ranks that it starts again that they have been asked to stop."""

SECONDS = 1.0
"""Between two looks at the launcher."""


def name_of(number: int) -> str:
    """`SIGTERM`; real-time signals, most of which have no name, count from SIGRTMIN."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def handled_signals() -> set[int]:
    """The signals that this process is to handle, SIGINT aside: what it ignores stays ignored, and what a library
    handles stays with the library."""
    lines = Path("/proc/self/status").read_text().splitlines()
    masks = dict(line.split(":\t") for line in lines if line.startswith("Sig"))
    taken = int(masks["SigIgn"], 16) | int(masks["SigCgt"], 16)
    free: set[int] = {number for number in STOPPING | AT_ONCE if not taken >> (number - 1) & 1}
    return (free | ALWAYS) - {signal.SIGINT}


def die_of(number: int) -> None:
    """Ends this process by a signal's default action, so that whoever waits for it learns what ended it. Any thread
    may call it."""
    ctypes.CDLL(None).signal(number, 0)  # signal.signal works in the main thread only
    signal.pthread_kill(
        threading.get_ident(), number
    )  # before anything else; another thread might take what os.kill sends
    os._exit(128 + number)  # the first process of a container gets no signal that it does not handle


class SignalHandlers:
    """Handles the signals of this process from construction until `restore`, and watches the launcher.

    stop: called with what has come, for requests and when the launcher has ended; leave: called with the name of a
    signal of `AT_ONCE`, of which the process then dies. Both may be replaced at any time.

    own: the process belongs to the command line. Signals are then handled in a thread, since the main thread may wait
    in C++ for minutes, where no Python handler runs. Else they are handled where Python does that, as another library
    (asyncio) may need the one descriptor that such a thread reads from.
    """

    present: SignalHandlers | None = None

    def __init__(self, stop: Callable[[str], None], leave: Callable[[str], None], own: bool):
        self.stop, self.leave, self.own = stop, leave, own
        self.launcher = find_launcher()
        self.before: dict[int, Any] = {}
        self.reading, self.writing = os.pipe()
        SignalHandlers.present = self
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def handle(self) -> None:
        """Installs the handlers; only the main thread may."""
        if self.own:
            os.set_blocking(self.writing, False)
            signal.set_wakeup_fd(self.writing, warn_on_full_buffer=False)
        for number in handled_signals():
            handler = (lambda *_: None) if self.own else (lambda number, _: self._take(number))
            self.before[number] = signal.signal(number, handler)

    def restore(self) -> None:
        """Gives the signals back to who had them."""
        if self.own:
            signal.set_wakeup_fd(-1)
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: of a library; Python cannot give that back
        SignalHandlers.present = None
        os.close(self.writing)  # ends the thread

    def _listen(self) -> None:
        launcher: KnownProcess | None = self.launcher
        while True:
            ready, _, _ = select.select([self.reading], [], [], SECONDS if launcher else None)
            if ready:
                come = os.read(self.reading, 64)
                if not come:
                    os.close(self.reading)
                    return
                for number in come:
                    self._take(number)
            elif launcher and KnownProcess.of(launcher.pid) != launcher:
                launcher = None
                self.stop(LAUNCHER_ENDED)

    def _take(self, number: int) -> None:
        if number in AT_ONCE:
            with contextlib.suppress(Exception):
                self.leave(name_of(number))
            die_of(number)
        elif number in STOPPING - {signal.SIGINT}:
            self.stop(name_of(number))


def _forget() -> None:
    """A forked process is not what the signals were for: what ends it by default ends it."""
    if (signals := SignalHandlers.present) is not None:
        SignalHandlers.present = None
        if signals.own:
            signal.set_wakeup_fd(-1)
        for number in signals.before:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
