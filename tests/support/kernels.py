"""Triton kernels beside torch code, in a process of their own: Triton reads its switches when it is imported.

Where torch comes without Triton, TRITON_PATH may name a folder that has it: for these processes alone, since torch's
compiler imports in every process what it finds."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from support.launch import WORKERS


def compare_kernels(worker: str, device: str, **environment: str) -> None:
    """Runs tests/workers/`worker`, which fails where bits differ."""
    beside = os.environ.get("TRITON_PATH", "")
    if not beside and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, and TRITON_PATH names no folder that has it")
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, WORKERS.parents[:2]), beside, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, str(WORKERS / worker), device],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
