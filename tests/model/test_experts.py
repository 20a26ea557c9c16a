"""Experts: the grouped GEMM and its gradients, the choice of experts, and what recompute leaves of it."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.config import ActivationConfig, Config, ModelConfig, OptimizerConfig
from trainer.config.model import ExpertsSpec, FeedForwardSpec, ModelSpec, assign_fields
from trainer.model import experts
from trainer.model.initial import initial_value, initialize_model, name_seed, parameter_infos
from trainer.model.layers import Mixture
from trainer.model.linear import DeferredGrads
from trainer.model.stage import split_report
from trainer.model.transformer import Transformer
from trainer.optim.muon import orthogonalise_matrix
from trainer.parallel.pipeline.plan import estimated_costs
from trainer.parallel.recompute import apply_recompute
from trainer.parity.compare import find_quantile
from trainer.planning.features import resolve_plan
from trainer.planning.float8 import describe_float8, float8_linears
from trainer.planning.layer import model_programs
from trainer.planning.parameters import UpdateSettings, declare_parameters
from trainer.planning.plan import BatchPlan
from trainer.planning.recompute import recompute_problems

CPU = torch.device("cpu")


def spec_of(**changes: Any) -> ModelSpec:
    spec = ModelSpec(vocab_size=61, width=16, depth=2, max_length=64)
    spec.attention.heads, spec.feed_forward = 2, FeedForwardSpec(width=24, experts=ExpertsSpec(count=6, top_k=2))
    assign_fields(spec, changes, "model")
    return spec


def with_experts(**fields: Any) -> ModelSpec:
    return spec_of(feed_forward={"experts": fields})


def build(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> Transformer:
    model = Transformer(spec)
    initialize_model(model, spec, 0, CPU)
    return model.to(dtype)


def objective_of(model: Transformer, tokens: Tensor) -> Tensor:
    """The loss with what layers add to it."""
    (objective, _), report = split_report(model(tokens, tokens))
    return objective if report.objective is None else objective + report.objective


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


# The grouped GEMM.


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    deferring=st.sampled_from(["no", "at once", "later"]),
    biased=st.sampled_from(["no", "plain", "weighted"]),
)
def test_a_grouped_product_and_its_gradients_are_those_of_each_expert(counts, deferring, biased):
    """Of no rows at all too, of one expert with all, of experts without any."""
    torch.manual_seed(0)
    spec = ExpertsSpec(count=len(counts))
    layer = experts.GroupedLinear(spec, 8, 16, ("inner", "embed"), bias=biased != "no").double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    deferred = DeferredGrads()
    if deferring != "no":
        layer.defer(deferred)
        deferred.active = deferring == "later"
    x = torch.randn(sum(counts), 8, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(sum(counts), 16, dtype=torch.float64)
    factors = torch.randn(sum(counts), dtype=torch.float64, requires_grad=True) if biased == "weighted" else None
    y = layer(x, ends_of(counts), factors)
    y.backward(gradient)
    if deferring == "later":
        assert layer.weight.grad is None
        deferred.take()()
    other, weight = x.detach().requires_grad_(), layer.weight.detach().requires_grad_()
    expected = torch.cat([part @ matrix.t() for part, matrix in zip(other.split(counts), weight)])
    pairs = [(layer.weight, weight), (x, other)]
    if biased != "no":
        bias = layer.bias.detach().requires_grad_()
        rows = torch.cat([row.expand(count, -1) for row, count in zip(bias, counts)])
        pairs.append((layer.bias, bias))
        if factors is not None:
            again = factors.detach().requires_grad_()
            rows = rows * again[:, None]
            pairs.append((factors, again))
        expected = expected + rows
    expected.backward(gradient)
    for found, wanted in ((y, expected), *((one.grad, two.grad) for one, two in pairs)):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0]])
def test_the_operators_are_sound_for_the_compiler(counts):
    x, weight, ends = torch.randn(sum(counts), 8), torch.randn(3, 16, 8), ends_of(counts)
    gradient, scores = torch.randn(sum(counts), 16), torch.rand(5, 8)
    for operator, arguments in (
        (torch.ops.trainer.grouped_matmul, (x, weight, ends)),
        (torch.ops.trainer.grouped_backward, (gradient, weight, x, ends, [])),
        (torch.ops.trainer.choose_experts, (scores, 2, 4, 2, 2)),
        (torch.ops.trainer.sum_groups, (gradient, torch.rand(sum(counts)), ends)),
        (torch.ops.trainer.count_by_sequence, (torch.randint(0, 8, (5, 2)), torch.arange(5) // 2, 3, "", 8)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


# The layer, beside every expert computing every token.


def bias_of(module: torch.nn.Module) -> Tensor | float:
    """The bias of a projection, zero where it has none."""
    return dict(module.named_parameters()).get("bias", 0.0)


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    if activation == "silu":
        return F.silu(gate) * up
    return (
        gate.minimum(torch.tensor(7.0))
        / (1 + torch.exp(-1.702 * gate.minimum(torch.tensor(7.0))))
        * (up.minimum(torch.tensor(7.0)).maximum(torch.tensor(-7.0)) + 1)
    )


def dense_mixture(block: Mixture, spec: FeedForwardSpec, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a mixture computes, by plain operations: all experts of all tokens, weighted with zero where not chosen.
    Returns besides which experts each token chose, and the router's logits and scores."""
    e = spec.experts
    logits = x @ block.router.weight.t() + bias_of(block.router)
    ways = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "sqrtsoftplus": (1 + logits.exp()).log().sqrt()}
    scores = ways[e.score]
    biased = scores if block.router.balance is None else scores + block.router.balance
    groups = biased.unflatten(-1, (e.groups, -1)).sort(-1, descending=True).values
    values = groups[..., : 2 if e.group_score == "top2" else 1].sum(-1)
    usable = values >= values.sort(-1, descending=True).values[:, e.top_groups - 1, None]
    ranked = biased.masked_fill(~usable.repeat_interleave(e.count // e.groups, -1), -torch.inf)
    chosen = ranked >= ranked.sort(-1, descending=True).values[:, e.top_k - 1, None]
    weights = torch.where(chosen, scores, 0)
    if e.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    inner = (getattr(block.experts, name) for name in ("gate", "up"))
    hidden = gated(spec.activation, *(torch.einsum("tw,efw->tef", x, one.weight) + bias_of(one) for one in inner))
    outputs = torch.einsum("tef,ewf->tew", hidden, block.experts.down.weight) + bias_of(block.experts.down)
    result = torch.einsum("tew,te->tw", outputs, weights * e.scale)
    if block.shared is not None:
        (gate, up), down = (
            ((one.weight, bias_of(one)) for one in (block.shared.gate, block.shared.up)),
            block.shared.down,
        )
        hidden = gated(spec.activation, *(x @ weight.t() + bias for weight, bias in (gate, up)))
        shared = hidden @ down.weight.t() + bias_of(down)
        gating = 1 if block.shared_gate is None else (x @ block.shared_gate.weight.t()).sigmoid()
        result = result + gating * shared
    return result, chosen, logits, scores


@st.composite
def mixtures(draw: st.DrawFn) -> ExpertsSpec:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    size = draw(st.integers(2, 4))
    top_groups = draw(st.integers(1, groups))
    shared = draw(st.sampled_from([0, 12]))
    return ExpertsSpec(
        count=groups * size,
        top_k=draw(st.integers(1, top_groups * size)),
        score=draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"])),
        normalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["max", "top2"])),
        shared_width=shared,
        shared_gate=bool(shared) and draw(st.booleans()),
        router_bias=draw(st.booleans()),
        bias_rate=draw(st.sampled_from([0.0, 0.1])),
    )


