"""Folders of runs as runs leave them, written by hand: what a page about them has to show is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from trainer.diagnosis.time_breakdown import ACCOUNTS, KernelTotal, TimeBreakdown
from trainer.observe import metrics
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.simulate import simulate_schedule, write_timeline
from trainer.planning.schedules.templates import build_schedule

BEGAN = 1_795_000_000.0
"""Seconds since 1970 of a run's first line."""
TRIALS = (
    ("dp2_none", "done", 0.5, 0.4, 0.4, 30.0, None),
    ("tp2_none", "done", 0.8, 0.5, 0.6, 20.0, None),
    ("dp2_full", "done", 0.9, 0.6, 0.7, 25.0, None),
    ("dp2_large", "out_of_memory", None, 0.45, 0.5, None, "CUDA out of memory. Tried to allocate 2.00 GiB"),
    ("pp2_none", "failed", None, 0.45, 0.5, None, "a defect"),
    ("pp2_full", "timeout", None, 0.45, 0.55, None, None),
)
"""Of a search: trial, status, seconds of a step, predicted and expected, GiB, reason."""
TABLE = {
    "model": [["name", "tiny (llama)"], ["parameters", "5.77M"], ["layers x width", "6 x 256"]],
    "plan": [["processes", "4 x NVIDIA H200"], ["plan", "dp2 x pp2, ZeRO-1"], ["recompute", "selective"]],
    "batch": [["sequence", "256 tokens"], ["global batch", "8 sequences = 2.05k tokens"]],
    "memory": [
        ["counts", "the states of one rank, predicted; activations come on top"],
        ["parameters", "11.0 MiB"],
        ["optimizer", "22.0 MiB"],
    ],
    "peak": [["at", "0F0, action 1 of 8, loss"], ["activations", "40.0 MiB"], ["sum", "115 MiB"]],
}

DIAGNOSIS = {
    "format": 1,
    "verdict": {
        "kind": "communication",
        "text": "communication bounds the run (parallelisation): exposed communication of axis data, 12.0% of the step",
    },
    "step": {"seconds": 0.5, "predicted": 0.45, "profiled": 0.51, "steps": [150]},
    "findings": [
        {
            "kind": kind,
            "detail": "",
            "layer": layer,
            "title": title,
            "share": share,
            "bounds": share > 0.1,
            "evidence": [f"{share:.0%} of the step on the median rank"],
            "without": 0.5 * (1 - share),
            "overrides": [{"text": override, "seconds": 0.5 * (1 - share), "note": "other plan, same numbers"}],
            "advice": "",
        }
        for kind, layer, title, share, override in (
            ("communication", "parallelisation", "exposed communication of axis data", 0.12, "parallel.zero.stage=1"),
            ("bubble", "parallelisation", "waiting in the pipeline", 0.1, "batch.accumulation=16"),
            ("host", "runtime", "the host is late to launch kernels", 0.04, "compile=true"),
        )
    ],
    "roofline": {
        "ceilings": {"peak": 989.4e12, "products": 700e12, "bandwidth": 4.8e12, "memory": 4.1e12},
        "points": [],
    },
    "stalled": [],
    "notes": ["profiled steps take 2% longer than others"],
}


def step_line(step: int, speed: float = 1.0, **more: float | None) -> dict[str, Any]:
    """A line of a run whose loss falls from 8 to 3."""
    seconds = (9.0 if step == 1 else 0.5 + 0.02 * math.sin(step)) / speed
    return (
        metrics.format_line(
            {
                "step": step,
                "time": BEGAN + step * 0.5 / speed,
                "tokens": step * 2048,
                "epoch": step / 100,
                "loss": 3 + 5 * math.exp(-step / 40) + 0.05 * math.sin(step * 1.7),
                "grad_norm": 0.4 + 4 * math.exp(-step / 10) + 0.1 * math.cos(step),
                "lr": 1e-3 * min(1, step / 20),
                "tokens_per_second": 2048 / seconds,
                "mfu": 0.31 * speed,
                "mfu_full": 0.36 * speed,
                "memory_gib": 41.5,
                "step_seconds": seconds,
                "step_seconds_p50": None if step == 1 else 0.5 / speed,
                "step_seconds_p95": None if step == 1 else 0.52 / speed,
                "data_seconds": 0.01,
                "bubble": 0.12,
                "skipped": 0,
            },
            metrics.STEP,
        )
        | more
    )


def write_metrics(folder: Path, steps: int, speed: float = 1.0, **more: float | None) -> None:
    """metrics.jsonl of so many steps, with an evaluation every twentieth."""
    lines = []
    for step in range(1, steps + 1):
        line = step_line(step, speed, **more)
        lines.append(line)
        if step % 20 == 0:
            held = {"eval_loss": line["loss"] + 0.1, **{name: line[name] for name in ("step", "time", "tokens")}}
            lines.append(metrics.format_line(held, metrics.EVALUATION))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def start(step: int = 0, **settings: Any) -> dict[str, Any]:
    """A line of starts.jsonl."""
    name = settings.pop("name", "tiny")
    return {
        "time": "2026-11-22T10:00:00+0000",
        "step": step,
        "resumed": f"runs/{name}/checkpoints/step-{step:08d}" if step else None,
        "set_aside": None,
        "command": f"python -m trainer +config=debug run.name={name}",
        "job": None,
        "code": {"commit": "0123456789abcdef", "dirty": True},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "hosts": {"node-1": 4},
        "devices": {"NVIDIA H200": 4},
        "changed": {"lr.peak": [0.001, 0.002]} if step else {},
        "table": TABLE,
        "processes": 4,
        "settings": {
            "run": {"name": name, "steps": 200},
            "lr": {"peak": 1e-3, **settings},
            "precision": {"compute": "bf16", "matmul": "highest"},
        },
    }


