"""Training beside torchtitan, and beside transformers under DeepSpeed's ZeRO-3 or FSDP2, on all GPUs of this machine:
in turn, one row a model and plan, each side under the same plan and recompute, and under the best found for it.

    python bench/compare.py OUT_FOLDER [rounds=1] [sides=ours,torchtitan,transformers] [depth=16] [ROW...]

depth: layers, where GPUs have no room for all of them.

torchtitan (0.2.2 with torch 2.11) has to be importable for the rows that have it; its corpus and tokenizer are made
from the standard library. All sides have the same model. Ours and DeepSpeed's read the loss after every step,
torchtitan after every fifth. Of at least 20 steps the first 10 are dropped, and the median of what is left counts. A
JSON line a measurement goes to OUT_FOLDER/compare.jsonl, a table to OUT_FOLDER/compare.md."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu_check import stop
from specs import read_spec, torchtitan_name

ROOT = Path(__file__).parents[1]
STEPS, DROPPED = 20, 10
LIMIT = float(os.environ.get("LIMIT", 150))
"""Seconds that a measurement may take."""

Settings = list[str]


@dataclass(frozen=True)
class Row:
    """sequences: of a GPU's micro-batch; ours, titan, transformers: settings of each side, of which the fastest count;
    model: of configs/model, and what is changed of it; accumulation: micro-batches of a step."""

    sequences: int
    ours: list[Settings]
    titan: list[Settings]
    transformers: list[Settings] = field(default_factory=list)
    length: int = 8192
    model: str = "llama3_8b"
    changes: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1


NONE, RECOMPUTED = ["--activation_checkpoint.mode", "none"], ["recompute=true"]
FSDP2 = ["engine=fsdp2", "compile=true"]
OPERATIONS = ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option"]
BUDGET = ["--activation_checkpoint.mode", "memory_budget", "--activation_checkpoint.memory_budget"]
SELECTIVE = ["activation.mode=selective"]
KEPT = [*SELECTIVE, "activation.save=[attention,matmul]"]
WITHOUT = ["activation.mode=none"]
RECORDED = [*WITHOUT, "run.cuda_graphs=true"]
COPIED = "parallel.zero.collectives=copy_engine"
GATHERED = ["parallel.zero.stage=2", "activation.tile=0", "loss.tile=0", "activation.offload=false"]
THEIRS = ["--parallelism.fsdp_reshard_after_forward", "never"]
"""Parameters that stay after they were gathered."""
DECIDED = ["activation.mode=auto", "parallel.zero.stage=2", COPIED]
"""The fastest recompute that fits beside gathered parameters."""
FP8 = ["precision.float8.recipe=tensorwise", "precision.float8.ends=0"]
FP8_PEER = (
    "--model.converters quantize.linear.float8 --quantize.linear.float8.enable_fsdp_float8_all_gather "
    "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp --quantize.linear.float8.filter_fqns output"
).split()
SHARING = ["--parallelism.context_parallel_degree", "2"]
SMALL = {"width": 768, "depth": 12, "attention": {"heads": 12}, "feed_forward": {"width": 2048}, "tied": False}
ROWS = {
    "selective_1": Row(1, [SELECTIVE, [*SELECTIVE, COPIED]], [[*OPERATIONS, "op"]]),
    "selective_2": Row(
        2, [SELECTIVE, [*SELECTIVE, COPIED]], [[*OPERATIONS, "op"]], [RECOMPUTED, [*RECOMPUTED, *FSDP2]]
    ),
    "none_1": Row(1, [WITHOUT, [*WITHOUT, COPIED]], [NONE]),
    "best_2": Row(
        2, [KEPT, [*KEPT, COPIED]], [[*BUDGET, "0.7"], [*BUDGET, "0.85"], [*OPERATIONS, "2"], [*OPERATIONS, "4"]]
    ),
    "decided_2": Row(2, [DECIDED, [*DECIDED, "parallel.zero.stage=3"]], [[*BUDGET, "0.7", *THEIRS]]),
    "decided_fp8_2": Row(2, [[*DECIDED, *FP8]], [[*BUDGET, "0.7", *THEIRS, *FP8_PEER]]),
    "decided_2x8": Row(2, [DECIDED], [[*BUDGET, "0.7", *THEIRS]], accumulation=8),
    "decided_fp8_2x8": Row(2, [[*DECIDED, *FP8]], [[*BUDGET, "0.7", *THEIRS, *FP8_PEER]], accumulation=8),
    "gathered_2": Row(2, [[*KEPT, COPIED], [*KEPT, COPIED, *GATHERED]], [[*BUDGET, "0.7"], [*BUDGET, "0.7", *THEIRS]]),
    "cp2_32k": Row(
        1,
        [[*SELECTIVE, "parallel.cp=2"], [*KEPT, "parallel.cp=2", COPIED]],
        [[*OPERATIONS, "op", *SHARING], [*BUDGET, "0.7", *SHARING]],
        length=32768,
    ),
    "1b": Row(16, [WITHOUT, RECORDED], [NONE], [["recompute=false"]], 2048, "tinyllama_1b"),
    "100m": Row(32, [WITHOUT, RECORDED], [NONE], [["recompute=false"]], 1024, "llama_60m", SMALL),
}


@dataclass(frozen=True)
class Launcher:
    """Starts programs under torchrun on the first GPUs of this machine. out: folder of the logs; gpus: ranks; limit:
    seconds that a program may take. Without GPUs the ranks are processes on the CPUs."""

    out: Path
    gpus: int
    limit: float

    def run(self, name: str, arguments: list[str], folder: Path = ROOT, **variables: str) -> str:
        """Runs a program under torchrun and returns what it printed, which is also in OUT/NAME.log. folder: where it
        runs; variables: of its environment."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus)]
        return self.execute(name, [*command, *arguments], folder, **variables)

    def execute(self, name: str, command: list[str], folder: Path = ROOT, **variables: str) -> str:
        """The same for any command."""
        environment = {"OMP_NUM_THREADS": "8", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | dict(os.environ)
        environment |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **variables}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])
        path, ending = self.out / f"{name}.log", ""
        with open(path, "wb") as log:
            process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
            try:
                if code := process.wait(self.limit):
                    ending = f"\nexit code {code}"
            except subprocess.TimeoutExpired:
                stop(process)
                ending = f"\nstopped after {self.limit:.0f} s"
            log.write(ending.encode())
        return path.read_text(errors="replace")