@settings(max_examples=40, deadline=None)
@given(
    chosen=mixtures(),
    tokens=st.integers(0, 9),
    skewed=st.booleans(),
    bias=st.booleans(),
    activation=st.sampled_from(["silu", "clamped_swiglu"]),
)
def test_a_mixture_is_the_weighted_sum_of_its_experts(chosen, tokens, skewed, bias, activation):
    """Outputs and the gradients of tokens and all parameters; skewed: all tokens to the same experts."""
    spec = FeedForwardSpec(width=24, bias=bias, activation=activation, experts=chosen)
    assert not chosen.check(16, spec)
    torch.manual_seed(1)
    block = Mixture(spec, 16).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = 3 * torch.randn(tokens, 16, dtype=torch.float64)  # some of the gate's inputs are clamped
    if skewed:
        x = x[:1].expand(tokens, 16) + 1e-3 * x
    x.requires_grad_()
    if block.router.balance is not None:
        block.router.balance.normal_()
    gradient = torch.randn(tokens, 16, dtype=torch.float64)
    inputs = [x, *block.parameters()]
    result, report = block(x)
    found = [result, *torch.autograd.grad(result, inputs, gradient)]
    expected, choice, *_ = dense_mixture(block, spec, x)
    wanted = [expected, *torch.autograd.grad(expected, inputs, gradient)]
    assert torch.equal(report.statistics["load"], choice.sum(0)) and report.objective is None
    assert torch.equal(block.eval()(x), result)
    for name, one, other in zip(["output", "x", *dict(block.named_parameters())], found, wanted):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_router_computes_in_fp32(dtype):
    """Of scores in 16 bits up to a tenth would tie."""
    router = experts.Router(ExpertsSpec(count=8, top_k=2), 16).to(dtype)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    chosen, weights, *_ = router(x)
    scores = (x.float() @ router.weight.float().t()).softmax(-1)
    values, indices = scores.topk(2)
    assert weights.dtype is torch.float32 and torch.equal(chosen, indices)
    torch.testing.assert_close(weights, values / values.sum(-1, keepdim=True))
    weights[:, 0].sum().backward()
    assert x.grad.dtype is router.weight.grad.dtype is dtype


