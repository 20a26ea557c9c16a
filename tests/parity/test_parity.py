"""The parity command: what it runs, what it finds, and how it says so."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess

import pytest
import torch
from support.launch import launch, warm_python

from trainer.commands.parity import main
from trainer.config import Config, ConfigError
from trainer.config.model import ModelSpec
from trainer.parity.compare import (
    PLAIN,
    TOLERANCES,
    Trajectory,
    coarsest_tolerance,
    compare_runs,
    error_limits,
    judge_plan,
)
from trainer.parity.watch import generate_plans
from trainer.planning.features import resolve_plan
from trainer.planning.neighbours import fit_batch, global_size, override_key, plan_list
from trainer.planning.plan import resolve_batch

DATA = [
    "+config=debug",
    "data.sources.stdlib.limit=40",
    "run.device=cpu",
    "model.width=32",
    "model.depth=4",
    "model.attention.heads=4",
    "model.feed_forward.width=64",
    "batch.sequence_length=32",
]
TWICE = "parallel.tp=2 precision=bf16"
PLANS = [
    "zero3",
    "parallel.tp=2 batch.micro_size=2",
    "parallel.pp=2 parallel.pipeline.schedule=zb_v batch.accumulation=3 precision=fp16",
    '"parallel.pp=2 parallel.pipeline.split=[1,3] activation=full"',
    TWICE,
    "parallel.tp=4",
    "parallel.pp=2 lr.peak=1",
    TWICE,
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the command printed and wrote on two processes."""
    folder = tmp_path_factory.mktemp("parity")
    done = launch(
        "parity.py",
        2,
        folder,
        *DATA,
        "batch.global_size=12",
        f"data.cache={folder}/cache",
        f"plans=[{', '.join(PLANS)}]",
        "steps=2",
    )
    return done.stdout, {
        name: json.loads((folder / f"{name}.json").read_text()) for name in ("codes", "sound", "broken")
    }


def test_plans_pass_and_refusals_do_not_fail(runs):
    _, written = runs
    plans = written["sound"]["plans"]
    assert written["codes"]["sound"] == 0
    assert [plan["verdict"] for plan in plans] == ["PASS"] * 5 + ["REFUSED"] * 2 + ["PASS"]
    assert [plan["kind"] for plan in plans[:5]] == ["fp32", "fp32", "fp16", "fp32", "bf16"]
    for plan in plans[:5]:
        assert len(plan["losses"]) == len(plan["norms"]) == len(plan["errors"]["steps"]) == 2
        assert plan["losses"] == pytest.approx(written["sound"]["reference"]["losses"], rel=1e-3)
        assert plan["errors"]["steps"][1][2] > 0  # it was computed, not copied
    described = [" ".join(plan["description"]) for plan in plans[:5]]
    assert "dp2, ZeRO-3, fp32" in described[0] and "tp2" in described[1] and "6 micro-batches of 2 x 32" in described[1]
    assert "zb_v, 3 micro-batches" in described[2] and "4 x 32 tokens" in described[2]
    assert "layers 1-3" in described[3] and "full recompute" in described[3]
    assert plans[7] == plans[4]
    assert "parallel.tp=4" in plans[5]["reasons"][0] and "parallel.tp=2" in " ".join(plans[5]["reasons"])
    assert plans[6]["reasons"] == ["a plan cannot set lr.peak: the reference has it too; set it outside of plans=[...]"]


def test_a_missing_reduction_fails_and_is_named(runs):
    _, written = runs
    zero, tensor, narrow = written["broken"]["plans"]
    assert written["codes"]["broken"] == 1 and zero["verdict"] == narrow["verdict"] == "PASS"
    assert tensor["verdict"] == "FAIL"
    text = "\n".join(tensor["reasons"])
    assert "norm.weight differs between ranks that hold the same part" in text and "step 1: the gradient of" in text
    assert tensor["errors"]["steps"][0][3].endswith("norm.weight") and tensor["errors"]["steps"][0][2] > 0.1


def test_plans_are_decided_as_runs_are(runs):
    _, written = runs
    assert written["codes"]["decided"] == [["nccl", False], ["nccl", False], ["nccl", True]]


def test_the_table_tells_what_was_seen(runs):
    printed, written = runs
    for loss in written["sound"]["reference"]["losses"]:
        assert printed.count(f"{loss:.6f}") >= 2
    for words in (
        "reference: one process, fp32",
        "limits for bf16",
        "gradient error",
        "REFUSED: parallel.tp=4",
        "6 PASS, 2 REFUSED",
        "2 PASS, 1 FAIL",
        "FAIL: parallel.tp=2",
    ):
        assert words in printed, words