def ours(
    name: str, launcher: Launcher, model: str | Path, length: int, sequences: int, settings: Settings
) -> dict[str, Any]:
    """model: its file, from the repository's root."""
    shape = [f"model={model}", f"length={length}", f"micro={sequences}", f"warm={DROPPED}", f"steps={STEPS - DROPPED}"]
    common = ["precision.compute=bf16", "parallel.zero.stage=3", "compile=true"]
    return told(launcher.run(name, ["bench/step.py", f"case={name}", *shape, *common, *settings]))


def told(text: str) -> dict[str, Any]:
    """What the line of a step says."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"case"')]
    if not found:
        return {"error": last_error(text)}
    shares = {name: share for name, share in found[0].get("shares", {}).items() if name != "longest_kernels"}
    line = {"tokens": found[0]["tokens_per_second_per_gpu"], "reserved": found[0].get("reserved_gib", 0.0)}
    line |= {key: found[0][key] for key in ("plan", "predicted", "experts") if key in found[0]}
    return line | ({"shares": shares, "without_work": found[0]["without_work"]} if shares else {})


def last_error(text: str) -> str:
    """Why a program ended: the last error that its log names, other than torchrun's, or the log's last line."""
    lines = text.strip().splitlines() or [""]
    if lines[-1].startswith("stopped after"):
        return lines[-1]
    told = (line for line in reversed(lines) if re.search(r"\b\w*(Error|Exception|error): ", line))
    return next((line for line in told if "ChildFailedError" not in line), lines[-1])


def torchtitan(
    name: str, launcher: Launcher, model: Path, length: int, sequences: int, settings: Settings, assets: Path
) -> dict[str, Any]:
    kind = torchtitan_name(read_spec(model))
    arguments = f"""-m torchtitan.train --job.dump_folder {assets}/titan --model.name {kind} --model.flavor spec
        --experimental.custom_import specs --model.hf_assets_path {assets}/tokenizer
        --training.dataset c4_test --training.dataset_path {assets}/corpus --training.seq_len {length}
        --training.local_batch_size {sequences} --training.steps {STEPS} --compile.enable --metrics.log_freq 5
        --metrics.disable_color_printing --lr_scheduler.warmup_steps 2""".split()
    text = launcher.run(name, [*arguments, *settings], assets, TITAN_SPEC=str(model))
    logged = re.findall(r"step: +(\d+) .*?memory: +([\d.]+)GiB.*?tps: +([\d,]+)", text)
    last = max((int(step) for step, *_ in logged), default=0)
    speeds = [float(tokens.replace(",", "")) for step, _, tokens in logged if int(step) > last // 2]
    if not speeds:
        return {"error": last_error(text)}
    return {"tokens": statistics.median(speeds), "reserved": max(float(memory) for _, memory, _ in logged)}


def transformers(
    name: str, launcher: Launcher, model: Path, length: int, sequences: int, settings: Settings
) -> dict[str, Any]:
    shape = [f"model={model}", f"length={length}", f"micro={sequences}", f"warm={DROPPED}", f"steps={STEPS - DROPPED}"]
    variables = {}
    if torch.cuda.is_available():  # DeepSpeed cannot read names such as 9.0a
        variables["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*torch.cuda.get_device_capability())
    return told(launcher.run(name, ["bench/transformers_step.py", *shape, *settings], ROOT, **variables))


def peft(name: str, launcher: Launcher, model: Path, length: int, sequences: int, settings: Settings) -> dict[str, Any]:
    """One process, whatever the launcher has."""
    shape = [f"model={model}", f"length={length}", f"micro={sequences}", f"warm={DROPPED}", f"steps={STEPS - DROPPED}"]
    return told(launcher.execute(name, [sys.executable, "bench/peft_step.py", *shape, *settings], ROOT))


def accumulate(micro_batches: int, sequences: int, gpus: int) -> tuple[Settings, Settings]:
    """Settings of ours and of torchtitan for steps of several micro-batches, of which few are enough to measure.
    sequences: of a GPU's micro-batch."""
    if micro_batches == 1:
        return [], []
    theirs = ["--training.global_batch_size", str(micro_batches * sequences * gpus), "--training.steps", "4"]
    return [f"accumulation={micro_batches}", "warm=1", "steps=2"], [*theirs, "--metrics.log_freq", "1"]


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


