"""The probe's predictions beside runs, and what the machine's counters say during them.

    python bench/probe.py OUT_FOLDER [PLAN...] [+config=llama3_8b] [SETTING=VALUE ...]

Measures all GPUs of this machine at the shapes of the recipe (OUT_FOLDER/hardware.yaml), then trains each plan of
`PLANS` (or those that are named) that the GPUs allow for 12 steps, and prints predicted and measured seconds of a step,
with the shipped file and with the measured one, predicted and measured memory (GiB allocated at the peak of the fullest
GPU), and the metrics `hardware/*` of the last steps. Without GPUs it does the same on two CPU processes with a tiny
model, to try it out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch

from trainer.observe import metrics

PLANS = {
    "zero3": (1, ["parallel=zero3"]),
    "selective": (1, ["parallel=zero3", "activation=selective"]),
    "full": (1, ["parallel=zero3", "activation=full"]),
    "micro4": (1, ["parallel=zero3", "batch.micro_size=4"]),
    "eager": (1, ["parallel=zero3", "compile=false"]),
    "zero2": (2, ["parallel=zero2"]),
    "tp2": (2, ["parallel=tp2"]),
    "pp2": (2, ["parallel=pp2"]),
}
"""The processes that a plan needs, and what it sets."""
BILLION = ["model=tinyllama_1b", "batch.sequence_length=2048", "batch.micro_size=8"]


def torchrun(processes: int, module: str, *words: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    subprocess.run([*launcher, "-m", module, *words], check=True, stdout=sys.stderr)


def predicted(recipe: list[str], processes: int, hardware: str, out: Path) -> tuple[float, float]:
    """Seconds of a step, and GiB."""
    words = [*recipe, f"hardware={hardware}", f"processes={processes}", f"json={out}"]
    subprocess.run([sys.executable, "-m", "trainer", "estimate", *words], check=True, stdout=subprocess.DEVNULL)
    told = json.loads(out.read_text())[0]
    return told["seconds"], max(sum(rank["categories"].values()) for rank in told["ranks"]) / 2**30


def main(arguments: list[str]) -> None:
    out, gpus = Path(arguments[0]), torch.cuda.device_count()
    out.mkdir(parents=True, exist_ok=True)
    processes = gpus or 2
    alone = ["+config=llama_60m", "compile=true", "data.vocab_size=4096", *BILLION]
    small = alone if gpus else ["+config=debug", "run.device=cpu", "batch.micro_size=4"]
    named = [word for word in arguments[1:] if word in PLANS]
    recipe = [word for word in arguments[1:] if word not in PLANS] or (["+config=llama3_8b"] if gpus > 1 else small)
    recipe += ["batch.accumulation=2", "batch.global_size=null", "run.steps=12", "lr.warmup=2"]
    shipped = "cpu" if not gpus else torch.cuda.get_device_name().split()[-1].lower()
    file = out / "hardware.yaml"
    torchrun(processes, "trainer", "probe", *recipe, f"out={file}")
    for plan, (needed, settings) in PLANS.items():
        if processes % needed or named and plan not in named:
            continue
        words, folder = [*recipe, *settings], out / plan
        given = {name: predicted(words, processes, name, out / "estimate.json") for name in (shipped, str(file))}
        run = [f"run.dir={folder}", "checkpoint=never", "logging.console=none", "eval.every=0"]
        try:
            torchrun(processes, "trainer", *words, *run)
        except subprocess.CalledProcessError as error:  # no memory, say
            print(json.dumps({"plan": plan, "exit_code": error.returncode}), flush=True)
            continue
        lines = metrics.read_metrics(folder)[4:]
        took, used = median(line["step_seconds"] for line in lines), max(line["memory_gib"] for line in lines)
        said = {"shipped": given[shipped][0], "probed": given[str(file)][0]}
        errors = {f"{name}_error": round(seconds / took - 1, 4) for name, seconds in said.items()}
        memory = {"gib": used, "predicted_gib": round(given[shipped][1], 2)}
        memory["gib_error"] = round(given[shipped][1] / used - 1, 4)
        seen = {name: value for name, value in lines[-1].items() if name.startswith("hardware/")}
        told = {"plan": plan, "processes": processes, "seconds": took, **said, **errors, **memory, **seen}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
