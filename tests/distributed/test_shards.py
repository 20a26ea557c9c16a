"""Gathers and sums by copies over memory that ranks share: the numbers they have to give, and others without a part of
the protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kernels import compare_kernels
from support.launch import launch

from trainer.parallel.zero.copy_engine import split_pieces


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 12))
def test_pieces_are_full_and_have_everything_once(lengths: list[int], most: int) -> None:
    cut = list(split_pieces(lengths, most))
    elements = [(number, place) for piece in cut for number, start, stop in piece for place in range(start, stop)]
    assert elements == [(number, place) for number, length in enumerate(lengths) for place in range(length)]
    sizes = [sum(stop - start for _, start, stop in piece) for piece in cut]
    assert all(start < stop for piece in cut for _, start, stop in piece)
    assert all(size == most for size in sizes[:-1]) and all(0 < size <= most for size in sizes)


@pytest.mark.parametrize("size", [2, 3])
def test_numbers_are_right_and_miss_waits_signals_and_halves(tmp_path: Path, size: int) -> None:
    launch("shards.py", size, tmp_path / "out.json", forks=True)
    found, calls = json.loads((tmp_path / "out.json").read_text()), {"shards in _gather", "sums in _sum"}
    assert all(error < 1e-6 for error in found["right"].values()) and len(found["right"]) == 2
    assert set(found["without"]) == {"halves", *(f"wait for {call}" for call in calls)}
    assert all(error > 0.1 for error in found["without"].values()), found["without"]
    assert set(found["errors"]) == {f"signal for {call}" for call in calls}
    for signal, error in found["errors"].items():
        assert f"rank 0 waits for {signal.split()[2]} (float32) of rank {size - 1} in epoch 1" in error


def test_numbers_are_right_by_the_kernels_of_gpus(tmp_path: Path) -> None:
    """Of three ranks: the kernels are those of any number, which the test before varies."""
    compare_kernels("shards.py", str(tmp_path / "out.json"), TRITON_INTERPRET="1", WORLD_SIZE="3")


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_kernels_have_the_bits_of_torch_and_move_16_bytes_at_a_time(tmp_path: Path, target: str) -> None:
    environment = {"TRITON_CACHE_DIR": str(tmp_path)} | ({"TRITON_INTERPRET": "1"} if target == "cpu" else {})
    compare_kernels("shard_kernels.py", target, **environment)