def test_exit_code_of_a_refused_command(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [warm_python(), "-m", "trainer", "parity", *DATA, f"data.cache={tmp_path}", "plans=[parallel.tp=2, zero9]"],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert (
        done.returncode == 2
        and "plan 'parallel.tp=2'" in done.stderr
        and "plan 'zero9': parallel=zero9: there is no such option" in done.stderr
    )
    assert not done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            ["+config=debug", "optimizer=lion"],
            "optimizer.name=lion: the reference is AdamW, or Muon; set optimizer=adamw or optimizer=muon",
        ),
        (["+config=debug", "steps=0"], "steps=0 must be at least 1"),
        (["+config=debug", "steps=few"], "steps=few must be a whole number"),
        (["+config=debug", "plans=[a, [b"], "cannot be read as a list"),
        (["+config=debug", "lr.peek=1"], "did you mean 'lr.peak'"),
        (["+config=debug", "--plan"], "--plan is no option"),
        (["+config=debug", "json=nowhere/out.json"], "there is no folder nowhere"),
        (
            ["+config=debug", "lr.warmup=9", "run.device=cpu"],
            "configuration error: lr.warmup=9 must be below run.steps=5",
        ),
        (["+config=debug", "precision.types.matrix.state_dtype=bf16"], "set state_dtype=fp32"),
    ],
)
def test_what_is_wrong_is_said(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_arguments():
    given = main.parse(
        [
            "+config=demo",
            'plans=[zero3, parallel.tp=2 parallel.pp=2, "activation.save=[a,b]"]',
            "lr.peak=1",
            "--config-dir",
            "mine",
            "steps=7",
            "json=out.json",
        ]
    )
    assert given.overrides == ["+config=demo", "lr.peak=1"]
    assert (given.steps, given.json, given.config_dir) == (7, "out.json", "mine")
    assert plan_list(given.plans) == ["zero3", "parallel.tp=2 parallel.pp=2", "activation.save=[a,b]"]
    given = main.parse(["+config=demo"])
    assert (given.plans, given.steps, given.json, given.config_dir) == ("", 3, "", None)
    assert plan_list(main.parse(["plans=zero1"]).plans) == ["zero1"]


@pytest.mark.parametrize("processes, depth, count", [(1, 4, 1), (4, 4, 20), (8, 8, None)])
def test_generated_plans_are_legal_and_hold_every_layout(processes, depth, count):
    spec = ModelSpec(depth=depth)
    spec.attention.heads, spec.attention.kv_heads = 8, 2
    plans, seen = generate_plans(spec, processes), set()
    for text in plans:
        named = dict(word.split("=") for word in text.split())
        config = Config()
        config.parallel.tp, config.parallel.pp = int(named["parallel.tp"]), int(named["parallel.pp"])
        config.parallel.zero.stage, config.parallel.cp = int(named["parallel.zero.stage"]), int(named["parallel.cp"])
        plan = resolve_plan(config.parallel, processes, spec)
        seen.add((plan.dp, plan.cp, plan.tp, plan.pp))
    assert len(set(plans)) == len(plans) and count in (None, len(plans))
    powers = [n for n in (1, 2, 4, 8) if n <= processes]
    grid = {(dp, 1, tp, pp) for dp in powers for tp in powers for pp in powers if dp * tp * pp == processes}
    assert seen == grid | {(processes // cp, cp, 1, 1) for cp in powers}


@pytest.mark.parametrize(
    "batch, dp, pp, named, expected",
    [
        ({}, 4, 1, {}, (6, 1)),
        ({"micro_size": 2}, 4, 1, {}, (2, 3)),
        ({"micro_size": 5}, 4, 1, {}, (6, 1)),
        ({"accumulation": 2}, 4, 1, {}, (6, 1)),
        ({}, 1, 2, {}, (6, 4)),
        ({"micro_size": 2}, 1, 2, {}, (2, 12)),
        ({}, 4, 4, {}, (1, 6)),
        ({"micro_size": 2}, 2, 2, {"accumulation": 3}, (4, 3)),
        ({"accumulation": 2}, 2, 1, {"micro_size": 3}, (3, 4)),
    ],
)
def test_micro_batches_are_fitted_to_the_plan(batch, dp, pp, named, expected):
    config = Config()
    config.batch = dataclasses.replace(config.batch, sequence_length=64, **{**batch, **named})
    config.parallel.pp = pp
    fit_batch(config, resolve_plan(config.parallel, dp * pp), 24, {f"batch.{name}" for name in named})
    found = resolve_batch(config.batch, dp)
    assert (found.micro_size, found.accumulation) == expected and found.global_size == 24


def test_a_batch_that_the_ranks_do_not_divide_is_left_to_the_batch_arithmetic():
    config = Config()
    fit_batch(config, resolve_plan(config.parallel, 8), 12, set())
    with pytest.raises(ConfigError, match="batch.global_size=8 or 16"):
        resolve_batch(config.batch, 8)


def test_the_global_batch_is_the_same_under_every_plan():
    batch = Config().batch
    assert global_size(dataclasses.replace(batch, global_size=12, micro_size=5), 8) == 12
    assert global_size(dataclasses.replace(batch, global_tokens=4096), 8) == 8
    assert global_size(dataclasses.replace(batch, micro_size=3, accumulation=2), 4) == 24
    assert override_key("++parallel.tp=2") == override_key("parallel.tp=2") == "parallel.tp"


def trajectory(**changes) -> Trajectory:
    weights = {"a.weight": torch.ones(4, 4), "b.weight": torch.full((3,), 2.0)}
    gradients = [{"a.weight": torch.full((4, 4), 0.5), "b.weight": torch.arange(3.0)} for _ in range(2)]
    return dataclasses.replace(
        Trajectory(
            {name: value.clone() for name, value in weights.items()}, [4.0, 3.0], [1.0, 1.0], gradients, weights
        ),
        **changes,
    )


def verdict(seen: Trajectory, kind: str = "fp32", **options) -> tuple[str, str]:
    result = judge_plan("plan", [], kind, seen, trajectory(), **options)
    return result.verdict, "\n".join(result.reasons)


def test_equal_numbers_pass_and_small_errors_are_judged_by_the_type():
    assert verdict(trajectory()) == ("PASS", "")
    assert (
        verdict(trajectory(losses=[4.0, 3.0001]))[0] == "FAIL"
        and verdict(trajectory(losses=[4.0, 3.0001]), "bf16")[0] == "PASS"
    )
    assert error_limits("fp32") == [TOLERANCES["fp32"]]
    rounding = compare_runs(trajectory(losses=[4.0, 3.0001]), trajectory())
    assert error_limits("fp32", rounding)[0] == TOLERANCES["fp32"] and error_limits("fp32", rounding)[
        1
    ].loss == pytest.approx(10 / 3 * 1e-4)
    assert verdict(trajectory(losses=[4.0, 3.0003]), plain=rounding)[0] == "PASS"


def test_losses_after_the_first_step_may_be_off_by_what_is_granted_to_a_plain_process():
    rounded = compare_runs(trajectory(), trajectory())
    first, second = error_limits("bf16", rounded)
    assert first == TOLERANCES["bf16"] and second == first._replace(loss=PLAIN["bf16"][0])
    assert verdict(trajectory(losses=[4.0, 3.001]), "bf16", plain=rounded)[0] == "PASS"
    assert verdict(trajectory(losses=[4.0, 3.002]), "bf16", plain=rounded)[0] == "FAIL"
    assert verdict(trajectory(losses=[4.001, 3.0]), "bf16", plain=rounded)[0] == "FAIL"


def test_the_type_of_a_plan_is_its_coarsest():
    precision = Config().precision
    assert (
        coarsest_tolerance(precision) == "fp32"
        and coarsest_tolerance(dataclasses.replace(precision, matmul="high")) == "tf32"
    )
    assert coarsest_tolerance(dataclasses.replace(precision, compute="fp16")) == "fp16"
    assert coarsest_tolerance(dataclasses.replace(precision, compute="fp16", reduce="bf16")) == "bf16"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"losses": [4.0, float("nan")]}, "step 2: the loss is off by nan"),
        ({"norms": [1.001, 1.0]}, "step 1: the gradient norm is off by 1.0e-03, the limit is 1.0e-06"),
        ({"gradients": [{}, {}]}, "step 1: the gradient of a.weight is off by inf"),
        (
            {
                "gradients": [
                    trajectory().gradients[0],
                    {"a.weight": torch.full((4, 4), 0.5), "b.weight": torch.tensor([0.0, 1.0, 2.1])},
                ]
            },
            "step 2: the gradient of b.weight is off by 4.5e-02",
        ),
        (
            {
                "gradients": [
                    trajectory().gradients[0],
                    {"a.weight": torch.full((4, 4), float("nan")), "b.weight": torch.arange(3.0)},
                ]
            },
            "step 2: the gradient of a.weight is off by nan",
        ),
        (
            {"initial": {"a.weight": torch.ones(4, 4) + 2**-23, "b.weight": torch.full((3,), 2.0)}},
            "the initial weights differ in a.weight",
        ),
        (
            {"parameters": {"a.weight": torch.ones(4, 4), "b.weight": torch.full((3,), 2.1)}},
            "after the last step b.weight is off by 5.0e-02",
        ),
        ({"problems": ["step 1: a.weight has no gradient on rank 1"]}, "no gradient"),
    ],
)
def test_what_is_off_is_named(changes, words):
    found, text = verdict(trajectory(**changes))
    assert found == "FAIL" and words in text


def test_weights_that_only_rounding_moves_are_not_compared():
    moved = trajectory(parameters={"a.weight": torch.ones(4, 4), "b.weight": torch.full((3,), 2.1)})
    tiny = [{"a.weight": torch.full((4, 4), 0.5), "b.weight": torch.full((3,), 1e-9)}] * 2
    assert compare_runs(moved, trajectory(gradients=tiny)).weights == 0
    assert compare_runs(moved, trajectory()).weights == pytest.approx(0.05)
