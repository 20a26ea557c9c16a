"""bench/slow_network.sh: fewer bytes make shorter steps where the network is slow. Needs root, iproute2 and network
namespaces. Steps wait for the link several times as long as they compute, so that it may run beside other tests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.launch import warm_python

BENCH = Path(__file__).parents[2] / "bench" / "slow_network.sh"


def test_int8_is_faster_at_fifty_megabits(tmp_path):
    arguments = ["1", "--rates", "0.05", "--cases", "none", "int8", "--steps", "2", "model.width=256", "model.depth=2"]
    done = subprocess.run(
        ["bash", str(BENCH), str(tmp_path / "out.jsonl"), *arguments],
        env={**os.environ, "PYTHON": warm_python(), "PYTHON_EXEC": warm_python()},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if done.stdout.startswith("skipped"):
        pytest.skip(done.stdout.strip())
    rows = {
        (row["rate_gbit"], row["case"]): row
        for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    }
    assert set(rows) == {(rate, name) for rate in (None, 0.05) for name in ("none", "int8")}
    none, int8 = (rows[0.05, name] for name in ("none", "int8"))
    # The link is as slow as asked, whatever else the machine does: a step cannot be shorter than its bytes take.
    assert none["seconds"] > 0.9 * 8 * none["wire_bytes"] / 0.05e9 and none["measured_gbit"] < 0.06
    # The counter of the link knows nothing of codecs: data parallelism over two ranks sends each gradient once.
    free = rows[None, "int8"]
    assert free["wire_bytes"] == pytest.approx(free["bytes_outer"], rel=0.05)
    assert free["wire_bytes"] < 0.27 * rows[None, "none"]["wire_bytes"]
    assert int8["ratio"] < 0.7 and int8["expected_ratio"] < 0.7
    assert int8["loss"] == pytest.approx(none["loss"], rel=1e-3)
    assert done.stdout.index("expected") < done.stdout.index("bytes_outer")
