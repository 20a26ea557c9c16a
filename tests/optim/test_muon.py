"""Muon: the iteration, how matrices are dealt out to ranks, which parameters it is for, and what it keeps."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.reference import settings, tiny_spec
from torch import nn

from trainer.config import ConfigError, OptimizerConfig, TypePolicy
from trainer.optim import muon
from trainer.optim.optimizer import Optimizer, ParameterPolicy, parameter_policies
from trainer.planning.parameters import UpdateSettings, declare_parameters, orthogonalisation_flops
from trainer.planning.plan import Plan
from trainer.planning.resolve import config_problems, resolve_layout
from trainer.planning.states import local_parameters, state_bytes

SHAPES = [(24, 12), (12, 24), (16, 16), (1, 7)]


def test_steps_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    weights = {f"p{i}": nn.Parameter(torch.randn(shape, generator=generator)) for i, shape in enumerate(SHAPES)}
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights.values()]
    config = OptimizerConfig()
    ours = Optimizer(weights, dict.fromkeys(weights, ParameterPolicy("muon", torch.float32, 0.1, 0.5)), config)
    theirs = torch.optim.Muon(
        copies, lr=0.01, weight_decay=0.1, momentum=0.95, nesterov=True, ns_steps=5, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        for mine, copy in zip(weights.values(), copies):
            copy.grad = torch.randn(copy.shape, generator=generator)
            mine.grad = copy.grad * 8
        ours.step(torch.tensor(0.02), torch.tensor(8.0), torch.tensor(0.0))
        theirs.step()
    for mine, copy in zip(weights.values(), copies):
        torch.testing.assert_close(mine, copy, rtol=1e-6, atol=1e-6)


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 9000)), min_size=1, max_size=40), st.integers(1, 9))
def test_ranks_share_the_work(shapes, ranks):
    names = {str(index): shape for index, shape in enumerate(shapes)}
    rounds = muon.assign_matrices(names, ranks)
    assert sorted(name for some in rounds for name, _ in some) == sorted(names)
    costs = {name: orthogonalisation_flops(shape, 5) for name, shape in names.items()}
    longest = 0
    for some in rounds:
        owned = [[name for name, owner in some if owner == rank] for rank in range(ranks)]
        longest += max(sum(costs[name] for name in mine) for mine in owned)
        for mine in owned:
            assert len(mine) < 2 or sum(prod(names[name]) for name in mine) <= muon.ROUND
    assert longest <= max(costs.values()) + sum(costs.values()) / ranks


def test_it_is_for_hidden_matrices_and_leaves_the_rest_to_adamw():
    config = settings(optimizer__name="muon", precision__types__rules={"layers.0.*.q.weight": {"optimizer": "lion"}})
    infos = declare_parameters(tiny_spec())
    policies = parameter_policies(infos, config.precision.types, config.optimizer)
    assert policies["layers.0.attention.q.weight"].optimizer == "lion"
    for name, info in infos.items():
        if name != "layers.0.attention.q.weight":
            assert policies[name].optimizer == ("muon" if info.role == "matrix" else "adamw"), name


@pytest.mark.parametrize(
    "where, words",
    [
        ({"embedding": TypePolicy(optimizer="muon")}, "embedding.weight optimizer=muon"),
        ({"rules": {"layers.1.*": {"optimizer": "muon"}}}, "layers.1.attention.q.bias and 6 more optimizer=muon"),
    ],
)
def test_it_is_refused_for_what_is_no_hidden_matrix(where, words):
    config = settings(batch__global_size=1)
    vars(config.precision.types).update(where)
    with pytest.raises(ConfigError) as refused:
        resolve_layout(config, 1, tiny_spec())
    (problem,) = refused.value.problems
    assert words in problem and "precision.types.matrix.optimizer=muon" in problem


@pytest.mark.parametrize("given", [{"optimizer__name": "muon"}, {"precision__types__matrix__optimizer": "muon"}])
def test_deepspeed_is_refused(given):
    engine = {"parallel__zero__engine": "deepspeed", "parallel__zero__stage": 1}
    problems = [text for text in config_problems(settings(**engine, **given)) if "muon" in text]
    assert len(problems) == 1 and "parallel.zero.engine=torch" in problems[0]


def test_states_are_counted_as_they_are_kept():
    spec, plan = tiny_spec(), Plan(pp=1, replicate=1, shard=2, tp=2, stage=1, offload=False)
    config = settings(optimizer__name="muon", optimizer__ema__decay=0.9)
    config.precision.types.norm.state_dtype = "bf16"
    states = state_bytes(spec, plan, 4, updates=UpdateSettings.of(config))
    sizes = {"matrix": 4, "norm": 4}
    moments = sum(sizes.get(info.role, 8) * info.held(2) for info in declare_parameters(spec).values())
    assert states.optimizer == -(-moments // 2)
    assert states.average == 4 * -(-sum(local_parameters(spec, 2).units(range(3))) // 2)
    assert dict(states.rows())["average of weights"] == states.average
    plain = state_bytes(spec, plan, 4)
    assert states.total - states.average - states.optimizer == plain.total - plain.optimizer
