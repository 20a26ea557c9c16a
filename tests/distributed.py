"""Launches a worker script on several processes, the way users do: torchrun on one machine."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CAN_COMPILE = bool(shutil.which("g++") or shutil.which("clang++"))
"""Whether torch.compile can build for the CPU here."""

WORKERS = Path(__file__).parent / "workers"


def launch(worker: str, world: int, *arguments: object, timeout: float = 300, check: bool = True) -> subprocess.CompletedProcess:
    """Runs tests/workers/`worker` on `world` gloo processes; with `check`, a failure shows what the workers printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   "PYTHONPATH": os.pathsep.join([str(WORKERS.parent.parent), str(WORKERS.parent)])}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
                           str(WORKERS / worker), *map(str, arguments)],
                          env=environment, timeout=timeout, capture_output=True, text=True, errors="replace")
    if check and done.returncode != 0:
        raise AssertionError(f"{worker} on {world} processes ended with {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return done
