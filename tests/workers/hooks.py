"""Runs of two ranks with hooks of every kind: those of examples/, and a callback that notes what it sees."""

from __future__ import annotations

import json
import sqlite3
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from support.checkpoints import read_tensors
from support.launch import fork, leave

import trainer
from trainer import option, register
from trainer.commands.parity import main as compare_plans
from trainer.config import ConfigError
from trainer.distributed.mesh import join_world
from trainer.planning.features import resolve_plan
from trainer.training.hooks import HookFailed

SEEN: list[list] = []


@dataclass
class Asking:
    """A rank's wishes: after which step it asks."""

    rank: int = option(1, "which rank asks")
    save: int = option(0, "step")
    evaluate: int = option(0, "step")
    finish: int = option(0, "step")
    fail: int = option(0, "step after which every rank fails")


@register.callback("asking", Asking)
class AskingCallback:
    def __init__(self, settings):
        self.settings, self.starts = settings, 0

    def note(self, event, run):
        SEEN.append([event, run.step, run.tokens, run.metrics.get("step"), run.metrics.get("loss")])

    def start(self, run):
        self.starts += 1
        SEEN.append(["start", run.step, self.starts])

    def step(self, run):
        self.note("step", run)
        total = sum(norm.square() for norm in run.gradient_norms.values()).sqrt().item()
        SEEN.append(["norm", total, run.metrics["grad_norm"]])
        for ask in ("save", "evaluate", "finish"):
            if getattr(self.settings, ask) == run.step and run.rank == self.settings.rank:
                getattr(run, ask)()
        if self.settings.fail == run.step:
            raise KeyError("out of luck")

    def evaluation(self, run):
        SEEN.append(["evaluation", run.step, run.metrics["eval_loss"]])

    def save(self, run):
        SEEN.append(["save", run.step, run.checkpoint.name])

    def end(self, run):
        self.note("end", run)

    def state_dict(self):
        return {"starts": self.starts}

    def load_state_dict(self, state):
        self.starts = state["starts"]


def parity(folder: Path, plans: str, *more: str) -> dict:
    """The verdict of each plan beside one plain process."""
    common = ["+config=debug", "run.device=cpu", "data.tokenizer=bytes", f"data.cache={folder}/cache"]
    small = ["data.sources.stdlib.limit=40", "batch.sequence_length=32", "batch.global_size=8", "batch.micro_size=1"]
    model = ["model.width=32", "model.depth=2", "model.vocab_size=257", "data.vocab_size=257", "steps=2"]
    code = compare_plans([*common, *small, *model, *more, f"plans={plans}", f"json={folder}/parity.json"])
    if code == 2:
        return {"code": code}
    plans = json.loads((folder / "parity.json").read_text())["plans"]
    return {"code": code, "verdicts": {plan["plan"]: [plan["verdict"], *plan["reasons"]] for plan in plans}}


def run(folder: Path, *more: str, **overrides: object) -> dict:
    values = {
        "model": "tiny",
        "data.tokenizer": "bytes",
        "data.cache": folder.parent / "cache",
        "data.sources.stdlib.limit": 40,
        "batch.sequence_length": 32,
        "batch.global_size": 4,
        "model.width": 32,
        "model.depth": 2,
        "model.vocab_size": 257,
        "data.vocab_size": 257,
        "run.steps": 8,
        "lr.warmup": 2,
        "run.dir": folder,
        "run.device": "cpu",
        "logging.console": "none",
        **overrides,
    }
    SEEN.clear()
    answer: dict = {"error": None, "code": None}
    try:
        config = trainer.compose([*(f"{name}={value}" for name, value in values.items()), *more])
        answer["code"] = trainer.run(config).code
    except (ConfigError, HookFailed) as error:
        answer["error"] = str(error)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(SEEN))
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return answer | {"seen": everyone, "lines": lines}


def scenarios(root: Path):
    """Name -> result."""
    measured = {
        "imports": "[examples.weight_norm,examples.csv_file]",
        "logging.metrics.weight_norm": "{}",
        "logging.sinks.csv_file.keys": "[step,loss]",
        "checkpoint.every": 4,
        "checkpoint.keep_last": 0,
        "eval.sequences": 4,
    }
    asks = {"callbacks.asking.save": 2, "callbacks.asking.evaluate": 3, "callbacks.asking.finish": 6}
    for plan in ("zero3", "tp2"):
        folder = root / f"asked_{plan}"
        answer = run(folder, **measured, **asks, parallel=plan)
        saved = read_tensors(folder / "checkpoints" / "step-00000004")
        squares = sum(value.double().square().sum() for name, value in saved.items() if name.startswith("model."))
        yield f"asked_{plan}", answer | {"norm": squares.sqrt().item()}
    yield "resumed", run(root / "asked_zero3", **measured, parallel="zero1", **{"callbacks.asking": "{}"})
    yield "failed", run(root / "failed", **{"callbacks.asking.fail": 3})
    if dist.get_rank() == 0:
        with sqlite3.connect(root / "corpus.db") as database:
            database.execute("CREATE TABLE documents (text TEXT)")
            rows = [(f"document {number}: " + "all work and no play " * 20,) for number in range(50)]
            database.executemany("INSERT INTO documents VALUES (?)", rows)
    dist.barrier()
    everything = {
        "imports": "[examples.inverse_root,examples.sqlite_rows,examples.confidence,examples.squared_relu]",
        "lr.schedule": "inverse_root",
        "lr.final": 0,
        "data.workers": 2,
        "data.sources.stdlib.kind": "sqlite",
        "data.sources.stdlib.settings.sqlite.file": root / "corpus.db",
        "loss.terms.confidence.weight": 0.25,
        "model.feed_forward.kind": "squared_relu",
        "model.feed_forward.settings.squared_relu.power": 3,
        "batch.micro_size": 1,
    }
    yield "everything", run(root / "everything", **everything, parallel="pp2")
    for plan in ("zero3", "tp2"):
        adamax = {"imports": "[examples.adamax]", "optimizer.name": "adamax", "run.steps": 4}
        yield f"adamax_{plan}", run(root / f"adamax_{plan}", **adamax, parallel=plan)
    block = ["imports=[examples.squared_relu,examples.confidence]", "model.feed_forward.kind=squared_relu"]
    term = ["loss.terms.confidence.weight=0.3", "model.logit_soft_cap=5", "loss.chunk=20"]
    yield (
        "block_and_term",
        parity(
            root,
            "[zero3 activation.mode=full loss.tile=8, parallel.pp=2 parallel.pipeline.schedule=zb_h1]",
            *block,
            *term,
        ),
    )
    yield "block_cut", parity(root, "[parallel.tp=2]", *block, "model.overrides={1: {feed_forward: {kind: gated}}}")
    yield "term_cut", parity(root, "[parallel.tp=2]", *block, *term)


def main(root: str) -> None:
    join_world(resolve_plan(trainer.Config().parallel, 2), torch.device("cpu"))
    results = dict(scenarios(Path(root)))
    if dist.get_rank() == 0:
        (Path(root) / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    fork()
    main(sys.argv[1])
    leave()
