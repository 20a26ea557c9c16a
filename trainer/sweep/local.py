"""Runs trials on this machine, each a torchrun of its own on GPUs of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trainer.sweep import results
from trainer.sweep.plan import SweepConfig, Trial
from trainer.util.lines import open_to_append
from trainer.util.machine import child_processes

OnEnd = Callable[[Trial, str, str | None], None]
"""Called with a trial that has ended, its status, and the reason for it."""


def visible_gpus() -> list[str]:
    """The GPUs for trials, by their names in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    try:
        lines = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in lines))]


@dataclass
class RunningTrial:
    """A trial under way.

    agent: its torchrun. deadline: by `time.monotonic`. kills: `results.oom_kills` at its start. requested: the status
    that the sweep's stop signal will give it, and `since` when. signalled: the workers that got the signal."""

    trial: Trial
    agent: subprocess.Popen
    gpus: list[str]
    deadline: float
    kills: int | None
    requested: str | None = None
    since: float = 0.0
    signalled: set[int] = field(default_factory=set)

    def workers(self) -> list[int]:
        """The processes that the agent has started, each the head of a process group."""
        return child_processes(self.agent.pid)

    def stop(self, status: str) -> None:
        """Signals the workers to save and end after the step in progress. Repeated calls signal workers started
        since."""
        if self.requested is None:
            self.requested, self.since = status, time.monotonic()
        for pid in set(self.workers()) - self.signalled:
            self.signalled.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def kill(self) -> None:
        for pid in [*self.workers(), self.agent.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def run_locally(
    trials: list[Trial],
    sweep: SweepConfig,
    config_dir: str | None,
    gpus: list[str],
    on_end: OnEnd,
    say: Callable[[str], None],
) -> None:
    """Runs the trials in order, `sweep.parallel` at a time.

    After a stop signal, running trials save and end, and no others start; a second signal kills them."""
    waiting, running, free = list(trials), [], list(gpus)
    with stop_signals() as signals:
        try:
            while running or waiting and not signals:
                while waiting and not signals and len(running) < sweep.parallel:
                    wanted = waiting[0].processes if gpus and waiting[0].on_gpus else 0
                    if wanted > len(free):
                        break
                    running.append(_start(waiting.pop(0), [free.pop(0) for _ in range(wanted)], sweep, config_dir))
                    say(
                        f"trial {running[-1].trial.name}: started"
                        + (f" on GPU {','.join(running[-1].gpus)}" if wanted else "")
                    )
                for one in list(running):
                    if one.agent.poll() is not None:
                        running.remove(one)
                        free += one.gpus
                        killed = None if one.kills is None else (results.oom_kills() or 0) > one.kills
                        on_end(
                            one.trial,
                            *results.trial_outcome(one.trial.folder, one.agent.returncode, one.requested, killed),
                        )
                    elif len(signals) > 1 or one.requested and time.monotonic() > one.since + sweep.saving_seconds:
                        one.kill()
                    elif signals or time.monotonic() > one.deadline:
                        one.stop("stopped" if signals else "timeout")
                time.sleep(0.1)
        finally:
            for one in running:  # after an error of the sweep itself
                one.kill()


def _start(trial: Trial, gpus: list[str], sweep: SweepConfig, config_dir: str | None) -> RunningTrial:
    results.clear_trial(trial.folder)
    results.note_start(trial)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}
    torchrun = [sys.executable, "-m", "trainer", "torchrun", "--standalone", "--nproc-per-node", str(trial.processes)]
    errors = ["--log-dir", str(trial.folder.absolute() / "torchrun" / "0")]
    with open(open_to_append(trial.folder / "log.txt"), "ab") as log:
        agent = subprocess.Popen(
            [*torchrun, *errors, "-m", "trainer", *trial.words(config_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    limit = 60 * sweep.time_minutes if sweep.time_minutes else float("inf")
    return RunningTrial(trial, agent, gpus, time.monotonic() + limit, results.oom_kills())


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects stop signals instead of dying of them. Trials, in sessions of their own, do not get a terminal's
    Ctrl-C."""
    come: list[int] = []
    heeded = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN  # nohup ignores SIGHUP, which stays so
    ]
    before = {number: signal.signal(number, lambda number, _: come.append(number)) for number in heeded}
    try:
        yield come
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
