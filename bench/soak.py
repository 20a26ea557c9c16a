"""Kills small runs at random moments, lets them go on, and compares them with runs that nothing disturbed.

    python bench/soak.py SECONDS [OUT_FOLDER] [seed=N]

Runs of two processes, on two GPUs where there are as many, else on CPUs, are started by the public commands, under
several plans. Each start meets one fault: SIGKILL of a rank, of the launcher, or of all processes; SIGTERM or SIGHUP of
the launcher; SIGSTOP of a rank for a while. It comes during the start, in training, within a save, or while an earlier
run is set aside. The same command then goes on, or torchrun starts the ranks again. There are new faults for SECONDS;
what is under way then ends within two more minutes.

A line is printed for each fault, and a summary. The exit code is 1 if a run was lost (it did not resume, or an earlier
run is no longer whole), had other losses than the undisturbed one or a step twice, left a damaged checkpoint, or a
status.json that is not true, or processes. `seed=N` draws the same faults again. OUT_FOLDER keeps soak.jsonl and the
folders of runs that failed."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.checkpointing.manifest import list_checkpoints
from trainer.checkpointing.retention import find_newest
from trainer.observe import metrics
from trainer.util.reading import Malformed

ROOT = Path(__file__).parents[1]
STEPS, EVERY, PROCESSES = 200, 10, 2
PLANS = {"dp2": ["parallel=ddp"], "tp2": ["parallel=tp2"], "pp2": ["parallel=pp2"], "zero3": ["parallel=zero3"]}
SETTINGS = [
    "+config=debug",
    "model.depth=2",
    "batch.global_size=4",
    "batch.micro_size=1",
    f"run.steps={STEPS}",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep_last=3",
    "checkpoint.at_end=true",
    "run.deterministic=true",
    "logging.console=plain",
    "logging.every=1",
    "logging.report=false",
    "data.sources.stdlib.limit=20",
    "guard.stall_seconds=60",
    "guard.stall_allowance=180",
]
LAUNCHERS = {
    "trainer train": ["-m", "trainer", "train", "--processes", str(PROCESSES)],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    + ["--max-restarts", "100", "-m", "trainer"],
}
FAULTS = {"kill rank": 4, "kill launcher": 2, "kill all": 2, "SIGTERM": 2, "SIGHUP": 1, "stop rank": 1}
MOMENTS = {"start": 3, "training": 4, "save": 2}
"""How often each is drawn."""
LIMIT = 180.0
"""Seconds without output in which a run has to take a step after a fault, and its processes have to be gone after their
end."""


@dataclass
class Kill:
    """A fault and what followed. after: seconds from the fault to the next step; repeated: steps that were trained
    again; wrong: what should not be."""

    run: int
    plan: str
    launcher: str
    fault: str
    moment: str
    step: int = 0
    after: float | None = None
    repeated: int = 0
    wrong: list[str] = field(default_factory=list)


def processes(folder: Path) -> dict[int, int | None]:
    """All processes of this machine with a run's folder in their command line, each with its rank; the launcher has
    none."""
    found: dict[int, int | None] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"run.dir={folder}\0".encode() in (place / "cmdline").read_bytes():
                rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", (place / "environ").read_bytes())
                found[int(place.name)] = int(rank[1]) if rank else None
    return found


def send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def kill_all(folder: Path) -> None:
    """Ends whatever runs in a folder. The launcher is stopped first, which else would start others."""
    while found := processes(folder):
        for process in sorted(found, key=lambda process: found[process] is not None):
            send(process, signal.SIGKILL)
        time.sleep(0.05)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The logged steps; empty where there are none, or the file is being replaced."""
    try:
        return [line for line in metrics.read_metrics(folder) if "loss" in line]
    except Exception:
        return []


