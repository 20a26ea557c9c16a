"""What signals do to runs, and what runs do whose launcher has ended: exit codes, status.json, and no process left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.launch import program_of, warm_python

from trainer.checkpointing.manifest import list_checkpoints
from trainer.util.machine import AT_ONCE, FAULTS, LAUNCH, NOT_ENDING, SECONDS, STOPPING, child_processes, name_of

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("SIGNAL_SEED", random.randrange(10**6)))
SETTINGS = [
    "+config=debug",
    "model.depth=1",
    "batch.global_size=2",
    "run.steps=100000",
    "run.device=cpu",
    "checkpoint.every=0",
    "logging.console=plain",
    "logging.report=false",
    "data.sources.stdlib.limit=20",
]
ONE, OURS = ["-m", "trainer"], ["-m", "trainer", "train", "--processes", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer"]
HANDLED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
"""Python ignores them, so that a write says what is wrong."""


class Launch:
    """A run under way, whose output goes to a file beside its folder."""

    def __init__(self, folder: Path, command: list[str], *overrides: str, python: str = "", **options: Any):
        self.folder, self.log = folder, folder.with_suffix(".txt")
        environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHON_EXEC": warm_python()}
        places = [f"run.dir={folder}", f"data.cache={folder.parents[1] / 'cache'}"]
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                [python or warm_python(), *command, *SETTINGS, *places, *overrides],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                **{"stdout": out, "stderr": out, "start_new_session": True, **options},
            )
        self.workers: set[int] = set()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, (
                f"seed {SEED}: no {what}: {self.text[-3000:]}"
            )
            time.sleep(0.01)

    def steps(self, number: int) -> None:
        """Waits for a logged step."""
        metrics = self.folder / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and len(metrics.read_bytes().split(b"\n")) > number, f"step {number}")

    def send(self, number: int) -> None:
        """To the process that was started, and to no other."""
        program = program_of(self.process.pid)
        self.workers |= {program_of(child) for child in child_processes(program)}
        with contextlib.suppress(ProcessLookupError):
            os.kill(program, number)

    def end(self) -> int:
        """The exit code, once the workers have ended too."""
        try:
            code = self.process.wait(600)
            self.wait_until_gone()
            return code
        finally:
            self.kill()

    def wait_until_gone(self) -> None:
        end = time.monotonic() + 60
        while any(Path(f"/proc/{worker}").exists() for worker in self.workers):
            assert time.monotonic() < end, f"seed {SEED}: a worker goes on: {self.text[-3000:]}"
            time.sleep(0.05)

    def kill(self) -> None:
        program = program_of(self.process.pid)
        found = [program, *map(program_of, child_processes(program)), *self.workers]
        if self.process.poll() is None:
            found.append(self.process.pid)
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder whose runs find their data tokenised."""
    print(f"SIGNAL_SEED={SEED}")
    folder = tmp_path_factory.mktemp("signals")
    first = Launch(folder_of(folder), ONE, "run.steps=2")
    assert first.end() == 0, first.text
    return folder


def folder_of(place: Path) -> Path:
    """For another run."""
    folder = place / "runs" / f"run-{time.monotonic_ns()}"
    folder.parent.mkdir(exist_ok=True)
    return folder


def together(launches: list[tuple[Any, Callable[[], Any]]]) -> dict[Any, Any]:
    """What several launches come to, three at a time."""
    with ThreadPoolExecutor(3) as pool:
        return dict(zip([name for name, _ in launches], pool.map(lambda launch: launch[1](), launches)))


