"""Runs trials as Slurm jobs: each is train.sbatch, as any other run under Slurm is, with its preflight, restarts and
requeues."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trainer.cluster.job import CANCELLED, read_end
from trainer.config import ConfigError
from trainer.sweep import results
from trainer.sweep.local import OnEnd, stop_signals
from trainer.sweep.plan import SweepConfig, Trial
from trainer.util.exit_codes import DONE, REFUSED

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
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in given.items()
        if value is not None and value is not False
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
