"""The spec, what is derived from it (modules, initial weights, costs), and the shipped models."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.flop_counter import FlopCounterMode

from trainer.config.model import AttentionSpec, LatentSpec, ModelSpec, NormSpec
from trainer.hf.agreement import find_disagreement, shrink_model, with_few_layers
from trainer.hf.config import config_from_spec, first_difference, spec_from_config
from trainer.model import attention
from trainer.model.attention import build_mask, causal_attention
from trainer.model.initial import initial_std, initialize_model, parameter_infos
from trainer.model.loss import LossSettings, linear_cross_entropy
from trainer.model.stage import split_report
from trainer.model.transformer import Transformer
from trainer.planning import layer as cost
from trainer.planning import states
from trainer.planning.parameters import declare_parameters
from trainer.planning.plan import Plan

CONFIGS = Path(__file__).parents[2] / "configs"
CPU = torch.device("cpu")
PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama31_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen2_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "qwen3_0_6b": 596_049_920,
    "mistral_7b": 7_241_732_096,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_xl": 1_557_611_200,
    "pythia_160m": 162_322_944,
    "pythia_1_4b": 1_414_647_808,
    "olmo2_7b": 7_298_617_344,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "phi3_mini": 3_821_079_552,
    "tinyllama_1b": 1_100_048_384,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_404_352,
}
ACTIVE = {"gpt_oss_20b": 3.61e9, "gpt_oss_120b": 5.13e9}
"""Parameters that a token meets, without the embedding, as published."""
SHIPPED = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))


def shipped(name: str) -> ModelSpec:
    """The spec that `model=NAME` composes."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        values = OmegaConf.to_container(compose(f"model/{name}"), resolve=True)
    return ModelSpec.from_dict(values["model"])


def small(**changes) -> ModelSpec:
    spec = ModelSpec(vocab_size=61, width=32, depth=4, max_length=64)
    spec.attention.heads, spec.attention.kv_heads, spec.feed_forward.width = 4, 2, 44
    for path, value in changes.items():
        *blocks, name = path.split("__")
        target = spec
        for block in blocks:
            target = getattr(target, block)
        setattr(target, name, value)
    return spec


def build(spec: ModelSpec, layers: range | None = None, seed: int = 0) -> Transformer:
    model = Transformer(spec, layers)
    initialize_model(model, spec, seed, CPU)
    return model


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models(name: str) -> None:
    """Each has the published size, and transformers makes the same model of its config.json."""
    pytest.importorskip("transformers")
    spec = shipped(name)
    assert spec.name == name and spec.check() == []
    count = cost.parameter_counts(spec)["total"]
    assert count == PUBLISHED.get(name, count)
    active = cost.parameter_counts(spec)["matmul"]
    assert active == pytest.approx(ACTIVE.get(name, active), rel=1e-3)
    config = json.loads(json.dumps(config_from_spec(spec)))
    assert first_difference(spec, spec_from_config(config)) is None
    assert find_disagreement(spec, {**config, "pad_token_id": None}) is None


@pytest.mark.parametrize("name", ["llama3_70b", "gemma2_9b", "gpt2_xl"])
def test_asking_transformers_costs_as_little_for_a_large_model(name: str) -> None:
    spec, config = with_few_layers(shipped(name), {})
    assert spec.depth <= 3 and cost.parameter_counts(shrink_model(spec, config)[0])["total"] < 2e7


def test_shipped_sizes() -> None:
    assert set(PUBLISHED) <= set(SHIPPED)
    assert 5e6 < cost.parameter_counts(shipped("demo"))["total"] < 7e6
    assert 5e7 < cost.parameter_counts(shipped("llama_60m"))["total"] < 1e8


@pytest.mark.parametrize("name, config_class", [("gemma2_2b", "Gemma2Config"), ("gpt2", "GPT2Config")])
def test_shipped_models_against_the_defaults_of_transformers(name: str, config_class: str) -> None:
    config = getattr(pytest.importorskip("transformers"), config_class)()
    assert first_difference(shipped(name), spec_from_config(config.to_dict())) is None