def account(rank: int, seconds: float = 0.5) -> TimeBreakdown:
    """The account of a step on a rank of a pipeline of two."""
    shares = {
        "products": 0.34,
        "attention": 0.1,
        "memory_bound": 0.12,
        "recompute": 0.05,
        "optimizer": 0.02,
        "communication/data/transfer": 0.09,
        "communication/data/waiting": 0.03,
        "communication/pipeline/transfer": 0.02,
        "bubble/schedule": 0.1,
        "bubble/imbalance": 0.04,
        "host/launch": 0.04,
        "data": 0.02,
        "checkpoint": 0.01,
        "other": 0.02,
    }
    kernels = (
        KernelTotal("ampere_bf16_gemm_128x128", "products", 96, 0.12, 60e12, 0.15e12),
        KernelTotal("flash_fwd_kernel", "attention", 24, 0.05, 12e12, 0.04e12),
        KernelTotal("triton_poi_fused_silu_mul", "memory_bound", 48, 0.04, 0.02e12, 0.12e12),
        KernelTotal("ncclDevKernel_ReduceScatter", "communication", 12, 0.06),
    )
    return TimeBreakdown(
        rank=rank,
        step=150,
        place={"pp": rank // 2, "replicate": rank % 2},
        device="NVIDIA H200",
        seconds=math.fsum(share * seconds for share in shares.values()),
        terms={name: share * seconds for name, share in shares.items()},
        hidden={"data": 0.08},
        kernels=kernels,
    )


def write_run(folder: Path, steps: int = 60, speed: float = 1.0, **more: float | None) -> Path:
    """A run with a pipeline that was resumed once, with all that a page can show of it."""
    write_metrics(folder, steps, speed, **more)
    starts = [start(name=folder.name), start(40, name=folder.name, peak=2e-3 / speed)]
    (folder / "starts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in starts))
    (folder / "status.json").write_text(json.dumps({"status": "done", "step": steps, "steps": steps}) + "\n")
    (folder / "console.log").write_text(
        "model   name             tiny (llama)\n"
        f"2026-11-22 10:00:01  step  1/{steps}  loss  8.1\n"
        f"2026-11-22 10:00:21  saved runs/{folder.name}/checkpoints/step-00000040: 0.07 GB in 0.2 s\n"
        "2026-11-22 10:00:22  step 41: no update, the gradient of model.head.weight is not finite on rank 1\n"
    )
    (folder / "metrics-replaced.jsonl").write_text('{"step": 41}\n{"step": 42}\n')
    schedule = build_schedule("1f1b", 2, 8)
    for name, weight in (("planned", 1.0), ("measured", 1.3)):
        found = simulate_schedule(schedule, StageCosts.uniform(schedule.stages, 0.01, 0.01, 0.01 * weight))
        write_timeline(folder / "schedule" / f"{name}.json", found.spans, found.makespan)
    (folder / ACCOUNTS).write_text("".join(account(rank, 0.5 / speed).dumps() + "\n" for rank in range(4)))
    (folder / "diagnosis.json").write_text(json.dumps(DIAGNOSIS))
    return folder


def write_search(folder: Path, name: str = "", **more: Any) -> Path:
    """A search with six trials of eight plans, the first two of which have written what runs write. name: of the
    first plan; more: what search.json says otherwise."""
    lines = []
    for trial, status, seconds, predicted, expected, memory, reason in TRIALS:
        line = {"trial": trial, "overrides": [], "processes": 2, "status": status, "reason": reason, "folder": trial}
        line |= dict.fromkeys(("loss", "eval_loss", "mfu"))
        line |= {"tokens_per_second": seconds and 2048 / seconds, "memory_gib": memory, "step_seconds_p50": seconds}
        line |= {"predicted_seconds": predicted, "expected_seconds": expected, "predicted_memory_gib": 35.0}
        lines.append(line)
    for line in lines[:2]:
        write_metrics(folder / line["trial"], 4, 0.5 / line["step_seconds_p50"])
    names = [name or lines[0]["trial"], *(line["trial"] for line in lines[1:]), "untried_1", "untried_2"]
    told = [(line["predicted_seconds"], line["expected_seconds"]) for line in lines] + [(0.7, 0.9), (0.75, 1.0)]
    foretold = [
        {"plan": plan, "predicted": predicted, "expected": expected, "low": 0.8 * expected, "high": 1.25 * expected}
        | {"memory_gib": 35.0, "tokens": 2048}
        for plan, (predicted, expected) in zip(names, told)
    ]
    search = {"name": "tiny-tune", "machine": "2 x NVIDIA H200", "plans": 8, "budget": 6, "ended": "ended: budget=6"}
    search |= {"best": names[0], "command": "trainer train --gpus 2 +config=debug parallel.zero.stage=1"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "search.json").write_text(json.dumps(search | {"foretold": foretold} | more))
    lines[0]["trial"] = names[0]
    (folder / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config/best.yaml").write_text("# @package _global_\nparallel: {zero: {stage: 1}}\n")
    return folder