def measure(out: Path, rows: list[str], rounds: int, wanted: list[str], depth: int = 0) -> Iterator[dict[str, Any]]:
    """The measurements, the sides in turn."""
    assets = make_assets(out / "assets")
    launcher = Launcher(out, max(1, torch.cuda.device_count()), LIMIT)
    for number in range(rounds):
        for name in rows:
            row, model = ROWS[name], out / f"{name}.yaml"
            spec = read_spec(ROOT / f"configs/model/{row.model}.yaml").to_dict()
            for key, value in row.changes.items():
                spec[key] = spec[key] | value if isinstance(value, dict) else value
            spec["depth"] = depth or spec["depth"]
            model.write_text(yaml.safe_dump(spec))
            own, theirs = accumulate(row.accumulation, row.sequences, launcher.gpus)
            sides: list[tuple[str, Callable[..., dict[str, Any]], list[Settings], Settings]] = [
                ("ours", ours, row.ours, own),
                ("torchtitan", partial(torchtitan, assets=assets), row.titan, theirs),
                ("transformers", transformers, row.transformers, []),
            ]
            for side, run, choices, shared in (one for one in sides if one[0] in wanted):
                for index, settings in enumerate(choices):
                    began, settings = time.monotonic(), [*settings, *shared]
                    found = run(f"{name}-{side}-{index}-{number}", launcher, model, row.length, row.sequences, settings)
                    took = round(time.monotonic() - began)
                    yield {"row": name, "side": side, "settings": settings} | found | {"seconds": took}


def table(lines: list[dict[str, Any]]) -> str:
    """Of each row and side the fastest settings, and how many times as fast ours is."""
    text = "| row | side | settings | tokens/s a GPU | reserved | ours to it |\n|---|---|---|---:|---:|---:|\n"
    for row in dict.fromkeys(line["row"] for line in lines):
        best: dict[str, tuple[float, str, float]] = {}
        for side in dict.fromkeys(line["side"] for line in lines if line["row"] == row):
            runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for line in lines:
                if (line["row"], line["side"]) == (row, side) and "tokens" in line:
                    runs[" ".join(line["settings"])].append(line)
            medians = [
                (statistics.median(line["tokens"] for line in some), name, some[0]["reserved"])
                for name, some in runs.items()
            ]
            best[side] = max(medians, default=(math.nan, "failed", math.nan))
        for side, (speed, name, reserved) in best.items():
            ratio = best["ours"][0] / speed if "ours" in best else math.nan
            text += f"| {row} | {side} | {name} | {speed:,.0f} | {reserved:.1f} GiB | {ratio:.3f} |\n"
    return text


def main(arguments: list[str]) -> None:
    out, given = Path(arguments[0]).absolute(), arguments[1:]
    options = {"rounds": "1", "sides": "ours,torchtitan,transformers", "depth": "0"}
    asked = dict(text.split("=") for text in given if "=" in text)
    assert asked.keys() <= options.keys(), asked
    options |= asked
    rows = [name for name in given if "=" not in name] or list(ROWS)
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    with open(out / "compare.jsonl", "a") as file:
        for line in measure(out, rows, int(options["rounds"]), options["sides"].split(","), int(options["depth"])):
            lines.append(line)
            print(json.dumps(line), flush=True)
            print(json.dumps(line), file=file, flush=True)
            (out / "compare.md").write_text(table(lines))
    print(table(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