# Balance.


@settings(max_examples=40, deadline=None)
@given(chosen=mixtures(), over=st.sampled_from(["sequence", "previous"]), z_loss=st.sampled_from([0.0, 0.5]))
def test_the_losses_are_those_of_the_papers(chosen, over, z_loss):
    """Fedus et al., arXiv 2101.03961, equation 4, with the scores of each token divided by their sum, for each sequence
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) or with the load of the previous step; Zoph et al., arXiv
    2202.08906, equation 5. Sums over tokens, and so are their gradients."""
    chosen = replace(chosen, balance=0.25, balance_over=over, z_loss=z_loss)
    spec, length = FeedForwardSpec(width=24, experts=chosen), 5
    torch.manual_seed(2)
    block = Mixture(spec, 16).double()
    for value in [*block.parameters(), *block.buffers()]:
        torch.nn.init.normal_(value, std=0.5)
    x = torch.randn(3 * length, 16, dtype=torch.float64, requires_grad=True)
    numbers = torch.arange(3).repeat_interleave(length)
    sequences = experts.Sequences(numbers, 3, "") if over == "sequence" else None
    assert block.by_sequence == (sequences is not None)
    report = block(x, sequences).report
    _, choice, logits, scores = dense_mixture(block, spec, x)
    shares = scores / scores.sum(-1, keepdim=True)
    if over == "previous":
        balance = length * 3 * (block.router.usage @ shares.mean(0))
    else:
        rows = zip(choice.double().split(length), shares.split(length))
        balance = sum(length * chosen.count * (c.mean(0) / chosen.top_k) @ s.mean(0) for c, s in rows)
    square = logits.exp().sum(-1).log().square().sum()
    wanted = [0.25 * balance, *torch.autograd.grad(0.25 * balance + z_loss * square, [x, block.router.weight])]
    found = [report.statistics["balance"][0], *torch.autograd.grad(report.objective, [x, block.router.weight])]
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other)
    assert ("z_loss" in report.statistics) == (z_loss > 0)
    assert {name: len(value) for name, value in report.statistics.items()} == block.reports


