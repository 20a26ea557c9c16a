"""Runs trials as Slurm jobs, through submitit: one torchrun on each node. A preempted job saves, and is requeued."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.config import ConfigError
from trainer.sweep import results
from trainer.sweep.local import OnEnd, command, stop_signals
from trainer.sweep.plan import SlurmConfig, SweepConfig, Trial
from trainer.util.exit_codes import STOPPED
from trainer.util.extras import needs

# The signal that submitit lets Slurm send to all processes of a job shortly before its time limit: one that workers
# handle.
SIGNAL = "USR1"
os.environ["SUBMITIT_PREEMPT_SIGNAL"] = SIGNAL

with needs("slurm", "sweep.launcher=submitit"):
    import submitit

POLL = 2.0
"""Seconds between looks at the queue."""

REQUEUES = 1000
"""How often a trial may reach its time limit and be requeued. Each time it has made progress."""

# The job's script runs this on its first node. The node's address is taken, since its name need not resolve. A free
# port is chosen at every start.
RENDEZVOUS = [
    f"export SUBMITIT_PREEMPT_SIGNAL={SIGNAL}",
    'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))',
    "head=$(scontrol show node -o \"${nodes[0]}\" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')",
    "export TRAINER_RENDEZVOUS=$head:"
    f'$({shlex.quote(sys.executable)} -c \'import socket; s = socket.socket(); s.bind(("", 0)); '
    "print(s.getsockname()[1])')",
]


@dataclass
class Job:
    """What submitit calls on every node of a trial's job. processes: how many each node has."""

    trial: Trial
    processes: int
    config_dir: str | None

    def __call__(self) -> int:
        """Runs this node's torchrun, the agent, and returns its exit code."""
        node, restart = int(os.environ["SLURM_PROCID"]), int(os.environ.get("SLURM_RESTART_COUNT", 0))
        number = os.environ["SLURM_JOB_ID"]
        rendezvous = [
            "--nnodes",
            os.environ["SLURM_JOB_NUM_NODES"],
            "--nproc-per-node",
            str(self.processes),
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            os.environ["TRAINER_RENDEZVOUS"],
            "--rdzv-id",
            f"{number}.{restart}",
        ]
        (self.trial.folder / f"exit-{node}.json").unlink(missing_ok=True)  # of an earlier start
        # After a requeue the trial resumes what it has saved, whatever the recipe says.
        again = ["checkpoint.resume=auto"] if restart else []
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with open(self.trial.folder / (f"log-{node}.txt" if node else "log.txt"), "ab") as log:
            self.agent = subprocess.Popen(
                [*command(self.trial, *rendezvous, config_dir=self.config_dir, start=restart), *again],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        while not self.ended():
            time.sleep(0.5)
        code = self.agent.wait()
        if code == STOPPED and node == 0 and _state(number) == "RUNNING":  # a preemption signals the workers alone
            subprocess.run(["scontrol", "requeue", number], check=True)
            sys.exit(code)
        results.note_exit(self.trial.folder, node, number, code)
        return code

    def ended(self) -> bool:
        """Whether the agent has ended. Popen's lock is not taken, since the handler `checkpoint` may interrupt any
        line."""
        return os.waitid(os.P_PID, self.agent.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Waits for the workers to save, and returns what to run after the requeue.

        submitit calls it when the time limit is near; the workers get the same signal from Slurm."""
        while not self.ended():
            time.sleep(0.5)
        return submitit.helpers.DelayedSubmission(Job(self.trial, self.processes, self.config_dir))


def claim(folder: Path) -> None:
    """Makes submitit's folder in that of a sweep, for this user alone: a job unpickles, and so runs, what it finds
    there under its number. Raises `ConfigError` where others could put something in its place."""
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"sweep.dir={folder} belongs to another user or can be written by others, and jobs run what lies in its "
            f"folder submitit; say chmod go-w {folder}, or set another sweep.dir"
        )
    own = folder / "submitit"
    own.mkdir(0o700, exist_ok=True)
    if own.is_symlink() or own.stat().st_uid != os.getuid():
        raise ConfigError(f"{own} is a link, or belongs to another user, and jobs run what lies there; remove it")
    own.chmod(0o700)


def run(
    trials: list[Trial], sweep: SweepConfig, config_dir: str | None, on_end: OnEnd, say: Callable[[str], None]
) -> None:
    """Submits the trials that have no job yet, and with `sweep.wait` waits for all.

    A stop signal ends the waiting, not the jobs. A trial is recorded as submitted at once, so that no later start
    submits it again."""
    folder = Path(sweep.dir).absolute() / "submitit"
    with stop_signals() as signals:
        for trial in trials:
            if trial.job is None and not signals:
                _submit(trial, sweep, config_dir, folder)
                on_end(trial, "submitted", f"job {trial.job}")
        left = [trial for trial in trials if trial.job is not None]
        while left and not signals:
            now = queued()
            for trial in [trial for trial in left if now is not None and trial.job not in now]:
                left.remove(trial)
                on_end(trial, *_outcome(trial, sweep.slurm.nodes))
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


def _submit(trial: Trial, sweep: SweepConfig, config_dir: str | None, folder: Path) -> None:
    """Submits a trial and records the job's number. Raises `ConfigError` with Slurm's message where Slurm refuses."""
    wanted, nodes = sweep.slurm, sweep.slurm.nodes
    results.clear(trial.folder)
    try:
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=REQUEUES)
        executor.update_parameters(
            name=f"{sweep.name}/{trial.name}",
            timeout_min=wanted.time_minutes,
            nodes=nodes,
            tasks_per_node=1,
            slurm_stderr_to_stdout=True,
            slurm_setup=RENDEZVOUS,
            **_asked(wanted),
            # A quarter of the time is enough to save in tests; five minutes with most models.
            slurm_signal_delay_s=min(300, 15 * wanted.time_minutes),
            slurm_additional_parameters={"requeue": True, **wanted.options},
        )
        trial.job = executor.submit(Job(trial, trial.processes // nodes, config_dir)).job_id
    except (RuntimeError, submitit.core.utils.FailedJobError) as error:
        raise ConfigError(
            f"trial {trial.name} cannot be submitted: {' '.join(str(error).split())}; see sweep.slurm"
        ) from None
    results.note_start(trial, job=trial.job)


def _asked(wanted: SlurmConfig) -> dict[str, object]:
    given = {
        "gpus_per_node": wanted.gpus_per_node or None,
        "cpus_per_task": wanted.cpus_per_node,
        "mem_gb": wanted.memory_gib,
        "slurm_partition": wanted.partition,
        "slurm_account": wanted.account,
        "slurm_qos": wanted.qos,
    }
    return {name: value for name, value in given.items() if value is not None}


def _outcome(trial: Trial, nodes: int) -> tuple[str, str | None]:
    """The status of a job that has left the queue, and the reason.

    They follow from the agents' exit codes, which each node has noted, or, where Slurm ended the agents, from Slurm's
    state of the job. submitit's own results are pickles, and are not read."""
    codes = [results.read_exit(trial.folder, node, trial.job) for node in range(nodes)]
    if None not in codes:
        return results.outcome(trial.folder, max(codes, key=lambda code: (code == 128 + signal.SIGKILL, code != 0)))
    state, (status, reason) = _state(trial.job), results.outcome(trial.folder, None)
    if state == "OUT_OF_MEMORY":
        return "out_of_memory", "Slurm ended the job for lack of host memory"
    if status == "failed":
        return (
            "stopped" if state == "CANCELLED" else status,
            f"Slurm ended the job ({state or 'why is forgotten'}); {reason}",
        )
    return status, reason


def queued() -> set[str] | None:
    """The numbers of this user's queued and running jobs; None where Slurm does not answer."""
    try:
        done = subprocess.run(["squeue", "--noheader", "--me", "--format=%A"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return set(done.stdout.split()) if done.returncode == 0 else None


def _state(job: str) -> str | None:
    """A job's state in Slurm; None once Slurm no longer knows the job."""
    shown = subprocess.run(["scontrol", "show", "job", "-o", job], capture_output=True, text=True).stdout
    return next((part.partition("=")[2] for part in shown.split() if part.startswith("JobState=")), None)
