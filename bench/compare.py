"""Llama-3 8B beside torchtitan on all GPUs of this machine, in turn: one row a plan, ours and theirs under the same
plan and recompute, and each under the best recompute that was found for it.

    python bench/compare.py OUT_FOLDER [rounds=1] [ROW...]

torchtitan (0.2.2 with torch 2.11) has to be importable; its corpus and tokenizer are made from the standard library.
Both sides read the loss only as often as they log: ours after every step, torchtitan after every fifth. Of at least 20
steps the first 10 are dropped, and the median of what is left counts. A JSON line a measurement goes to
OUT_FOLDER/compare.jsonl, a table to OUT_FOLDER/compare.md."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
LENGTH, STEPS, DROPPED = 8192, 20, 10
LIMIT = float(os.environ.get("LIMIT", 150))
"""Seconds that a measurement may take."""

OPERATIONS = ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option"]
BUDGET = ["--activation_checkpoint.mode", "memory_budget", "--activation_checkpoint.memory_budget"]
ROWS: dict[str, tuple[int, list[str], list[list[str]]]] = {
    "selective_1": (1, ["activation.mode=selective"], [[*OPERATIONS, "op"]]),
    "selective_2": (2, ["activation.mode=selective"], [[*OPERATIONS, "op"]]),
    "none_1": (1, ["activation.mode=none"], [["--activation_checkpoint.mode", "none"]]),
    "best_2": (
        2,
        ["activation.mode=selective", "activation.save=[attention,matmul]"],
        [[*BUDGET, "0.7"], [*BUDGET, "0.85"], [*OPERATIONS, "2"], [*OPERATIONS, "4"]],
    ),
}
"""Row: sequences a GPU, our settings, and theirs, of which the fastest counts."""


def launch(name: str, out: Path, arguments: list[str], folder: Path) -> str:
    """What a torchrun over all GPUs printed; also in OUT/NAME.log."""
    gpus = max(1, torch.cuda.device_count())
    environment = {**os.environ, "OMP_NUM_THREADS": "8", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    process = subprocess.Popen(
        [*command, *arguments],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text = process.communicate()[0] + f"\nstopped after {LIMIT:.0f} s"
    (out / f"{name}.log").write_text(text)
    return text


def ours(name: str, out: Path, sequences: int, settings: list[str]) -> dict[str, Any]:
    text = launch(
        name,
        out,
        [
            "bench/step.py",
            f"case={name}",
            "model=configs/model/llama3_8b.yaml",
            f"length={LENGTH}",
            f"micro={sequences}",
            f"warm={DROPPED}",
            f"steps={STEPS - DROPPED}",
            "precision.compute=bf16",
            "parallel.zero.stage=3",
            "compile=true",
            *settings,
        ],
        ROOT,
    )
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"case"')]
    if not found:
        return {"error": text.strip().splitlines()[-1:]}
    return {
        "tokens": found[0]["tokens_per_second_per_gpu"],
        "reserved": found[0]["reserved_gib"],
        "shares": {k: v for k, v in found[0]["shares"].items() if k != "longest_kernels"},
    }


def theirs(name: str, out: Path, sequences: int, settings: list[str], assets: Path) -> dict[str, Any]:
    arguments = f"""-m torchtitan.train --job.dump_folder {out}/titan --model.name llama3 --model.flavor 8B
        --model.hf_assets_path {assets}/tokenizer --training.dataset c4_test --training.dataset_path {assets}/corpus
        --training.seq_len {LENGTH} --training.local_batch_size {sequences} --training.steps {STEPS}
        --compile.enable --metrics.log_freq 5 --metrics.disable_color_printing --lr_scheduler.warmup_steps 2""".split()
    text = launch(name, out, [*arguments, *settings], out)
    logged = re.findall(r"step: +(\d+) .*?memory: +([\d.]+)GiB.*?tps: +([\d,]+)", text)
    speeds = [float(tokens.replace(",", "")) for step, _, tokens in logged if int(step) > DROPPED]
    if not speeds:
        return {"error": text.strip().splitlines()[-1:]}
    return {"tokens": statistics.median(speeds), "reserved": max(float(memory) for _, memory, _ in logged)}


def make_assets(folder: Path) -> Path:
    """A tokenizer of bytes in 4,096 merges, and a corpus in JSON Lines, from the standard library's sources."""
    from tokenizers import ByteLevelBPETokenizer

    sources = [path for path in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py") if "site-packages" not in str(path)]
    texts = [text for path in sources if len(text := path.read_text(errors="ignore")) > 500]
    ends = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=4096, special_tokens=list(ends.values()))
    for name in ("tokenizer", "corpus"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text(
        json.dumps(ends | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (folder / "corpus/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def measure(out: Path, rows: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """The measurements, ours and theirs in turn."""
    assets = make_assets(out / "assets")
    for number in range(rounds):
        for row in rows:
            sequences, mine, others = ROWS[row]
            for index, settings in enumerate([None, *others]):
                began, name = time.monotonic(), f"{row}-{index}-{number}"
                if settings is None:
                    found = ours(name, out, sequences, mine)
                else:
                    found = theirs(name, out, sequences, settings, assets)
                took = round(time.monotonic() - began)
                yield (
                    {"row": row, "side": "theirs" if settings else "ours", "settings": settings or mine}
                    | found
                    | {"seconds": took}
                )


def table(lines: list[dict[str, Any]]) -> str:
    text = "| plan | torchtitan: tokens/s, reserved | trainer: tokens/s, reserved | ratio |\n|---|---:|---:|---:|\n"
    for row in dict.fromkeys(line["row"] for line in lines):
        cells, speeds = [], []
        for side in ("theirs", "ours"):
            runs: dict[str, list[dict[str, Any]]] = {}
            for line in lines:
                if line["row"] == row and line["side"] == side and "tokens" in line:
                    runs.setdefault(" ".join(line["settings"]), []).append(line)
            medians = {name: statistics.median(line["tokens"] for line in some) for name, some in runs.items()}
            best = max(medians, key=lambda name: medians[name], default="")
            speeds.append(medians.get(best, float("nan")))
            reserved = runs[best][0]["reserved"] if runs else float("nan")
            cells.append(f"{speeds[-1]:,.0f}, {reserved:.1f} GiB ({best.split('.')[-1]})")
        text += f"| {row} | {cells[0]} | {cells[1]} | {speeds[1] / speeds[0]:.3f} |\n"
    return text


def main(arguments: list[str]) -> None:
    out, given = Path(arguments[0]).absolute(), arguments[1:]
    rounds = next((int(text.split("=")[1]) for text in given if text.startswith("rounds=")), 1)
    rows = [name for name in given if "=" not in name] or list(ROWS)
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    with open(out / "compare.jsonl", "a") as file:
        for line in measure(out, rows, rounds):
            lines.append(line)
            print(json.dumps(line), flush=True)
            print(json.dumps(line), file=file, flush=True)
            (out / "compare.md").write_text(table(lines))
    print(table(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