def last_time(folder: Path) -> float:
    """When the newest step was logged."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            return json.loads(file.read().split(b"\n")[-2])["time"]
    except (OSError, ValueError, IndexError):
        return 0.0


def status_of(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "status.json").read_text())
    except OSError:
        return {"status": None, "step": 0}


def untrue(folder: Path) -> list[str]:
    """What status.json says and the folder does not, once no process runs there."""
    status, saved = status_of(folder), next(iter(list_checkpoints(folder / "checkpoints")), 0)
    wanted = {"done": STEPS, "stopped": status["step"]}.get(status["status"])
    return [] if wanted in (None, saved) else [f"status.json says {status}, and the newest checkpoint has step {saved}"]


class Soak:
    """The runs, one after the other. folder: for them; python: the interpreter that starts them; process_of: the
    process behind one of them; say: takes lines; device: `run.device`."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        python: str = sys.executable,
        process_of: Callable[[int], int] = lambda process: process,
        say: Callable[[str], None] = print,
        device: str = "cpu",
    ):
        self.folder, self.seed, self.python, self.process_of, self.say = folder, seed, python, process_of, say
        self.device = device
        self.draw, self.kills, self.wrong = random.Random(seed), list[Kill](), list[str]()
        self.runs, self.undisturbed = 0, dict[str, list[float]]()
        self.present: Path | None = None
        self.starting = 5.0  # seconds
        self.killed_at, self.before = 0.0, ""  # time of the newest fault, and the start that it met
        atexit.register(self.close)

    def close(self) -> None:
        """Leaves no process behind."""
        if self.present is not None:
            kill_all(self.present)

    def start(self, folder: Path, plan: str, launcher: str, *overrides: str) -> subprocess.Popen:
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHON_EXEC": self.python}
        self.present = folder
        with open(folder.with_suffix(".log"), "ab") as log:
            return subprocess.Popen(
                [self.python, *LAUNCHERS[launcher], *SETTINGS, *PLANS[plan]]
                + [f"run.device={self.device}", f"data.cache={self.folder / 'cache'}", *overrides, f"run.dir={folder}"],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, condition: Callable[[], object], launch: subprocess.Popen | None = None) -> bool:
        """Whether the condition came before the launcher ended, and before `LIMIT` seconds without output of the run,
        at most five times as many: a busy machine is no failure."""
        start = said = time.monotonic()
        size = 0
        while not condition():
            if self.present and (now := self.present.with_suffix(".log").stat().st_size) != size:
                size, said = now, time.monotonic()
            if time.monotonic() > min(said + LIMIT, start + 5 * LIMIT) or launch and launch.poll() is not None:
                return bool(condition())
            time.sleep(0.005)
        return True

    def gone(self, folder: Path, launch: subprocess.Popen) -> bool:
        """Whether the launch and all its processes end by themselves."""
        ended = self.wait(lambda: launch.poll() is not None and not processes(folder))
        kill_all(folder)
        launch.wait()
        return ended

    def losses(self, plan: str) -> list[float]:
        """Those of the undisturbed run."""
        if plan not in self.undisturbed:
            folder = self.folder / f"undisturbed-{plan}"
            began, launch = time.time(), self.start(folder, plan, "trainer train")
            if not self.gone(folder, launch) or launch.returncode:
                raise RuntimeError(f"the undisturbed run failed: {folder.with_suffix('.log').read_text()[-3000:]}")
            lines = steps_of(folder)
            self.starting, self.undisturbed[plan] = lines[0]["time"] - began, [line["loss"] for line in lines]
        return self.undisturbed[plan]

    def run(self, seconds: float, kills: int = sys.maxsize) -> bool:
        """Runs until the seconds are over or so many faults have been; whether all was right."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(self.kills) < kills:
            self.runs += 1
            plan = [*PLANS][(self.runs - 1) % len(PLANS)]
            expected = self.losses(plan)
            folder, before = self.folder / f"run-{self.runs}", len(self.wrong)
            launcher = self.draw.choice([*LAUNCHERS])
            self.disturb(folder, plan, launcher, lambda: time.monotonic() < end and len(self.kills) < kills)
            self.compare(folder, expected)
            if len(self.wrong) == before and time.monotonic() < end and self.draw.random() < 0.3:
                self.set_aside(folder, plan, expected)
            if len(self.wrong) == before:
                shutil.rmtree(folder)
                folder.with_suffix(".log").unlink()
        return not self.wrong

    def disturb(self, folder: Path, plan: str, launcher: str, more: Callable[[], bool]) -> None:
        """A run to its end, with a fault for each start as long as there are to be `more`."""
        launch, idle = self.start(folder, plan, launcher), 0
        while idle < 6:
            kill = self.fault(folder, plan, launcher, launch) if more() else None
            if kill is None and (not more() or launch.poll() is not None):
                self.gone(folder, launch)
                for wrong in untrue(folder):
                    self.fail(folder, wrong)
                if status_of(folder)["status"] == "done":
                    return
            if launch.poll() is not None:
                launch = self.start(folder, plan, launcher)
                if kill is not None:
                    self.follow(folder, kill, launch)
            idle = 0 if kill is not None and kill.after is not None else idle + 1
        self.fail(folder, "lost: no step in 6 starts")
        kill_all(folder)

    def fault(self, folder: Path, plan: str, launcher: str, launch: subprocess.Popen) -> Kill | None:
        """One fault, and what comes of it until the next step or the end of the launch. None where the run has ended
        before."""
        began = time.time()
        moment, fault = (self.draw.choices([*kinds], kinds.values())[0] for kinds in (MOMENTS, FAULTS))
        rank, wait, pause = self.draw.randrange(PROCESSES), self.draw.random(), self.draw.uniform(0.1, 2)
        if moment == "start":
            time.sleep(self.starting * wait)
        elif not self.wait(lambda: last_time(folder) > began, launch):
            return None
        if moment == "training":
            time.sleep(wait)
        elif moment == "save" and not self.wait(lambda: any((folder / "checkpoints").glob("*.tmp/*")), launch):
            return None
        found = processes(folder)
        ranks = [process for process, place in found.items() if place == rank]
        if launch.poll() is not None or fault.endswith("rank") and not ranks:
            return None
        kill = Kill(self.runs, plan, launcher, fault, moment)
        steps = steps_of(folder)
        kill.step, self.killed_at = steps[-1]["step"] if steps else 0, time.time()
        self.kills.append(kill)
        self.before = self.newest_start(folder)
        if fault == "stop rank":
            for process in map(self.process_of, ranks):
                send(process, signal.SIGSTOP)
                time.sleep(pause)
                send(process, signal.SIGCONT)
            self.follow(folder, kill, launch)
            return kill
        victims = {"kill rank": ranks, "kill all": sorted(found, key=lambda process: found[process] is not None)}
        number = getattr(signal, fault) if fault.startswith("SIG") else signal.SIGKILL
        for process in victims.get(fault, [launch.pid]):
            send(self.process_of(process) if number != signal.SIGKILL else process, number)
        if fault == "kill rank" and launcher == "torchrun":
            self.follow(folder, kill, launch)
            return kill
        if not self.gone(folder, launch):
            kill.wrong.append("processes were left")
        kill.wrong += untrue(folder)
        status = status_of(folder)["status"]
        if fault.startswith("SIG") and moment != "start" and status not in ("stopped", "done"):
            kill.wrong.append(f"{fault} left the status {status}")
        if damaged := find_newest(folder / "checkpoints")[1]:
            kill.wrong.append(f"damaged: {damaged}")
        return kill

    def follow(self, folder: Path, kill: Kill, launch: subprocess.Popen) -> None:
        """Waits for the next step of the start that follows a fault, and reports it."""
        old = "", self.before
        begun = kill.fault == "stop rank" or self.wait(lambda: self.newest_start(folder) not in old, launch)
        since = time.time()
        if begun and self.wait(lambda: last_time(folder) > since, launch):
            kill.after = time.time() - self.killed_at
            if kill.fault != "stop rank":
                kill.repeated = max(0, kill.step - json.loads(self.newest_start(folder))["step"])
        elif status_of(folder)["status"] != "done":
            kill.wrong.append("no step after the fault")
        self.report(folder, kill)

    def newest_start(self, folder: Path) -> str:
        """The last whole line of starts.jsonl, which begins anew where a run has nothing to resume."""
        with contextlib.suppress(OSError, IndexError):
            return (folder / "starts.jsonl").read_text().split("\n")[-2]
        return ""

    def report(self, folder: Path, kill: Kill) -> None:
        text = f"{len(self.kills):4d}  run {kill.run} {kill.plan:5} {kill.launcher:13} {kill.fault:13} "
        text += f"{kill.moment:9} step {kill.step:4d}"
        if kill.after is not None:
            text += f"  next step after {kill.after:5.1f} s, {kill.repeated} repeated"
        self.say(text)
        for wrong in kill.wrong:
            self.fail(folder, wrong)

    def fail(self, folder: Path, what: str) -> None:
        self.wrong.append(what)
        self.say(f"      WRONG: {folder.name}: {what}")

    def compare(self, folder: Path, expected: list[float]) -> None:
        """A run that has ended with the undisturbed one."""
        if status_of(folder)["status"] != "done":
            return self.fail(folder, f"lost: the run ended with {status_of(folder)}")
        if "passing over the damaged checkpoint" in folder.with_suffix(".log").read_text(errors="replace"):
            self.fail(folder, "damaged: a checkpoint was passed over")
        lines = steps_of(folder)
        if [line["step"] for line in lines] != list(range(1, STEPS + 1)):
            return self.fail(folder, "steps are missing, or there twice")
        differ = [line["step"] for line, loss in zip(lines, expected) if line["loss"] != loss]
        if differ:
            self.fail(folder, f"losses differ in {len(differ)} steps, first in step {differ[0]}")

    def set_aside(self, folder: Path, plan: str, expected: list[float]) -> None:
        """A new run in the folder of a finished one, killed while the finished one is moved."""
        begin, kill = "checkpoint.resume=none", Kill(self.runs, plan, "trainer train", "kill all", "set aside")
        launch = self.start(folder, plan, kill.launcher, begin)
        if self.wait(lambda: (folder / "earlier").exists(), launch):
            time.sleep(self.draw.choice([0.0, 0.002, 0.02]))
            self.killed_at, self.before = time.time(), self.newest_start(folder)
            kill_all(folder)
            launch.wait()
            self.kills.append(kill)
        self.gone(folder, launch)
        launch = self.start(folder, plan, kill.launcher, begin)
        self.follow(folder, kill, launch)
        self.gone(folder, launch)
        self.compare(folder, expected)
        if not any(self.is_whole(run) for run in (folder / "earlier").glob("*")):
            self.fail(folder, "lost: the run that was set aside is no longer whole")

    def is_whole(self, folder: Path) -> bool:
        """Whether a finished run is in a folder, with its last checkpoint."""
        with contextlib.suppress(OSError, Malformed):
            saved = next(iter(list_checkpoints(folder / "checkpoints")), 0)
            damaged = find_newest(folder / "checkpoints")[1]
            return saved == STEPS and not damaged and len(steps_of(folder)) == STEPS
        return False

    def summary(self) -> dict[str, Any]:
        after = [kill.after for kill in self.kills if kill.after is not None]
        count = {name: sum(text.startswith(name) for text in self.wrong) for name in ("lost", "losses", "damaged")}
        return {
            "seed": self.seed,
            "kills": len(self.kills),
            "runs": self.runs,
            "lost": count["lost"],
            "wrong_losses": count["losses"],
            "damaged": count["damaged"],
            "otherwise_wrong": len(self.wrong) - sum(count.values()),
            "seconds_to_next_step": {
                "median": round(statistics.median(after), 2) if after else None,
                "max": round(max(after), 2) if after else None,
            },
            "steps_repeated": sum(kill.repeated for kill in self.kills),
        }


def main(arguments: list[str]) -> int:
    seeds = [int(text.removeprefix("seed=")) for text in arguments if text.startswith("seed=")]
    seconds, *out = [text for text in arguments if not text.startswith("seed=")]
    seed = seeds[0] if seeds else random.randrange(10**6)
    print(f"seed={seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
        device = "cuda" if torch.cuda.device_count() >= PROCESSES else "cpu"
        soak = Soak(Path(name), seed, say=lambda text: print(text, flush=True), device=device)
        try:
            fine = soak.run(float(seconds))
        finally:
            soak.close()
            print(json.dumps(soak.summary()), flush=True)
            if out:
                place = Path(out[0])
                place.mkdir(parents=True, exist_ok=True)
                lines = [*map(asdict, soak.kills), soak.summary()]
                (place / "soak.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
                for run in Path(name).glob("run-*"):
                    copy = shutil.copytree if run.is_dir() else shutil.copy2
                    with contextlib.suppress(OSError):
                        copy(run, place / run.name)
    return 0 if fine else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # atexit leaves no process behind
    sys.exit(main(sys.argv[1:]))
