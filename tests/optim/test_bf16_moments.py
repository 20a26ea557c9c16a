"""Moments in bf16: those that are accepted follow moments in fp32, and the others are refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import trainer.optim.optimizer
from trainer.config import ConfigError, OptimizerConfig
from trainer.optim.optimizer import Optimizer, ParameterPolicy
from trainer.planning.parameters import DECAYS, SLOWEST_IN_BF16
from trainer.planning.resolve import compose

SMALL = ["+config=debug", "run.device=cpu"]


def moments_of(name: str, state: torch.dtype, decay: float, steps: int) -> dict[str, Tensor]:
    """The moments of 2,000 elements whose gradients, after one step, are a tenth of what they were."""
    config = OptimizerConfig(name=name, beta1=0.9, beta2=decay)
    if name == "sgd":
        config.beta1 = decay
    weight, generator = nn.Parameter(torch.zeros(40, 50)), torch.Generator().manual_seed(0)
    optimizer = Optimizer({"w": weight}, {"w": ParameterPolicy(name, state, 0.0, 1.0)}, config)
    mean = 1 + torch.rand(40, 50, generator=generator)
    for (_, moment), value in optimizer.state.items():
        value.copy_((mean**2 if moment == "exp_avg_sq" else mean) / ((1 - decay) if name == "sgd" else 1))
    for _ in range(steps):
        weight.grad = 0.1 * mean * (1 + 0.3 * torch.randn(40, 50, generator=generator))
        optimizer.step(torch.tensor(1e-3), torch.tensor(1.0), torch.tensor(0.0))
    return {moment: value.float() for (_, moment), value in optimizer.state.items()}


@pytest.mark.parametrize("name", list(DECAYS))
@pytest.mark.parametrize("decay", [0.8, 0.9, 0.95, 0.98, SLOWEST_IN_BF16])
def test_accepted_decays_forget_as_in_fp32(name: str, decay: float, monkeypatch) -> None:
    monkeypatch.setattr(trainer.optim.optimizer, "MOMENTUM", decay)
    steps = int(12 / (1 - decay)) if name != "muon" else int(6 / (1 - decay))
    found, expected = (moments_of(name, state, decay, steps) for state in (torch.bfloat16, torch.float32))
    for moment, value in expected.items():
        assert (found[moment] - value).norm() < 0.06 * value.norm()


@pytest.mark.parametrize("name, decay", [("adamw", 0.998), ("adamw", 0.999), ("lion", 0.999), ("sgd", 0.999)])
def test_refused_decays_do_not(name: str, decay: float) -> None:
    found, expected = (
        moments_of(name, state, decay, int(6 / (1 - decay))) for state in (torch.bfloat16, torch.float32)
    )
    moment = "momentum" if name == "sgd" else "exp_avg" if name == "lion" else "exp_avg_sq"
    assert (found[moment] - expected[moment]).norm() > 2 * expected[moment].norm()


@pytest.mark.parametrize("setting", sorted({setting for settings in DECAYS.values() for setting in settings}))
@pytest.mark.parametrize("name", list(DECAYS))
@pytest.mark.parametrize("decay", [SLOWEST_IN_BF16, 0.991])
@pytest.mark.parametrize(
    "state", ["matrix.state_dtype=bf16", "rules={layers.0.feed_forward.up.weight: {state_dtype: bf16}}", None]
)
def test_decays_too_near_to_one_are_refused_where_a_moment_in_bf16_has_them(setting, name, decay, state) -> None:
    given = [*SMALL, f"optimizer={name}", "optimizer.beta1=0.9", "optimizer.beta2=0.9"]
    given += [f"{setting}={decay}", *([f"precision.types.{state}"] if state else [])]
    if state is None or setting not in DECAYS[name] or decay <= SLOWEST_IN_BF16:
        assert compose(given, world_size=1).optimizer.name == name
        return
    words = f"{setting}={decay} is too near to 1 for moments in bf16"
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        compose(given, world_size=1)
    assert "state_dtype=fp32 in precision.types.matrix" in str(caught.value)
