"""The command `trainer estimate`: what it prints, writes and refuses, without torch."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainer.commands.estimate import main
from trainer.config import Config
from trainer.planning.estimate.plans import rank_plans
from trainer.planning.hardware import load_hardware
from trainer.planning.neighbours import compose_variant
from trainer.planning.resolve import check_config, compose

ROOT = Path(__file__).parents[1]
RECIPE = ["+config=llama3_8b", "processes=4", "batch.accumulation=8"]


def test_one_plan_needs_no_torch(tmp_path):
    words = [*RECIPE, "parallel=pp2", f"json={tmp_path / 'numbers.json'}", "tokens=1e12"]
    code = f"import sys, trainer.commands.estimate as e; print(e.main({words}), 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "0 False"
    for text in ("1f1b, 8 micro-batches", "allocator's pools", "bubble", "of 139.8 GiB", "1.00T tokens"):
        assert text in run.stdout
    [one] = json.loads((tmp_path / "numbers.json").read_text())
    assert one["seconds"] == pytest.approx(sum(one["terms"].values()))
    assert len(one["ranks"]) == 2 and one["plan"]["world"] == 4
    rank = max(one["ranks"], key=lambda rank: sum(rank["categories"].values()) + rank["pools"])
    assert one["memory"] == pytest.approx(sum(rank["categories"].values()) + rank["pools"] + 1.5 * 2**30)
    assert one["range"]["seconds"] == pytest.approx([0.94 * one["seconds"], 1.06 * one["seconds"]])
    assert one["range"]["mfu"] == pytest.approx([one["mfu"] / 1.06, one["mfu"] / 0.94])
    assert one["range"]["terms"].keys() == one["terms"].keys() and one["range"]["memory"][0] < one["memory"]
    assert one["tokens"] == 1e12 and one["tokens_per_day"] == pytest.approx(86400 * one["tokens_per_second"])
    assert one["device_hours"] == pytest.approx(4 * one["seconds_of_tokens"] / 3600)
    assert set(one["communication"]) == {"shard", "pipeline"}
    for axis, term in (("shard", "sharding collectives"), ("pipeline", "pipeline transfers")):
        moved = one["communication"][axis]
        assert moved["exposed"] == one["terms"][term] and moved["hidden"] > 0


def test_the_best_plan_as_a_recipe(tmp_path, capsys):
    (tmp_path / "config").mkdir()
    out, numbers = tmp_path / "config" / "best.yaml", tmp_path / "numbers.json"
    base = ["+config=llama_60m", "processes=4"]
    assert main([*base, "plans=all", "top=3", f"out={out}", f"json={numbers}"]) == 0
    shown = capsys.readouterr().out
    assert "3 fastest of" in shown
    best: Config = compose(["+config=[llama_60m,best]"], tmp_path, 4)
    first = json.loads(numbers.read_text())[0]
    assert (best.batch.micro_size, best.activation.mode) == (first["micro_size"], first["recompute"])
    assert (best.parallel.tp, best.parallel.pp) == (first["plan"]["tp"], first["plan"]["pp"])
    assert main(["+config=[llama_60m,best]", f"--config-dir={tmp_path}", "processes=4"]) == 0


def test_all_plans_keep_what_the_command_line_gives(tmp_path, capsys):
    """Settings by name, and those of a group; of the recipe's plan nothing is kept."""
    numbers, found = tmp_path / "numbers.json", {}
    for words in ("parallel.tp=2 activation=full", "parallel=zero3", ""):
        base = ["+config=llama_60m", "processes=4", "plans=all", "top=3", f"json={numbers}"]
        assert main([*base, *words.split()]) == 0
        plans = json.loads(numbers.read_text())
        found[words] = [(one["plan"]["tp"], one["plan"]["stage"], one["recompute"]) for one in plans]
    named, group, free = found.values()
    assert {(tp, recompute) for tp, _, recompute in named} == {(2, "full")}
    assert {(tp, stage) for tp, stage, _ in group} == {(1, 3)} and named != free != group


@pytest.mark.parametrize(
    "words",
    [
        "processes=2 parallel.grad_comm.inner.codec=int8",
        "processes=2 run.cuda_graphs=true logging.profile=0",
        "processes=2 activation=selective activation.offload=true",
        "processes=2 optimizer.ema.decay=0.9 parallel.zero.offload=true",
        "processes=1 parallel.zero.stage=3 parallel.zero.offload=true",
    ],
)
def test_every_plan_that_is_found_can_be_run(words):
    """Settings beside the plan may rule it out. Offloaded states need a ZeRO stage, on one process too."""
    world, *overrides = words.split()
    processes = int(world.removeprefix("processes="))
    config = compose_variant(["+config=debug", *overrides], None, processes)
    found = rank_plans(config, load_hardware("h200"), processes, 8, most=40).best
    assert found
    for one in found:
        assert not check_config(one.config, processes), one.layout.plan


