"""Weight gradients that GEMMs add to their sums, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

from support.launch import WORKERS


def test_sums_of_gemms_are_those_of_fp64_and_a_model_trains_with_them():
    """In every precision, beside sums by autograd and FSDP; the worker counts the products that add."""
    paths = os.pathsep.join([*map(str, WORKERS.parents[:2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(WORKERS / "weight_sums.py"), "cpu"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
