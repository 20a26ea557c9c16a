"""What the simulator predicts of schedules, beside what four gloo processes take for them. A file of its own, because
nothing else runs meanwhile where its processes may not go first."""

from __future__ import annotations

import json

from support.launch import launch


def test_simulator_predicts_measured_times(tmp_path):
    launch("pipeline_runtime.py", 4, "bubbles", tmp_path / "out.json")
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert len(cases) >= 20
    for case in cases:
        assert case["measured"] > case["ideal"], case
        assert abs(case["measured"] / case["predicted"] - 1) < 0.1, case
        assert abs(case["measured_bubble"] - case["predicted_bubble"]) < 0.05, case
