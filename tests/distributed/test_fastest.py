"""What `parallel.fusion=auto` chooses."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.launch import launch

from trainer.distributed.fastest import GAIN, chosen, code

WAYS = st.sampled_from(["chunks", "copy_engine", "triton"])
TIMES = st.floats(1e-3, 1e3)


@given(off=TIMES, others=st.dictionaries(WAYS, TIMES))
def test_nothing_slower_than_off_is_chosen(off: float, others: dict[str, float]) -> None:
    times = {"off": off, **others}
    best = chosen(times)
    assert times[best] <= off and (best == "off" or times[best] < (1 - GAIN) * off)
    assert best != "off" or min(times.values()) >= (1 - GAIN) * off


def test_shapes_are_measured_once_on_all_ranks(tmp_path: Path) -> None:
    launch("fastest.py", 2, tmp_path, forks=True)
    results = json.loads((tmp_path / "out.json").read_text())
    gathered, reduced, columns, put_off, rows = results["first"]
    assert "gathered product of up to 16 tokens over 2 ranks with 4 x 8 + 2 x 8 (float32, output, kept)" in gathered
    assert "reduced product of up to 16 tokens over 2 ranks with 8 x 4" in reduced and "copy_engine" in reduced
    assert "gradients of a gathered product of up to 16 tokens over 2 ranks with 4 x 8 + 2 x 8 (float32)" in columns
    assert "reduced product of up to 16 tokens over 2 ranks with 4 x 8 + 2 x 8 (float32, input gradient)" in put_off
    assert "copy_engine" in put_off
    assert "gradients of a reduced product of up to 16 tokens over 2 ranks with 4 x 8 (float32)" in rows
    assert results["again"] == results["first"] and len(results["damaged"]) == 5
    assert not any("copy_engine" in text for text in results["far"])
    assert [" left out, rank 1: cannot share memory (no space is left)" in text for text in results["no memory"]] == (
        5 * [True, False]
    )
    for failing, calls in (("growing", 4), ("at once", 1), ("later", 1)):
        reasons = [text for text in results[failing] if "left out" in text]
        assert len(reasons) == calls and all(text.endswith("left out, rank 1: out of memory") for text in reasons)
        texts = [text for text in results[failing] if "left out" not in text]
        assert ["copy_engine" in text for text in texts] == calls * [False] + (5 - calls) * [True]
    ((name, kept),) = json.loads((tmp_path / "fusion.json").read_text()).items()
    assert f", torch {torch.__version__}, ways {code()}" in name
    assert [set(times) for times in kept.values()] == 5 * [{"off", "chunks", "copy_engine"}]
