"""Launches a worker script on several processes: the way users do, by torchrun, or forked from one that has imported
everything."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainer.cluster.node import free_ports

CAN_COMPILE = bool(shutil.which("g++") or shutil.which("clang++"))
"""Whether torch.compile can build for the CPU here."""

WORKERS = Path(__file__).parents[1] / "workers"
ROOT = WORKERS.parents[1]

SHARED = "TRAINER_TESTS_PYTHON"
"""Environment variable: the interpreter of `start_warm` that several processes of pytest share."""

WARM_UP = 120
"""Seconds that its imports may take on a busy machine."""

HANG = 1500
"""Seconds after which a launch is taken to hang: more than twice what the longest has taken on two busy cores."""


@functools.cache
def warm_python() -> str:
    """An interpreter for programs that import torch and the project: tests/support/warm.py. torchrun starts its workers
    with that which PYTHON_EXEC names."""
    python = Path(os.environ.get(SHARED) or start_warm())
    end = time.monotonic() + WARM_UP
    while not (python.parent / "socket").exists():
        if time.monotonic() > end or not python.exists():
            raise RuntimeError(f"tests/support/warm.py has not begun to serve in {python.parent}")
        time.sleep(0.02)
    return str(python)


def start_warm() -> Path:
    """Starts the server behind `warm_python`, which ends with this process, and does not wait until it has imported."""
    folder, script = Path(tempfile.mkdtemp(prefix="warm-")), Path(__file__).parent / "warm.py"
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # packages may be there alone
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    server = subprocess.Popen(
        [sys.executable, script, "serve", folder / "socket"], stdin=subprocess.PIPE, env=environment, cwd="/"
    )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.communicate)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{script}" "{folder}/socket" "$@"\n')
    python.chmod(0o755)
    return python


def program_of(process: int) -> int:
    """The program behind a process that `warm_python` is: signals that it cannot pass on go there."""
    try:
        name = Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return process
    return int(name.removeprefix("for-")) if name.startswith("for-") else process


def launch(
    worker: str, world: int, *arguments: object, check: bool = True, forks: bool = False
) -> subprocess.CompletedProcess:
    """Runs tests/workers/`worker` on `world` gloo processes; with `check`, a failure shows what the workers printed, as
    a hang always does. forks: the worker is one process, and calls `fork` below."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHON_EXEC": warm_python(),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(WORKERS.parent)]),
    }
    launcher = [] if forks else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    if forks:
        environment["WORLD_SIZE"] = str(world)
    command = [warm_python(), *launcher, str(WORKERS / worker), *map(str, arguments)]
    try:
        done = subprocess.run(command, env=environment, timeout=HANG, capture_output=True, text=True, errors="replace")
        ended, printed = f"ended with {done.returncode}", (done.stdout, done.stderr)
    except subprocess.TimeoutExpired as error:
        done, ended = None, f"had not ended after {HANG} s"
        printed = [(one or b"").decode(errors="replace") for one in (error.stdout, error.stderr)]
    if done is None or check and done.returncode != 0:
        raise AssertionError("\n".join([f"{worker} on {world} processes {ended}", *(one[-6000:] for one in printed)]))
    return done


FORKED: list[int] = []
"""Of rank 0: the processes of the others."""


def fork(compiles: bool = False, deepspeed: bool = False) -> None:
    """To be called by a worker that has imported what it needs. Launched with `forks`, it becomes all ranks: many
    processes that import for themselves would take minutes. compiles, deepspeed: the ranks use torch.compile or
    DeepSpeed, whose first use takes a process seconds; so it is made before there are several."""
    if "RANK" not in os.environ:
        if compiles:
            compile_once()
        if deepspeed:
            import_deepspeed()
    gc.collect()
    gc.freeze()  # what is imported stays, and need not be looked at after each case
    gc.set_threshold(20_000, 20, 50)  # plans leave cycles behind, and many small collections took a tenth of the time
    gc.unfreeze = lambda: None  # as a run asks for at its end: the next would look at all of it again, on every rank
    if "RANK" in os.environ:  # torchrun has made them
        return
    world, [port] = os.environ["WORLD_SIZE"], free_ports()
    mine = 0
    for rank in range(1, int(world)):
        if (process := os.fork()) == 0:
            mine = rank
            FORKED.clear()
            break
        FORKED.append(process)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_WORLD_SIZE": world,
        "RANK": str(mine),
        "LOCAL_RANK": str(mine),
    }


def compile_once() -> None:
    """A graph of one product with its backward pass, captured and cut as those of workers are. Not where torch is
    built for GPUs: the backward pass may then start threads, and a process that has them cannot be forked."""
    import torch

    if torch.backends.cuda.is_built():
        return
    x = torch.ones(2, 2, requires_grad=True)
    torch.compile(lambda x: (x @ x).sum(), backend="aot_eager_decomp_partition")(x).backward()
    torch._dynamo.reset()


def import_deepspeed() -> None:
    """DeepSpeed for CPUs, and what its engine imports when one is made."""
    import torch

    from trainer.parallel.zero.fsdp import import_engine

    import_engine(torch.device("cpu"))
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    numa = importlib.import_module("deepspeed.utils.numa")
    numa.get_numa_cores = functools.cache(numa.get_numa_cores)  # starts a program for each collective of stage 3


def leave() -> None:
    """Ends a worker at once: gloo's threads now and then abort an interpreter that has done its work. Rank 0 waits for
    the others, and fails if one has."""
    sys.stdout.flush()
    failed = [os.waitpid(process, 0)[1] for process in FORKED]
    os._exit(any(failed))
