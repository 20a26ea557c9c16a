"""The engines behind one protocol: which there are, who may ask for their names, and FSDP's private names."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainer.config import Config
from trainer.distributed.mesh import join_world
from trainer.parallel.compress.reduction import compression_of
from trainer.parallel.zero.fsdp import ENGINES, FSDPSharding
from trainer.parallel.zero.fsdp_internals import fsdp_units, is_set_up, parameter_group, sharded_sizes
from trainer.planning.features import resolve_plan
from trainer.planning.plan import Plan

PACKAGE = Path(__file__).parents[2] / "trainer"


def test_every_engine_that_can_be_asked_for_is_there():
    [field] = [field for field in dataclasses.fields(Config().parallel.zero) if field.name == "engine"]
    assert tuple(ENGINES) == field.metadata["choices"]


def test_what_carries_a_plan_out_does_not_ask_for_an_engine():
    """Planning may know what an engine cannot do; who trains goes through the table."""
    allowed = {"config", "planning", "parallel/zero/plan.py", "parallel/zero/fsdp.py", "parallel/zero/deepspeed"}
    allowed |= {"parallel/experts/plan.py"}
    named = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and any(isinstance(part, ast.Constant) and part.value in ENGINES for part in [node.left, *node.comparators])
    }
    named -= {"diagnosis/suggestions.py"}  # advice on what to set, which is planning
    assert named and not [path for path in named if not path.startswith(tuple(allowed))]


def test_a_step_does_not_look_for_units_among_all_modules(monkeypatch):
    """FSDP's setters would, which takes longer than launching the layers' kernels."""
    joined, walks = dist.is_initialized(), []
    world = join_world(Plan(), torch.device("cpu"))
    try:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(3)))
        for module in [*model, model]:
            fully_shard(module, mesh=world.mesh["shard"])
        config = Config()
        plan = resolve_plan(config.parallel, 1)
        sharding = FSDPSharding({0: model}, plan, 1, compression_of(config.parallel.grad_comm, plan, world))
        model(torch.ones(2, 3))  # finds its units once
        walk = nn.Module.named_modules
        monkeypatch.setattr(nn.Module, "named_modules", lambda self, *a, **k: walks.append(self) or walk(self, *a, **k))
        sharding.begin(0)
        loss = model(torch.ones(2, 3)).sum()
        sharding.begin_reducing_backward(0)
        loss.backward()
        sharding.end_reducing_backward(0)
        sharding.reshard(0)
        sharding.end(0)
        assert not walks
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    finally:
        if not joined:
            dist.destroy_process_group()


def test_fsdp_has_the_private_names_that_are_used():
    """Of a unit before and after its first forward and backward pass; what a version of torch lacks is named."""
    joined = dist.is_initialized()
    world = join_world(Plan(), torch.device("cpu"))
    try:
        model = fully_shard(nn.Linear(3, 5), mesh=world.mesh["shard"])
        assert not is_set_up(model)
        (parameter, _), (_, rows) = sharded_sizes(model)
        assert parameter is model.weight and rows == 5 and fsdp_units(model) == [model]
        model(torch.ones(2, 3)).sum().backward()
        assert is_set_up(model)
        state, group = model._get_fsdp_state(), parameter_group(model)
        wanted = {
            state: ("_root_post_backward_final_callback",),
            group: ("post_backward", "fsdp_params"),
            group.fsdp_params[0]: ("_unsharded_param", "unsharded_param", "unsharded_accumulated_grad", "reduce_dtype"),
        }
        assert not [name for owner, names in wanted.items() for name in names if not hasattr(owner, name)]
    finally:
        if not joined:
            dist.destroy_process_group()
