"""Measurements that fit into a lease of GPUs: those of experts.sh, many_gpus.sh and lora.sh, and of transformers' own
code.

    python bench/lease.py experts|code|many_gpus|lora OUT_FOLDER [CASE...] [tiny=true] [gpus=N]

Every case is a program with a time limit of its own, and all cases have one limit (LEASE_SECONDS): a case that no time
is left for is named and not started. A case of a peer stands beside the case of ours that it is compared with. A JSON
line goes to OUT_FOLDER/results.jsonl when a case ends:

- tokens: tokens/s of a GPU; tflops, tflops_full: model FLOPs of a GPU in TFLOP/s, by active parameters, recompute not
  counted, attention counted over the keys that a token sees or over all
- reserved: GiB that torch's allocator had reserved at the peak; predicted: what `trainer estimate` says of the step
- experts: load of the fullest expert over the mean, share of idle experts (of ours)
- error, log: why there is no measurement, and the log's name; took: seconds of the case; machine: GPUs and versions

With tiny=true the models are a few layers wide and deep enough to start every program, also on CPUs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import yaml
from compare import (
    COPIED,
    DECIDED,
    FP8,
    FP8_PEER,
    FSDP2,
    OPERATIONS,
    ROOT,
    SELECTIVE,
    THEIRS,
    Launcher,
    accumulate,
    last_error,
    make_assets,
    ours,
    peft,
    torchtitan,
    transformers,
)
from specs import merge_values, read_spec, read_values

from trainer.observe.metrics import read_metrics
from trainer.planning.layer import flops_per_token

SECONDS = float(os.environ.get("LEASE_SECONDS", 590))
"""In which all cases end."""
TINY_STEPS = ["warm=1", "steps=2", "compile=false"]

Line = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A measurement. limit: seconds; measure: yields its lines."""

    name: str
    limit: float
    measure: Callable[[Launcher], Iterator[Line]]


@dataclass
class Lease:
    """What the cases share. scratch: folder for what is large, which the next call on this machine finds again."""

    out: Path
    gpus: int
    tiny: bool
    scratch: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "trainer_lease")

    def model(self, name: str, depth: int = 0, **changes: Any) -> Path:
        """The file of a model of configs/model with another depth and other values."""
        values = merge_values(read_values(ROOT / f"configs/model/{name}.yaml"), changes)
        values["depth"] = depth or values["depth"]
        if self.tiny:
            shrink(values)
        text = yaml.safe_dump(values)
        path = self.scratch / f"{name}-{zlib.crc32(text.encode()):08x}.yaml"
        path.write_text(text)
        return path

    def assets(self) -> Path:
        folder = self.scratch / "assets"
        return folder if (folder / "corpus/train.jsonl").is_file() else make_assets(folder)

    def step(
        self,
        name: str,
        model: Path,
        length: int,
        micro: int,
        settings: list[str],
        limit: float = 170,
        side: Callable[..., Line] = ours,
    ) -> Case:
        """A case that measures the training step of ours or of a peer (`side`). settings: of that side."""
        length = 64 if self.tiny else length

        def measure(launcher: Launcher) -> Iterator[Line]:
            spec = read_spec(model)
            own = {"assets": self.assets()} if side is torchtitan else {}
            smaller = [] if not self.tiny or side is torchtitan else TINY_STEPS[: 2 if side is peft else 3]
            found = side(name, launcher, model, length, micro, [*settings, *smaller], **own)
            flops = {"tflops": True, "tflops_full": False}
            work = {key: flops_per_token(spec, length, causal) / 1e12 for key, causal in flops.items()}
            speeds = {key: round(found["tokens"] * each, 1) for key, each in work.items()} if "tokens" in found else {}
            shape = {"side": side.__name__, "depth": spec.depth, "length": length, "micro": micro, "settings": settings}
            yield shape | found | speeds

        return Case(name, limit, measure)

    def titan(self, name: str, model: Path, length: int, micro: int, settings: list[str], limit: float = 200) -> Case:
        """A case of torchtitan. With tiny=true it is not compiled."""
        smaller = ["--training.steps", "6", "--compile.no-enable"] if self.tiny else []
        return self.step(name, model, length, micro, [*OPERATIONS, "op", *settings, *smaller], limit, torchtitan)

    def command(
        self, name: str, limit: float, command: list[str], found: Callable[[str], Line], **variables: str
    ) -> Case:
        """A case that runs a command. found: what its output says; variables: of its environment."""

        def measure(launcher: Launcher) -> Iterator[Line]:
            # gpu_check.sh ends by itself within these seconds, and says what it had no time for.
            seconds = {"GPU_CHECK_SECONDS": f"{launcher.limit - 20:.0f}"}
            yield found(launcher.execute(name, command, ROOT, **variables, **seconds))

        return Case(name, limit, measure)


