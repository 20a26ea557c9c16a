"""The command `python -m trainer.estimate`: what it prints, writes and refuses, without torch."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import Config
from trainer.estimate import main
from trainer.planning.resolve import compose

ROOT = Path(__file__).parents[1]
RECIPE = ["+config=llama3_8b", "processes=4", "batch.accumulation=8"]


def test_one_plan_needs_no_torch(tmp_path):
    words = [*RECIPE, "parallel=pp2", f"json={tmp_path / 'numbers.json'}", "tokens=1e12"]
    code = f"import sys, trainer.estimate as e; print(e.main({words}), 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "0 False"
    for text in ("1f1b, 8 micro-batches", "allocator's pools", "bubble", "of 139.8 GiB", "1.00T tokens"):
        assert text in run.stdout
    [one] = json.loads((tmp_path / "numbers.json").read_text())
    assert one["seconds"] == pytest.approx(sum(one["terms"].values()))
    assert len(one["ranks"]) == 2 and one["plan"]["world"] == 4
    rank = max(one["ranks"], key=lambda rank: sum(rank["categories"].values()) + rank["pools"])
    assert one["memory"] == pytest.approx(sum(rank["categories"].values()) + rank["pools"] + 1.5 * 2**30)


def test_the_best_plan_as_a_recipe_and_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "config").mkdir()
    out, plot, numbers = tmp_path / "config" / "best.yaml", tmp_path / "best.png", tmp_path / "numbers.json"
    base = ["+config=llama_60m", "processes=4"]
    assert main([*base, "plans=all", "top=3", f"out={out}", f"plot={plot}", f"json={numbers}"]) == 0
    shown = capsys.readouterr().out
    assert "3 fastest of" in shown and str(plot) in shown and plot.stat().st_size > 10_000
    best: Config = compose(["+config=[llama_60m,best]"], tmp_path, 4)
    first = json.loads(numbers.read_text())[0]
    assert (best.batch.micro_size, best.activation.mode) == (first["micro_size"], first["recompute"])
    assert (best.parallel.tp, best.parallel.pp) == (first["plan"]["tp"], first["plan"]["pp"])
    assert main(["+config=[llama_60m,best]", f"--config-dir={tmp_path}", "processes=4"]) == 0


def test_plans_by_name(capsys):
    assert main([*RECIPE, "plans=[zero3, tp2, 'parallel.pp=2 activation=full']"]) == 0
    table = capsys.readouterr().out.split("\nplan ")[0].splitlines()
    assert len(table) == 5 and table[0] == "3 plans on 4 devices"
    assert [line.split()[0] for line in table[2:]] == ["1", "2", "3"]


@pytest.mark.parametrize(
    "words, problem",
    [
        ("hardware=h20", "hardware=h20: there is no such file; did you mean 'h200'?"),
        ("nodes=0", "nodes=0 must be at least 1"),
        ("processes=6 parallel.tp=4", "parallel.tp=4 x parallel.pp=1 needs a multiple of 4 processes, but 6 run"),
        ("nodes=2 parallel.tp=16", "parallel.tp=16 spans nodes of 8 processes"),
        ("plans=[zero9]", "parallel=zero9: there is no such option"),
        ("plans=all hardware.memory=1", "every plan needs more memory than a device has"),
        ("out=/no/such/folder/best.yaml", "out=/no/such/folder/best.yaml: there is no folder"),
        ("hardware=l40s hardware.device=Abacus", "hardware.device=Abacus has no known peak in bf16"),
        ("--plan", "--plan is no option; see python -m trainer.estimate --help"),
    ],
)
def test_refusals(words, problem, capsys):
    assert main(["+config=llama3_8b", *shlex.split(words)]) == 2
    assert problem in capsys.readouterr().err
