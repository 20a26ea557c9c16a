"""What CPU tests cannot see, on all GPUs of this machine: see gpu_check.sh.

Cases run several at once, since most of their time is compilation on the host, and share what is compiled. Each has its
own time limit, and all of them one. At its limit a case is told to dump the stacks of its processes, and is killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = float(os.environ.get("GPU_CHECK_SECONDS", 560))
"""In which all ends."""
AT_ONCE = max(6, min(10, (os.cpu_count() or 1) // 3))
"""Cases: what they wait for most is the compiler, on the host. Programs that share a GPU take turns on it, and a
collective goes on only while those of all its ranks have theirs: of 21 at once, each on all of four GPUs, most ran out
of time."""
AT_ONCE_SHARED = 4
"""Cases, where the ranks of each share a GPU."""
SHARE = (
    "NCCL_HOSTID=$LOCAL_RANK NCCL_SOCKET_IFNAME=lo TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 "
    'LOCAL_RANK=$((LOCAL_RANK % $0)) exec "$@"'
)
"""Starts a rank that shares its GPU with others; $0 is the number of GPUs. NCCL refuses two ranks of a host on one GPU,
but takes ranks that name different hosts, which then send through sockets. Their times mean nothing."""
FEW_BUFFERS = ["env", "NCCL_BUFFSIZE=524288", "NCCL_MAX_NCHANNELS=2"]
"""Every plan has process groups of its own. With NCCL's defaults, their buffers fill the memory of a GPU."""
REPORT = 20
"""Seconds between reports of what runs."""


@dataclass
class Case:
    """command: runs in the repository's root. limit: seconds. ranks: processes, each on its own GPU where possible.
    own: whether ranks cannot share a GPU. alone: runs before the others."""

    name: str
    command: list[str]
    limit: float
    ranks: int = 1
    own: bool = False
    alone: bool = False