def shrink(values: dict[str, Any]) -> None:
    """Makes a model of any size a few thousand parameters small, in place, with the same blocks."""
    attention, feed_forward = values["attention"], values["feed_forward"]
    values |= {"width": 64, "depth": min(values["depth"], 2), "vocab_size": 4608}  # the assets' tokenizer has 4,096
    attention |= {"heads": 8, "kv_heads": 8}
    if attention.get("head_dim"):
        attention["head_dim"] = 16
    if attention.get("latent"):
        attention["latent"] = {"kv_rank": 16, "nope_dim": 16, "rope_dim": 8, "value_dim": 16}
    feed_forward["width"] = 176 if values["family"] == "llama" else 32
    if experts := feed_forward.get("experts"):
        experts |= {"count": 8, "top_k": 2}
        if experts.get("shared_width"):
            experts["shared_width"] = 64
    for override in values.get("overrides", {}).values():
        override["feed_forward"]["width"] = 96


EP2 = [*SELECTIVE, "parallel.ep=2"]
BY_SHARED_MEMORY = ["parallel.ep_dispatch=shared_memory", "parallel.ep_capacity=1.5"]
IN_TURNS = ["parallel.zero.stage=2", "accumulation=4"]
EXPERT_RANKS = ["--parallelism.expert_parallel_degree"]
BALANCED, BALANCED_PEER = ["balanced=true"], ["--debug.moe_force_load_balance"]


def experts(lease: Lease) -> list[Case]:
    """Those of experts.sh. Names are GROUP.CASE."""
    flexible = [*EXPERT_RANKS, "2", "--model.flavor", "spec_flex"]
    qwen3, qwen3_12 = lease.model("qwen3_30b_a3b", 8), lease.model("qwen3_30b_a3b", 12)
    deepseek = lease.model("deepseek_v2_lite", 8)
    few = ["warm=2", "steps=4"]

    def pairs(group: str, model: Path, balanced: bool) -> list[Case]:
        """Ours and torchtitan in turn: sequence 4096, 4 sequences a GPU."""
        mine, theirs = (BALANCED, BALANCED_PEER) if balanced else ([], [])

        def own(name: str, settings: list[str]) -> Case:
            return lease.step(f"{group}.{name}", model, 4096, 4, [*settings, *mine])

        def peer(name: str, settings: list[str]) -> Case:
            return lease.titan(f"{group}.{name}", model, 4096, 4, [*settings, *theirs])

        return [
            own("zero3", SELECTIVE),
            peer("torchtitan_fsdp", []),
            own("ep2_shared_memory", [*EP2, *BY_SHARED_MEMORY]),
            peer("torchtitan_ep2", [*EXPERT_RANKS, "2"]),
            own("ep2_alltoall", [*EP2, "parallel.ep_dispatch=alltoall"]),
            own("ep2_alltoall_of_4", [*EP2, "parallel.ep_dispatch=alltoall", *IN_TURNS]),
            own("ep2_alltoall_overlap", [*EP2, "parallel.ep_dispatch=alltoall_overlap", *IN_TURNS]),
            own("ep2_allgather", [*EP2, "parallel.ep_dispatch=allgather"]),
        ]

    return [
        *pairs("qwen3", qwen3, False),
        *pairs("deepseek", deepseek, False),
        lease.titan("deepseek.torchtitan_flex", deepseek, 4096, 4, flexible),
        *pairs("qwen3_12", qwen3_12, True),
        *pairs("qwen3_balanced", qwen3, True),
        *pairs("deepseek_balanced", deepseek, True),
        *(
            lease.step(f"zero3.{name}", qwen3, 4096, micro, [*few, *settings], limit, side)
            for name, micro, settings, limit, side in (
                ("ours_1", 1, SELECTIVE, 170, ours),
                ("transformers_1", 1, ["recompute=true"], 200, transformers),
                ("transformers_4", 4, ["recompute=true"], 200, transformers),
                ("transformers_eager_1", 1, ["recompute=true", "experts=eager"], 200, transformers),
            )
        ),
        Case("convergence.prepare", 200, partial(prepare, lease)),
        Case("convergence.runs", 560, partial(converge, lease)),
    ]