def test_pattern_and_overrides() -> None:
    spec = small(
        depth=7,
        pattern=[{"attention": {"window": 4}, "repeat": 2}, {"attention": {"window": 0}, "norm": {"eps": 0.5}}],
        overrides={
            "-1": {"attention": {"window": 9}},
            "1:3": {"feed_forward": {"width": 10}},
            "0": {"attention": {"rope": {"theta": 7.0}}},
        },
    )
    layers = [spec.layer(index) for index in range(7)]
    assert [layer.attention.window for layer in layers] == [4, 4, 0, 4, 4, 0, 9]
    assert [layer.norm.eps for layer in layers] == [1e-5, 1e-5, 0.5, 1e-5, 1e-5, 0.5, 1e-5]
    assert [layer.feed_forward.width for layer in layers] == [44, 10, 10, 44, 44, 44, 44]
    assert [layer.attention.rope.theta for layer in layers] == [7.0] + [10000.0] * 6
    assert layers[0].attention.kv_heads == 2 and layers[0].attention.head_dim == 8
    assert spec.attention == small().attention  # resolving a layer leaves the spec alone
    assert declare_parameters(spec)["layers.1.feed_forward.up.weight"].shape == (10, 32)
    assert build(spec)(torch.arange(24)[None]).shape == (1, 24, 61)


patterns = st.lists(
    st.builds(
        lambda window, count: {"attention": {"window": window}, "repeat": count}, st.integers(0, 9), st.integers(1, 3)
    ),
    max_size=3,
)
specs = st.builds(
    lambda width, heads, depth, window, theta, tied, kind, pattern: small(
        width=width,
        depth=depth,
        tied=tied,
        pattern=pattern,
        attention__heads=heads,
        attention__window=window,
        attention__rope__theta=theta,
        feed_forward__kind=kind,
        overrides={"0": {"attention": {"window": window}}},
    ),
    st.integers(1, 512),
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(0, 9),
    st.floats(1, 1e7),
    st.booleans(),
    st.sampled_from(["gated", "plain"]),
    patterns,
)


@given(specs)
@settings(max_examples=50, deadline=None)
def test_dict_round_trip(spec: ModelSpec) -> None:
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_unknown_fields_are_named() -> None:
    with pytest.raises(ValueError, match="model.attention.hedas.*did you mean 'heads'"):
        ModelSpec.from_dict({"attention": {"hedas": 4}})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"width": 0}, ["model.width=0 must be positive"]),
        ({"attention__heads": 5}, ["model.attention.heads=5", "model.width=32", "one of 1, 2, 4, 8, 16,"]),
        ({"attention__heads": 0}, ["model.attention.heads=0 must be positive"]),
        ({"attention__head_dim": -8}, ["model.attention.head_dim=-8"]),
        ({"attention__kv_heads": 3}, ["model.attention.kv_heads=3", "model.attention.heads=4", "legal: 1, 2, 4"]),
        ({"attention__head_dim": 5}, ["model.attention.head_dim=5", "must be even"]),
        ({"attention__rope__fraction": 1.5}, ["rope.fraction=1.5"]),
        ({"feed_forward__width": -1}, ["model.feed_forward.width=-1 must be positive"]),
        ({"overrides": {"9": {"norm": {"eps": 1.0}}}}, ["layer 9", "model.depth=4"]),
        ({"overrides": {"last": {"norm": {"eps": 1.0}}}}, ["model.overrides", "last"]),
        ({"overrides": {"2": {"attention": {"kv_heads": 3}}}}, ["layer 2", "kv_heads=3"]),
        ({"pattern": [{"atention": {"window": 1}}]}, ["model.atention", "did you mean 'attention'"]),
    ],
)
def test_check_names_field_value_and_way_out(changes: dict, words: list[str]) -> None:
    problems = small(**changes).check()
    assert len(problems) == 1 and all(word in problems[0] for word in words), problems


@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_do_not_depend_on_the_cut(tied: bool) -> None:
    spec = small(tied=tied)
    whole = dict(build(spec).named_parameters())
    parts = [
        (name, value)
        for layers in (range(0, 2), range(2, 3), range(3, 4))
        for name, value in build(spec, layers).named_parameters()
    ]
    assert Counter(name for name, _ in parts) == Counter(whole.keys()) + Counter(
        ["embedding.weight"] * tied
    )  # each end holds a copy
    for name, value in parts:
        assert torch.equal(value, whole[name]), name
    other = dict(build(spec, seed=1).named_parameters())
    drawn = [name for name in whole if "norm" not in name]
    assert drawn and not any(torch.equal(whole[name], other[name]) for name in drawn)
    assert not torch.equal(whole["layers.0.attention.q.weight"], whole["layers.1.attention.q.weight"])


