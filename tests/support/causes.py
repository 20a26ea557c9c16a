"""Runs that nothing slows down but themselves, or two causes at once, by the kind that bounds them. What their steps
took is recorded in fixtures/accounts.jsonl.xz: `python -m support.causes FOLDER`, after `workers/bounds.py FOLDER
recorded` on two quiet cores, writes it anew."""

from __future__ import annotations

import json
import lzma
import random
import sys
from dataclasses import replace
from pathlib import Path

from trainer.diagnosis.time_breakdown import TimeBreakdown, read_breakdowns

RECORDED = Path(__file__).parents[1] / "fixtures" / "accounts.jsonl.xz"

STEPS = 6
"""Of each recorded run; all but the first are profiled."""

WIDE = {"model.width": 448, "model.feed_forward.width": 1792, "model.depth": 2, "batch.sequence_length": 256}
LARGE = {**WIDE, "batch.global_size": 16}
PIPELINE = {**WIDE, "parallel.pp": 2, "batch.micro_size": 1, "model.depth": 4, "parallel.pipeline.split": "[2,2]"}
NO_PREFETCH = {"data.prefetch": 0}

CAUSES: dict[str, tuple[str, dict[str, object]]] = {
    # Nothing but the model and its plan.
    "wide": ("compute", WIDE),
    "wider": ("compute", {**WIDE, "model.width": 576, "model.feed_forward.width": 2304}),
    "deeper": ("compute", {**WIDE, "model.depth": 3}),
    "long": ("compute", {**WIDE, "batch.sequence_length": 512}),
    "accumulated": ("compute", {**LARGE, "batch.micro_size": 2}),
    "zero1": ("compute", {**LARGE, "parallel.zero.stage": 1}),
    "zero2": ("compute", {**LARGE, "parallel.zero.stage": 2, "batch.micro_size": 8}),
    "lion": ("compute", {**LARGE, "optimizer": "lion"}),
    "average": ("compute", {**LARGE, "optimizer.ema.decay": 0.99}),
    "pipeline of many micro-batches": ("compute", {**PIPELINE, "batch.global_size": 16}),
    "pipeline of few micro-batches": ("bubble", {**PIPELINE, "batch.global_size": 4}),
    "recompute": ("memory capacity", {**LARGE, "activation": "full"}),
    # Two causes, the larger of which is to be named.
    "loader and sleep": ("data", {**NO_PREFETCH, "loading": 0.6, "sleep": 0.25}),
    "sleep and loader": ("host", {**NO_PREFETCH, "loading": 0.25, "sleep": 0.6}),
    "loader and wide": ("data", {**WIDE, **NO_PREFETCH, "loading": 0.4}),
    "loader and copies": ("data", {**NO_PREFETCH, "loading": 0.8, "copies": 60}),
    "copies and loader": ("memory bandwidth", {**NO_PREFETCH, "loading": 0.05, "copies": 1000}),
    "straggler and loader": ("straggler", {**NO_PREFETCH, "loading": 0.05, "products": 200, "rank": 1}),
    "loader and straggler": ("data", {**NO_PREFETCH, "loading": 0.8, "products": 60, "rank": 1}),
    "unbalanced and loader": (
        "bubble",
        {**PIPELINE, **NO_PREFETCH, "parallel.pipeline.split": "[3,1]", "batch.global_size": 16, "loading": 0.1},
    ),
}
"""Name -> what bounds the run, and its settings as in workers/bounds.py."""

LAUNCHED = ("loader and sleep", "sleep and loader")
"""Those that are run again by each test run, beside the eight causes."""


def folder(root: Path, name: str) -> Path:
    return root / name.replace(" ", "_")


def recorded() -> dict[str, list[TimeBreakdown]]:
    """The accounts of each run."""
    lines = map(json.loads, lzma.decompress(RECORDED.read_bytes()).splitlines())
    return {line["name"]: [TimeBreakdown.loads(json.dumps(one)) for one in line["accounts"]] for line in lines}


def resampled(accounts: list[TimeBreakdown], draw: random.Random, steps: int, noise: float) -> list[TimeBreakdown]:
    """Another run of the same kind: of its steps some at random, each of which may come again, and in each term of a
    rank a factor of its own."""
    numbers, found = sorted({one.step for one in accounts}), []
    for new, old in enumerate(draw.choices(numbers, k=steps), start=2):
        for one in (one for one in accounts if one.step == old):
            terms = {name: seconds * draw.lognormvariate(0, noise) for name, seconds in one.terms.items()}
            found.append(replace(one, step=new, terms=terms, seconds=sum(terms.values())))
    return found


def main(root: Path) -> None:
    lines = []
    for name in CAUSES:
        kept = [json.loads(replace(one, kernels=()).dumps()) for one in read_breakdowns(folder(root, name))]
        lines.append(json.dumps({"name": name, "accounts": kept}))
    RECORDED.write_bytes(lzma.compress("".join(line + "\n" for line in lines).encode(), preset=9))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
