"""Callbacks, metrics and sinks of the user's packages in runs of several ranks."""

from __future__ import annotations

import csv
import json

import pytest
from support.launch import launch


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("hooks")


@pytest.fixture(scope="module")
def results(root):
    launch("hooks.py", 2, root, forks=True)
    return json.loads((root / "results.json").read_text())


@pytest.mark.parametrize("plan", ["zero3", "tp2"])
def test_every_rank_sees_the_same_in_the_same_order(results, plan):
    first, second = results[f"asked_{plan}"]["seen"]
    assert first == second
    steps = [entry for entry in first if entry[0] == "step"]
    assert [step for _, step, *_ in steps] == list(range(1, 8))
    losses = {line["step"]: line["loss"] for line in results[f"asked_{plan}"]["lines"] if "loss" in line}
    for _, step, tokens, known, loss in steps:
        assert (tokens, known) == (step * 4 * 32, step) and loss == losses[step]
    for _, computed, logged in (entry for entry in first if entry[0] == "norm"):
        assert computed == pytest.approx(logged, rel=1e-9)


@pytest.mark.parametrize("plan", ["zero3", "tp2"])
def test_one_rank_may_ask_for_all(results, plan):
    result = results[f"asked_{plan}"]
    events = [(entry[0], entry[1]) for entry in result["seen"][0] if entry[0] not in ("step", "norm")]
    assert events == [("start", 0), ("save", 3), ("evaluation", 4), ("save", 4), ("save", 7), ("end", 7)]
    assert result["code"] == 0 and result["error"] is None
    [evaluation] = [line for line in result["lines"] if "eval_loss" in line]
    assert ["evaluation", 4, evaluation["eval_loss"]] in result["seen"][0]


@pytest.mark.parametrize("plan", ["zero3", "tp2"])
def test_a_metric_of_the_weights_counts_each_element_once(results, plan):
    lines = {line["step"]: line["user/weight_norm"] for line in results[f"asked_{plan}"]["lines"] if "loss" in line}
    assert set(lines) == set(range(1, 8)) and lines[4] == pytest.approx(results[f"asked_{plan}"]["norm"], rel=1e-9)


def test_a_sink_gets_the_lines_of_steps(results, root):
    rows = list(csv.reader(open(root / "asked_zero3" / "metrics.csv")))
    lines = [line for line in results["resumed"]["lines"] if "loss" in line]
    assert rows == [["step", "loss"], *([str(line["step"]), str(line["loss"])] for line in lines)]
    assert [line["step"] for line in lines] == list(range(1, 9)), "the run that had finished went on"


def test_a_callback_finds_its_state_again(results):
    assert results["resumed"]["seen"][0][0] == ["start", 7, 2]
    status = results["resumed"]
    assert status["code"] == 0 and status["seen"][0][-1][:2] == ["end", 8]


def test_who_fails_is_named(results, root):
    assert results["failed"]["error"] == (
        "callback 'asking' (__main__.AskingCallback) failed in step() after step 3: KeyError: 'out of luck'"
    )
    status = json.loads((root / "failed" / "status.json").read_text())
    assert status["status"] == "failed" and "callback 'asking'" in status["reason"]