def test_a_cut_model_computes_what_the_whole_computes() -> None:
    spec = small(pattern=[{"attention": {"window": 5}}, {"attention": {"window": 0}}])
    tokens = torch.arange(40).view(2, 20)
    x = build(spec, range(0, 1))(tokens)
    x = build(spec, range(1, 3))(tokens, hidden=x)
    assert torch.equal(build(spec, range(3, 4))(tokens, hidden=x), build(spec)(tokens))


@pytest.mark.parametrize(
    "scheme, residual",
    [
        ({}, 0.02 / 8**0.5),
        ({"init__residual": "none"}, 0.02),
        ({"init__std": 0.0, "init__residual": "wang"}, 2 / (4 * 256**0.5)),
    ],
)
def test_initial_scale(scheme: dict, residual: float) -> None:
    spec = small(width=256, feed_forward__width=512, **scheme)
    std = spec.init.std or (2 / (5 * 256)) ** 0.5
    model, infos = build(spec), declare_parameters(spec)
    for name, expected in (
        ("layers.1.attention.q.weight", std),
        ("layers.1.attention.o.weight", residual),
        ("layers.3.feed_forward.down.weight", residual),
        ("head.weight", std),
        ("embedding.weight", std),
    ):
        assert initial_std(spec, infos[name]) == pytest.approx(expected)
        assert model.get_parameter(name).std().item() == pytest.approx(expected, rel=0.05), name
    assert torch.equal(model.norm.weight, torch.ones(256))


def test_truncated_initialisation_and_norm_offset() -> None:
    model = build(small(width=128, init__truncate=2.0, init__residual="none", norm__offset=1.0, attention__bias=True))
    largest = max(parameter.abs().max().item() for parameter in model.parameters())
    assert 0.038 < largest <= 0.04
    assert not model.layers["0"].attention_norm.weight.any() and not model.layers["0"].attention.k.bias.any()


