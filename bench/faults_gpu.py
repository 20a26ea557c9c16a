"""What bench/faults_gpu.sh measures: faults that are injected from outside into runs under torchrun on 2 GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.checkpointing.retention import find_newest
from trainer.observe import metrics

OUT = Path(sys.argv[1])
TRAINED = float(os.environ.get("TRAINED", 10))
"""Seconds for which an undisturbed run trains; the number of steps, which all runs have, is found out first."""
LIMIT = 120
"""Seconds within which a run has to come as far as it is waited for."""
RUN = [
    "+config=debug",
    "batch.global_size=4",
    "run.deterministic=true",
    "logging.console=plain",
    "guard.stall_seconds=6",
    "guard.stall_allowance=120",
    f"data.cache={OUT / 'cache'}",
]
REMEDY = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(name: str, *arguments: str, restarts: int = 0) -> subprocess.Popen:
    with open(OUT / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "--max-restarts",
                str(restarts),
                "-m",
                *arguments,
            ],
            env={**os.environ, **REMEDY},
            stdout=log,
            stderr=log,
        )


def training(name: str, steps: int, restarts: int = 0) -> subprocess.Popen:
    """A run of so many steps, saved twenty times."""
    folder = f"run.dir={OUT / name}"
    return torchrun(
        name, "trainer", *RUN, f"run.steps={steps}", f"checkpoint.every={save_every(steps)}", folder, restarts=restarts
    )


def save_every(steps: int) -> int:
    return max(2, steps // 20)


def steps() -> int:
    """Steps that take `TRAINED`, of a short run with its checkpoints; kept in OUT for cases that are started later."""
    kept = OUT / "steps"
    if not kept.exists():
        launcher = training("pace", 60)
        try:
            wait_for(lambda: last_step(OUT / "pace") >= 10, LIMIT, "step 10")
            start, first = time.monotonic(), last_step(OUT / "pace")
            wait_for(lambda: last_step(OUT / "pace") >= 58, LIMIT, "step 58")
            pace = (time.monotonic() - start) / max(1, last_step(OUT / "pace") - first)
            launcher.wait(LIMIT)
        finally:
            launcher.terminate()
        kept.write_text(str(min(5000, max(100, int(TRAINED / max(pace, 1e-3))))))
    return int(kept.read_text())


def last_step(folder: Path) -> int:
    try:
        return metrics.read_metrics(folder)[-1]["step"]
    except Exception:  # no file, no line, or a line that is being written
        return 0


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> float:
    """Seconds until `condition` held. Raises `TimeoutError` that says `what` did not come."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"no {what} within {seconds:g} s")
        time.sleep(0.1)
    return time.monotonic() - start


def amid_steps(folder: Path) -> bool:
    """Whether a quarter of the steps is over, and the next save some steps away: a save has guard.stall_allowance."""
    step, every = last_step(folder), save_every(steps())
    return step > steps() // 4 and 0 < step % every <= every // 2


def children(launcher: subprocess.Popen) -> list[int]:
    return list(map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()))


def rank(launcher: subprocess.Popen, number: int) -> int:
    for child in children(launcher):
        if f"RANK={number}" in Path(f"/proc/{child}/environ").read_text(errors="replace").split("\0"):
            return child
    raise LookupError(f"there is no rank {number}")


def compared(folder: Path) -> dict[str, Any]:
    """The run's losses beside those of the undisturbed one."""
    mine, calm = ([line["loss"] for line in metrics.read_metrics(run)] for run in (folder, OUT / "calm"))
    return {
        "steps": len(mine),
        "largest_loss_error": max(abs(a - b) / b for a, b in zip(mine, calm)),
        "ok": len(mine) == len(calm) == steps(),
    }


def calm() -> dict[str, Any]:
    start = time.monotonic()
    launcher = training("calm", steps())
    try:
        code = launcher.wait(LIMIT)
    finally:
        launcher.terminate()
    return {"code": code, "seconds": time.monotonic() - start, "ok": code == 0}


def killed() -> dict[str, Any]:
    folder = OUT / "killed"
    launcher = training("killed", steps(), restarts=2)
    try:
        wait_for(lambda: last_step(folder) > steps() // 4, LIMIT, "quarter of the steps")
        saved = find_newest(folder / "checkpoints")[0]
        os.kill(rank(launcher, 1), signal.SIGKILL)
        log = OUT / "killed.log"
        again = wait_for(lambda: "resumed from" in log.read_text(), LIMIT, "second start")
        code = launcher.wait(LIMIT)
    finally:
        launcher.terminate()
    result = compared(folder)
    return {"code": code, "saved": saved.name, "seconds_to_resume": again, **result, "ok": result["ok"] and code == 0}


def stopped(victim: int) -> dict[str, Any]:
    name = f"stopped{victim}"
    folder = OUT / name
    launcher = training(name, steps(), restarts=2)
    report: list[Path] = []
    try:
        wait_for(lambda: amid_steps(folder), LIMIT, "quarter of the steps")
        process = rank(launcher, victim)
        os.kill(process, signal.SIGSTOP)
        try:
            told = wait_for(
                lambda: (
                    report.extend(file for file in folder.glob("flight/*/report.txt") if file.read_text()) or report
                ),
                60,
                "report",
            )
            time.sleep(2)  # the ranks that can end have ended
            ended = not any(Path(f"/proc/{child}").exists() for child in children(launcher) if child != process)
        finally:
            os.kill(process, signal.SIGKILL)  # torchrun would wait 30 s for it
        status = json.loads((folder / "status.json").read_text())
        log = OUT / f"{name}.log"
        again = wait_for(lambda: "resumed from" in log.read_text(), LIMIT, "second start")
        code = launcher.wait(LIMIT)
    finally:
        launcher.terminate()
    text = report[0].read_text()
    result = compared(folder)
    named = f"rank {victim} does not answer" in text and f"which rank {victim} may not have entered" in text
    return {
        "code": code,
        "seconds_to_report": told,
        "seconds_to_resume": again,
        "peer_ended_itself": ended,
        "status": status["status"],
        "named": named,
        "report": text.splitlines(),
        **result,
        "ok": result["ok"] and code == 0 and named and ended,
    }


def preflight() -> dict[str, Any]:
    node_settings = ["check=node", f"gpus={torch.cuda.device_count()}", f"run_dir={OUT / 'calm'}", "free_gib=1"]
    node = subprocess.run(
        [sys.executable, "-m", "trainer", "preflight", *node_settings], capture_output=True, text=True, timeout=LIMIT
    )
    code = torchrun("network", "trainer", "preflight", "check=network").wait(LIMIT)
    return {
        "node": node.returncode,
        "node_said": (node.stdout + node.stderr).splitlines(),
        "network": code,
        "network_said": [line for line in (OUT / "network.log").read_text().splitlines() if "preflight" in line],
        "ok": node.returncode == 0 and code == 0,
    }


CASES = {
    "calm": calm,
    "killed": killed,
    "stopped1": lambda: stopped(1),
    "stopped0": lambda: stopped(0),
    "preflight": preflight,
}


def main(wanted: list[str]) -> int:
    fine = True
    with open(OUT / "faults.jsonl", "a") as file:
        for name in wanted or CASES:
            try:
                result = CASES[name]()
            except Exception as error:
                result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            line = json.dumps({"case": name, **result})
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()
            fine = fine and result["ok"]
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