def code(lease: Lease) -> list[Case]:
    """Own blocks, transformers' own code under the same plan, and transformers under DeepSpeed's ZeRO-3 and under its
    Trainer with FSDP2."""

    def beside(group: str, model: Path, length: int, micro: int, few: Sequence[str] = ()) -> list[Case]:
        """few: the steps of transformers, where its steps are slow."""
        by_code = [*SELECTIVE, "code=transformers"]
        return [
            lease.step(f"{group}.own", model, length, micro, SELECTIVE),
            lease.step(f"{group}.code", model, length, micro, by_code, 250),
            lease.step(f"{group}.code_eager", model, length, micro, [*by_code, "compile=false"]),
            lease.step(f"{group}.code_copied", model, length, micro, [*by_code, COPIED], 250),
            *(
                lease.step(f"{group}.{name}", model, length, micro, ["recompute=true", *more, *few], 200, transformers)
                for name, more in (
                    ("transformers", []),
                    ("transformers_fsdp2", FSDP2[:1]),
                    ("transformers_fsdp2_compiled", FSDP2),
                )
            ),
        ]

    llama, qwen3 = lease.model("llama3_8b", 16), lease.model("qwen3_30b_a3b", 8)
    return [*beside("llama3", llama, 8192, 1), *beside("qwen3", qwen3, 4096, 4, ["warm=2", "steps=4"])]


SEEDS = (0, 1, 2)
MODELS = {
    "mixture": [],
    "dense": ["model.family=llama", "model.feed_forward.experts.count=0", "model.feed_forward.width=2048"],
}
"""Settings of the recipe experts_100m. A token meets four experts of width 512 of the mixture."""


def recipe(lease: Lease) -> list[str]:
    """The settings that all runs of `converge` share. LEASE_STEPS: of 65,536 tokens; 240 are about 5 epochs of the
    corpus, and 100 s on an H100."""
    steps = int(os.environ.get("LEASE_STEPS", 240))
    shared = ["+config=experts_100m", f"data.cache={lease.scratch / 'cache'}", f"run.steps={steps}", "lr.warmup=40"]
    shared += [f"eval.every={max(1, steps // 6)}", "checkpoint.every=0", "checkpoint.at_end=false"]
    small = ["run.steps=4", "eval.every=2", "eval.sequences=8", "lr.warmup=1", "model.width=64", "model.depth=1"]
    small += ["model.attention.heads=4", "batch.global_size=4", "batch.sequence_length=64", "data.tokenizer=bytes"]
    small += ["compile=false", "data.sources.stdlib.limit=20"]
    return [*shared, "logging.every=5", "logging.report=false", *(small if lease.tiny else [])]


def prepare(lease: Lease, launcher: Launcher) -> Iterator[Line]:
    """Fills the cache, so that runs that begin together need not wait for each other."""
    text = launcher.execute("convergence.prepare", [sys.executable, "-m", "trainer", "prepare", *recipe(lease)])
    yield {"said": text.strip().splitlines()[-4:]} if "exit code" not in text else {"error": last_error(text)}


