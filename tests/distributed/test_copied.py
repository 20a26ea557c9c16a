"""Products by copies over memory that ranks share: the usual numbers, and none without a part of the protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launch import launch

CALLS = ("gather in copied_gather_matmul", "scatter in copied_matmul_scatter", "gather in rows_gradients")
CALLS += ("gather in columns_gradients", "scatter in columns_gradients", "largest in largest_of_all")


@pytest.mark.parametrize("size", [2, 3])
def test_they_equal_the_usual_ones_and_miss_waits_signals_and_halves(tmp_path: Path, size: int) -> None:
    launch("copied.py", size, tmp_path / "out.json", forks=True)
    found = json.loads((tmp_path / "out.json").read_text())
    copied = found["copied"]
    assert copied.pop("float32") < 1e-5
    # Sums of two are rounded as gloo's, and in fp8 with the same scales; sums of three once instead of twice.
    assert set(copied) == {"bfloat16", "tensorwise", "rowwise"}
    assert all(error == 0 if size == 2 else error < 1e-2 for error in copied.values()), found
    assert len(found["gradients"]) == (3 if size == 2 else 0) and not any(found["gradients"].values())
    assert set(found["without"]) == {"halves", *(f"wait for {call}" for call in CALLS)}
    assert all(error > 0.1 for error in found["without"].values()), found["without"]
    assert set(found["errors"]) == {f"signal for {call}" for call in CALLS}
    for signal, error in found["errors"].items():
        kind = signal.split()[2]
        assert f"rank 0 waits for {kind} (" in error and f"of rank {size - 1} in epoch 1; its flag says -1" in error


def test_the_measurement_runs_on_processes_that_share_memory(tmp_path: Path) -> None:
    small = ("scale=64", "tokens=16", "most=4", "repeats=1", "methods=off,copy_engine,torch")
    launch("../../bench/fusion.py", 2, tmp_path / "out.jsonl", *small)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    sweeps = [f"{kind} {tokens}" for kind in ("sweep", "sweep_k") for tokens in (1, 2, 4)]
    assert [line["case"] for line in lines][8:] == sweeps and lines[-1]["weight"] == [56, 128]
    for line in lines:
        ours = {"off", "copy_engine"}
        assert set(line["milliseconds"]) == ours and line["bound"] > 1
        assert all(
            line["errors"][name] < 1e-2 for name in ours
        )  # parts of the inputs are rounded before they are added
        assert isinstance(line["errors"]["torch"], str)  # needs GPUs
