"""Callbacks, metrics and sinks of the user's packages in runs of several ranks."""

from __future__ import annotations

import csv
import json
import math
import sys

import pytest
import yaml
from support.launch import launch
from support.registries import forgotten, package

from trainer.commands import export, sample


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


def test_registered_blocks_and_loss_terms_are_right_under_plans(results):
    for name in ("block_and_term", "block_cut"):
        verdicts = results[name]["verdicts"].values()
        assert results[name]["code"] == 0 and all(verdict[0] == "PASS" for verdict in verdicts), results[name]
    assert results["term_cut"]["code"] == 2, "each rank has a part of the vocabulary alone"


def test_a_run_of_registered_parts(results, root):
    assert results["everything"]["error"] is None
    lines = results["everything"]["lines"]
    shares = [min(step / 2, (2 / max(step, 2)) ** 0.5) for step in range(1, 9)]
    assert [line["lr"] for line in lines] == pytest.approx([3e-4 * share for share in shares], rel=1e-6)
    # A quarter of the negative entropy, of nearly even predictions among 257 tokens at first.
    assert lines[0]["term/confidence"] == pytest.approx(-0.25 * math.log(257), rel=0.02)
    assert lines[0]["loss"] == pytest.approx(math.log(257), rel=0.02), "the term is no part of it"
    settings = yaml.safe_load((root / "everything" / "config.yaml").read_text())
    assert settings["lr"]["settings"] == {"inverse_root": {"power": 0.5}}, "what is chosen is shown with its defaults"
    assert settings["model"]["feed_forward"]["settings"] == {"squared_relu": {"power": 3.0}}


def test_an_optimizer_of_elements_is_the_same_under_plans(results):
    cut, sharded = ([line["loss"] for line in results[f"adamax_{plan}"]["lines"]] for plan in ("tp2", "zero3"))
    assert cut == pytest.approx(sharded, rel=1e-5) and len(cut) == 4 and cut[-1] < cut[0]


def test_what_a_run_folder_says_of_imports_is_not_followed(results, root, tmp_path, capsys):
    """A checkpoint with a registered block is read only by those who say whose code makes it."""
    package(tmp_path, "evil", "raise SystemExit('imported')")
    checkpoint = f"checkpoint={root / 'everything'}"
    with forgotten(tmp_path):
        path = root / "everything" / "config.yaml"
        path.write_text(path.read_text().replace("imports:", "imports:\n- evil"))
        for command in (sample, export):
            assert command.main([checkpoint, *([f"out={tmp_path}/out"] if command is export else [])]) == 2
            error = capsys.readouterr().err
            assert "model.feed_forward.kind=squared_relu is not one of gated, plain; imports=" in error, error
        assert "evil" not in sys.modules and "examples.squared_relu" not in sys.modules
        imports = "imports=[examples.squared_relu]"
        assert sample.main([checkpoint, imports, "tokens=3", "prompt=doc"]) == 0
        assert capsys.readouterr().out.startswith("doc")
        assert export.main([checkpoint, imports, f"out={tmp_path}/out"]) == 2
        assert "squared_relu" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_who_fails_is_named(results, root):
    assert results["failed"]["error"] == (
        "callback 'asking' (__main__.AskingCallback) failed in step() after step 3: KeyError: 'out of luck'"
    )
    status = json.loads((root / "failed" / "status.json").read_text())
    assert status["status"] == "failed" and "callback 'asking'" in status["reason"]