def converge(lease: Lease, launcher: Launcher) -> Iterator[Line]:
    """Trains the mixture and the dense model with each seed, one run a GPU, and compares the losses on held-out data.
    Both have the same data in the same order."""
    free: SimpleQueue[int] = SimpleQueue()
    for gpu in range(lease.gpus):
        free.put(gpu)
    end = time.monotonic() + launcher.limit

    def train(seed: int, model: str) -> Line:
        gpu = free.get()
        name = f"convergence.{model}_{seed}"
        folder = lease.scratch / f"{name}-{time.time_ns()}"
        command = [sys.executable, "-m", "trainer", *recipe(lease), *MODELS[model], f"run.seed={seed}"]
        left = Launcher(launcher.out, 1, max(1.0, end - time.monotonic()))
        text = left.execute(name, [*command, f"run.dir={folder}"], CUDA_VISIBLE_DEVICES=str(gpu))
        free.put(gpu)
        line: Line = {"model": model, "seed": seed, "settings": MODELS[model]}
        lines = read_metrics(folder) if folder.is_dir() else []
        losses = {one["step"]: one["eval_loss"] for one in lines if one.get("eval_loss") is not None}
        if "exit code" in text or "stopped after" in text or not losses:
            return line | {"error": last_error(text), "losses": losses}
        speeds = [one["tokens_per_second"] for one in lines if one.get("tokens_per_second")]
        last = {"loss": losses[max(losses)], "best": min(losses.values()), "losses": losses}
        return line | last | {"tokens": statistics.median(speeds) if speeds else None}

    found = []
    with ThreadPoolExecutor(lease.gpus) as pool:
        runs = [pool.submit(train, seed, model) for seed in SEEDS for model in MODELS]
        for run in runs:
            found.append(run.result())
            yield found[-1]
    losses = {(one["model"], one["seed"]): one["loss"] for one in found if "loss" in one}
    by_model = {model: [loss for (name, _), loss in losses.items() if name == model] for model in MODELS}
    both = [seed for seed in SEEDS if all((model, seed) in losses for model in MODELS)]
    by_model["mixture less dense"] = [losses["mixture", seed] - losses["dense", seed] for seed in both]
    yield {
        "summary": {
            name: {"runs": len(some), "mean": statistics.mean(some), "deviation": statistics.stdev(some)}
            for name, some in by_model.items()
            if len(some) > 1
        }
    }


ADAPTER, FP8_WEIGHTS = {"rank": 16}, {"weights": "fp8"}
GATHERED_FP8 = [*FP8, "precision.float8.gather=true"]