def test_plans_by_name(capsys):
    plans = "plans=[zero3, tp2, 'parallel.pp=2 activation=full']"
    assert main([*RECIPE, plans, "tokens=1e12", "hardware.band=0.2"]) == 0
    table = capsys.readouterr().out.split("\nplan ")[0].splitlines()
    assert table[:2] == ["3 plans on 4 devices", "taken: 1, the fastest that fits for sure"]
    assert table[2] == "step: ±20%, tokens/s a device: -17% +25%, memory: ±5%"
    assert [line.split()[0] for line in table[4:]] == ["1", "2", "3"]
    assert "time" in table[3].split() and max(map(len, table)) <= 120


def test_what_fits_for_sure_is_taken(tmp_path, capsys):
    """The two fastest plans perhaps fit such a GPU: what is written is one that does, though it is not among them."""
    out, numbers = tmp_path / "best.yaml", tmp_path / "numbers.json"
    words = ["+config=llama3_8b", "hardware=h100", "batch.global_size=64", "hardware.memory=66", "plans=all", "top=2"]
    words += ["parallel.tp=2", "activation=none"]  # as the fastest have: a sixth of the plans
    assert main([*words, f"out={out}", f"json={numbers}"]) == 0
    shown, found = capsys.readouterr().out, json.loads(numbers.read_text())
    assert "\ntaken: 3, the fastest that fits for sure\n" in shown
    assert [one["fits"] for one in found] == ["perhaps", "perhaps", "yes"]
    assert [one["chosen"] for one in found] == [False, False, True]
    assert "GiB ±5% of 66, which fits for sure." in out.read_text()
    assert yaml.safe_load(out.read_text())["parallel"]["zero"]["stage"] == found[2]["plan"]["stage"] == 1
    tight = ["hardware.memory=73", "plans=['parallel.zero.stage=2 activation=none']"]
    assert main([*words[:3], *tight, f"out={out}"]) == 0
    assert "taken: 1, none fits for sure" in capsys.readouterr().out and "perhaps fits" in out.read_text()


def test_a_plan_that_does_not_fit_says_what_would(capsys):
    words = ["+config=llama3_8b", "hardware=h100", "processes=1"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "fits                   no:" in shown
    change = shown.split("to make it fit")[1].split()[0]
    assert main([*words, change]) == 0
    shown = capsys.readouterr().out
    assert "fits                   yes:" in shown and "to make it fit" not in shown
    assert main([*words, "hardware.memory=8"]) == 0
    assert "plans=all searches the others" in capsys.readouterr().out


def test_processes_are_spread_over_the_given_nodes(tmp_path):
    numbers, found = tmp_path / "numbers.json", {}
    for words in ("nodes=4 processes=4", "processes=4", "nodes=4 processes=4 hardware.devices=1"):
        assert main(["+config=llama3_8b", "parallel=zero3", *words.split(), f"json={numbers}"]) == 0
        found[words] = json.loads(numbers.read_text())[0]["seconds"]
    apart, together, alone = found.values()
    assert apart == alone > together


@pytest.mark.parametrize(
    "words, problem",
    [
        ("hardware=h20", "hardware=h20: there is no such file; did you mean 'h200'?"),
        ("nodes=-1", "nodes=-1 must be at least 0"),
        ("nodes=3 processes=4", "processes=4 are not as many on each of nodes=3, of 8 devices each; set"),
        ("nodes=1 processes=16", "set a multiple of 1 up to 8, or leave nodes or processes out"),
        ("top=3", "top=3 is how many of all plans are shown; set plans=all, or leave it out"),
        ("processes=6 parallel.tp=4", "parallel.tp=4 x parallel.pp=1 needs a multiple of 4 processes, but 6 run"),
        ("nodes=2 parallel.tp=16", "parallel.tp=16 spans nodes of 8 processes"),
        ("plans=[zero9]", "plans=zero9: parallel=zero9: there is no such option"),
        ("plans=all hardware.memory=1", "fits 1 GiB a device; set a smaller batch.sequence_length, more nodes, or"),
        ("plans=all batch.global_size=70000 processes=70000", "70000 processes are more than any plan is made for"),
        ("out=.", "out=. is a folder; name a file in it"),
        ("hardware=pyproject.toml", "hardware=pyproject.toml: pyproject.toml is not YAML"),
        (
            "plans=all processes=3 batch.global_size=8 model.depth=2 parallel.tp=2",
            "batch.global_size=8 is no multiple of parallel.dp=3; set one that is",
        ),
        ("plans=all parallel.tp=3", "parallel.tp=3 is in none; legal: 1, 2, 4, 8"),
        ("plans=all model=gpt2", "batch.sequence_length=8192 exceeds the learned positions of model.max_length=1024"),
        ("plans=all parallel=pp2_auto", "parallel.pipeline.schedule=auto cannot be kept in a search of plans"),
        ("out=/no/such/folder/best.yaml", "out=/no/such/folder/best.yaml: there is no folder"),
        ("hardware=l40s hardware.device=Abacus", "hardware.device=Abacus has no known peak in bf16"),
        ("token=1e9", "token is no option of trainer estimate; did you mean 'tokens'?"),
        ("--plan", "--plan is no option of trainer estimate; did you mean '--plans'?"),
    ],
)
def test_refusals(words, problem, capsys):
    assert main(["+config=llama3_8b", *shlex.split(words)]) == 2
    assert problem in capsys.readouterr().err
