"""A real Slurm on this machine for a test: its own munged, a controller and two nodes, on loopback and in a folder of
its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.cluster.node import free_ports

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES = ("n1", "n2")
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# Credentials live for seconds, because a requeued job waits until the old ones have expired.
AuthInfo=socket={root}/munge/socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=20
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why no Slurm can be started here, or nothing."""
    absent = [tool for tool in TOOLS if not _tool(tool)]
    if absent:
        return f"Slurm is not installed: no {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons run jobs of their users only as root"


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Returns when `condition` holds; fails, saying `what` it waited for, after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"after {seconds:.0f} s still no {what}"
        time.sleep(0.5)  # each look may start one of Slurm's commands


class Cluster:
    """A running Slurm of two one-core nodes, n1 and n2, with the partitions `low` and `high`, which preempts it."""

    def __init__(self) -> None:
        # Not pytest's folder: munge wants one that others can enter.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.root.chmod(0o755)
        for name in ("munge", "state", *NODES):
            (self.root / name).mkdir()
        conf, self.daemons = self.root / "slurm.conf", []
        conf.write_text(CONF.format(host=socket.gethostname().split(".")[0], root=self.root, ports=free_ports(3)))
        self.environment = {**os.environ, "SLURM_CONF": str(conf)}
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        munge = self.root / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o600)
        files = [f"--{name}-file={munge / name}" for name in ("key", "log", "pid", "seed")]
        self._daemon("munged", "--foreground", "--force", "--num-threads=2", f"--socket={munge / 'socket'}", *files)
        wait_for((munge / "socket").exists, 20, "munged")
        self._daemon("slurmctld", "-D", "-c")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        wait_for(
            lambda: self.ask("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D", check=False).strip() == "2",
            60,
            "idle nodes",
        )

    def _daemon(self, name: str, *arguments: str) -> None:
        with open(self.root / f"{name}.out", "ab") as out:
            self.daemons.append(
                subprocess.Popen(
                    [_tool(name), *arguments],
                    env=self.environment,
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    def ask(self, *command: str, check: bool = True, **options: object) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, **options)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job: JobState, Restarts, ExitCode and so on."""
        return dict(
            part.split("=", 1) for part in self.ask("scontrol", "show", "job", "-o", number).split() if "=" in part
        )

    def processes(self, *variables: str) -> Iterator[int]:
        """Processes of this Slurm, its jobs among them, that have these NAME=VALUE in their environment."""
        wanted = {f"SLURM_CONF={self.environment['SLURM_CONF']}", *variables}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted <= set((folder / "environ").read_text(errors="replace").split("\0")):
                    yield int(folder.name)
            except OSError:
                continue  # it has ended

    def stop(self) -> None:
        """Ends all jobs and daemons, and removes the folder."""
        if len(self.daemons) == 4:
            self.ask("scancel", "--full", "--signal=KILL", "--user=root", check=False)
            self.ask("scancel", "--user=root", check=False)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.processes():  # steps outlive their daemon
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        shutil.rmtree(self.root, ignore_errors=True)


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