def many_gpus(lease: Lease) -> list[Case]:
    """Those of many_gpus.sh, for four and for eight GPUs."""
    gpus = lease.gpus
    python, torchrun = [sys.executable], [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    kept = [*SELECTIVE, "activation.save=[attention,matmul]"]
    llama = lease.model("llama3_8b")
    checks = [
        lease.command(
            f"check.{count}",
            500,
            ["bash", "bench/gpu_check.sh", str(lease.out / f"check_{count}")],
            read_verdict,
            GPU_CHECK_GPUS=str(count),
        )
        for count in dict.fromkeys((4, gpus))
        if count <= gpus
    ]
    small = ["model.attention.heads=8", "model.attention.kv_heads=8", "model.depth=8", "batch.sequence_length=512"]
    # In later steps a token near the border between two experts may go to the other one.
    both = ["precision=fp32", "batch.global_size=16", "steps=1"]
    plans = [
        lease.command(
            f"plans.{name}",
            200,
            [
                *(*torchrun, "--nproc-per-node", str(gpus), "-m", "trainer", "parity", "+config=debug"),
                *(f"model={model}", *small, *both, f"plans=[{', '.join(map(json.dumps, some))}]"),
                f"json={lease.scratch / f'parity-{name}.json'}",
            ],
            partial(read_parity, lease.scratch / f"parity-{name}.json"),
        )
        for name, model, some in (
            ("dense", "tiny", dense_plans(gpus)),
            ("context", "tiny", context_plans(gpus)),
            ("experts", "tiny_experts", expert_plans(gpus)),
        )
    ]
    many, many_peer = accumulate(16, 1, gpus)
    many_peer += THEIRS  # the fastest of its choices where batches accumulate
    steps = [
        lease.step("llama.fp8_1_copied", llama, 8192, 1, [*kept, *FP8, COPIED], 150),
        lease.titan("llama.torchtitan_fp8_1", llama, 8192, 1, FP8_PEER),
        lease.step("llama.fp8_1", llama, 8192, 1, [*kept, *GATHERED_FP8], 150),
        lease.step("llama.fp8_16_zero2", llama, 8192, 1, [*DECIDED, *FP8, *many], 260),
        lease.titan("llama.torchtitan_fp8_16", llama, 8192, 1, [*FP8_PEER, *many_peer], 260),
        lease.step("llama.bf16_1_copied", llama, 8192, 1, [*kept, COPIED], 150),
        lease.step("llama.bf16_1", llama, 8192, 1, kept, 150),
        lease.titan("llama.torchtitan_bf16_1", llama, 8192, 1, []),
        lease.step("llama.bf16_16_zero2", llama, 8192, 1, [*DECIDED, *many], 260),
        lease.titan("llama.torchtitan_bf16_16", llama, 8192, 1, many_peer, 260),
        lease.step("llama.fp8_1_zero2", llama, 8192, 1, [*DECIDED, *FP8], 150),
        lease.step("llama.fp8_16", llama, 8192, 1, [*kept, *GATHERED_FP8, *many], 260),
        lease.step("llama.bf16_16", llama, 8192, 1, [*kept, *many], 260),
    ]
    # 30 billion parameters and their states take 61 GB of each of eight GPUs, and half of the layers as much of four.
    qwen3 = lease.model("qwen3_30b_a3b", 48 if gpus >= 8 else 24)
    shared = [*SELECTIVE, f"parallel.ep={gpus}", *BALANCED]
    steps += [
        lease.step("qwen3.ep_shared_memory", qwen3, 4096, 2, [*shared, *BY_SHARED_MEMORY], 220),
        lease.titan(*("qwen3.torchtitan_ep", qwen3, 4096, 2, [*EXPERT_RANKS, str(gpus), *BALANCED_PEER], 260)),
        lease.step("qwen3.ep_alltoall", qwen3, 4096, 2, [*shared, "parallel.ep_dispatch=alltoall"], 220),
        lease.step("qwen3.zero3", qwen3, 4096, 2, [*SELECTIVE, *BALANCED], 220),
        lease.step("qwen3.full_recompute", qwen3, 4096, 2, [*shared, "activation.mode=full"], 220),
    ]
    for count in (4, 8):
        for name, depth in (("llama3_8b", 8), ("llama3_70b", 4)):
            for overlap in ("off", "copy_engine") if count <= gpus else ():
                settings = [*SELECTIVE, f"parallel.tp={count}", f"parallel.tp_overlap={overlap}"]
                case = f"tensor.{name}_tp{count}_{overlap}"
                steps.append(lease.step(case, lease.model(name, depth), 8192, 2, settings, 120))
    frozen = lease.model("llama3_70b", adapter=ADAPTER)
    steps += [
        lease.step("adapters.bf16", frozen, 4096, 1, SELECTIVE, 250),
        lease.step("adapters.fp8", frozen, 4096, 1, [*SELECTIVE, *GATHERED_FP8], 250),
    ]
    drill = ["+config=llama_60m", "compile=false", "eval.every=0", "checkpoint.every=0", "parallel=zero1"]
    drill += ["batch.global_size=16", f"data.cache={lease.scratch / 'cache'}"]
    if lease.tiny:
        drill = ["+config=debug"]
    killed = lease.command(
        "killed.ranks",
        300,
        [*python, "bench/peer_drill.py", str(lease.scratch / "drill"), "kills=5", f"processes={gpus}", *drill],
        read_drill,
        OMP_NUM_THREADS="4",
    )
    return [*checks, *plans, *steps, killed]


def dense_plans(gpus: int) -> list[str]:
    """Plans of all GPUs for `trainer parity`, and with eight GPUs three dimensions at once."""
    pipeline = ["parallel.pipeline.schedule=interleaved", "parallel.zero.stage=1"]
    staged = "batch.accumulation=4 " + " ".join(pipeline)
    plans = [f"parallel.tp={gpus}", f"parallel.tp=4 parallel.pp={gpus // 4} batch.accumulation=4"]
    plans += [
        f"parallel.pp=4 {staged}",
        f"parallel.tp=2 parallel.pp=2 {staged}",
        "parallel.shard=2 parallel.zero.stage=3",
    ]
    plans += [f"parallel.pp=4 batch.accumulation=8 parallel.pipeline.schedule={name}" for name in ("1f1b", "zb_v")]
    return plans


def context_plans(gpus: int) -> list[str]:
    methods = ["method=allgather", "method=ulysses", "method=hybrid"]
    plans = [f"parallel.cp={gpus} parallel.context.{method}" for method in methods]
    return [*plans, "parallel.cp=4 parallel.zero.stage=3"]


def expert_plans(gpus: int) -> list[str]:
    dispatches = ("alltoall", "allgather", "shared_memory")
    plans = [f"parallel.ep={gpus} parallel.ep_dispatch={name} parallel.zero.stage=3" for name in dispatches]
    return [*plans, "parallel.ep=4", "parallel.ep=2 parallel.tp=2 parallel.zero.stage=3"]


def read_verdict(text: str) -> Line:
    """The verdict of gpu_check.sh."""
    lines = text.strip().splitlines()
    verdict = next((line for line in reversed(lines) if line.startswith(("PASS", "FAIL"))), None)
    if verdict is None:
        return {"error": last_error(text)}
    return {"verdict": verdict} | ({"error": "not all cases passed"} if verdict.startswith("FAIL") else {})


def read_parity(file: Path, text: str) -> Line:
    """Each plan's verdict, and its largest errors of a loss and of a gradient."""
    if not file.is_file():
        return {"error": last_error(text)}
    found = json.loads(file.read_text())["plans"]
    file.unlink()
    plans = {}
    for plan in found:
        steps = (plan["errors"] or {}).get("steps") or []
        worst = [f"{max(step[index] for step in steps):.1e}" for index in (0, 2)] if steps else plan["reasons"][:1]
        plans[plan["plan"]] = " ".join([plan["verdict"], *worst])
    line: Line = {"plans": plans}
    failed = [name for name, verdict in plans.items() if not verdict.startswith("PASS")]
    return line | ({"error": "no PASS: " + "; ".join(failed)} if failed else {})


def read_drill(text: str) -> Line:
    """Its summary, or the kills before it was stopped."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if lines and "median_seconds" in lines[-1]:
        return lines[-1]
    return {"kills": lines, "error": last_error(text)}


def lora(lease: Lease) -> list[Case]:
    """Those of lora.sh: `one` and `peft` for one GPU, `two` for two."""
    llama, narrow = (lease.model("llama3_8b", adapter=ADAPTER | more) for more in ({}, FP8_WEIGHTS))
    large, kept = lease.model("llama3_70b", adapter=ADAPTER | FP8_WEIGHTS), ["activation.mode=none"]
    products, whole = ["precision.float8.recipe=rowwise"], ["activation.mode=full"]
    return [
        lease.step("one.bf16", llama, 4096, 2, kept),
        lease.step("one.bf16_graphs", llama, 4096, 2, [*kept, "run.cuda_graphs=true"]),
        lease.step("one.fp8_products", llama, 4096, 2, [*kept, *products]),
        lease.step("one.fp8_weights", narrow, 4096, 2, kept),
        lease.step("one.fp8_weights_products", narrow, 4096, 2, [*kept, *products]),
        lease.step("one.fp8_weights_full", narrow, 4096, 1, whole),
        *(
            lease.step(f"peft.{name}", llama, 4096, 2, settings, 200, peft)
            for name, settings in (
                ("fp32", []),
                ("fp32_compiled", ["compile=true"]),
                ("bf16", ["adapters=bf16"]),
                ("bf16_compiled", ["adapters=bf16", "compile=true"]),
                ("bf16_recompute", ["adapters=bf16", "recompute=true"]),
            )
        ),
        lease.step("two.tp", large, 4096, 2, [*whole, "parallel.tp=2"], 250),
        lease.step("two.tp_fp8_products", large, 4096, 2, [*whole, "parallel.tp=2", *products], 250),
        lease.step("two.zero3", large, 4096, 2, whole, 250),
    ]


def describe_machine(gpus: int) -> Line:
    """The GPUs, and the versions of what is measured."""
    versions = {}
    for name in ("torch", "triton", "torchtitan", "torchao", "transformers", "accelerate", "deepspeed", "peft"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPUs"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    machine = {"device": device, "gpus": gpus, "cuda": torch.version.cuda, "commit": commit.stdout.strip() or "unknown"}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        machine["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0]
    return machine | {"date": time.strftime("%Y-%m-%d"), "versions": versions}


SUITES: dict[str, Callable[[Lease], list[Case]]] = {
    "experts": experts,
    "code": code,
    "many_gpus": many_gpus,
    "lora": lora,
}


def choose_cases(cases: list[Case], wanted: list[str]) -> list[Case]:
    """Those that are named, or whose group is. Raises `SystemExit` for a name that no case has."""
    names = {name for case in cases for name in (case.name, case.name.split(".")[0])}
    if unknown := [name for name in wanted if name not in names]:
        raise SystemExit(f"no case or group {', '.join(unknown)}; there are {', '.join(case.name for case in cases)}")
    return [case for case in cases if not wanted or case.name in wanted or case.name.split(".")[0] in wanted]


def main(arguments: list[str]) -> int:
    begun = time.monotonic()
    suite, out = arguments[0], Path(arguments[1]).absolute()
    options = dict(argument.split("=") for argument in arguments[2:] if "=" in argument)
    if unknown := options.keys() - {"tiny", "gpus"}:
        raise SystemExit(f"no option {', '.join(sorted(unknown))}; there are tiny=true and gpus=N")
    gpus = int(options.get("gpus", torch.cuda.device_count() or 2))
    lease = Lease(out, gpus, options.get("tiny") == "true")
    logs = out / "logs"
    for folder in (logs, lease.scratch):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(lease.scratch / "inductor"))
    wanted = [argument for argument in arguments[2:] if "=" not in argument]
    cases, machine = choose_cases(SUITES[suite](lease), wanted), describe_machine(gpus)
    failed = 0
    with open(out / "results.jsonl", "a") as file:
        for case in cases:
            left, started = SECONDS - (time.monotonic() - begun), time.monotonic()
            for line in run_case(case, Launcher(logs, gpus, min(case.limit, left))):
                failed += "error" in line
                took = {"took": round(time.monotonic() - started), "log": f"{case.name}.log"}
                file.write(json.dumps({"case": case.name} | line | took | {"machine": machine}) + "\n")
                file.flush()
                print(f"{time.monotonic() - begun:4.0f} s  {case.name}: {summarise(line)}", flush=True)
            shutil.make_archive(str(out / "logs"), "gztar", logs)
    return int(failed > 0)


def run_case(case: Case, launcher: Launcher) -> Iterator[Line]:
    """The case's lines, or why there are none. A case that fails does not keep the next one from running."""
    if launcher.limit < min(45, case.limit):
        yield {"error": "not started: no time is left"}
        return
    try:
        yield from case.measure(launcher)
    except Exception as error:
        yield {"error": f"{type(error).__name__}: {error}"}


def summarise(line: Line) -> str:
    """The numbers of a line for the console."""
    keys = ["model", "seed", "tokens", "tflops", "tflops_full", "reserved", "predicted", "experts", "loss", "summary"]
    keys += ["verdict", "plans", "median_seconds", "said", "error"]
    return ", ".join(f"{key} {line[key]}" for key in keys if key in line)[:600]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