def test_the_kinds_of_signals_are_those_of_the_kernel():
    """Each signal is sent to a process that handles none."""
    script = """
import os, resource, signal, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for number in sorted(signal.valid_signals()):
    if (child := os.fork()) == 0:
        signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), number)
        os._exit(0)
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    elif os.WIFSIGNALED(status):
        print(int(number))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    ending = set(map(int, done.stdout.split()))
    assert ending == STOPPING | AT_ONCE | FAULTS | {signal.SIGKILL}
    assert ending == signal.valid_signals() - NOT_ENDING
    assert {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGPWR} <= STOPPING


def outcome(launch: Launch, number: int) -> tuple[int, str, bool]:
    """Exit code, status, and whether the newest checkpoint is that of the status."""
    launch.steps(3)
    launch.send(number)
    if number in HANDLED_BY_PYTHON:
        time.sleep(0.3)
        assert launch.process.poll() is None, launch.text
        launch.send(signal.SIGTERM)
    code, status = launch.end(), launch.status
    saved = next(iter(list_checkpoints(launch.folder / "checkpoints")), None)
    return code, status["status"], saved == status["step"]


def expected(number: int, ours: bool = False) -> tuple[int, str, bool]:
    """Of one process, or of the workers of our launcher."""
    if number in STOPPING:
        return 75, "stopped", True
    return 128 + number if ours else -number, "failed" if number in AT_ONCE else "running", False


def test_every_signal_stops_a_run_or_leaves_a_truthful_status(place):
    """One process. Of the real-time signals, the first, the last, and one that container runtimes use."""
    named = {number for number in signal.valid_signals() - NOT_ENDING if number < signal.SIGRTMIN}
    numbers = sorted({*named, signal.SIGRTMIN, signal.SIGRTMIN + 3, signal.SIGRTMAX})
    seen = together([(n, lambda n=n: outcome(Launch(folder_of(place), ONE), n)) for n in numbers])
    assert {name_of(n): seen[n] for n in numbers} == {name_of(n): expected(n) for n in numbers}


def test_signals_to_our_launcher_reach_its_workers(place):
    numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGSTKFLT, signal.SIGRTMAX, signal.SIGQUIT]
    seen = together([(n, lambda n=n: outcome(Launch(folder_of(place), OURS), n)) for n in numbers])
    assert {name_of(n): seen[n] for n in numbers} == {name_of(n): expected(n, ours=True) for n in numbers}


def test_no_rank_trains_on_when_its_launcher_has_ended(place):
    """By a signal that it passes on, by one that it dies of, and by SIGKILL."""
    numbers = {"ours": [signal.SIGKILL], "torchrun": [signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL]}
    commands = {"ours": OURS, "torchrun": TORCHRUN}
    cases = [(name, number) for name, several in numbers.items() for number in several]
    seen = together([(c, lambda c=c: outcome(Launch(folder_of(place), commands[c[0]]), c[1])) for c in cases])
    assert {case: found[1:] for case, found in seen.items()} == dict.fromkeys(cases, ("stopped", True))


def test_a_launcher_that_is_told_to_stop_starts_nothing_again(place):
    launch = Launch(folder_of(place), ["-m", "trainer", "torchrun", "--max-restarts", "2", *TORCHRUN[2:]])
    assert outcome(launch, signal.SIGTERM) == (75, "stopped", True), launch.text
    assert launch.text.count("stopped by a signal after step") == 1 and "resumed from" not in launch.text


def test_nohup_keeps_a_run_and_its_launcher_from_a_hangup(place):
    """Under plain torchrun, which does not heed nohup, the run saves."""

    def nohup(command: list[str]) -> Launch:
        return Launch(folder_of(place), command, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))

    def hung_up(command: list[str]) -> tuple[int, str, bool]:
        launch = nohup(command)
        launch.steps(3)
        launch.send(signal.SIGHUP)
        time.sleep(1)
        assert launch.process.poll() is None, launch.text
        return outcome(launch, signal.SIGTERM)

    launches = [(name, lambda c=c: hung_up(c)) for name, c in (("one", ONE), ("ours", OURS))]
    seen = together([*launches, ("torchrun", lambda: outcome(nohup(TORCHRUN), signal.SIGHUP))])
    stopped = ("stopped", True)
    assert seen == {"one": (75, *stopped), "ours": (75, *stopped), "torchrun": (1, *stopped)}


def test_a_run_goes_on_when_the_shell_that_started_it_has_ended(place):
    shell = Launch(folder_of(place), ["-c", '"$@" & echo $!', "-", sys.executable, *ONE], python="bash")
    shell.process.wait(600)
    run = int(shell.text.split()[0])
    try:
        end = time.monotonic() + 60
        while not list((shell.folder).glob("metrics.jsonl")):
            assert time.monotonic() < end, shell.text
            time.sleep(0.05)
        time.sleep(2 * SECONDS + 0.5)
        assert "stopped" not in shell.text and Path(f"/proc/{run}").exists()
    finally:
        os.kill(run, signal.SIGKILL)


def test_the_launcher_is_found_through_scripts_and_no_other_process_is_taken_for_it():
    code = "from trainer.util.machine import find_launcher; print(find_launcher())"
    mine = {**os.environ, "PYTHONPATH": str(ROOT), LAUNCH: "one"}
    for script in ('"$@"', 'bash -c \'"$@"; true\' - "$@"; true'):
        command = ["bash", "-c", f"{script}; true", "-", sys.executable, "-c", code]
        said = subprocess.run(command, env=mine, capture_output=True, text=True, check=True).stdout
        assert f"pid={os.getpid()}," in said, said
    for name, elsewhere in (("none", None), ("another launch", "two")):
        environment = {key: value for key, value in mine.items() if key != LAUNCH or elsewhere}
        command = ["bash", "-c", f'echo $$; {f"{LAUNCH}={elsewhere}" if elsewhere else ""} "$@"; true']
        said = subprocess.run(
            [*command, "-", sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout.split("\n")
        assert said[1] == "None" if elsewhere is None else f"pid={said[0]}," in said[1], (name, said)


def test_a_run_of_a_script_takes_free_signals_only_and_gives_them_back(tmp_path):
    """Handlers of the script stay, but for SIGTERM, and a process that is forked meanwhile dies as any."""
    script = """
