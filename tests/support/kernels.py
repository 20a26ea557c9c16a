"""Triton kernels beside torch code, in a process of their own: Triton reads its switches when it is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from support.launch import WORKERS


def compare_kernels(worker: str, device: str, **environment: str) -> None:
    """Runs tests/workers/`worker`, which fails where bits differ."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, WORKERS.parents[:2]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, str(WORKERS / worker), device],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
