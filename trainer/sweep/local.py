"""Runs trials: on this machine, each a torchrun of its own on GPUs of its own, or as jobs of Slurm."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainer.cluster.job import CANCELLED, read_end
from trainer.config import ConfigError
from trainer.sweep import results
from trainer.sweep.plan import SweepConfig, Trial
from trainer.util.exit_codes import DONE, REFUSED
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


# Runs trials as Slurm jobs: each is train.sbatch, as any other run under Slurm is, with its preflight, restarts and
# requeues.


HERE = Path(__file__).parents[1]

SCRIPT = (HERE if (HERE / "launch").is_dir() else HERE.parent) / "launch" / "slurm" / "train.sbatch"
"""Inside the package in a wheel, beside it in a checkout."""

WHOLE_NODES = re.compile(r"^#SBATCH --(exclusive|mem=0)\n", re.MULTILINE)
"""What the script asks for and options of sbatch cannot take back: a trial need not have whole nodes."""

POLL = 2.0
"""Seconds between looks at the queue."""


def run_on_slurm(
    trials: list[Trial], sweep: SweepConfig, config_dir: str | None, on_end: OnEnd, say: Callable[[str], None]
) -> None:
    """Submits the trials that have no job yet, and with `sweep.wait` waits for all.

    A stop signal ends the waiting, not the jobs. A trial is recorded as submitted at once, so that no later start
    submits it again."""
    with stop_signals() as signals:
        for trial in trials:
            if trial.job is None and not signals:
                _submit(trial, sweep, config_dir)
                on_end(trial, "submitted", f"job {trial.job}")
        left = [trial for trial in trials if trial.job is not None]
        while left and not signals:
            now = queued_jobs()
            for trial in [trial for trial in left if now is not None and trial.job not in now]:
                left.remove(trial)
                on_end(trial, *_outcome(trial))
            if not sweep.wait:
                break
            look = time.monotonic() + POLL
            while left and not signals and time.monotonic() < look:
                time.sleep(0.1)
    if left:
        say(
            f"{len(left)} jobs go on by themselves ({' '.join(str(trial.job) for trial in left)}): the same command, "
            "given again, collects what has ended; scancel ends them"
        )


def _submit(trial: Trial, sweep: SweepConfig, config_dir: str | None) -> None:
    """Submits a trial and records the job's number. Raises `ConfigError` with Slurm's message where Slurm refuses."""
    results.clear_trial(trial.folder)
    processes = trial.processes // sweep.slurm.nodes
    environment = {"TRAINER_PYTHON": sys.executable, **os.environ, "TRAINER_PROCESSES": str(processes)}
    with tempfile.NamedTemporaryFile("w", prefix="train-", suffix=".sbatch") as script:
        script.write(WHOLE_NODES.sub("", SCRIPT.read_text()))
        script.flush()
        command = ["sbatch", "--parsable", *_requested(trial, sweep), script.name, *trial.words(config_dir)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        except OSError as error:
            raise ConfigError(f"sweep.launcher=slurm: sbatch cannot be run here ({error.strerror})") from None
    number = re.match(r"\d+", done.stdout)
    if done.returncode or not number:
        said = " ".join(f"{done.stderr} {done.stdout}".split())
        raise ConfigError(f"trial {trial.name} cannot be submitted: {said}; see sweep.slurm")
    trial.job = number[0]
    results.note_start(trial, job=trial.job)


def _requested(trial: Trial, sweep: SweepConfig) -> list[str]:
    """The options of sbatch, which win over those in the script."""
    wanted = sweep.slurm
    # A quarter of the time is enough to save in tests; five minutes with most models.
    warning = min(300, 15 * wanted.time_minutes)
    given = {
        "job-name": f"{sweep.name}/{trial.name}",
        "output": f"{trial.folder.absolute()}/log.txt".replace("%", "%%"),
        "nodes": wanted.nodes,
        "gpus-per-node": wanted.gpus_per_node,
        "time": wanted.time_minutes,
        "signal": f"B:USR1@{warning}",
        "cpus-per-task": wanted.cpus_per_node,
        "mem": wanted.memory_gib and f"{round(1024 * wanted.memory_gib)}M",
        "partition": wanted.partition,
        "account": wanted.account,
        "qos": wanted.qos,
        **{name.replace("_", "-"): value for name, value in wanted.options.items()},
    }
    return [
        f"--{name}" if value == "true" else f"--{name}={value}"
        for name, value in given.items()
        if value not in (None, "false")
    ]


def _outcome(trial: Trial) -> tuple[str, str | None]:
    """The status of a job that has left the queue, and the reason: from what the job has noted, or, where Slurm ended
    its script, from Slurm's state of the job."""
    ended = read_end(trial.folder, trial.job)
    if ended is not None:
        if ended.code == CANCELLED:
            status, reason = results.trial_outcome(trial.folder, ended.last, requested="stopped")
            return status, reason or ended.why
        status, reason = results.trial_outcome(trial.folder, DONE if ended.code == DONE else ended.last)
        return status, f"{reason}; {ended.why}" if status == "failed" else reason
    job = _job(trial.job)
    refused = job.get("ExitCode") == f"{REFUSED}:0"
    state, (status, reason) = job.get("JobState"), results.trial_outcome(trial.folder, REFUSED if refused else None)
    if state == "OUT_OF_MEMORY":
        return "out_of_memory", "Slurm ended the job for lack of host memory"
    if status == "failed":
        return (
            "stopped" if state == "CANCELLED" else status,
            f"Slurm ended the job ({state or 'why is forgotten'}); {reason}",
        )
    return status, reason


def queued_jobs() -> set[str] | None:
    """The numbers of this user's queued and running jobs; None where Slurm does not answer."""
    try:
        done = subprocess.run(["squeue", "--noheader", "--me", "--format=%A"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return set(done.stdout.split()) if done.returncode == 0 else None


def _job(number: str) -> dict[str, str]:
    """What Slurm says of a job; empty once Slurm no longer knows it."""
    shown = subprocess.run(["scontrol", "show", "job", "-o", number], capture_output=True, text=True).stdout
    return dict(part.split("=", 1) for part in shown.split() if "=" in part)
