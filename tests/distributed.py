"""Launches a worker script on several processes, the way users do: torchrun on one machine."""
from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

CAN_COMPILE = bool(shutil.which("g++") or shutil.which("clang++"))
"""Whether torch.compile can build for the CPU here."""

WORKERS = Path(__file__).parent / "workers"


def launch(worker: str, world: int, *arguments: object, timeout: float = 300, check: bool = True,
           forks: bool = False) -> subprocess.CompletedProcess:
    """Runs tests/workers/`worker` on `world` gloo processes; with `check`, a failure shows what the workers printed. forks: the worker
    is one process, and calls `fork` below once it has imported what all need."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   "PYTHONPATH": os.pathsep.join([str(WORKERS.parent.parent), str(WORKERS.parent)])}
    launcher = [] if forks else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    if forks:
        environment["WORLD_SIZE"] = str(world)
    done = subprocess.run([sys.executable, *launcher, str(WORKERS / worker), *map(str, arguments)],
                          env=environment, timeout=timeout, capture_output=True, text=True, errors="replace")
    if check and done.returncode != 0:
        raise AssertionError(f"{worker} on {world} processes ended with {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return done


def fork() -> None:
    """In a worker that was launched with `forks`: makes its ranks. Many processes that import for themselves would take minutes."""
    if "RANK" in os.environ:  # torchrun has made them
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world, port = os.environ["WORLD_SIZE"], str(free.getsockname()[1])
    rank = next((rank for rank in range(1, int(world)) if os.fork() == 0), 0)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
