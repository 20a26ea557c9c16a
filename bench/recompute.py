"""Llama-3 8B on all GPUs of this machine under `activation.mode=auto` and under every uniform mode, in turn.

    python bench/recompute.py OUT_FOLDER [sequences=2] [rounds=1] [MODE...]

ZeRO-3, compiled, sequences of 8192. Of 14 steps the first 6 are dropped, and the median of the others counts. A JSON
line a measurement goes to OUT_FOLDER/recompute.jsonl, a table to OUT_FOLDER/recompute.md: speed and reserved memory as
measured, the allocator's retries, and both as the estimate has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.config.compose import CONFIGS
from trainer.planning.estimate.hardware import load_hardware
from trainer.planning.estimate.step import GIB, Estimate, estimate
from trainer.planning.resolve import resolve
from trainer.planning.variants import compose

ROOT, LENGTH = Path(__file__).parents[1], 8192
MODES = {
    "auto": ["activation.mode=auto"],
    "none": ["activation.mode=none"],
    "products": ["activation.mode=selective", "activation.save=[attention,matmul]"],
    "half": ["activation.mode=selective", "activation.save=[attention,matmul/2]"],
    "attention": ["activation.mode=selective", "activation.save=[attention]"],
    "full": ["activation.mode=full"],
}


def measure(name: str, sequences: int, gpus: int, out: Path) -> dict[str, Any]:
    """What bench/step.py says of a mode, or how it failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    arguments = ["bench/step.py", f"case={name}", f"model={CONFIGS}/model/llama3_8b.yaml", f"length={LENGTH}"]
    arguments += [f"micro={sequences}", "warm=6", "steps=8", "precision.compute=bf16", "parallel.zero.stage=3"]
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "8",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [*command, *arguments, "compile=true", *MODES[name]],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        errors="replace",
    )
    (out / f"{name}.log").write_text(done.stdout + done.stderr)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return found[0] if found else {"case": name, "error": done.stderr.strip().splitlines()[-1:]}


def predicted(name: str, sequences: int, gpus: int) -> Estimate:
    overrides = ["+config=llama3_8b", f"batch.micro_size={sequences}", "activation.save=[attention,matmul/2]"]
    config: Config = compose([*overrides, *MODES[name]], None, gpus, corpus=False)
    return estimate(config, resolve(config, gpus, config.model, gpus), load_hardware("h200"))


def main(arguments: list[str]) -> None:
    out, given = Path(arguments[0]).absolute(), dict(text.split("=", 1) for text in arguments[1:] if "=" in text)
    names = [text for text in arguments[1:] if "=" not in text] or list(MODES)
    gpus = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())
    sequences = int(given.get("sequences", 2))
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        "| recompute | tokens/s per GPU | reserved | retries | predicted | reserved |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in names * int(given.get("rounds", 1)):
        found, foreseen = measure(name, sequences, gpus, out), predicted(name, sequences, gpus)
        print(json.dumps(found), flush=True)
        with open(out / "recompute.jsonl", "a") as file:
            file.write(json.dumps(found) + "\n")
        measured = [
            f"{found[key]:,}" for key in ("tokens_per_second_per_gpu", "reserved_gib", "retries") if key in found
        ]
        speed, reserved = foreseen.tokens_per_second / gpus, foreseen.fullest.reserved / GIB
        cells = [name, *(measured or [str(found.get("error")), "", ""]), f"{speed:,.0f}", f"{reserved:.1f}"]
        rows.append("| " + " | ".join(cells) + " |")
        (out / "recompute.md").write_text("\n".join(rows) + "\n")
    print("\n".join(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