def torchrun(count: int, *program: str, gpus: int) -> list[str]:
    """The command for ranks of a program, of which several take the same GPU where there are fewer GPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    shared = ["--no-python", "bash", "-c", SHARE, str(gpus), sys.executable] if count > gpus else []
    return [*command, *shared, *program]


def cases(logs: Path, scratch: Path, ranks: int, gpus: int) -> list[Case]:
    """All that there is to check, the longest first. logs: for results; scratch: for what is large."""
    start = partial(torchrun, gpus=gpus)
    processes = max(count for count in (1, 2, 4) if count <= ranks)
    pair = min(processes, 2)

    def plans(name: str, *which: object, limit: float) -> Case:
        worker = ["tests/workers/plans.py", str(logs / f"{name}.json"), *map(str, which)]
        return Case(name, [*FEW_BUFFERS, *start(processes, *worker)], limit, processes)

    def run(name: str, *settings: str, count: int = pair) -> Case:
        where = [f"run.name={name}", f"run.dir={scratch / name}", "run.steps=20", f"data.cache={scratch / 'cache'}"]
        return Case(name, start(count, "-m", "trainer", "+config=demo", *where, *settings), 150, count)

    def runtime(name: str, mode: str, count: int, limit: float) -> Case:
        worker = ["tests/workers/pipeline_runtime.py", mode, str(logs / f"{name}.json")]
        return Case(name, start(count, *worker), limit, count)

    measuring = ["-m", "trainer", "probe", "+config=llama_60m", "precision=bf16", "compile=true", "seconds=20"]
    parts = 8 if processes > 1 else 2
    faults = ["bash", "bench/faults_gpu.sh", str(scratch / "faults")]
    tests = [
        "tests/observe/test_observe.py",
        "tests/observe/test_hardware_samples.py",
        "tests/data/test_batches.py",
        "tests/training/test_room.py",
        "tests/training/test_step.py",
        "tests/training/test_recorded.py",
        "tests/model/test_tiles.py",
        "tests/model/test_plain_attention.py",
        "tests/generate/test_graphs.py",
        "-k",
        "cuda or gpu",
        "-p",
        "no:cacheprovider",
    ]
    shared = ["tests/parallel/test_context_parallel.py", "tests/parallel/test_tensor_parallel.py"]
    mixed = "activation.save=[attention,attention.*@2-3,all@4-5]"
    small_gemma = [
        *(
            "model=gemma2_2b",
            "model.width=256",
            "model.depth=4",
            "model.attention.heads=4",
            "model.attention.kv_heads=2",
        ),
        *("model.attention.head_dim=64", "model.feed_forward.width=512", "model.vocab_size=4096"),
        *("model.attention.window=64", "precision=bf16"),
    ]
    return [
        # GPUs that others use are refused.
        Case("preflight", [*faults, "preflight"], 60, 2, own=True, alone=True),
        Case("faults", [*faults, "calm", "killed", "stopped1", "stopped0"], 420, 2, own=True),
        *(plans(f"plans_{part}", part, parts, limit=500) for part in range(parts)),
        runtime("circles", "synchronous", 2, 120),
        plans("deepspeed", "deepspeed", limit=180),
        Case("tp_overlap", start(2, "tests/workers/fusion_gpu.py", str(logs / "tp_overlap.json")), 300, 2),
        Case(
            "float8_gather",
            start(2, "tests/workers/float8_gather.py", str(logs / "float8_gather.json"), "cuda"),
            150,
            pair,
        ),
        Case("quantize", [sys.executable, "tests/workers/quantize.py", "cuda"], 180),
        Case("float8", [sys.executable, "tests/workers/float8.py", "cuda"], 120),
        Case("grouped", [sys.executable, "tests/workers/grouped.py", "cuda"], 240),
        Case("rows", [sys.executable, "tests/workers/rows_kernels.py", "cuda"], 120),
        Case("shard_kernels", [sys.executable, "tests/workers/shard_kernels.py", "cuda"], 120),
        Case(
            "weight_sums", [sys.executable, "tests/workers/weight_sums.py", "cuda", str(logs / "weight_sums.json")], 240
        ),
        Case("multi_tensor", [sys.executable, "tests/workers/multi_tensor.py", "cuda"], 120),
        Case("probe", start(gpus, *measuring, f"out={logs / 'probe.yaml'}"), 180, gpus),
        Case("tests", [sys.executable, "-m", "pytest", "-q", *tests], 200),
        *(
            Case(name, [sys.executable, "-m", "pytest", "-q", *which, *tests[-2:]], limit)
            for name, which, limit in (
                ("casts", ["tests/precision/test_casts_once.py", "-k", "cuda or gpu"], 120),
                # On CPUs, under a torch that may be older than the one installed by default
                ("names", ["tests/test_private_names.py"], 60),
                ("compiler", [*shared, "-k", "compiled"], 240),
            )
        ),
        run("demo", count=processes),
        *(run(name, f"parallel={name}", count=processes) for name in ("pp2_zbv", "pp2_auto") if pair == 2),
        run("compiled", "compile=true", "precision=bf16", "activation=selective"),
        run("recompute", "compile=true", "precision=bf16", "activation=selective", mixed),
        run("fp8", "compile=true", "precision=fp8", "precision.float8.ends=0", "activation=selective"),
        *(
            run(f"fp8_{name}", f"parallel={name}", "precision=fp8", "precision.float8.ends=0", "compile=true")
            for name in ("pp2_zbv", "tp2")
            if pair == 2
        ),
        *(
            run(
                f"fusion_{name}",
                "parallel.tp=2",
                f"parallel.tp_overlap={name}",
                "precision=bf16",
                "compile=true",
                *more,
            )
            for name, more in {"copy_engine": ("activation=selective",)}.items()
            if pair == 2
        ),
        *(
            run(f"fusion_fp8_{name}", "parallel.tp=2", f"parallel.tp_overlap={name}", "precision=fp8", *more)
            for name, more in {"copy_engine": ("compile=true", "precision.float8.ends=0")}.items()
            if pair == 2
        ),
        *(
            run(f"context_{name}", "parallel.cp=2", "precision=bf16", *settings, count=processes)
            for name, settings in {
                "gather": ("parallel.context.method=allgather", "compile=true"),
                "blocks": ("parallel.context.method=allgather", "parallel.context.order=blocks", "compile=true"),
                "documents": (
                    *("parallel.context.method=allgather", "data.mask_documents=true", "compile=true"),
                    "activation=selective",
                ),
                "heads": ("parallel.context.method=ulysses", "parallel=zero3"),
            }.items()
            if pair == 2
        ),
        run(
            "copied_shards",
            *("parallel=zero3", "parallel.zero.collectives=copy_engine"),
            *("compile=true", "precision=bf16", "activation=selective"),
            count=processes,
        ),
        *(
            [
                run(
                    "fp8_gathered",
                    *("parallel=zero3", "precision=fp8", "precision.float8.ends=0", "precision.float8.gather=true"),
                    *("compile=true", "activation=selective"),
                    count=processes,
                ),
                Case("steps", [*FEW_BUFFERS, *start(2, "tests/workers/steps.py")], 300, 2),
            ]
            if pair == 2
            else []
        ),
        run(
            "recorded",
            *("parallel=zero3", "run.cuda_graphs=true", "compile=true", "precision=bf16", "eval.every=10"),
            "checkpoint.every=20",
            count=processes,
        ),
        run("documents", "data.mask_documents=true", "compile=true", "precision=bf16"),
        run("offload", "parallel=zero3_offload"),
        run("fp16", "precision=fp16", "parallel=zero2"),
        run("gemma", *small_gemma),
    ]


class Check:
    """Runs cases and says how they are."""

    def __init__(self, logs: Path, scratch: Path, gpus: int):
        self.logs, self.gpus = logs, gpus
        self.start = time.monotonic()
        self.running: dict[str, float] = {}
        self.results: dict[str, dict] = {}
        self.lock, self.load = threading.Lock(), [0] * gpus  # cases that run on each GPU
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [".", "tests", os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",  # SIGABRT then dumps the stacks of all threads, whatever they are in
            "OMP_NUM_THREADS": "4",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
            "TRITON_CACHE_DIR": str(scratch / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
        }

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        print(f"{self.seconds():5.0f} s  {text}", flush=True)

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def run(self, case: Case) -> None:
        """Runs the case if there is time, and says how it ended."""
        start, left = self.seconds(), SECONDS - self.seconds()
        if left < 10:
            why, told = "not started, no time left", {}
        else:
            self.running[case.name] = start
            with self.taken(min(case.ranks, self.gpus)) as which:
                why, told = self.outcome(case, min(case.limit, left), which), {}
            del self.running[case.name]
            try:
                told = summary(self.logs, case.name)
            except Exception as error:
                why = why or f"{type(error).__name__}: {error}"
        why = why or told.get("why", "")
        seconds = self.seconds() - start
        self.results[case.name] = {"ok": not why, "why": why, "seconds": round(seconds), **told.get("numbers", {})}
        self.say(
            f"{'FAIL' if why else 'ok'} {case.name} ({seconds:.0f} s){': ' * bool(why)}{why}{told.get('text', '')}"
        )
        for line in evidence(self.log(case.name)) if why else ():
            print(f"        {line}", flush=True)

    @contextmanager
    def taken(self, count: int) -> Iterator[range]:
        """The `count` adjacent GPUs on which the fewest cases run."""
        with self.lock:
            first = min(range(0, self.gpus - count + 1, count), key=lambda first: sum(self.load[first : first + count]))
            which = range(first, first + count)
            for gpu in which:
                self.load[gpu] += 1
        yield which
        with self.lock:
            for gpu in which:
                self.load[gpu] -= 1

    def outcome(self, case: Case, limit: float, which: range) -> str:
        """What was wrong with the process, nothing if it ended well. which: the GPUs that it sees."""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, which))}  # the tests hide GPUs by default
        with open(self.log(case.name), "wb") as log:
            process = subprocess.Popen(
                case.command, cwd=ROOT, env=self.environment | visible, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                stop(process)
                return f"hung or too slow: {limit:.0f} s"
        return f"exit code {code}" if code else ""

    def report(self) -> None:
        for name, start in list(self.running.items()):
            self.say(f"... {name} ({self.seconds() - start:.0f} s): {last_word(self.log(name))[:150]}")


def last_word(log: Path) -> str:
    """The last line that a case itself has printed."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if line.strip() and not re.match(r"\[rank|W\d{4}| ", line)), "")


def evidence(log: Path) -> list[str]:
    """Where the main threads were of processes that were told to dump their stacks; else the end of the log. Of a case
    that was not started, nothing."""
    text = log.read_text(errors="replace") if log.exists() else ""
    stacks = re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)[1:]
    stacks = [stack for stack in stacks if "in <module>" in stack and "distributed/run.py" not in stack]
    lines = [line for stack in stacks[:2] for line in stack.splitlines()[:24]] or text.splitlines()[-25:]
    return [line[:400] for line in lines]


