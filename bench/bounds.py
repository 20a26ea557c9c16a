"""What `trainer.diagnose` says of runs on GPUs that are each slowed down by one cause which is known.

    python bench/bounds.py OUT_FOLDER [CASE...] [SETTING=VALUE ...]

Runs the cases of `CASES` for which there are GPUs, each for 25 steps of which every eighth is profiled, and asks for
what bounds them. A JSON line a case: what was to be told, what was told, with which share of the step, evidence and
override. Settings go to all runs. Without GPUs the cases of one process run on the CPU, to try it out; what they are
told to be is of no meaning there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
LIMIT = 90
"""Seconds that a run may take."""

TERM = "loss.terms.disturbance"
BASE = {
    "imports": "[support.disturbance]",
    "data.tokenizer": "bytes",
    "data.vocab_size": 257,
    "data.sources.stdlib.limit": 400,
    "model.vocab_size": 257,
    "batch.sequence_length": 1024,
    "batch.global_size": "null",
    "batch.accumulation": 2,
    "run.steps": 25,
    "lr.warmup": 2,
    "logging.profile": 8,
    "logging.console": "none",
    "checkpoint": "never",
    "eval.every": 0,
}
SMALL = {
    "model.width": 512,
    "model.attention.heads": 8,
    "model.depth": 4,
    "model.feed_forward.width": 1408,
    "batch.micro_size": 16,
}
LARGE = {"model": "tinyllama_1b", "batch.micro_size": 8}
CASES: dict[str, tuple[str, int, dict[str, object]]] = {
    "compute": ("compute", 1, LARGE),
    "eager": ("memory bandwidth", 1, {**LARGE, "model.width": 512, "batch.micro_size": 64, "compile": "false"}),
    "copies": ("memory bandwidth", 1, {**SMALL, "copies": 20, "elements": 1 << 27}),
    "tiny kernels": ("host", 1, {**SMALL, "batch.micro_size": 1, "compile": "false"}),
    "reads": ("host", 1, {**SMALL, "reads": 60}),
    "data": ("data", 1, {**SMALL, "data.prefetch": 0, "loading": 0.2}),
    "recompute": ("memory capacity", 1, {**LARGE, "activation": "full"}),
    "full memory": ("memory capacity", 1, {**LARGE, "batch.micro_size": 16}),
    "slow link": ("communication", 2, {**LARGE, "model.depth": 8, "parallel": "zero3", "batch.micro_size": 1}),
    "split": ("bubble", 2, {**LARGE, "parallel": "pp2", "parallel.pipeline.split": "[17,5]", "batch.accumulation": 8}),
    "slow rank": ("straggler", 2, {**LARGE, "parallel": "zero2", "products": 4, "size": 8192, "rank": 1}),
}
"""Name: what is to be told, processes, and settings; those without a dot or a group's name are of the disturbance."""
GROUPS = ("model", "parallel", "activation", "compile")
SLOW_LINK = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""NCCL then sends over the machine's own network."""


def train(folder: Path, name: str, settings: dict[str, object], processes: int, more: list[str]) -> str:
    """Runs a case; what it printed if it failed."""
    if name == "full memory":
        total = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 1 << 35
        settings = settings | {"held": int((0.955 * total - 40 * 2**30) / 2**20)}
    plain = {key: value for key, value in settings.items() if "." in key or key in GROUPS}
    disturbed = {f"{TERM}.{key}": value for key, value in settings.items() if key not in plain}
    words = [f"{key}={value}" for key, value in {**BASE, **plain, **disturbed, "run.dir": folder}.items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | (SLOW_LINK if name == "slow link" else {})
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [*launcher, "-m", "trainer", "+config=llama_60m", *words, *more]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT} s"
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]


def main(arguments: list[str]) -> None:
    out, given = Path(arguments[0]), arguments[1:]
    more = [word for word in given if "=" in word]
    names = [word for word in given if "=" not in word] or list(CASES)
    for name in names:
        kind, processes, settings = CASES[name]
        if processes > max(1, torch.cuda.device_count()):
            continue
        folder = out / name.replace(" ", "_")
        failed = train(folder, name, settings, processes, more)
        if failed:
            print(json.dumps({"case": name, "expected": kind, "failed": failed}), flush=True)
            continue
        asked = [sys.executable, "-m", "trainer.diagnose", str(folder)]
        (folder / "diagnosis.txt").write_text(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
        said = json.loads((folder / "diagnosis.json").read_text())
        first = said["findings"][0] if said["findings"] else {}
        told = {key: first.get(key) for key in ("kind", "detail", "share", "evidence", "overrides")}
        print(json.dumps({"case": name, "right": told["kind"] == kind, "expected": kind} | told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
