"""Every plan gives the numbers of one process: losses, gradient norm, and every parameter's gradient."""
from __future__ import annotations

import json

import pytest

from distributed import launch

TOLERANCE = {  # loss, gradient norm, per-parameter gradient, parameters after three updates
    "fp32": (1e-6, 1e-6, 5e-6, 1e-5), "fp16": (1e-4, 2e-3, 3e-2, 2e-2), "bf16": (1e-4, 5e-3, 5e-2, 3e-2)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Number of processes -> what tests/workers/plans.py measured on them, one launch each."""
    seen: dict = {}

    def measure(world: int) -> list[dict]:
        if world not in seen:
            out = tmp_path_factory.mktemp("plans") / "results.json"
            launch("plans.py", world, out, timeout=400)
            seen[world] = json.loads(out.read_text())
        return seen[world]

    return measure


@pytest.mark.parametrize("world", [1, 2, 4])
def test_plans_match_one_process(world, measured):
    results = measured(world)
    assert len(results) > 40
    wrong = []
    for result in results:
        limits = TOLERANCE[result["compute"]]
        found = [result[name] for name in ("loss", "norm", "gradient", "parameters")]
        if not all(value <= limit for value, limit in zip(found, limits)):
            wrong.append(f"{result['case']}: loss, norm, gradient, parameters = {found} at {result['where']}")
    assert not wrong, "\n".join(wrong)


def test_recompute_changes_no_bit(measured):
    recomputed = [r for r in measured(2) if r["recompute"] != "none" and r["compute"] == "fp32"]
    assert len(recomputed) >= 16
    assert all(r["bitwise"] for r in recomputed), [r["case"] for r in recomputed if not r["bitwise"]]
