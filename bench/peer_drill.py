"""Kills ranks of a run again and again and measures how soon it trains on from in-memory checkpoints.

Usage: bench/peer_drill.py OUT_FOLDER [kills=20] [processes=2] [every=5] [seed=0] [SETTING=VALUE ...]

The run goes through torchrun with restarts. A kill is SIGKILL of a random rank, a random number of steps after the
first step of the start before. Nothing is saved on disk, so a run that loses its in-memory checkpoint begins anew,
which counts as lost. Prints a JSON line for each kill: seconds from the kill to the next logged step, and steps that
were trained again. The last line compares all losses with those of a run that nothing disturbed. The exit code is 1 if
they differ by more than 1e-5 of their size, if a step is missing, or if a start was lost.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.observe import metrics

STEPS_A_KILL = 15
START_LIMIT = 300.0
"""Seconds that a start may take until its first step."""


def start_run(out: Path, name: str, processes: int, restarts: int, settings: list[str]) -> subprocess.Popen:
    """Starts torchrun, whose output goes to OUT/NAME.log."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["--max-restarts", str(restarts), "-m", "trainer", *settings, f"run.dir={out / name}"]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    with open(out / f"{name}.log", "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def wait_for(launcher: subprocess.Popen, condition: Callable[[], Any], what: str) -> None:
    """Returns when `condition` holds. Raises `RuntimeError` if the launcher ends, or `START_LIMIT` is over, before."""
    end = time.monotonic() + START_LIMIT
    while not condition():
        if launcher.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"no {what}; the launcher {'lasts' if launcher.poll() is None else 'has ended'}")
        time.sleep(0.02)


def read_last_line(folder: Path) -> dict[str, Any]:
    """The newest line of metrics.jsonl; step 0 if there is none."""
    try:
        return json.loads((folder / "metrics.jsonl").read_bytes().splitlines()[-1])
    except (OSError, ValueError, IndexError):  # no file, no line, or one that is being written
        return {"step": 0, "time": 0.0}


def find_ranks(launcher: subprocess.Popen) -> list[int]:
    """The processes of the ranks of a launch."""
    return [*map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split())]


def kill_a_rank(launcher: subprocess.Popen, out: Path, generator: random.Random) -> dict[str, Any]:
    """Waits until a random step of the present start, kills a random rank, and waits for the next step."""
    folder, log = out / "drill", out / "drill.log"
    begun = read_last_line(folder)["step"]
    goal = begun + generator.randrange(STEPS_A_KILL)
    wait_for(launcher, lambda: read_last_line(folder)["step"] >= goal, f"step {goal}")
    ranks = find_ranks(launcher)
    victim, starts = generator.randrange(len(ranks)), len(re.findall("resumed from", log.read_text()))
    before, killed = read_last_line(folder)["step"], time.time()
    os.kill(ranks[victim], signal.SIGKILL)
    before = max(before, read_last_line(folder)["step"])
    wait_for(launcher, lambda: len(re.findall("resumed from", log.read_text())) > starts, "second start")
    loaded = time.time()
    wait_for(launcher, lambda: read_last_line(folder)["time"] > killed + 0.5, "next step")
    found = re.findall(r"resumed from (\S+) at step (\d+)", log.read_text())[-1]
    last = read_last_line(folder)
    return {
        "step": before,
        "rank": victim,
        "resumed": int(found[1]),
        "from": "disk" if "/checkpoints/" in found[0] else "memory",
        "steps_lost": before - int(found[1]),
        "seconds_to_loaded": round(loaded - killed, 2),
        "seconds_to_next_step": round(last["time"] - killed, 2),
    }


def main(arguments: list[str]) -> int:
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    options = {"kills": 20, "processes": 2, "every": 5, "seed": 0}
    own = [argument for argument in arguments[1:] if argument.partition("=")[0] in options]
    options |= {name: int(value) for name, _, value in (argument.partition("=") for argument in own)}
    kills, processes = options["kills"], options["processes"]
    settings = [argument for argument in arguments[1:] if argument not in own] or ["+config=debug"]
    settings += [f"run.steps={kills * STEPS_A_KILL + 10}", "logging.every=1", "logging.console=plain"]
    settings += ["run.deterministic=true", "checkpoint.at_end=false", "logging.report=false"]
    generator, results = random.Random(options["seed"]), []
    calm = start_run(out, "calm", processes, 0, settings)
    if calm.wait() != 0:
        print((out / "calm.log").read_text()[-3000:])
        return 1
    launcher = start_run(out, "drill", processes, kills, [*settings, f"checkpoint.peer_every={options['every']}"])
    try:
        with open(out / "drill.jsonl", "w") as file:
            wait_for(launcher, lambda: read_last_line(out / "drill")["step"] >= options["every"] + 2, "first steps")
            for _ in range(kills):
                results.append(kill_a_rank(launcher, out, generator))
                print(line := json.dumps(results[-1]), flush=True)
                file.write(line + "\n")
                file.flush()
        code = launcher.wait()
    finally:
        launcher.terminate()
        (out / "summary.json").write_text(json.dumps(results))
    lines = {name: metrics.read_metrics(out / name) for name in ("drill", "calm")}
    drill, undisturbed = ({line["step"]: line["loss"] for line in lines[name]} for name in ("drill", "calm"))
    error = max(abs(drill[step] - loss) / abs(loss) for step, loss in undisturbed.items() if step in drill)
    step_seconds = {name: statistics.median(line["step_seconds"] for line in some) for name, some in lines.items()}
    seconds = [result["seconds_to_next_step"] for result in results]
    summary = {
        "kills": kills,
        "code": code,
        "median_seconds": statistics.median(seconds),
        "most_seconds": max(seconds),
        "most_steps_lost": max(result["steps_lost"] for result in results),
        "largest_loss_error": error,
        "missing_steps": len(undisturbed.keys() - drill.keys()),
        "median_step_seconds": step_seconds,
        "waits_a_step": statistics.mean(line.get("checkpoint_seconds") or 0.0 for line in lines["drill"]),
        "seed": options["seed"],
    }
    print(json.dumps(summary), flush=True)
    (out / "summary.json").write_text(json.dumps(summary))
    lost = any(result["from"] != "memory" or result["steps_lost"] > 2 * options["every"] for result in results)
    return int(code != 0 or lost or error > 1e-5 or summary["missing_steps"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
