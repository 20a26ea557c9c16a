"""What a plan may ask of a model is what `Stage` says, and the kinds of blocks are those of the settings."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
from support.foreign import ForeignModel, WatchedFeedForward
from support.reference import random_batch, tiny_spec
from torch import nn
from torch.distributed.fsdp import FSDPModule

import trainer
from trainer.config import ActivationConfig
from trainer.config.model import AttentionSpec, FeedForwardSpec, ModelSpec
from trainer.model.initial import initialize_model
from trainer.model.layers import ATTENTION, FEED_FORWARD, Layer
from trainer.model.stage import BlockReport, ReportedOutput, Stage, StageLayer, join_reports, split_report
from trainer.model.transformer import Transformer
from trainer.parallel.recompute import apply_recompute

USERS = (
    "parallel/recompute.py",
    "parallel/zero/deepspeed_engine.py",
    "parallel/zero/fsdp.py",
    "parallel/zero/fsdp_internals.py",
    "parallel/parallelize.py",
    "parallel/pipeline/timing.py",
    "parallel/tensor/apply.py",
    "training/state.py",
    "training/step.py",
)


@pytest.mark.parametrize("table, spec", [(ATTENTION, AttentionSpec), (FEED_FORWARD, FeedForwardSpec)])
def test_the_kinds_of_blocks_are_those_that_a_setting_may_name(table, spec):
    (kind,) = (field for field in dataclasses.fields(spec) if field.name == "kind")
    assert set(table) == set(kind.metadata["choices"])


def test_a_layer_is_made_of_the_blocks_that_its_spec_names(monkeypatch):
    monkeypatch.setitem(FEED_FORWARD, "watched", WatchedFeedForward)
    spec = tiny_spec()
    spec.pattern = [{}, {"feed_forward": {"kind": "watched"}}]
    with torch.device("meta"):
        model = Transformer(spec)
    kinds = [type(layer.feed_forward) for layer in model.layers.values()]
    assert kinds == [FEED_FORWARD["gated"], WatchedFeedForward, FEED_FORWARD["gated"]]
    assert model.reports == {
        f"layers.1.feed_forward.{name}": n for name, n in dict(penalty=1, tokens=1, positive=4).items()
    }


def members(protocol: type) -> set[str]:
    return set(protocol.__annotations__) | {name for name in vars(protocol) if not name.startswith("_")}


@pytest.mark.parametrize("make", [Transformer, ForeignModel])
def test_models_have_what_a_plan_may_ask_of_them(make):
    spec = tiny_spec()
    with torch.device("meta"):
        for part in (make(spec, None), make(spec, range(0, 1)), make(spec, range(1, 3))):
            assert isinstance(part, Stage)
            assert all(isinstance(layer, nn.Module) for layer in part.layers.values())
            assert all(hasattr(layer, name) for layer in part.layers.values() for name in members(StageLayer))


@pytest.mark.parametrize("user", USERS)
def test_nothing_else_is_asked_of_a_model(user):
    """By the names that all of these files give to a model, its layers and modules."""
    tree = ast.parse((Path(trainer.__file__).parent / user).read_text())
    sharded = set(dir(FSDPModule)) - set(dir(object))
    allowed = {"model": members(Stage) | sharded, "layer": members(StageLayer) | set(dir(nn.Module))}
    asked = [
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in allowed
    ]
    assert not [f"{name}.{attribute}" for name, attribute in asked if attribute not in allowed[name]]
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert "Layer" not in imported
    assert asked or user.startswith("training/step")


def test_reports_are_added_up_and_named():
    one = BlockReport(torch.tensor(2.0), {"load": torch.ones(2)})
    two = BlockReport(torch.tensor(3.0), {})
    result, report = split_report(join_reports("x", {"a": one, "b": None, "c": two}))
    assert result == "x" and report.objective == 5 and report.statistics.keys() == {"a.load"}
    assert join_reports("x", {"a": None}) == "x" and split_report("x") == ("x", None)
    assert split_report(ReportedOutput("x", one)) == ("x", one)
    assert split_report(join_reports("x", {"a": BlockReport(None, {"load": torch.ones(2)})}))[1].objective is None


def test_a_compiled_and_recomputed_layer_reports_once(monkeypatch):
    monkeypatch.setitem(FEED_FORWARD, "watched", WatchedFeedForward)
    spec = tiny_spec(depth=2)
    spec.feed_forward.kind = "watched"
    batch, seen = random_batch(0, 2, 16, spec.vocab_size, False), []
    for compiled in (False, True):
        model = Transformer(spec)
        initialize_model(model, spec, 0, torch.device("cpu"))
        if compiled:
            apply_recompute(model, ActivationConfig(mode="full"))
            for layer in model.layers.values():
                layer.run = torch.compile(layer.run, dynamic=False, backend="aot_eager")
        (objective, _), report = split_report(model(batch.tokens, batch.targets))
        (objective + report.objective).backward()
        seen.append([*report.statistics.values(), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*seen):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(one.abs().max()))


def test_layers_report_in_training_alone(monkeypatch):
    monkeypatch.setitem(FEED_FORWARD, "watched", WatchedFeedForward)
    spec = ModelSpec(width=24)
    spec.feed_forward.kind = "watched"
    layer = Layer(spec.layer(0), spec.width, False)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.attention.rotary = False
    x = torch.randn(8, spec.width)
    assert isinstance(layer(x, (2, 4), None, None), ReportedOutput)
    assert torch.equal(layer.eval()(x, (2, 4), None, None), layer.train()(x, (2, 4), None, None).result)