def tree(process: int) -> list[int]:
    """The process and all below it, children first."""
    found = []
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    except OSError:  # it has ended
        return found
    return [*found, process]


def dumps(process: int) -> bool:
    """Whether the stacks of a process tell anything: those of the compiler's own processes do not."""
    try:
        return b"compile_worker" not in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def stop(process: subprocess.Popen) -> None:
    """Has the case dump its stacks, workers first and one after the other, and ends it."""
    everyone = tree(process.pid)
    for kind, some in ((signal.SIGABRT, [one for one in everyone if dumps(one)][:12]), (signal.SIGKILL, everyone)):
        for one in some:
            try:
                os.kill(one, kind)
            except ProcessLookupError:
                continue
            if kind == signal.SIGABRT:
                time.sleep(0.5)
    process.wait()


def summary(logs: Path, name: str) -> dict:
    """What a case's files say: of plans the verdicts and worst errors."""
    file = logs / f"{name}.json"
    if not name.startswith(("plans", "deepspeed")) or not file.exists():
        return {}
    results = json.loads(file.read_text())["cases"]
    failed = [f"{result['plan']}: {result['reasons'][0]}" for result in results if result["verdict"] != "PASS"]
    worst: dict[str, float] = {}  # of gradients, by numeric type
    for result in results:
        for _, _, gradient, _ in result["errors"]["steps"]:
            worst[result["kind"]] = max(gradient, worst.get(result["kind"], 0.0))
    numbers = {"plans": len(results), "failed": failed, "worst_gradient": worst}
    gradients = ", ".join(f"{kind} {error:.1e}" for kind, error in worst.items())
    told = {"numbers": numbers, "text": f": {len(results)} plans; worst gradient: {gradients}"}
    return told | ({"why": "; ".join(failed)} if failed else {})


