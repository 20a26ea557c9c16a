"""The optimizer, its schedule, the loss scaler and the parameter-type map."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernels import compare_kernels
from support.reference import tiny_spec
from support.registries import forgotten, package
from torch import nn

import trainer.precision.scaler
from trainer.config import Config, ConfigError, LearningRateConfig, OptimizerConfig, PrecisionConfig, TypePolicy
from trainer.config.compose import import_modules
from trainer.model.initial import parameter_infos
from trainer.model.transformer import Transformer
from trainer.optim.optimizer import Optimizer, ParameterPolicy, learning_rate, parameter_policies
from trainer.planning.resolve import compose
from trainer.precision.scaler import GradScaler


def problem(optimizer: str, state: torch.dtype = torch.float32, decay: float = 0.1):
    generator = torch.Generator().manual_seed(0)
    weights = {f"p{i}": nn.Parameter(torch.randn(5, 3, generator=generator)) for i in range(3)}
    ours = Optimizer(
        weights, {name: ParameterPolicy(optimizer, state, decay, 1.0) for name in weights}, OptimizerConfig(beta2=0.99)
    )
    return weights, ours, generator


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(float(value))


@pytest.mark.parametrize("state, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_adamw_equals_torch(state, tolerance):
    weights, ours, generator = problem("adamw", state)
    copies = [nn.Parameter(w.detach().clone()) for w in weights.values()]
    theirs = torch.optim.AdamW(copies, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for _ in range(5):
        for mine, copy in zip(weights.values(), copies):
            copy.grad = torch.randn(5, 3, generator=generator)
            mine.grad = copy.grad * 8
        ours.step(scalar(0.01), scalar(8), scalar(0))
        theirs.step()
    for mine, copy in zip(weights.values(), copies):
        torch.testing.assert_close(mine, copy, rtol=tolerance, atol=tolerance)
    assert all(value.dtype is state for value in ours.state.values())


def test_a_registered_optimizer_equals_torch_and_skips():
    with forgotten():
        import_modules(["examples.adamax"])
        weights, ours, generator = problem("adamax", decay=0.0)
        copies = [nn.Parameter(w.detach().clone()) for w in weights.values()]
        theirs = torch.optim.Adamax(copies, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
        for broken in (0, 0, 1, 0):
            for mine, copy in zip(weights.values(), copies):
                copy.grad = torch.randn(5, 3, generator=generator)
                mine.grad = copy.grad * (float("inf") if broken else 8)
            ours.step(scalar(0.01), scalar(8), scalar(broken))
            if not broken:
                theirs.step()
        for mine, copy in zip(weights.values(), copies):
            torch.testing.assert_close(mine, copy, rtol=1e-6, atol=1e-6)
        assert {moment for _, moment in ours.state} == {"exp_avg", "exp_inf"}


def test_registered_optimizers_that_cannot_be(tmp_path):
    with forgotten(tmp_path):
        package(
            tmp_path,
            "whole",
            """
            @register.optimizer("whole", moments=("m",), elementwise=False)
            def whole(settings, update):
                return update.weight, {"other": update.weight}
            """,
        )
        mine = ["imports=[whole]", "precision.types.matrix.optimizer=whole"]
        for plan in ("zero1", "tp2"):
            with pytest.raises(ConfigError, match=r"optimizer 'whole' \(whole.whole\) needs whole parameters"):
                compose([*mine, f"parallel={plan}"], world_size=2)
        assert compose([*mine, "parallel=ddp"], world_size=2).precision.types.matrix.optimizer == "whole"
        with pytest.raises(ConfigError, match="optimizer.settings.whole: .* is not chosen"):
            compose(["imports=[whole]", "optimizer.settings.whole={}"], world_size=1)
        weights, ours, _ = problem("whole")
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight)
        with pytest.raises(ConfigError, match="returns the moments other, and is registered with m"):
            ours.step(scalar(1), scalar(1), scalar(0))


def test_lion_and_sgd_follow_their_definitions():
    for name in ("lion", "sgd"):
        weights, ours, generator = problem(name)
        weight = weights["p0"].detach().clone()
        moment = torch.zeros_like(weight)
        for _ in range(4):
            gradients = {key: torch.randn(5, 3, generator=generator) for key in weights}
            for key, parameter in weights.items():
                parameter.grad = gradients[key] * 2
            ours.step(scalar(0.1), scalar(2), scalar(0))
            gradient = gradients["p0"]
            if name == "lion":  # arXiv 2302.06675, algorithm 2
                weight = weight - 0.1 * (torch.sign(0.9 * moment + 0.1 * gradient) + 0.1 * weight)
                moment = 0.99 * moment + 0.01 * gradient
            else:
                moment = 0.9 * moment + gradient
                weight = weight - 0.1 * (moment + 0.1 * weight)
            torch.testing.assert_close(weights["p0"].detach(), weight)


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "muon"])
def test_a_skipped_step_changes_nothing(name):
    weights, ours, generator = problem(name)

    def step(found_inf: float) -> None:
        for parameter in weights.values():
            parameter.grad = torch.full((5, 3), float("nan")) if found_inf else torch.randn(5, 3, generator=generator)
        ours.step(scalar(0.1), scalar(float("nan") if found_inf else 1), scalar(found_inf))

    step(0)
    before = [t.clone() for t in [*weights.values(), *ours.tensors().values()]]
    step(1)
    assert all(torch.equal(a, b) for a, b in zip(before, [*weights.values(), *ours.tensors().values()]))
    assert ours.updates == 1


def test_kernels_in_tritons_interpreter_have_the_bits_of_the_torch_code():
    compare_kernels("multi_tensor.py", "cpu", TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu_have_the_bits_of_the_torch_code():
    compare_kernels("multi_tensor.py", "cuda")


@given(
    st.sampled_from(["cosine", "wsd", "linear", "constant"]),
    st.integers(0, 20),
    st.integers(0, 30),
    st.floats(0, 1),
    st.integers(41, 200),
)
def test_schedule_shape(schedule, warmup, decay, final, steps):
    config = LearningRateConfig(schedule=schedule, peak=2.0, warmup=warmup, decay=decay, final=final)
    rates = [learning_rate(config, steps, scalar(updates)).item() for updates in range(steps)]
    assert all(0 <= rate <= 2.0 + 1e-6 for rate in rates)
    assert rates[:warmup] == pytest.approx([2.0 * (i + 1) / warmup for i in range(warmup)], rel=1e-5)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True) or schedule == "constant"
    assert rates[-1] == pytest.approx(2.0 if schedule == "constant" else 2.0 * final, abs=1e-5)
    if schedule == "wsd":
        length = decay or max(steps // 5, 1)
        assert rates[warmup : steps - length] == pytest.approx([2.0] * max(steps - length - warmup, 0))


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_scaler_follows_torch_amp(overflows, interval):
    with patch.object(trainer.precision.scaler, "GROWTH_INTERVAL", interval):
        ours = GradScaler(PrecisionConfig(compute="fp16", loss_scale=1024.0), torch.device("cpu"))
        theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        for overflow in overflows:
            theirs.scale(weight.sum()).backward()
            weight.grad.fill_(float("inf") if overflow else 1.0)
            theirs.step(optimizer)
            theirs.update()
            ours.update(scalar(overflow))
        if overflows:
            assert ours.state_dict() == pytest.approx(theirs.state_dict())
        again = GradScaler(PrecisionConfig(compute="fp16"), torch.device("cpu"))
        again.load_state_dict(ours.state_dict())
        assert again.state_dict()["scale"] == ours.state_dict()["scale"]


def test_scaler_is_idle_outside_fp16():
    scaler = GradScaler(PrecisionConfig(compute="bf16"), torch.device("cpu"))
    scaler.update(scalar(1))
    assert scaler.scale(scalar(3)) == 3 and scaler.value == 1
    theirs = torch.amp.GradScaler("cpu", enabled=False)
    assert scaler.state_dict() == theirs.state_dict() == {}


def test_scaler_begins_with_its_own_scale_after_a_run_without_one():
    scaler = GradScaler(PrecisionConfig(compute="fp16", loss_scale=512.0), torch.device("cpu"))
    scaler.load_state_dict(GradScaler(PrecisionConfig(compute="bf16"), torch.device("cpu")).state_dict())
    assert scaler.value == 512


def test_parameter_types_by_role_and_rule():
    config = Config()
    types = config.precision.types
    types.head = TypePolicy(optimizer="lion", lr_scale=0.5)
    types.rules = {
        "layers.0.*": {"lr_scale": 0.1},
        "layers.0.attention.q.weight": {"weight_decay": 0.7, "state_dtype": "bf16"},
    }
    infos = parameter_infos(Transformer(tiny_spec()))
    policies = parameter_policies(infos, types, config.optimizer)
    assert {infos[name].role for name in policies} == {"embedding", "norm", "bias", "head", "matrix"}
    assert (
        policies["embedding.weight"]
        == policies["norm.weight"]
        == policies["layers.1.attention.q.bias"]
        == ParameterPolicy("adamw", torch.float32, 0.0, 1.0)
    )
    assert policies["layers.1.feed_forward.up.weight"] == ParameterPolicy("adamw", torch.float32, 0.1, 1.0)
    assert policies["head.weight"] == ParameterPolicy("lion", torch.float32, 0.1, 0.5)
    assert policies["layers.0.attention.q.weight"] == ParameterPolicy("adamw", torch.bfloat16, 0.7, 0.1)
    assert policies["layers.0.attention_norm.weight"] == ParameterPolicy("adamw", torch.float32, 0.0, 0.1)