import os, signal, threading, time
from pathlib import Path
from trainer.training.session import stop_signals
mine, got = (lambda number, _: got.append(number)), []
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, mine)
with stop_signals() as stop:
    stop.defer(Path("."), lambda: 0, 5)
    signal.raise_signal(signal.SIGHUP)
    assert got == [signal.SIGHUP] and not stop.asked_by
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, b"!")
        time.sleep(60)
    os.read(reading, 1)
    os.kill(child, signal.SIGUSR2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR2 and not stop.asked_by
    signal.raise_signal(signal.SIGTERM)
    assert got == [signal.SIGHUP] and stop.asked_by == "a signal"
assert signal.getsignal(signal.SIGTERM) is mine and signal.getsignal(signal.SIGHUP) is mine
assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
time.sleep(0.2)
assert not [thread for thread in threading.enumerate() if thread.name == "signals"]
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([warm_python(), "-c", script], env=environment, check=True, timeout=600)


@pytest.mark.parametrize("command", [ONE, OURS], ids=["one", "ours"])
def test_a_signal_at_any_moment_ends_a_run_with_a_truthful_status(place, command):
    """During the start, evaluations, saves, and at the end.

    Half of the moments count from the launch and half from the first status, so that
    both the start and the steps are met when other processes make this one slow.
    """
    draw, requests = random.Random(f"{SEED} {command}"), [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]

    def at(moment: float, from_status: bool) -> tuple[int, str | None, list[int]]:
        short = ("run.steps=6", "checkpoint.every=1", "eval.every=1", "eval.at_start=true", "checkpoint.keep_last=2")
        launch = Launch(folder_of(place), command, *short)
        if from_status:
            launch.wait_for((launch.folder / "status.json").exists, "status")
        time.sleep(moment)
        launch.send(draw.choice(requests))
        code = launch.end()
        file = launch.folder / "status.json"
        saved = list(list_checkpoints(launch.folder / "checkpoints"))
        status = launch.status if file.exists() else {"status": None, "step": 0}
        if status["status"] == "stopped" and saved[0] != status["step"]:
            return code, f"step {status['step']}, saved {saved}", saved
        if status["status"] and code not in (0, 75):
            return code, f"{status}: {launch.text[-2000:]}", saved
        return code, status["status"], saved

    start = time.monotonic()
    whole = Launch(folder_of(place), command, "run.steps=6", "checkpoint.every=1", "eval.every=1", "eval.at_start=true")
    assert whole.end() == 0, whole.text
    length = time.monotonic() - start
    moments = [(draw.uniform(0, 0.8 * length), from_status) for _ in range(6) for from_status in (False, True)]
    seen = together([(moment, lambda m=moment: at(*m)) for moment in moments])
    # Before the process handles signals, they end it, and it has written nothing.
    early = [(code, status) for code, status, saved in seen.values() if status is None and not saved]
    assert set(early) <= {(75, None), *((code, None) for n in requests for code in (-n, 128 + n))}, seen
    late = {(code, status) for code, status, saved in seen.values() if status is not None}
    assert late <= {(75, "stopped"), (0, "done")} and late, (SEED, seen)


FAILING = """
import os, signal, sys, threading
from trainer.commands import train

def fail(config):
    if sys.argv[1:]:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    raise RuntimeError("Connection reset by peer")

train._train = fail
os._exit(train.run(train.TrainOptions(overrides=["+config=debug"]), own=True))
"""
"""A rank whose peer has left; with an argument, it is itself asked to stop a moment later."""


@pytest.mark.parametrize("asked, code, words", [((), 1, "reset by peer"), (("asked",), 75, "SIGTERM before the first")])
def test_a_rank_whose_peer_was_asked_to_stop_first_is_stopped_and_has_not_failed(asked, code, words):
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", FAILING, *asked], env=environment, capture_output=True, text=True)
    assert (ended.returncode, words in ended.stderr) == (code, True), ended.stderr
    assert not asked or "Traceback" not in ended.stderr


def test_ctrl_c_that_also_ends_what_reads_the_output_stops_a_run_in_order(place):
    """As in `trainer train ... 2>&1 | tee log`."""
    reading, writing = os.pipe()
    launch = Launch(folder_of(place), ONE, stdout=writing, stderr=writing)
    os.close(writing)
    launch.steps(3)
    os.close(reading)
    assert outcome(launch, signal.SIGINT) == (75, "stopped", True)


@pytest.mark.parametrize("command", [ONE, OURS], ids=["one", "ours"])
def test_a_closed_terminal_stops_a_run_in_order(place, command):
    """The terminal sends SIGHUP to the process that it started, and whatever is written to it fails."""
    inside, outside = pty.openpty()[::-1]
    launch = Launch(
        folder_of(place),
        command,
        "logging.console=rich",
        python=sys.executable,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(inside)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read_until, outside, lambda: (launch.folder / "metrics.jsonl").exists())
        launch.steps(3)
        reader.result()
    launch.workers |= {program_of(child) for child in child_processes(launch.process.pid)}
    os.close(outside)
    assert launch.end() == 75 and launch.status["status"] == "stopped", (launch.folder / "console.log").read_text()


def read_until(terminal: int, condition: Callable[[], bool]) -> None:
    while not condition():
        os.read(terminal, 4096)


@pytest.fixture(autouse=True)
def no_core_files() -> Iterator[None]:
    import resource

    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, before)