def main(out: Path, wanted: list[str]) -> int:
    present = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())
    ranks = int(os.environ.get("GPU_CHECK_GPUS") or present)
    if not present:
        print("there is no GPU", file=sys.stderr)
        return 2
    gpus = min(ranks, present)
    logs, scratch = out / "logs", Path(tempfile.mkdtemp(prefix="gpu_check-"))
    logs.mkdir(parents=True, exist_ok=True)
    check, ended = Check(logs, scratch, gpus), threading.Event()
    chosen = [case for case in cases(logs, scratch, ranks, gpus) if case.ranks <= (gpus if case.own else ranks)]
    if wanted:
        chosen = [case for case in chosen if not {case.name, case.name.split("_")[0]}.isdisjoint(wanted)]
    for case in chosen:
        if case.ranks > gpus:  # which wait for their turns
            case.limit *= 2
    at_once = AT_ONCE if ranks == gpus else AT_ONCE_SHARED
    where = f"{gpus} GPUs" if ranks == gpus else f"{ranks} ranks that share {gpus} GPUs"
    check.say(f"{len(chosen)} cases on {where}, at most {at_once} at once, {SECONDS:.0f} s")

    def reports() -> None:
        while not ended.wait(REPORT):
            check.report()

    threading.Thread(target=reports, daemon=True).start()
    for case in chosen:
        if case.alone:
            check.run(case)
    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(check.run, case) for case in chosen if not case.alone]:
            done.result()
    ended.set()
    failed = [name for name, result in check.results.items() if not result["ok"]]
    plans = sum(result.get("plans", 0) for result in check.results.values())
    verdict = f"FAIL: {', '.join(failed)}" if failed else "PASS"
    verdict += f" ({len(check.results) - len(failed)} of {len(check.results)} cases, {plans} plans, {where}"
    verdict += f", {check.seconds():.0f} s)"
    for file in scratch.glob("faults/*.log"):
        shutil.copy(file, logs / f"faults_{file.name}")
    shutil.make_archive(str(out / "logs"), "gztar", logs)
    shutil.rmtree(scratch, ignore_errors=True)
    (out / "verdict.json").write_text(json.dumps({"verdict": verdict, "cases": check.results}, indent=1))
    print(verdict, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
