"""A block with an objective and statistics of its own, and a model that is not ours, under every kind of plan."""

from __future__ import annotations

import json

import pytest
from support.launch import launch


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("foreign") / "results.json"
    launch("foreign.py", 4, out, forks=True)
    return json.loads(out.read_text())


LIMIT = {"fp32": 5e-6, "fp16": 2e-2}
"""Of the error of any parameter's gradient, relative to its norm."""


def test_objectives_within_layers_have_exact_gradients_under_every_plan(results):
    for found in results["watched"]:
        assert found["moved"] > 0.5, found["case"]  # each gradient would be wrong without the objective
        assert found["worst"] < LIMIT[found["precision"]] and not found["differing"], found


def test_statistics_of_layers_are_sums_over_all_ranks_and_micro_batches(results):
    for found in results["watched"]:
        assert len(found["statistics"]) == len(found["expected"]) > 0
        limit = 1e-6 if found["precision"] == "fp32" else 2e-3
        assert found["statistics"] == pytest.approx(found["expected"], rel=limit), found["case"]


def test_the_loss_is_told_without_them_and_evaluation_leaves_them_alone(results):
    for found in results["watched"]:
        assert found["loss"] == pytest.approx(found["evaluated"], rel=1e-6), found["case"]
        assert not found["told again"], found["case"]


def test_a_model_of_other_code_trains_under_plans(results):
    for found in results["foreign"]:
        assert found["worst"] < LIMIT["fp32"] and not found["differing"], found
        assert found["loss"] == pytest.approx(found["evaluated"], rel=1e-6), found["case"]
        assert found["statistics"] == []
