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
        describe=lambda config, plan: [("experts", "an all-to-all")],
    )
    layout = resolve_layout(config, 4, config.model, 4)
    monkeypatch.setattr("trainer.planning.features.FEATURES", (*FEATURES, asked))
    monkeypatch.setattr("trainer.planning.resolve.FEATURES", (*FEATURES, asked))
    depth = config.model.depth
    assert check_plan(config.parallel, 4, config.model, 4) == [f"model of {depth} layers", "4 of 4 ranks"]
    with pytest.raises(ConfigError, match="4 of 4 ranks"):
        resolve_layout(config, 4, config.model, 4)
    assert ("experts", "an all-to-all") in communication_table(config, layout.plan)
    assert collect_warnings(config, layout, 4)[-1] == "slow on 4"
