"""Products in fp8 beside bf16, on all GPUs of this machine: Llama-3 8B's matrices alone, whole steps, and the loss.

    python bench/fp8.py OUT_FOLDER [products] [steps] [loss] [rounds=1] [depth=8] [seeds=3] [first=0] [sequences=32] \
        [text=GLOB]

products, on one GPU: each matrix of a layer under 8,192 tokens, its three products, with their casts compiled and each
without its casts. steps: the step of Llama-3 8B under ZeRO-3, cut to `depth` layers (32 needs two GPUs or more), bf16
and each recipe in turn. loss: 1,000 steps of a 97M model by recipe and seed, beside bf16 with the same seeds; those of
one seed run at the same time; `first` leaves out seeds. It reads the default corpus several times over, or the UTF-8
files of `text`. Lines go to OUT_FOLDER/fp8.jsonl, tables to the terminal."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compare import ROOT, launch, ours
from elapsed import elapsed
from torch import Tensor

from trainer.model.compiled import compiled
from trainer.observe import metrics
from trainer.precision.float8 import E4M3, Float8, quantise, scaled_product
from trainer.precision.products import Role, matmul

TOKENS = 8192
MATRICES = {"q, o": (4096, 4096), "k, v": (1024, 4096), "gate, up": (14336, 4096), "down": (4096, 14336)}
LLAMA = "configs/model/llama3_8b.yaml"
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
CASES = {"bf16": []} | {name: [f"precision.float8.recipe={name}"] for name in RECIPES}
LAST = 50
"""Steps over which the loss of training is averaged."""
MODEL = "width=768 depth=12 attention.heads=12 feed_forward.width=2048".split()


def products(out: Path, given: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Milliseconds and TFLOP/s of the three products of each matrix."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    for name, (outputs, inputs) in MATRICES.items():
        x, weight, gradient = random(TOKENS, inputs), random(outputs, inputs), random(TOKENS, outputs)
        factors = {
            Role.OUTPUT: (x, weight),
            Role.INPUT_GRADIENT: (gradient, weight),
            Role.WEIGHT_GRADIENT: (gradient, x),
        }
        for kind in ("bf16", *RECIPES):
            multiply = matmul if kind == "bf16" else Float8(kind)
            line: dict[str, Any] = {"matrix": name, "kind": kind}
            for role, pair in factors.items():
                whole = compiled(lambda *pair, role=role, multiply=multiply: multiply(*pair, role))
                taken = milliseconds(lambda whole=whole, pair=pair: whole(*pair))
                line[role.name] = [round(taken, 3), round(2 * TOKENS * outputs * inputs / taken / 1e9)]
                if kind in RECIPES[:2]:
                    line[f"{role.name} alone"] = round(milliseconds(alone(role, outputs, inputs, kind)), 3)
            yield line


def alone(role: Role, outputs: int, inputs: int, recipe: str) -> Callable[[], Tensor]:
    """A product without its casts."""
    m, k, n = {
        Role.OUTPUT: (TOKENS, inputs, outputs),
        Role.INPUT_GRADIENT: (TOKENS, outputs, inputs),
        Role.WEIGHT_GRADIENT: (outputs, TOKENS, inputs),
    }[role]
    (left, back_left), (right, back_right) = (
        quantise(torch.randn(rows, k, device="cuda"), 1, E4M3, recipe != "tensorwise") for rows in (m, n)
    )
    fast = role is Role.OUTPUT
    return lambda: scaled_product(left, right, (back_left, back_right), torch.bfloat16, fast)


def milliseconds(work: Callable[[], object], repeats: int = 12) -> float:
    """Median time on the device."""
    times = []
    for _ in range(repeats + 3):
        times.append(elapsed(work))
    return statistics.median(times[3:])


def steps(out: Path, given: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Tokens a second and GPU, and GiB, of each case in turn."""
    common = [f"depth={given['depth']}", "activation.mode=selective"]
    for number in range(int(given["rounds"])):
        for case, settings in CASES.items():
            yield {"case": case} | ours(f"{case}-{number}", out, LLAMA, 8192, 1, common + settings)


def loss(out: Path, given: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Losses of each case and seed: of held-out text, and the mean of the last steps."""
    corpus = ["data=text", f"data.sources.text.path='{given['text']}'", "data.on_error=skip"] if given["text"] else []
    common = ["run.name=fp8", "run.steps=1000", "eval.every=1000", "eval.sequences=512", "checkpoint=never"]
    common += ["logging.console=plain", "lr.peak=6e-4", "lr.warmup=100", "precision.float8.ends=1", *corpus]
    common += [f"batch.global_size={given['sequences']}", *(f"model.{text}" for text in MODEL)]

    def run(case: str, seed: int) -> dict[str, Any]:
        folder = out / f"loss-{case}-{seed}"
        words = [*common, f"run.dir={folder}", f"run.seed={seed}", *CASES[case]]
        launch(folder.name, out, ["-m", "trainer", "+config=llama_60m", *words], ROOT)
        lines = metrics.read(folder) if folder.exists() else []
        evaluated = [line["eval_loss"] for line in lines if "eval_loss" in line]
        trained = [line["loss"] for line in lines if line.get("loss") is not None]
        found = {"eval_loss": evaluated[-1] if evaluated else None, "steps": len(trained)}
        return {"case": case, "seed": seed} | found | {"train_loss": statistics.mean(trained[-LAST:] or [math.nan])}

    with ThreadPoolExecutor(len(CASES)) as pool:
        for seed in range(int(given["first"]), int(given["seeds"])):
            yield from pool.map(partial(run, seed=seed), CASES)


def report(name: str, lines: list[dict[str, Any]]) -> None:
    """What is compared, case by case."""
    for key in {"steps": ["tokens"], "loss": ["eval_loss", "train_loss"]}.get(name, []):
        values: dict[str, list[float]] = defaultdict(list)
        for line in lines:
            if line.get(key) is not None:
                values[line["case"]].append(line[key])
        for case, some in values.items():
            if name == "steps":
                ratio = statistics.median(some) / statistics.median(values["bf16"])
                print(f"| {case} | {statistics.median(some):,.0f} tokens/s a GPU | {ratio:.3f} |")
            elif len(some) == len(values["bf16"]):
                differences = [mine - base for mine, base in zip(some, values["bf16"])]
                texts = " | ".join(f"{value:.4f}" for value in some)
                print(f"| {key} | {case} | {texts} | {statistics.mean(differences):+.4f} |")
        if name == "loss" and len(values["bf16"]) > 1:
            print(f"standard deviation of bf16's {key} over seeds: {statistics.stdev(values['bf16']):.4f}")


def main(arguments: list[str]) -> None:
    own = {"rounds": "1", "depth": "8", "seeds": "3", "first": "0", "sequences": "32", "text": ""}
    given = own | dict(text.split("=", 1) for text in arguments if "=" in text)
    out, *wanted = (text for text in arguments if "=" not in text)
    folder, parts = Path(out).absolute(), {"products": products, "steps": steps, "loss": loss}
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "fp8.jsonl", "a") as file:
        for name in wanted or parts:
            lines = []
            for line in parts[name](folder, given):
                lines.append(line)
                for where in (sys.stdout, file):
                    print(json.dumps({"part": name} | line), file=where, flush=True)
            report(name, lines)


if __name__ == "__main__":
    main(sys.argv[1:])
