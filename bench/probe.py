"""The probe's predictions beside runs, and what the machine's counters say during them.

    python bench/probe.py OUT_FOLDER [+config=llama3_8b] [SETTING=VALUE ...]

Measures all GPUs of this machine at the shapes of the recipe (OUT_FOLDER/hardware.yaml), then trains each plan of
`PLANS` that the GPUs allow for 12 steps, and prints predicted and measured seconds of a step, with the shipped file and
with the measured one, and the metrics `hardware/*` of the last steps. Without GPUs it does the same on two CPU
processes with a tiny model, to try it out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch

from trainer.observe import metrics

PLANS = {"zero2": 1, "zero3": 1, "tp2": 2, "pp2": 2}
"""Files of the group parallel, and the processes that they need."""


def torchrun(processes: int, module: str, *words: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    subprocess.run([*launcher, "-m", module, *words], check=True, stdout=sys.stderr)


def predicted(recipe: list[str], processes: int, hardware: str, out: Path) -> float:
    words = [*recipe, f"hardware={hardware}", f"processes={processes}", f"json={out}"]
    subprocess.run([sys.executable, "-m", "trainer.estimate", *words], check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())[0]["seconds"]


def main(arguments: list[str]) -> None:
    out, gpus = Path(arguments[0]), torch.cuda.device_count()
    out.mkdir(parents=True, exist_ok=True)
    processes = gpus or 2
    small = ["+config=llama_60m", "precision=bf16", "compile=true"] if gpus else ["+config=debug", "run.device=cpu"]
    recipe = arguments[1:] or (["+config=llama3_8b"] if gpus > 1 else [*small, "batch.micro_size=4"])
    recipe += ["batch.accumulation=2", "batch.global_size=null"]
    shipped = "cpu" if not gpus else torch.cuda.get_device_name().split()[-1].lower()
    file = out / "hardware.yaml"
    torchrun(processes, "trainer.probe", *recipe, f"out={file}")
    for plan, needed in PLANS.items():
        if processes % needed:
            continue
        words, folder = [*recipe, f"parallel={plan}"], out / plan
        given = {name: predicted(words, processes, name, out / "estimate.json") for name in (shipped, str(file))}
        run = [f"run.dir={folder}", "run.steps=12", "checkpoint=never", "logging.console=none"]
        try:
            torchrun(processes, "trainer", *words, *run)
        except subprocess.CalledProcessError as error:  # no memory, say
            print(json.dumps({"plan": plan, "exit_code": error.returncode}), flush=True)
            continue
        lines = metrics.read(folder)[4:]
        took = median(line["step_seconds"] for line in lines)
        said = {"shipped": given[shipped], "probed": given[str(file)]}
        errors = {f"{name}_error": round(seconds / took - 1, 4) for name, seconds in said.items()}
        seen = {name: value for name, value in lines[-1].items() if name.startswith("hardware/")}
        print(json.dumps({"plan": plan, "processes": processes, "seconds": took, **said, **errors, **seen}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
