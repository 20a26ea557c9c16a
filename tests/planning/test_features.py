"""The tuple of features: what has a plan of its own is asked."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from support.estimates import settings, shipped

import trainer
from trainer.config import ConfigError
from trainer.planning.features import FEATURES, check_plan, communication_table
from trainer.planning.plan import Feature
from trainer.planning.resolve import collect_warnings, resolve_layout

FOLDERS = sorted(path.parent.name for path in (Path(trainer.__file__).parent / "parallel").glob("*/plan.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_feature_with_a_plan_is_asked(folder):
    feature = importlib.import_module(f"trainer.parallel.{folder}.plan").FEATURE
    assert feature in FEATURES and feature.name == folder


def test_a_feature_that_is_added_is_asked_everything(monkeypatch):
    """One entry is enough for checks, warnings and the table of communication."""
    config = settings(shipped("tiny"), batch__sequence_length=64, batch__micro_size=1)
    asked = Feature(
        "experts",
        check_model=lambda parallel, spec, world, node: [f"model of {spec.depth} layers"] if spec else [],
        check_ranks=lambda parallel, ranks, world, node: [f"{ranks} of {world} ranks"],
        check_plan=lambda config, spec, plan, node: ["the whole plan"],
        collect_warnings=lambda config, spec, plan, node: [f"slow on {plan.world}"],
        describe=lambda config, spec, plan: [("experts", "an all-to-all")],
    )
    layout = resolve_layout(config, 4, config.model, 4)
    monkeypatch.setattr("trainer.planning.features.FEATURES", (*FEATURES, asked))
    monkeypatch.setattr("trainer.planning.resolve.FEATURES", (*FEATURES, asked))
    depth = config.model.depth
    assert check_plan(config.parallel, 4, config.model, 4) == [f"model of {depth} layers", "4 of 4 ranks"]
    with pytest.raises(ConfigError, match="4 of 4 ranks"):
        resolve_layout(config, 4, config.model, 4)
    assert ("experts", "an all-to-all") in communication_table(config, layout.spec, layout.plan)
    assert collect_warnings(config, layout, 4)[-1] == "slow on 4"


OUT_OF_RANGE = {"pipeline__memory_cap": -2.0, "pipeline__chunks": 0, "grad_comm__min_size": -1}
"""Values that are out of their ranges, and leave the numbers of ranks as they are."""

IMPOSSIBLE = {
    "pp": (5, "parallel.pp=5 exceeds the 4 layers"),
    "tp": (3, "parallel.tp=3 does not divide model.attention.heads"),
    "tp_overlap": ("copy_engine", "parallel.tp_overlap=copy_engine is for the collectives"),
    "dp": (3, "parallel.dp=3 needs 3 processes, but 4 run"),
    "zero__nvme": ("/disk", "parallel.zero.nvme=/disk is for DeepSpeed"),
}
"""Values that features and the mesh refuse on four processes, and how each refusal begins."""


@pytest.mark.parametrize("impossible", IMPOSSIBLE)
@pytest.mark.parametrize("outside", OUT_OF_RANGE)
def test_a_value_out_of_its_range_hides_no_other_problem(outside, impossible):
    value, begins = IMPOSSIBLE[impossible]
    given = {outside: OUT_OF_RANGE[outside], impossible: value}
    config = settings(shipped("tiny"), **{f"parallel__{name}": value for name, value in given.items()})
    problems = check_plan(config.parallel, 4, config.model)
    path = f"parallel.{outside.replace('__', '.')}={OUT_OF_RANGE[outside]}"
    assert any(problem.startswith(path) for problem in problems), problems
    assert any(begins in problem for problem in problems), problems


@pytest.mark.parametrize(("name", "value"), [("tp", 0), ("pp", -1), ("cp", 0), ("dp", 0), ("dp", -2)])
def test_a_degree_that_divides_no_processes_is_the_only_problem(name, value):
    config = settings(shipped("tiny"), **{f"parallel__{name}": value, "parallel__tp_overlap": "copy_engine"})
    problems = check_plan(config.parallel, 4, config.model)
    assert problems and all(problem.startswith(f"parallel.{name}={value}") for problem in problems)
