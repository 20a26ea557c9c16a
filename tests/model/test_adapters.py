"""Low-rank adapters beside frozen matrices in one process: products and gradients against the formula, what backward
keeps, the table of parameters, and refusals. Plans are compared in tests/parallel/test_plans.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.reference import settings, tiny_spec
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from trainer.config.model import AdapterSpec, ExpertsSpec, ModelSpec
from trainer.config.synonyms import find_synonym
from trainer.model.experts import GroupedLinear
from trainer.model.initial import InitialWeights, initialize_model, parameter_infos
from trainer.model.layers import Linear, project_input
from trainer.model.transformer import Transformer
from trainer.parallel.parallelize import cast_frozen
from trainer.parallel.recompute import linear_names
from trainer.parallel.zero.plan import check_model
from trainer.planning.features import resolve_plan
from trainer.planning.layer import model_programs
from trainer.planning.parameters import UpdateSettings, declare_parameters, find_adapter_problems
from trainer.planning.resolve import check_config
from trainer.precision.products import Multiply, decode_rows, encode_rows, round_rows

WIDTH, TOKENS, RANK, SCALE = 12, 9, 3, 0.7


class SlowMultiply(Multiply):
    """Another implementation of the same products, with which linear layers do their own backward pass."""


SLOW = SlowMultiply()


def build_linear(outputs: int, kind: str, bias: bool, inputs: int = WIDTH) -> Linear:
    """kind: holds `adapted`, `frozen`, or none of both."""
    linear = Linear(inputs, outputs, ("heads", "embed"), bias).double()
    for parameter in linear.parameters():
        nn.init.normal_(parameter)
    if "frozen" in kind:
        for name in list(linear.declared):
            linear.freeze(name, AdapterSpec())
    if "adapted" in kind:
        linear.adapt(RANK, SCALE)
        linear.double()
        nn.init.normal_(linear.lora_a)
        nn.init.normal_(linear.lora_b)
    return linear


def expected_output(x: Tensor, linear: Linear) -> Tensor:
    y = x @ linear.weight.t()
    if linear.bias is not None:
        y = y + linear.bias
    return y if linear.adapter_scale is None else y + SCALE * (x @ linear.lora_a.t()) @ linear.lora_b.t()


KINDS = st.sampled_from(["plain", "frozen", "adapted", "frozen adapted"])


@given(kinds=st.lists(KINDS, min_size=1, max_size=3), bias=st.booleans(), leaf=st.booleans(), slow=st.booleans())
def test_products_and_gradients_are_those_of_the_formula(kinds: list[str], bias: bool, leaf: bool, slow: bool) -> None:
    """leaf: whether the input has no gradient, as that of a first layer behind a frozen embedding."""
    torch.manual_seed(0)
    linears = [build_linear(4 + place, kind, bias) for place, kind in enumerate(kinds)]
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=not leaf)
    parameters = [p for linear in linears for p in linear.parameters() if p.requires_grad]
    wanted = parameters if leaf else [x, *parameters]
    outputs = [expected_output(x, linear) for linear in linears]
    weights = [torch.randn_like(output) for output in outputs]
    expected = [
        torch.autograd.grad((o * w).sum(), wanted, allow_unused=True) if wanted and o.requires_grad else ()
        for o, w in zip(outputs, weights)
    ]
    totals = [
        sum((terms[place] for terms in expected if terms and terms[place] is not None), torch.zeros_like(parameter))
        for place, parameter in enumerate(wanted)
    ]
    for linear in linears:
        linear.multiply = SLOW if slow else linear.multiply
    seen = project_input(x, *linears)
    for one, other in zip(seen, outputs):
        torch.testing.assert_close(one, other)
    if wanted and any(one.requires_grad for one in seen):
        found = torch.autograd.grad(sum((o * w).sum() for o, w in zip(seen, weights)), wanted, allow_unused=True)
        for one, other in zip(found, totals):
            torch.testing.assert_close(torch.zeros_like(other) if one is None else one, other)


@pytest.mark.parametrize("outputs", [[64], [64, 32, 32], [176, 176]])
def test_adapters_read_a_shared_input_once(outputs: list[int]) -> None:
    """Elements that operators of adapters read and write beside those of the matrices, a token: forward the input and,
    to add to them, the outputs twice; backward the gradients of the outputs twice, the input once, and its gradient
    twice."""
    tokens, seen = 61, [0]

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            result = operator(*arguments, **(keywords or {}))
            if operator.namespace == "aten" and not operator.is_view:  # what operators of our own consist of
                flat = [one for one in tree_flatten((arguments, keywords, result))[0] if isinstance(one, Tensor)]
                seen[0] += sum(one.numel() for one in flat if tokens in one.shape)
            return result

    found = []
    for kind in ("frozen", "frozen adapted"):
        torch.manual_seed(0)
        linears = [build_linear(size, kind, bias=False, inputs=96).float() for size in outputs]
        for linear in linears:
            linear.multiply = SLOW  # without adapters the same code as with them
        x = torch.randn(tokens, 96, requires_grad=True)
        seen[0] = 0
        with Counted():
            results = project_input(x, *linears)
            forward, seen[0] = seen[0], 0
            torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        found.append((forward, seen[0]))
    (forward, backward), (more_forward, more_backward) = found
    narrow = 20 * RANK * len(outputs)
    assert more_forward - forward <= tokens * (96 + 2 * sum(outputs) + narrow)
    assert more_backward - backward <= tokens * (3 * 96 + 2 * sum(outputs) + narrow)


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=4), bias=st.booleans(), frozen=st.booleans())
def test_each_expert_has_an_adapter_of_its_own(counts: list[int], bias: bool, frozen: bool) -> None:
    """counts: rows of each expert."""
    torch.manual_seed(0)
    experts = GroupedLinear(ExpertsSpec(count=len(counts), top_k=1), WIDTH, 5, ("inner", "embed"), bias=bias)
    for name in list(experts.declared) if frozen else ():
        experts.freeze(name, AdapterSpec())
    experts.adapt(RANK, SCALE)
    experts.double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(sum(counts), WIDTH, dtype=torch.float64, requires_grad=True)
    wanted = [x, *(parameter for parameter in experts.parameters() if parameter.requires_grad)]
    parts = []
    for number, rows in enumerate(x.split(counts)):
        low = SCALE * rows @ experts.lora_a[number].t()
        parts.append(rows @ experts.weight[number].t() + low @ experts.lora_b[number].t())
        parts[-1] = parts[-1] + experts.bias[number] if bias else parts[-1]
    expected = torch.cat(parts)
    seen = experts(x, torch.tensor(counts).cumsum(0).int())
    torch.testing.assert_close(seen, expected)
    weights = torch.randn_like(expected)
    pairs = zip(*(torch.autograd.grad((one * weights).sum(), wanted) for one in (seen, expected)))
    for one, other in pairs:
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("kind", "slow", "kept"),
    [("frozen", True, False), ("frozen", False, False), ("frozen adapted", True, True), ("plain", True, True)],
)
def test_a_frozen_matrix_without_an_adapter_keeps_no_input(kind: str, slow: bool, kept: bool) -> None:
    linear = build_linear(5, kind, bias=False)
    linear.multiply = SLOW if slow else linear.multiply
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        linear(x).sum().backward()
    assert (x.data_ptr() in saved) == kept


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    spread=st.integers(0, 60),
    seed=st.integers(0, 999),
    wide=st.booleans(),
)
def test_values_in_fp8_are_exact_in_bf16(rows: int, columns: int, spread: int, seed: int, wide: bool) -> None:
    """spread: of the sizes of rows, as powers of two. Elements that are not tiny in their row keep three bits."""
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns) * torch.exp2(torch.randint(-spread, spread + 1, (rows, 1)).float())
    weight = weight if wide else weight.bfloat16()
    codes, scale = encode_rows(weight)
    assert codes.dtype is torch.float8_e4m3fn and torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    value = round_rows(weight)
    for dtype in (torch.bfloat16, torch.float32):
        for backward in (False, True):
            assert torch.equal(decode_rows(codes, scale, dtype, backward).float(), value)
    assert torch.equal(round_rows(value), value) and torch.equal(round_rows(value.bfloat16()), value)
    error, size = (value - weight.float()).abs(), weight.float().abs()
    tiny = size.amax(1, keepdim=True) * 2**-14
    assert (error <= torch.maximum(size / 16, tiny)).all()


@pytest.mark.parametrize("targets", [["*"], ["*.attention.q"]])
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_of_decoded_matrices_is_kept(targets: list[str], compiled: bool) -> None:
    """Between forward and backward a layer keeps the frozen matrices as they are held, one byte an element, and no
    copy of one in the compute type."""
    spec = tiny_spec(width=64, depth=1, adapter={"rank": 2, "weights": "fp8", "targets": targets})
    model = Transformer(spec)
    cast_frozen(model, torch.float32)
    initialize_model(model, spec, 0, torch.device("cpu"))
    feed, x = model.layers["0"].feed_forward, torch.randn(5, 64, requires_grad=True)
    run = torch.compile(feed, backend="aot_eager_decomp_partition") if compiled else feed
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(x)
    sizes = {linear.weight.numel() for linear in (feed.gate, feed.up, feed.down)}
    assert {one.dtype for one in kept if one.numel() in sizes} == {torch.float8_e4m3fn}
    assert len({one.data_ptr() for one in kept if one.dtype is torch.float8_e4m3fn}) == 3


PATTERNS = st.lists(
    st.sampled_from(["*", "*.q", "*.attention.*", "layers.0.*", "layers.[12].*.up", "*.o", "nothing"]), max_size=3
)
TRAINED = st.lists(st.sampled_from(["*norm*", "embedding.weight", "*.bias", "layers.1.*", "head.*", "*"]), max_size=2)


@given(
    targets=PATTERNS,
    trained=TRAINED,
    tied=st.booleans(),
    weights=st.sampled_from(["compute", "fp8"]),
    family=st.sampled_from(["gated", "plain", "latent", "experts"]),
)
def test_the_table_has_what_the_modules_have(
    targets: list[str], trained: list[str], tied: bool, weights: str, family: str
) -> None:
    spec = spec_of_family(family)
    spec = replace(
        spec, tied=tied, adapter=replace(spec.adapter, rank=2, targets=targets, trained=trained, weights=weights)
    )
    with torch.device("meta"):
        model = Transformer(spec)
    declared = declare_parameters(spec)
    assert list(parameter_infos(model).items()) == list(declared.items())
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == declared[name].trained
        assert declared[name].trained or not declared[name].adapter


def spec_of_family(family: str) -> ModelSpec:
    spec = tiny_spec()
    if family == "plain":
        spec.feed_forward.kind = "plain"
    if family == "latent":
        spec.attention.kind, spec.attention.qk_norm, spec.attention.kv_heads = "latent", "none", 0
    if family == "experts":
        spec.feed_forward.width, spec.feed_forward.experts.count = 40, 4
        spec.feed_forward.experts.shared_width = 16
    return spec


def test_a_model_begins_as_it_is_without_adapters() -> None:
    spec, device = tiny_spec(), torch.device("cpu")
    adapted = replace(spec, adapter=replace(spec.adapter, rank=4))
    tokens, logits = torch.arange(20).view(2, 10), []
    for one in (spec, adapted):
        model = Transformer(one)
        initialize_model(model, one, 7, device)
        logits.append(model(tokens))
    assert torch.equal(*logits)
    a = InitialWeights(adapted, 7, device)(
        "layers.0.attention.q.lora_a", declare_parameters(adapted)["layers.0.attention.q.lora_a"]
    )
    assert 0.8 * 24**-0.5 < a.abs().max() <= 24**-0.5


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gated", {"targets": ["*.query"]}, "model.adapter.targets: '*.query' matches no linear layer"),
        ("gated", {"targets": []}, "model.adapter.targets=[] gives no layer an adapter"),
        ("gated", {"trained": ["*.lora_a"]}, "model.adapter.trained: '*.lora_a' matches no parameter"),
        ("tied", {"trained": ["head.weight"]}, "the head is tied to embedding.weight"),
        ("gated", {"targets": ["head"]}, "'head' matches no linear layer"),
        ("experts", {"rank": 8}, "match layers.0.feed_forward.router: routers get no adapters"),
        ("experts", {"targets": ["*.experts.up"]}, "model.adapter.rank=4 must be a multiple of 8 for the grouped GEMM"),
        ("gated", {"rank": 0, "alpha": 8.0}, "model.adapter.alpha=8.0 has no effect with model.adapter.rank=0"),
        ("gated", {"rank": 0, "weights": "fp8"}, "model.adapter.weights=fp8 has no effect"),
        ("gated", {"rank": 0, "targets": ["*.q"]}, "model.adapter.targets=['*.q'] has no effect"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(family: str, changes: dict, said: str) -> None:
    spec = spec_of_family(family)
    spec = replace(spec, tied=family == "tied", adapter=replace(spec.adapter, **{"rank": 4, **changes}))
    problems = list(find_adapter_problems(spec))
    assert len(problems) == 1 and said in problems[0], problems


def test_the_way_out_of_a_refusal_is_accepted() -> None:
    spec = spec_of_family("experts")
    # With a dense layer, whose block has the name of the blocks with routers.
    spec.overrides = {"0": {"feed_forward": {"experts": {"count": 0}}}}
    [problem] = find_adapter_problems(replace(spec, adapter=replace(spec.adapter, rank=8)))
    patterns = problem.split("set model.adapter.targets=[")[1].split("]")[0].split(",")
    spec = replace(spec, adapter=replace(spec.adapter, rank=8, targets=patterns))
    assert not list(find_adapter_problems(spec))
    infos = declare_parameters(spec)
    named = {name.rpartition(".")[0] for name, info in infos.items() if info.role == "matrix"}
    without = {name for name in named if f"{name}.lora_a" not in infos}
    assert without == {"layers.1.feed_forward.router", "layers.2.feed_forward.router"}


def test_settings_that_contradict_adapters_are_refused() -> None:
    adapted = {"model__adapter__rank": 4, "parallel__zero__engine": "deepspeed", "parallel__zero__stage": 3}
    for change, said in (
        ({"model__adapter__weights": "fp8"}, "model.adapter.weights=fp8: DeepSpeed's stage 3"),
        ({"parallel__zero__nvme": "/disk"}, "model.adapter.rank=4 with parallel.zero.nvme=/disk"),
        (
            {"parallel__pp": 2, "parallel__zero__stage": 1, "model__adapter__targets": ["layers.0.*"]},
            "gives no adapters to 3 of 4 layers: DeepSpeed has no optimizer",
        ),
    ):
        assert any(said in problem for problem in check_config(settings(**adapted | change), 2)), change
    assert not check_config(settings(**adapted), 2)
    config, spec = settings(**adapted), tiny_spec(adapter={"rank": 4})
    plan = resolve_plan(config.parallel, 4)
    config.parallel.zero.deepspeed = {"zero_optimization": {"zero_hpz_partition_size": 2}}
    [problem] = check_model(config, spec, plan, 2)
    assert "zero_hpz_partition_size=2: DeepSpeed " in problem
    assert not check_config(settings(model__adapter__rank=4), 1)


def test_products_are_counted_as_without_adapters() -> None:
    """By which `activation.save` names them: the operators of adapters are others."""
    spec = tiny_spec(adapter={"rank": 4})
    with torch.device("meta"):
        model = Transformer(spec)
    assert linear_names(model.layers["0"]) == tuple(model_programs(spec, 16, 1, 4)[0].gemms)
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            seen.append(str(operator))
            return operator(*arguments, **(keywords or {}))

    names = ("aten.mm.default", "aten.addmm.default")
    for adapter in (spec.adapter, replace(spec.adapter, rank=0)):
        with Seen(), torch.no_grad():
            Transformer(replace(spec, adapter=adapter)).layers["0"].feed_forward(torch.ones(3, 24))
        counted = [name for name in seen if name in names]
        assert len(counted) == 3, counted
        seen.clear()


def test_muon_leaves_adapters_to_adamw() -> None:
    spec = tiny_spec(adapter={"rank": 4, "trained": ["*.up.weight"]})
    config = settings(optimizer__name="muon")
    infos = {name: info for name, info in declare_parameters(spec).items() if info.trained}
    chosen = {name: policy.optimizer for name, policy in UpdateSettings.of(config).policies(infos).items()}
    assert {name for name, optimizer in chosen.items() if optimizer == "muon"} == {
        f"layers.{index}.feed_forward.up.weight" for index in range(3)
    }


def test_names_of_peers_are_understood() -> None:
    for name, ours in (("lora_rank", "rank"), ("lora_alpha", "alpha"), ("target_modules", "targets")):
        assert f"model.adapter.{ours}" in str(find_synonym(name))