def test_a_tied_head_stays_tied_when_the_model_leaves_the_meta_device() -> None:
    with torch.device("meta"):
        model = Transformer(small(tied=True))
    model.to_empty(device="cpu")
    assert model.head.weight is model.embedding.weight and "head.weight" not in dict(model.named_parameters())


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seen: Tensor, scale: float, cap: float
) -> Tensor:
    """The definition, one query at a time. seen: bool [batch, length, length]."""
    batch, heads, length, _ = query.shape
    result, group = query.new_zeros(batch, heads, length, value.shape[3]), heads // key.shape[1]
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                keys = seen[b, i].nonzero()[:, 0]
                scores = key[b, h // group, keys] @ query[b, h, i] * scale
                scores = cap * torch.tanh(scores / cap) if cap else scores
                scores = scores if sinks is None else torch.cat([scores, sinks[h, None]])
                result[b, h, i] = torch.softmax(scores, 0)[: len(keys)] @ value[b, h // group, keys]
    return result


@pytest.fixture(scope="module")
def compiled_nothing() -> None:
    """A soft cap that other files of this process compiled with another value would be a symbol here."""
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiled_nothing")
@pytest.mark.parametrize("window", [0, 1, 5, 12])
@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("value_dim", [4, 3])
@pytest.mark.parametrize("flex", [False, True])
def test_attention_against_its_definition(
    window: int, cap: float, packed: bool, sunk: bool, value_dim: int, flex: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its gradients. flex: by FlexAttention, as on a GPU; eager, where torch can compute gradients on CPUs too."""
    if flex:
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
        monkeypatch.setattr(attention, "compiled_flex", lambda: flex_attention.flex_attention)
        monkeypatch.setattr(attention, "mask_of", attention.block_mask)
    torch.manual_seed(0)
    length = 12
    shapes = ((4, 4), (2, 4), (2, value_dim))
    inputs = [torch.randn(2, heads, length, size, dtype=torch.float64) for heads, size in shapes]
    inputs += [torch.randn(4, dtype=torch.float64)] * sunk
    query, key, value, sinks = [*(x.requires_grad_() for x in inputs), None][:4]
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12]) if packed else None
    index = torch.arange(length)
    distance = index[:, None] - index[None, :]
    seen = ((distance >= 0) & (distance < (window or length))).expand(2, -1, -1)
    if packed:
        seen = seen & (documents[:, :, None] == documents[:, None, :])
    mask = build_mask(documents, length, window, cap > 0 or sunk, CPU)
    assert isinstance(mask, BlockMask if flex else Tensor) or mask is None and window in (0, 12) and not packed
    ours = causal_attention(query, key, value, mask, 0.7, cap, sinks)
    wanted = dense_attention(query, key, value, sinks, seen, 0.7, cap)
    gradient = torch.randn_like(wanted)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(*(torch.autograd.grad(x, inputs, gradient) for x in (ours, wanted))):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "spec",
    [
        small(),
        small(learned_positions=True, attention__positions="none"),
        small(attention__window=4, attention__soft_cap=2.0, logit_soft_cap=3.0),
        small(attention__sinks=True),
    ],
)
def test_packed_documents_equal_separate_ones(spec: ModelSpec) -> None:
    """Logits, loss and gradients of a packed sequence are those of its documents alone."""
    model, lengths = build(spec), (7, 1, 12)
    tokens, targets = torch.randint(0, 61, (2, 1, 20), generator=torch.Generator().manual_seed(0))
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    separate = [model(part) for part in tokens.split(lengths, 1)]
    torch.testing.assert_close(model(tokens, documents=documents), torch.cat(separate, 1), rtol=1e-5, atol=1e-6)
    model(tokens, targets, documents)[0].backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for part, target in zip(tokens.split(lengths, 1), targets.split(lengths, 1)):
        model(part, target)[0].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cap, z_loss, chunk", [(0.0, 0.0, 0), (3.0, 0.0, 4), (0.0, 0.1, 3), (2.0, 0.1, 5)])
def test_loss_and_its_gradients(cap: float, z_loss: float, chunk: int) -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 6, dtype=torch.float64, requires_grad=True) for rows in (10, 9))
    targets = torch.tensor([3, -100, 0, 8, 2, 2, -100, 5, 1, 7])
    logits = hidden @ weight.t()
    logits = cap * torch.tanh(logits / cap) if cap else logits
    entropy = F.cross_entropy(logits, targets, reduction="none")
    expected = entropy.sum() + z_loss * logits[targets >= 0].logsumexp(-1).square().sum()
    gradients = torch.autograd.grad(2 * expected, (hidden, weight))
    objective, plain, _ = linear_cross_entropy(hidden, weight, targets, LossSettings(cap, z_loss, chunk), None, 0)
    torch.testing.assert_close(objective, expected)
    torch.testing.assert_close(plain, entropy)
    for ours, theirs in zip(torch.autograd.grad(2 * objective, (hidden, weight)), gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def grouped_flops(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    """Of a grouped GEMM: each row meets the matrix of one expert."""
    return 2 * x[0] * weight[1] * weight[2]


GROUPED = {
    torch.ops.trainer.grouped_matmul: grouped_flops,
    torch.ops.trainer.grouped_backward: lambda *shapes, **more: 2 * grouped_flops(*shapes, **more),
}


def counted(spec: ModelSpec) -> int:
    """FLOPs of torch's counter in both passes of two sequences of 24 tokens."""
    model, tokens = build(spec), torch.randint(0, 61, (2, 24))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=GROUPED) as counter:
        (objective, _), _ = split_report(model(tokens, tokens))
        objective.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "changes",
    [
        {"attention__head_dim": 12, "feed_forward__kind": "plain", "attention__bias": True},
        {"attention__soft_cap": 5.0, "overrides": {"1": {"feed_forward": {"width": 20}}}},
    ],
)
def test_flops_against_torchs_counter(changes: dict) -> None:
    spec = small(**changes)
    assert counted(spec) == cost.flops_per_token(spec, 24, causal=False) * 48


@pytest.mark.parametrize("name", SHIPPED)
def test_flops_of_shipped_models_against_torchs_counter(name: str) -> None:
    """Narrow and of few layers, and of its own kind: heads, windows, norms, biases, tied heads."""
    spec = shipped(name)
    spec.depth, spec.width, spec.vocab_size, spec.max_length = 3, 48, 61, 32
    attention, one = spec.attention, spec.layer(0).attention
    attention.heads, attention.kv_heads, attention.head_dim = 2 * one.heads // one.kv_heads, 2, 16
    attention.window, spec.feed_forward.width = min(attention.window, 8), 84
    if attention.kind == "latent":  # values of the size of keys, since a CPU pads them
        rank, attention.kv_heads = attention.latent.q_rank, attention.heads
        attention.latent = LatentSpec(min(rank, 20), kv_rank=24, nope_dim=10, rope_dim=6, value_dim=16)
    assert counted(spec) == cost.flops_per_token(spec, 24, causal=False) * 48


@given(st.integers(1, 60), st.integers(0, 80))
def test_seen_keys_counts_the_mask(length: int, window: int) -> None:
    index = torch.arange(length)
    distance = index[:, None] - index[None, :]
    seen = (distance >= 0) & (distance < (window or length))
    assert cost.seen_keys(length, window) == pytest.approx(seen.sum().item() / length)


def test_causal_flops() -> None:
    spec = small(pattern=[{"attention": {"window": 8}}, {"attention": {"window": 0}}])
    matrices = 6 * cost.parameter_counts(spec)["matmul"]
    keys = 2 * (8 * 9 / 2 + 24 * 8) / 32 + 2 * 33 / 2  # two layers with a window of 8, two without
    assert cost.flops_per_token(spec, 32, causal=True) == pytest.approx(matrices + 12 * 32 * keys)
    assert cost.flops_per_token(spec, 32, causal=False) == pytest.approx(matrices + 12 * 32 * 4 * 32)


def test_parameter_counts() -> None:
    counts, table = cost.parameter_counts(shipped("llama3_8b")), 128256 * 4096
    everything = {"total": 8_030_261_248, "trained": 8_030_261_248}
    assert counts == everything | {"embedding": table, "matmul": 8_030_261_248 - table - 65 * 4096}
    counts = cost.parameter_counts(shipped("gpt2"))
    assert counts["embedding"] == 50257 * 768 + 1024 * 768 and counts["matmul"] == 12 * 12 * 768 * 768 + 50257 * 768


def plan(stage: int, shard: int, offload: bool = False) -> Plan:
    return Plan(pp=1, replicate=8 // shard, shard=shard, tp=1, stage=stage, offload=offload)


def test_state_bytes() -> None:
    spec = shipped("llama3_8b")
    total = 8_030_261_248
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    unit = layer + 2 * 128256 * 4096 + 4096
    stages = {stage: states.state_bytes(spec, plan(stage, 8 if stage else 1), 2) for stage in range(4)}
    assert [stages[s].parameters for s in range(4)] == [4 * total, *[4 * total // 8] * 3]
    assert [stages[s].optimizer for s in range(4)] == [8 * total, *[8 * total // 8] * 3]
    assert [stages[s].gradients for s in range(4)] == [4 * total, 4 * total, 4 * total // 8, 4 * total // 8]
    assert [stages[s].gathered for s in range(4)] == [2 * total] * 3 + [2 * unit]
    assert [stages[s].unreduced for s in range(4)] == [0, 0, 2 * unit, 2 * unit]
    sums = [stages[s].total for s in range(4)]
    assert sums == sorted(sums, reverse=True) and stages[3].host == 0 and stages[3].device == sums[3]
    offloaded = states.state_bytes(spec, plan(3, 8, offload=True), 2)
    assert offloaded.host == 16 * total // 8 and offloaded.device == 4 * unit and offloaded.total == stages[3].total
    assert dict(offloaded.rows())["sum in host memory"] == offloaded.host
    assert dict(stages[3].rows())["sum"] == stages[3].total


def test_state_bytes_of_a_rank_that_holds_everything() -> None:
    """Parameters, gradients and moments of one process that trains in fp32."""
    spec = small()
    model = build(spec)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(10)[None], torch.arange(10)[None])[0].backward()
    optimizer.step()
    whole = states.state_bytes(spec, plan(0, 1), 4)
    assert whole.parameters == sum(p.nbytes for p in model.parameters())
    assert whole.gradients == sum(p.grad.nbytes for p in model.parameters())
    assert whole.optimizer == sum(s[key].nbytes for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))


def test_specs_are_independent() -> None:
    a, b = ModelSpec(), ModelSpec()
    a.attention.rope.theta, a.norm.eps = 1.0, 2.0
    assert b.attention == AttentionSpec() and b.norm == NormSpec() and copy.deepcopy(a) == a


def test_declarations_name_every_parameter() -> None:
    for name in ("demo", "gpt2", "gemma2_2b", "olmo2_7b"):
        spec = shipped(name)
        spec.depth = 2
        with torch.device("meta"):
            model = Transformer(spec)
        infos = parameter_infos(model)
        assert infos == declare_parameters(spec)
        for name, parameter in model.named_parameters():
            assert tuple(parameter.shape) == infos[name].shape, name
        assert all(len(info.axes) == len(info.shape) for info in infos.values())