@settings(max_examples=100, deadline=None)
@given(
    load=st.lists(st.integers(0, 2**40), min_size=1, max_size=8).filter(any),
    skipped=st.booleans(),
    start=st.floats(-1, 1, width=32),
)
def test_biases_move_towards_equal_load(load, skipped, start):
    """By the sign alone, also where the mean is no number of the machine; and not in a skipped step."""
    router = experts.Router(ExpertsSpec(count=len(load), bias_rate=0.25, balance=1.0, balance_over="previous"), 8)
    router.balance.fill_(start)
    router.usage.fill_(start)
    router.rebalance(torch.tensor(load, dtype=torch.float64), torch.tensor(float(skipped)))
    total = sum(load)
    moves = [(count * len(load) < total) - (count * len(load) > total) for count in load]
    expected = torch.full((len(load),), start)
    if not skipped:
        torch.testing.assert_close(router.usage, torch.tensor([count * len(load) / total for count in load]))
        expected = (expected.double() + 0.25 * torch.tensor(moves)).float()
    else:
        assert torch.equal(router.usage, expected)
    assert torch.equal(router.balance, expected)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    count=st.integers(2, 9),
    tokens=st.integers(1, 300),
    scale=st.sampled_from([1e-4, 0.1, 30.0]),
)
def test_quantiles_of_margins_are_those_of_all_tokens(seed, count, tokens, scale):
    """The exact quantile lies beside the same point, and margins of tokens that an expert has are negative."""
    generator = torch.Generator().manual_seed(seed)
    ranked, points = scale * torch.rand(tokens, count, generator=generator), experts.MARGIN_POINTS
    top_k = 1 + seed % (count - 1)
    counts = experts.count_margins(ranked, top_k).view(count, len(points)).double() / experts.WHOLE
    load = torch.bincount(ranked.topk(top_k).indices.flatten(), minlength=count)
    margins = (ranked.sort(-1, descending=True).values[:, top_k, None] - ranked).double()
    unclear = ((margins < 0) & (margins > points[30])).sum(0)
    negative = counts[:, : len(points) // 2].sum(1)
    assert (counts.sum(1) == tokens).all() and ((negative <= load) & (negative >= load - unclear)).all()
    inside = margins.clamp(points[0], points[-1])
    mean = (counts * torch.tensor(points, dtype=torch.float64)).sum(1) / tokens
    torch.testing.assert_close(mean, inside.mean(0), atol=1e-5, rtol=0)
    exact = inside.sort(0).values[math.ceil(tokens * top_k / count - 1e-9) - 1]
    found = experts.margin_quantiles(counts, top_k / count)
    for one, other, row in zip(found.tolist(), exact.tolist(), counts.tolist()):
        places = [bisect_left(points, value) for value in (one, other)]
        assert abs(places[0] - places[1]) <= 1 or tokens < 20
        assert one == pytest.approx(find_quantile(row, top_k / count), abs=1e-12)


def test_rounding_of_margins_hardly_changes_their_quantiles():
    """A margin near a point may be on either side of it under different plans."""
    ranked = torch.rand(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for number, point in enumerate(experts.MARGIN_POINTS[45:-1]):
        quantiles = []
        for change in (-1e-7, 1e-7):
            changed = ranked.clone()
            margin = changed[number].topk(3).values[1:2] - changed[number]
            changed[number, margin.argmax()] -= point + change - margin.max()
            counts = experts.count_margins(changed, 1).view(3, -1).double()
            quantiles.append(experts.margin_quantiles(counts, 1 / 3))
        torch.testing.assert_close(*quantiles, atol=2e-5, rtol=0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_quantiles_balance_skewed_scores_in_few_steps(score):
    """Steps by the sign are far from equal load by then."""
    torch.manual_seed(4)
    x, fullest = torch.randn(2000, 8), {}
    for rule, rate in (("sign", 1e-3), ("quantile", 1.0)):
        router = experts.Router(ExpertsSpec(count=16, top_k=3, score=score, bias_rate=rate, bias_rule=rule), 8)
        with torch.no_grad():
            router.weight.normal_(generator=torch.Generator().manual_seed(5))
            router.weight[3] *= 4  # of high scores for half of the tokens
        for _ in range(12):
            statistics = router.report(router(x), None).statistics
            router.rebalance(*(statistics["load"].double(), torch.tensor(0.0)), margins_of(statistics))
        load = router.report(router(x), None).statistics["load"]
        fullest[rule] = (load.max() * 16 / load.sum()).item()
        if rule == "quantile":
            assert router.balance.mean().abs() < 1e-6
            before = router.balance.clone()
            router.rebalance(load.double(), torch.tensor(1.0), margins_of(statistics))
            assert torch.equal(router.balance, before)
    assert fullest["quantile"] < (1.15 if score == "softmax" else 1.05) and fullest["sign"] > 1.5, fullest


def margins_of(statistics: dict[str, Tensor]) -> Tensor | None:
    return statistics["margins"].double() if "margins" in statistics else None


# Recompute, deferred gradients, initial weights, Muon.


POLICIES = {
    "full": {"mode": "full"},
    "selective": {"mode": "selective"},
    "blocks": {"mode": "selective", "save": ["attention", "attention.*"]},
    "products": {"mode": "selective", "save": ["feed_forward.experts.up", "feed_forward.router"]},
    "one layer": {"mode": "selective", "save": ["all@1"]},
}


@pytest.mark.parametrize(
    ("policy", "compiled"), [*((policy, False) for policy in POLICIES), ("full", True), ("products", True)]
)
def test_recompute_does_not_choose_again(policy, compiled, monkeypatch):
    """A second choice for the same tokens would be another. Losses of the router count once."""
    spec = with_experts(groups=2, top_groups=1, balance=0.1, z_loss=0.1, bias_rate=0.1)
    spec.overrides = {"1": {"feed_forward": {"experts": {"groups": 1, "bias_rule": "quantile"}}}}
    spec.feed_forward.bias = True
    assert not spec.check()
    tokens, calls = torch.randint(0, 61, (2, 12)), []
    plain, model, topk = build(spec), build(spec), Tensor.topk
    apply_recompute(model, ActivationConfig(**POLICIES[policy]))
    if compiled:
        torch._dynamo.reset()
        for layer in model.layers.values():
            layer.run = torch.compile(layer.run, backend="aot_eager_decomp_partition", dynamic=False)
    objective_of(plain, tokens).backward()

    def changing(self: Tensor, k: int, dim: int) -> Any:
        values, indices = topk(self, k, dim)
        if k == spec.feed_forward.experts.top_k:
            calls.append(len(self))
            indices = indices if len(calls) <= spec.depth else (indices + 1) % self.shape[-1]
        return torch.return_types.topk((values, indices))

    counted, count, margins, points = [], experts.count_choices, [], experts.margin_points

    def counting(keys: Tensor, size: int) -> Tensor:
        counted.append(size)
        return count(keys, size)

    monkeypatch.setattr(Tensor, "topk", changing)
    monkeypatch.setattr(experts, "count_choices", counting)
    monkeypatch.setattr(experts, "margin_points", lambda device: margins.append(24) or points(device))
    objective_of(model, tokens).backward()
    assert counted.count(2 * 6) == spec.depth  # by sequence, which may need other ranks
    assert margins == [24]
    assert calls == [24] * spec.depth
    for (name, one), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_what_would_choose_again_is_refused():
    spec = with_experts()
    for options in ({"tile": 8}, {"mode": "selective", "tile": 8}):
        (problem,) = recompute_problems(ActivationConfig(**options), spec)
        assert "routing" in problem or "routes" in problem
        dense = spec_of(feed_forward={"experts": {"count": 0}})
        assert not list(recompute_problems(ActivationConfig(**options), dense))


def test_deferred_gradients_are_those_of_one_pass():
    spec = with_experts(shared_width=8, shared_gate=True, router_bias=True, balance=0.1, z_loss=0.1)
    spec.feed_forward.bias = True
    tokens = torch.randint(0, 61, (2, 12))
    plain, model, deferred = build(spec), build(spec), DeferredGrads()
    objective_of(plain, tokens).backward()
    model.defer(deferred)
    deferred.active = True
    objective_of(model, tokens).backward()
    waiting = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert {f"layers.1.feed_forward.experts.{name}.weight" for name in ("gate", "up", "down")} <= {*waiting}
    deferred.take()()
    for (name, one), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_each_expert_is_drawn_by_itself():
    """From a generator of its own, whatever experts there are besides."""
    name, weights = "layers.0.feed_forward.experts.up.weight", []
    for count in (4, 6):
        spec = with_experts(count=count)
        weights.append(initial_value(spec, 7, name, parameter_infos(Transformer(spec))[name], CPU))
    assert torch.equal(weights[0], weights[1][:4])
    own = torch.Generator().manual_seed(name_seed(7, f"{name}/5"))
    assert torch.equal(weights[1][5], torch.empty(24, 16).normal_(0.0, spec.init.std, generator=own))
    assert len({part.sum().item() for part in weights[1]}) == 6
    assert weights[1].std().item() == pytest.approx(spec.init.std, rel=0.1)


@pytest.mark.parametrize("shape", [(3, 8, 16), (3, 16, 8)])
def test_muon_orthogonalises_the_matrix_of_each_expert(shape):
    stack = torch.randn(shape, dtype=torch.float64) * torch.tensor([1.0, 30.0, 0.01])[:, None, None]
    torch.testing.assert_close(orthogonalise_matrix(stack), torch.stack([orthogonalise_matrix(one) for one in stack]))


# What a spec is refused for.


WRONG = {
    "top_k=7": ({"top_k": 7}, ["top_k=7", "legal: 1 to 6"]),
    "count": ({"count": 2**31}, ["count=2147483648", "up to 4096"]),
    "groups": ({"groups": 4}, ["groups=4", "legal: 1, 2, 3, 6"]),
    "top_groups": ({"groups": 2, "top_groups": 3}, ["top_groups=3", "groups=2"]),
    "top_k in groups": ({"groups": 3, "top_k": 3}, ["top_k=3", "2 experts in 1 of 3 groups"]),
    "top2 of one": ({"groups": 6, "top_groups": 2, "group_score": "top2"}, ["group_score=top2", "group_score=max"]),
    "gate without block": ({"shared_gate": True}, ["shared_gate=true", "shared_width"]),
    "quantile without rate": ({"bias_rule": "quantile"}, ["bias_rate=0", "bias_rule=quantile", "bias_rate=1"]),
    "rate of quantiles": ({"bias_rule": "quantile", "bias_rate": 1.5}, ["bias_rate=1.5", "at most 1"]),
    "quantile in groups": ({"bias_rule": "quantile", "bias_rate": 1, "groups": 2, "top_groups": 2}, ["groups=2"]),
    "quantile of all": ({"bias_rule": "quantile", "bias_rate": 1, "top_k": 6}, ["top_k=6", "all 6", "bias_rule=sign"]),
    "load without loss": ({"balance_over": "previous"}, ["balance_over=previous", "experts.balance"]),
}
BLOCKS = {
    "kind": ({"kind": "plain"}, ["kind=plain", "gated"]),
    "activation": (
        {"kind": "plain", "activation": "clamped_swiglu", "experts": {"count": 0}},
        ["activation=clamped_swiglu", "kind=plain", "kind=gated"],
    ),
    "width": ({"width": 28}, ["width=28", "multiple of 8", "32"]),
}


@pytest.mark.parametrize("case", [*WRONG, *BLOCKS])
def test_a_wrong_mixture_is_refused_with_the_way_out(case):
    fields, words = WRONG.get(case) or BLOCKS[case]
    spec = with_experts(**fields) if case in WRONG else spec_of(feed_forward=fields)
    (problem,) = spec.check()
    assert all(word in problem for word in words), problem
    dense = spec_of(overrides={"0:2": {"feed_forward": {"experts": {"count": 0}}}}, feed_forward={"width": 28})
    assert not dense.check()


def test_fp8_and_muon_leave_routers_alone():
    spec = with_experts(shared_width=8, shared_gate=True)
    spec.feed_forward.width, spec.width = 32, 32
    table = declare_parameters(spec)
    config = Config(model=ModelConfig(**vars(spec)))
    config.precision.float8.recipe, config.precision.float8.ends = "rowwise", 0
    narrow = {name.partition(".feed_forward.")[2] for name in float8_linears(config.precision, spec)}
    assert narrow == {"", "shared.gate", "shared.up", "shared.down"}
    assert describe_float8(config, spec, resolve_plan(config.parallel, 1, spec)) == [
        ("weights", "cast to fp8 at each use"),
        ("experts", "multiply in fp32, other linear layers in fp8"),
    ]
    policies = UpdateSettings(OptimizerConfig(name="muon")).policies(table)
    for name, expected in {
        "router": "adamw",
        "shared_gate": "adamw",
        "experts.up": "muon",
        "shared.up": "muon",
    }.items():
        assert policies[f"layers.0.feed_forward.{name}.weight"].optimizer == expected, name


def test_a_token_is_counted_with_its_own_experts():
    """Parameters that a token meets, FLOPs, and rows of the grouped GEMM."""
    spec = with_experts()
    table = declare_parameters(spec)
    stacks = [info for name, info in table.items() if ".experts." in name]
    assert len(stacks) == 6 and all(info.active == 2 / 6 and info.tensor_dimension(2) is None for info in stacks)
    assert sum(info.size for info in stacks) == 2 * 3 * 6 * 24 * 16
    up = table["layers.0.feed_forward.experts.up.weight"]
    # Dealt out, cut inside, and padded where neither is possible.
    assert [(up.sharded_dimension(n), up.row(1, n)) for n in (3, 4, 24, 16)] == [
        (0, 2 * 24 * 16),
        (1, 6 * 6 * 16),
        (1, 6 * 16),
        (0, 24 * 16),
    ]
    for tp in (1, 2):
        (program, _) = model_programs(spec, 32, tp, 2)
        gemm = program.gemms["feed_forward.experts.up"]
        assert (gemm.flops, gemm.rows, gemm.matrices) == (2 * 2 * 24 * 16 / tp, 2 / tp, 6)
        (roomy, _) = model_programs(spec, 32, tp, 2, room=1.5)
        assert roomy.flops == program.flops
        for name in ("gate", "up"):
            wide, narrow = (one.gemms[f"feed_forward.experts.{name}"] for one in (roomy, program))
            assert wide.saved == 1.5 * narrow.saved > 0


def test_the_estimate_holds_the_rows_that_a_capacity_makes_room_for() -> None:
    def kept(capacity: float) -> float:
        config, spec = Config(), spec_of()
        config.parallel.ep, config.parallel.ep_capacity = 2, capacity
        plan = resolve_plan(config.parallel, 2, spec)
        return estimated_costs(config, spec, plan, BatchPlan(16, 4, 2, 1)).activation[1]

    assert kept(0.0) == kept(1.0) < kept(1.5) < kept(2.0)
