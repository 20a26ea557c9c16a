"""transformers' own code in one process: gradients beside transformers itself, weights in and out, initial weights,
estimates, and what is refused."""

from __future__ import annotations

import gc
import json
import re
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.code_models import MIXTURES, MODELS, PARTS, guess_values, small_values, train_batches
from support.estimates import shipped
from support.live import Live
from support.reference import random_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.checkpointing.loading import open_saved
from trainer.config import ActivationConfig, Config, ConfigError, Float8Config, PrecisionConfig
from trainer.config.model import CodeSpec, ModelSpec
from trainer.data.batches import MicroBatch
from trainer.generate.sampling import SamplingOptions, TokenGenerator
from trainer.generate.sharded_model import ShardedModel, place_saved
from trainer.hf import open_weights, spec_from_hf, starting_weights
from trainer.hf.accepted import ACCEPTED, code_spec, plain_values
from trainer.hf.code import (
    CodeStage,
    Elsewhere,
    StagePass,
    UnsupportedAttention,
    attend_in_pass,
    build_code,
    report_break,
    use_pass,
)
from trainer.hf.code_weights import CodeInitialWeights, code_name
from trainer.hf.config import config_from_spec
from trainer.hf.folder import export_model, model_from_hf
from trainer.hf.proof import drawn_weight, guess_facts, prove_code, prove_text
from trainer.model import experts
from trainer.model.initial import fill_parameters
from trainer.model.linear import DeferredGrads
from trainer.model.stage import split_report
from trainer.model.transformer import document_positions
from trainer.parallel.parallelize import check_declared, compile_layers, keep_buffers, multiply_in_float8
from trainer.parallel.recompute import apply_recompute, foreign_contexts, recompute_unrouted
from trainer.planning.code import WAITING
from trainer.planning.decide import SHARE, MemoryLimit, decide
from trainer.planning.estimate.step import estimate_step
from trainer.planning.features import check_plan, check_whole_plan, resolve_plan
from trainer.planning.float8 import float8_linears
from trainer.planning.hardware import load_hardware
from trainer.planning.layer import flops_per_token, model_programs, parameter_counts
from trainer.planning.parameters import declare_parameters, router_shapes
from trainer.planning.recompute import left_by_recompute
from trainer.planning.resolve import compose, resolve_layout
from trainer.planning.states import state_bytes
from trainer.precision.products import Float8Multiply, GEMMRole, matmul
from trainer.training.run import run

CPU = torch.device("cpu")


def spec_of(name: str, **changes: Any) -> CodeSpec:
    return code_spec(plain_values(small_values(name, **changes)))


def spec_from_ours(spec: ModelSpec) -> CodeSpec:
    """transformers' code for a model of this project."""
    return code_spec(plain_values(AutoConfig.for_model(**config_from_spec(spec)).to_dict()))


def stage_of(spec: CodeSpec, layers: range | None = None, value: Any = drawn_weight) -> CodeStage:
    with torch.device("meta"):
        stage = CodeStage(spec, layers)
    stage.to_empty(device="cpu")
    keep_buffers(stage, CPU)
    fill_parameters(stage, value)
    return stage


def train(stage: CodeStage, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """The stage's statistics of a micro-batch, whose gradients are added."""
    (objective, _), report = split_report(stage(batch.tokens, batch.targets, batch.documents))
    objective.backward()
    return report.statistics if report else {}


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES, *PARTS])
def test_gradients_are_those_of_transformers(name):
    spec = spec_of(name)
    stage = stage_of(spec)
    check_declared(stage, spec)
    batch = random_batch(0, 4, 16, 58, spec.transformers["outer"]["packed"])
    batch.tokens += 3
    loss, expected = train_batches(spec, [batch])
    (objective, entropy), _ = split_report(stage(batch.tokens, batch.targets, batch.documents))
    valid = (batch.targets != -100).sum()
    (objective / valid).backward()
    assert abs((entropy.sum() / valid).item() - loss) < 1e-6 * loss
    norm = torch.stack([one.norm() for one in expected.values() if one is not None]).norm()
    for name, parameter in stage.named_parameters():
        assert (parameter.grad is None) == (expected[name] is None) == (not parameter.requires_grad), name
        if parameter.grad is None:
            continue
        error = (parameter.grad - expected[name]).norm() / max(expected[name].norm(), 1e-3 * norm)
        assert error < 1e-5, name


def test_experts_of_older_versions_of_transformers_run_by_the_interface(monkeypatch):
    """5.17 says nothing of a norm behind experts, and 5.0 nothing of gates."""

    def build_older(spec: CodeSpec) -> torch.nn.Module:
        model = build_code(spec)
        marked = [module for module in model.modules() if "has_gate" in vars(module)]
        assert marked
        for module in marked:
            del module.has_gate, module.has_post_expert_norm
        return model

    monkeypatch.setattr("trainer.hf.code.build_code", build_older)
    test_gradients_are_those_of_transformers("qwen3_moe")


class Waiting(TorchDispatchMode):
    """Notes operators for whose results the host would wait, which no CUDA graph can have."""

    names = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operator: Any, _: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        self.seen += [operator._opname] * (operator._opname in self.names)
        return operator(*arguments, **keywords or {})


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "gpt2", "qwen3_5_text", "mamba2", "falcon_h1", "jetmoe"])
def test_a_pass_waits_for_no_value(name, monkeypatch):
    """Of a type whose steps can be replayed. Experts of this project wait for their router on CPUs alone."""
    stage = stage_of(code_spec(plain_values(guess_values(name))))
    batch, read = random_batch(0, 2, 16, 58, True), torch.Tensor.tolist
    with Waiting() as waiting:
        monkeypatch.setattr(torch.Tensor, "tolist", lambda x: waiting.seen.append("tolist") or read(x))
        train(stage, batch)
    assert bool(waiting.seen) == (name in WAITING), waiting.seen


@pytest.mark.parametrize("name", ["qwen3_8b", "phi3_mini"])
def test_layers_hold_what_is_planned(name, monkeypatch):
    """At full size, on meta tensors, with an attention kernel that keeps what those of GPUs do. What norms keep is
    planned for the types in which it is most."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    monkeypatch.setattr("trainer.hf.code.causal_attention", lambda q, k, v, *_: attend(q, k, v, 0.0, True)[0])
    length, both = 8192, {"mode": "selective", "save": ["attention", "matmul"]}
    specs = [spec_from_ours(replace(shipped(name), depth=depth)) for depth in (1, 2)]
    for options in ({"mode": "none"}, {"mode": "full"}, {**both, "save": ["attention"]}, both):
        policy, held = ActivationConfig(**options), []
        for spec in specs:
            with torch.device("meta"):
                stage, x = CodeStage(spec).bfloat16(), torch.empty(length, spec.width, dtype=torch.bfloat16)
            apply_recompute(stage, policy)
            gc.collect()
            with Live() as live:
                live.known = {one.untyped_storage()._cdata: 0 for one in (x, *stage.parameters(), *stage.buffers())}
                entered = StagePass(x.requires_grad_(), (1, length), None, length, None, None)
                result = stage.run_layers(entered, torch.arange(length, device="meta")[None])
                del entered
                held.append(live.bytes)
                del result
        left = left_by_recompute(model_programs(specs[1], length, 1, 2), policy)[1]
        error = (left.saved + left.eager.saved) * length / (held[1] - held[0]) - 1
        assert -0.03 < error < (0.17 if policy.mode == "none" else 0.01), options


@pytest.fixture
def graphs(monkeypatch):
    """Compiled functions are captured, cut and recomputed as by the default backend, and what is left runs eagerly.
    Returns what counts them."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    return lambda: counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "name, kinds, recompute", [("mixtral", 1, "none"), ("gemma2", 2, "selective"), ("deepseek_v3", 2, "selective")]
)
def test_compiled_layers_of_a_kind_share_a_graph(name, kinds, recompute, graphs):
    """Also where documents are others. Another length takes another graph."""
    stage, eager = stage_of(spec_of(name)), stage_of(spec_of(name))
    apply_recompute(stage, ActivationConfig(mode=recompute))
    compile_layers(stage, False)
    for seed in (0, 1):
        batch = random_batch(seed, 2, 16, 61, True)
        loads = train(stage, batch)
        assert graphs() == kinds and loads.keys() == stage.reports.keys()
        assert all(torch.equal(load, loads[key]) for key, load in train(eager, batch).items())
    with torch.no_grad():
        stage.eval()
        shorter = stage(batch.tokens[:, :12], None, batch.documents[:, :12])
        assert torch.allclose(stage(batch.tokens, None, batch.documents)[:, :12], shorter, atol=1e-5)
    assert graphs() == 3 * kinds


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_that_cannot_be_compiled_run_as_they_are(recompute, graphs, monkeypatch):
    from transformers.models.qwen3 import modeling_qwen3

    class Broken(modeling_qwen3.Qwen3MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2.0 if x.sum().item() > 1e9 else 1.0)

    batch, gradients = random_batch(0, 2, 16, 61, True), []
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(modeling_qwen3, "Qwen3MLP", Broken)
        stage = stage_of(spec_of("qwen3"))
        apply_recompute(stage, ActivationConfig(mode=recompute))
        compile_layers(stage, False)
        report_break.cache_clear()
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            for _ in range(2):
                train(stage, batch)
        said = [str(one.message) for one in noted if "without compilation" in str(one.message)]
        assert len(said) == broken and all("Qwen3DecoderLayer" in text for text in said)
        gradients.append({name: parameter.grad for name, parameter in stage.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][name], gradient, rtol=1e-4, atol=1e-5 * gradient.norm()), name


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("name", ["qwen3", "hunyuan_v1_moe"])
def test_linear_layers_multiply_in_fp8(name, recipe):
    """Outputs and weight gradients of each, and not those of routers and of layers at the ends."""
    spec = code_spec(plain_values(guess_values(name)))
    precision = PrecisionConfig(float8=Float8Config(recipe, ends=1))
    stage, product, seen = stage_of(spec), Float8Multiply(recipe), dict[str, list[torch.Tensor]]()
    multiply_in_float8(stage, spec, precision)
    for path, module in stage.named_modules():
        if type(module).__name__.startswith("CodeLinear"):
            module.register_forward_hook(partial(note_product, seen, path))
    batch = random_batch(0, 2, 16, 58, True)
    batch.tokens += 3
    train(stage, batch)
    inner = [path for path in seen if path.split(".")[1] in "12" and "mlp.gate.wg" not in path]
    assert set(inner) == set(float8_linears(precision, spec)) and len(seen) > len(inner) > 5
    for path, (x, y) in seen.items():
        weight, plain = stage.get_submodule(path).weight, path not in inner
        multiply = matmul if plain else product
        for role, factors, result in (
            (GEMMRole.OUTPUT, (x, weight), y),
            (GEMMRole.WEIGHT_GRADIENT, (y.grad, x), weight.grad),
        ):
            expected = multiply(*(one.detach().flatten(0, -2) for one in factors), role).view(result.shape)
            assert torch.allclose(result, expected, rtol=1e-5, atol=1e-5 * expected.norm()), (path, role)
            exact = matmul(*(one.detach().flatten(0, -2) for one in factors), role).view(result.shape)
            wide = plain or role is GEMMRole.WEIGHT_GRADIENT and recipe == "rowwise_with_gw_hp"
            assert torch.allclose(result, exact, rtol=1e-5, atol=1e-5 * exact.norm()) == wide, (path, role)


def note_product(seen: dict, path: str, module: nn.Module, given: tuple, y: torch.Tensor) -> None:
    y.retain_grad()
    seen[path] = [given[0], y]


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_generation_are_those_of_whole_sequences(name):
    """Of a prefix of each row, and then of one token after the other."""
    stage, tokens = stage_of(spec_of(name)).eval(), torch.randint(3, 61, (2, 16))
    model = ShardedModel(stage.spec, {0: stage}, CPU, torch.float32)
    with model.inference():
        expected, cache = stage(tokens), model.cache(2, 16)
        for first in range(5, 16):
            context = first == 5
            cache.lengths[:] = torch.tensor([first, first]) if context else torch.tensor([first - 1, first - 1])
            cache.look(first)
            given = tokens[:, :first] if context else tokens[:, first - 1 : first]
            assert torch.allclose(model.logits(given, cache), expected[:, first - 1], atol=1e-5), first
    assert len(cache.layers) == 4


def test_a_padding_token_does_not_train_its_row():
    spec = spec_of("qwen3")
    stage, batch = stage_of(spec), random_batch(0, 2, 16, 61, False)
    batch.tokens[:, 3] = 0
    stage(batch.tokens, batch.targets)[0].backward()
    assert not stage.embedding.weight.grad[0].any() and stage.embedding.weight.grad[1:].any()


@pytest.mark.parametrize("name", ["cohere2", "exaone4", "gemma2", "gemma3_text", "granite", *PARTS])
def test_two_stages_give_what_one_gives(name):
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    spec = code_spec(plain_values(guess_values(name) | (kinds if name == "gemma3_text" else {})))
    batch = random_batch(0, 2, 16, 58, spec.transformers["outer"]["packed"])
    batch.tokens += 3
    whole, first, second = (stage_of(spec, layers).eval() for layers in (None, range(3), range(3, 4)))
    expected = whole(batch.tokens, None, batch.documents)
    hidden = first(batch.tokens, None, batch.documents)
    assert torch.allclose(second(batch.tokens, None, batch.documents, hidden), expected, atol=1e-6)
    if name == "gemma3_text":
        # Its model picks rotations by a layer's place. With layers removed instead of replaced, they are others.
        second.runs.layers = nn.ModuleList([one for one in second.runs.layers if not isinstance(one, Elsewhere)])
        second.runs.config.num_hidden_layers = 1
        with use_pass(StagePass(hidden.view(2, 16, -1), (2, 16), batch.documents, 16, None, None)):
            places = document_positions(batch.documents)
            x = second.runs(inputs_embeds=hidden.view(2, 16, -1), position_ids=places, use_cache=False)
        assert not torch.allclose(
            second.head(x.last_hidden_state.flatten(0, 1)).view(expected.shape), expected, atol=1e-3
        )


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES, *PARTS])
def test_a_spec_survives_json(name):
    spec = spec_of(name)
    again = ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert isinstance(again, CodeSpec) and again == spec and not again.check()


@given(
    st.sampled_from(["config", "tables", "layers", "head_scale", "paths", "outer", "outer_tables"]),
    st.sampled_from([None, [], {}, 3, "x", [9], [{}]]),
)
def test_a_damaged_spec_is_refused(key, value):
    spec = spec_of_llama()
    spec.transformers = {**spec.transformers, key: value}
    if (key, value) not in (("config", {}), ("head_scale", 3)):
        assert spec.check()


def spec_of_llama() -> CodeSpec:
    if not hasattr(spec_of_llama, "kept"):
        spec_of_llama.kept = spec_of("llama").to_dict()  # type: ignore[attr-defined]
    return ModelSpec.from_dict(spec_of_llama.kept)  # type: ignore[attr-defined]


def saved_folder(path: Path, name: str, **changes: Any) -> nn.Module:
    """A folder that transformers saved, and its model."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small_values(name, **changes)))
    for key, buffer in model.named_buffers():
        if key in model.state_dict():
            buffer.copy_(0.1 * torch.randn(buffer.shape))
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES, *PARTS])
def test_weights_come_from_a_folder_and_go_into_one(tmp_path, name):
    theirs = saved_folder(tmp_path / "in", name).eval()
    spec = spec_from_hf(tmp_path / "in", code="transformers")
    weights, _ = open_weights(tmp_path / "in", spec)
    stage = stage_of(spec, value=weights).eval()
    tokens = torch.randint(3, 61, (2, 16))
    assert torch.allclose(stage(tokens), theirs(tokens).logits, atol=1e-5)
    export_model(spec, weights.tensor, tmp_path / "out", torch.float32, shard_size="40KB")
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(back.eval()(tokens).logits, theirs(tokens).logits)
    assert stored_names(tmp_path / "out") == stored_names(tmp_path / "in")


def stored_names(folder: Path) -> set[str]:
    from safetensors import safe_open

    return {name for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"), "missing from the weights"),
        (lambda tensors: tensors.pop("model.layers.1.mlp.gate.e_score_correction_bias"), "missing from the weights"),
        (lambda tensors: tensors.pop("model.layers.2.mlp.experts.1.up_proj.weight"), "cannot be joined|shape|missing"),
        (lambda tensors: tensors.update({"model.extra": torch.ones(2)}), "not part of the model"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}), r"shape \[7\]"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}), "holds I32"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, damage, message):
    from safetensors.torch import load_file, save_file

    saved_folder(tmp_path, "deepseek_v3", q_lora_rank=None)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    spec = spec_from_hf(tmp_path, code="transformers")
    with pytest.raises(ConfigError, match=message):
        open_weights(tmp_path, spec)


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_fresh_weights_are_those_of_the_code(name):
    """Of the distribution of a model that transformers has made, and equal in whatever order they are drawn."""
    spec = code_spec(plain_values(guess_values(name)))
    infos = declare_parameters(spec)
    weights, again, other = (CodeInitialWeights(spec, seed) for seed in (1, 1, 2))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.transformers["config"]))
    theirs = dict(model.named_parameters(remove_duplicate=False))
    drawn = {key: (weights(key, info), other(key, info)) for key, info in infos.items()}
    kinds: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for key, info in reversed(infos.items()):
        (first, second), expected = drawn[key], theirs[code_name(key, spec)].detach().float()
        assert torch.equal(again(key, info), first) and first.shape == expected.shape, key
        if torch.equal(first, second):
            assert torch.equal(first, expected), key
        else:
            kind = re.sub(r"layers\.\d+", "layers", key)
            kinds.setdefault(kind, []).append((torch.cat([first.flatten(), second.flatten()]), expected.flatten()))
    for kind, pairs in kinds.items():
        ours, expected = (torch.cat(some) for some in zip(*pairs))
        scale, allowed = expected.std(), 0.05 + 6 / len(expected) ** 0.5
        assert abs((ours.std() / scale).log()) < allowed and abs(ours.mean() - expected.mean()) < allowed * scale, kind


@given(st.sampled_from(["mixtral", *MIXTURES]), st.integers(2, 21), st.data())
@settings(max_examples=12, deadline=None)
def test_some_experts_are_those_of_the_whole_stack(name, count, data):
    """Drawn or read, whatever files hold the experts."""
    option = "num_experts" if name in ("qwen3_moe", "olmoe") else "num_local_experts"
    sizes = {"num_hidden_layers": 1, "num_experts_per_tok": 1, "layer_types": ["full_attention"]}
    first = data.draw(st.integers(0, count))
    numbers = range(first, data.draw(st.integers(first, count)))
    with TemporaryDirectory() as folder:
        theirs = saved_folder(Path(folder), name, **{option: count}, **sizes).state_dict()
        spec = spec_from_hf(folder, code="transformers")
        drawn, (read, _) = CodeInitialWeights(spec, 1), open_weights(folder, spec)
        stacks = {key: info for key, info in declare_parameters(spec).items() if info.stacked}
        assert len(stacks) == (4 if name == "gpt_oss" else 2)
        for key, info in stacks.items():
            for weights in (drawn, read):
                part = weights.experts(key, info, numbers)
                assert part.shape == (len(numbers), *info.shape[1:])
                assert torch.equal(part, weights(key, info)[numbers.start : numbers.stop]), key
            assert torch.equal(read(key, info), theirs[code_name(key, spec)]), key


@pytest.mark.parametrize("name", ["mixtral", *MIXTURES])
def test_weight_gradients_of_experts_can_be_deferred(name):
    batch = random_batch(0, 2, 16, 58, True)
    once, later = stage_of(spec_of(name)), stage_of(spec_of(name))
    deferred = DeferredGrads()
    later.defer(deferred)
    for stage in (once, later):
        deferred.active = stage is later
        train(stage, batch)
    stacks = [key for key, one in later.named_parameters() if one.dim() == 3]
    assert len(stacks) == 8 and all(later.get_parameter(key).grad is None for key in stacks)
    deferred.take()()
    for key, parameter in once.named_parameters():
        assert torch.equal(parameter.grad, later.get_parameter(key).grad), key


@pytest.mark.parametrize("inputs, outputs", [(16, 8), (12, 8), (16, 20), (8, 30)])
def test_the_grouped_kernel_gets_sizes_that_it_reads(monkeypatch, inputs, outputs):
    monkeypatch.setattr(experts, "multiplies_groups", lambda device: True)
    wanted = inputs % 8 == outputs % 8 == 0
    assert experts.can_group(torch.ones(3, inputs, dtype=torch.bfloat16), outputs) == wanted
    assert not experts.can_group(torch.ones(3, inputs), outputs)


def test_recompute_does_not_choose_experts_again():
    """Also where the router changes the values of `topk` in place, as that of Mixtral does."""

    class Counted(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, operator: Any, _: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
            self.calls += operator in (torch.ops.aten.topk.default, torch.ops.trainer.choose_largest.default)
            return operator(*arguments, **keywords or {})

    loads = []
    for mode in ({"mode": "none"}, {"mode": "full"}, {"mode": "selective"}):
        stage, batch = stage_of(spec_of("mixtral")), random_batch(0, 2, 16, 58, True)
        apply_recompute(stage, ActivationConfig(**mode))
        with Counted() as counted:
            loads.append(train(stage, batch))
        assert counted.calls == 4, mode
    # Nor is their load counted again.
    assert loads[0].keys() == stage.reports.keys() and len(loads[0]) == 4
    for name, load in loads[0].items():
        assert load.sum() == 2 * 16 * 2 and all(torch.equal(load, other[name]) for other in loads), name


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral"])
def test_layers_keep_what_auto_has_chosen(name):
    """As much memory as decides is between that of all and of nothing, and gradients are those without recompute."""
    spec, batch = spec_of(name), random_batch(0, 4, 16, 58, True)
    config = Config()
    config.batch.sequence_length, config.batch.micro_size, config.activation.mode = 16, 4, "auto"
    layout, hardware = resolve_layout(config, 1, spec), load_hardware("h100")
    most, least = (
        decide(config, layout, MemoryLimit(limit, 0.0), 1, hardware).predicted for limit in (float("inf"), 0.0)
    )
    assert (most.config.activation.mode, least.config.activation.mode) == ("none", "full")
    plain, kept = stage_of(spec), set()
    train(plain, batch)
    for share in (0.2, 0.5, 0.8):
        limit = least.peak + share * (most.peak - least.peak)
        chosen = decide(config, layout, MemoryLimit(limit / SHARE, 0.0), 1, hardware).config.activation
        stage = stage_of(spec)
        apply_recompute(stage, chosen)
        kept.add(tuple(chosen.save))
        train(stage, batch)
        for path, parameter in plain.named_parameters():
            assert torch.allclose(stage.get_parameter(path).grad, parameter.grad, atol=1e-6), path
    assert len(kept) == 3, kept


def test_a_router_that_changes_its_values_is_recomputed_when_compiled():
    weight, x = torch.randn(8, 16, requires_grad=True), torch.randn(5, 16)
    run = recompute_unrouted(foreign_contexts)

    def route(x: torch.Tensor) -> torch.Tensor:
        scores = (x @ weight.t()).softmax(-1)
        values, chosen = torch.topk(scores, 2, dim=-1)
        values /= values.sum(-1, keepdim=True)
        return (values * scores.gather(-1, chosen)).sum(-1)

    gradients = []
    for kind in (lambda function: function, partial(torch.compile, backend="aot_eager_decomp_partition")):
        kind(lambda x: run(route, x))(x).sum().backward()
        gradients.append(weight.grad)
        weight.grad = None
    torch.testing.assert_close(*gradients)


def test_weights_are_drawn_where_a_folder_has_none(tmp_path):
    AutoConfig.for_model(**small_values("cohere2")).save_pretrained(tmp_path)
    spec = spec_from_hf(tmp_path)
    assert isinstance(spec, CodeSpec) and isinstance(starting_weights(tmp_path, spec, 0)[0], CodeInitialWeights)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="pickle"):
        starting_weights(tmp_path, spec, 0)


def test_auto_takes_our_blocks_where_the_type_is_known(tmp_path):
    AutoConfig.for_model(**small_values("llama", attention_bias=False, mlp_bias=False)).save_pretrained(tmp_path)
    assert not isinstance(spec_from_hf(tmp_path), CodeSpec)
    ours, code = spec_from_hf(tmp_path, code="spec"), spec_from_hf(tmp_path, code="transformers")
    assert isinstance(code, CodeSpec)
    assert parameter_counts(code) == parameter_counts(ours)
    assert flops_per_token(code, 64, True) == pytest.approx(flops_per_token(ours, 64, True))


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES, *PARTS])
def test_collectives_of_the_program_of_a_layer_belong_to_its_gemms(name):
    for program in model_programs(spec_of(name), 64, 2, 2):
        assert all(set(op.gemms) <= program.gemms.keys() for op in program.ops)


def test_estimates_of_shared_experts_and_of_adapters_are_those_of_our_blocks(tmp_path):
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "vocab_size": 300, "num_experts": 16}
    AutoConfig.for_model(**small_values("qwen3_moe", **sizes)).save_pretrained(tmp_path)
    common = f"model.from_hf={tmp_path}", "data.tokenizer=bytes", "batch.sequence_length=64", "precision=bf16"
    ways = {"transformers": "self_attn", "spec": "attention"}
    for more in (["parallel.ep=4"], ["parallel.ep=2", "parallel.zero.stage=3", "activation=full"], ["adapter"]):
        found = []
        for code, block in ways.items():
            adapter = ["model.adapter.rank=4", f"model.adapter.targets=[*.{block}.*]"]
            chosen = adapter if more == ["adapter"] else more
            config = compose([*common, f"model.code={code}", *chosen], world_size=4)
            config.model = model_from_hf(config.model)
            layout = resolve_layout(config, 4, config.model)
            times = estimate_step(config, layout, load_hardware("h100")).terms
            found.append((state_bytes(config.model, layout.plan, 2), times.get("expert collectives")))
        assert found[0] == found[1], more


@pytest.mark.parametrize("name", [*MODELS, *PARTS])
def test_the_table_counts_the_parameters_of_transformers(name):
    spec = spec_of(name)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.transformers["config"]))
    assert parameter_counts(spec)["total"] == model.num_parameters()


# What is refused.


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type=dynamic"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits"),
        ("llama", {"num_kv_shared_layers": 2}, "num_kv_shared_layers=2"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("roberta", {"is_decoder": False}, "model_type=roberta: .*attention.self is non-causal attention"),
        ("hrm_text", {}, "model_type='hrm_text' is not accepted .*: its layers are not computed once each and in turn"),
        ("zaya", {}, "model_type='zaya' is not accepted .*: model.input_hidden_states_scale is a parameter outside"),
        ("inkling_text", {}, "InklingAttention passes position_bias to attention"),
        ("zamba", {}, "'zamba' is not accepted .*: some of its layers share parameters"),
        ("olmo_hybrid", {}, "'olmo_hybrid' is not accepted .*: no plan of it .* set model.code_unproven=true"),
    ],
)
def test_options_that_the_code_cannot_have_here_are_refused(name, changes, message):
    known = name in MODELS or name in PARTS
    values = small_values(name) if known else AutoConfig.for_model(name).to_dict()
    with pytest.raises(ConfigError, match=message):
        code_spec(plain_values(values | changes))


ALLOWED = {"dropout": 0.0, "position_ids": 1, "is_causal": True, "use_cache": False}


@given(st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1).filter(lambda name: name not in ALLOWED))
def test_an_argument_of_attention_that_is_not_known_is_refused(name):
    x = torch.ones(1, 1, 2, 4)
    named = {"module", "query", "key", "value", "scaling", "sliding_window", "softcap", "s_aux", "attention_mask"}
    known = {"cache_position", "output_attentions", "output_hidden_states", "position_embeddings", "past_key_values"}
    known |= {"cache", "return_dict", "output_router_logits"}
    with use_pass(StagePass(x, (1, 2), None, 2, None, None)):
        attend_in_pass(nn.Identity(), x, x, x, None, **ALLOWED)
        for refused in ({name: x} if name not in named | known else {}, {"is_causal": False}, {"attention_mask": x}):
            if refused:
                with pytest.raises(UnsupportedAttention):
                    attend_in_pass(nn.Identity(), x, x, x, **{"attention_mask": None, **refused})


def test_code_with_such_an_argument_is_refused_before_a_run(monkeypatch):
    from transformers.models.qwen3 import modeling_qwen3

    class Gated(modeling_qwen3.Qwen3Attention):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            return super().forward(*arguments, **named, head_mask=1)

    monkeypatch.setattr(modeling_qwen3, "Qwen3Attention", Gated)
    with pytest.raises(ConfigError, match="head_mask"):
        spec_of("qwen3")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"parallel.tp": 4}, "parallel.tp=4 does not divide num_key_value_heads=2"),
        ({"parallel.ep": 2}, "parallel.ep=2 shares experts, and the model has none"),
        ({"parallel.tp": 2, "parallel.tp_overlap": "copy_engine"}, "tp_overlap=copy_engine"),
        ({"activation.tile": 64}, "activation.tile=64"),
        ({"activation.mode": "selective", "activation.save": ["mlp.*"]}, r"activation.save=mlp.\*"),
    ],
)
def test_plans_and_settings_that_the_code_cannot_follow_are_refused(settings, message):
    config, spec = Config(), spec_of("qwen3")
    for path, value in settings.items():
        target, (*parents, last) = config, path.split(".")
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, value)
    problems = check_plan(config.parallel, 4, spec)
    if not any(path.startswith("parallel") for path in settings):
        problems = check_whole_plan(config, spec, resolve_plan(config.parallel, 4, spec), 4)
    import re

    assert any(re.search(message, problem) for problem in problems), problems


def test_experts_that_ranks_cannot_share_are_refused_by_name():
    config = Config()
    config.parallel.ep = 2
    for name in ("jetmoe", "gpt_oss"):
        found = list(check_plan(config.parallel, 2, code_spec(plain_values(guess_values(name)))))
        assert len(found) == (name == "jetmoe") and all(
            "parallel.ep=2: transformers' code of model_type=jetmoe" in one for one in found
        )
    config.parallel.ep_capacity = 1.5
    assert any("parallel.ep_capacity=1.5" in one for one in check_plan(config.parallel, 2, spec_of("gpt_oss")))


@pytest.mark.parametrize(
    "name, path, value, message",
    [
        ("bart", "data.mask_documents", True, "model_type=bart cannot keep the documents of a sequence apart"),
        ("minimax", "data.mask_documents", True, "model_type=minimax cannot keep the documents of a sequence apart"),
        (
            "gpt2",
            "batch.sequence_length",
            65,
            "exceeds the 64 positions of model_type=gpt2; set batch.sequence_length=64",
        ),
        ("falcon", "parallel.cp", 2, "parallel.cp=2: layers of model_type=falcon mix tokens outside"),
        ("qwen3_next", "parallel.cp", 2, "parallel.cp=2: layers of model_type=qwen3_next mix tokens outside"),
        ("falcon", "activation.mode", "auto", "activation.mode=auto: layers of model_type=falcon mix tokens outside"),
        ("lfm2", "activation.mode", "auto", "activation.mode=auto: layers of model_type=lfm2 mix tokens outside"),
        ("gpt_neo", "run.cuda_graphs", True, "run.cuda_graphs=true for model_type=gpt_neo is not supported"),
        ("bart", "parallel.tp", 2, "parallel.tp=2: transformers' code of model_type=bart has no plan for it"),
        ("ctrl", "parallel.pp", 2, "parallel.pp=2: transformers' code of model_type=ctrl has no plan for it"),
    ],
)
def test_what_a_type_cannot_have_is_refused_and_the_way_out_is_not(name, path, value, message):
    spec, config = code_spec(plain_values(guess_values(name))), Config()
    config.batch.sequence_length, config.data.mask_documents = 64, spec.transformers["outer"]["packed"]

    def problems() -> list[str]:
        if found := check_plan(config.parallel, 2, spec):
            return found
        plan = resolve_plan(config.parallel, 2, spec)
        return [one for one in check_whole_plan(config, spec, plan, 2) if "model_type" in one]

    assert not problems()
    group, _, last = path.partition(".")
    setattr(getattr(config, group), last, value)
    assert [one for one in problems() if message in one], problems()


def test_a_type_that_is_not_accepted_runs_after_its_comparison(monkeypatch, tmp_path):
    monkeypatch.delitem(ACCEPTED, "cohere2")
    AutoConfig.for_model(**small_values("cohere2", hidden_size=64, use_qk_norm=True)).save_pretrained(tmp_path / "in")
    prove_text.cache_clear()
    with pytest.raises(ConfigError, match="no plan of it has been compared .* set model.code_unproven=true"):
        spec_from_hf(tmp_path / "in")
    spec = spec_from_hf(tmp_path / "in", unproven=True)
    assert isinstance(spec, CodeSpec) and spec.width == 64 and spec.transformers["head_scale"] == 0.5
    assert not spec.transformers["tp"] and spec.transformers["pp"]
    with pytest.raises(ConfigError, match="code_unproven=true is about the code of model.from_hf"):
        compose(["model.code_unproven=true"])
    result = (
        run(compose(settings_of(tmp_path, "run", "model.code_unproven=true", "data.tokenizer=null")[:0] or []))
        if False
        else None
    )
    assert result is None


@pytest.mark.parametrize("broken", ["head_scale", "gradient", "missing", "stages", "size", "code"])
def test_a_type_whose_comparison_fails_is_refused(monkeypatch, broken):
    """Where another function is computed, where backward is another one, where a parameter gets no gradient, where two
    stages are not one, and where there is no small copy."""
    import trainer.hf.proof as proof

    prove_text.cache_clear()
    monkeypatch.delitem(ACCEPTED, "cohere2")
    values = plain_values(small_values("cohere2"))
    forward = CodeStage.forward

    def wrong(stage: CodeStage, tokens: torch.Tensor, targets: Any = None, documents: Any = None, hidden: Any = None):
        if broken == "stages" and hidden is not None:
            hidden = hidden * 1.01
        if broken == "missing":
            stage.layers["1"].mlp.up_proj.weight.requires_grad_(False)
        result = forward(stage, tokens, targets, documents, hidden)
        if broken == "gradient" and stage.last:
            return (result[0] * 1.01 - result[0].detach() * 0.01, *result[1:])
        return result

    monkeypatch.setattr(CodeStage, "forward", wrong)
    if broken == "head_scale":
        monkeypatch.setattr(proof, "guess_facts", lambda values: proof.CodeFacts())
    if broken == "size":
        monkeypatch.setattr(proof, "MOST", 1000)
    if broken == "code":
        monkeypatch.setattr(proof, "shrink_config", lambda values: {}["vocab_size"])
    if broken == "stages":
        assert not code_spec(values, prove=prove_code).transformers["pp"]
        return
    words = "is not possible" if broken in ("size", "code") else "has failed: a gradient differs by"
    with pytest.raises(ConfigError, match=f"model.code_unproven=true: .*model_type=cohere2 with transformers {words}"):
        code_spec(values, prove=prove_code)


@pytest.mark.parametrize("name, code", [("llama", "transformers"), ("cohere2", "auto")])
def test_an_old_transformers_is_refused(tmp_path, monkeypatch, name, code):
    import transformers

    AutoConfig.for_model(**small_values(name)).save_pretrained(tmp_path)
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(ConfigError, match="needs transformers 5 or later, and 4.57.1 is installed"):
        spec_from_hf(tmp_path, code=code)


def test_code_of_a_folder_is_never_run(tmp_path):
    values = small_values("cohere2") | {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(plain_values(values)))
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    notes: list[str] = []
    assert isinstance(spec_from_hf(tmp_path, notes), CodeSpec) and "auto_map" in notes[0]
    values["model_type"] = "own"
    (tmp_path / "config.json").write_text(json.dumps(plain_values(values)))
    with pytest.raises(ConfigError, match="model_type='own' is not supported"):
        spec_from_hf(tmp_path, notes)
    assert not (tmp_path / "ran").exists()


def test_a_type_without_a_plan_is_not_cut():
    spec = spec_of("qwen3")
    spec.transformers = {**spec.transformers, "tp": False, "pp": False}
    config = Config()
    for axis in ("tp", "pp"):
        config.parallel.tp = config.parallel.pp = 1
        setattr(config.parallel, axis, 2)
        assert any(f"parallel.{axis}=2: transformers' code" in text for text in check_plan(config.parallel, 2, spec))


def test_every_accepted_type_is_a_type_of_transformers():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert ACCEPTED.keys() <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() and MODELS.keys() <= ACCEPTED.keys()


def test_buffers_of_rotary_positions_are_those_of_the_configuration():
    """Also of scaling types, and where a run makes modules without storage first."""
    scaled = {
        "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
        "yarn": dict(factor=4.0, original_max_position_embeddings=16),
        "linear": dict(factor=2.0),
    }
    for kind, options in scaled.items():
        spec = spec_of("qwen3", rope_parameters={"rope_type": kind, "rope_theta": 1e4, **options})
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.transformers["config"])).eval()
        own = model.state_dict()
        stage = stage_of(spec, value=partial(lambda own, name, _: own[code_name(name, spec)], own)).eval()
        assert torch.equal(stage.shared["rotary_emb"].inv_freq, model.model.rotary_emb.inv_freq), kind
        tokens = torch.randint(3, 61, (1, 40))
        assert F.mse_loss(stage(tokens), model(tokens).logits) < 1e-10, kind


def test_buffers_that_checkpoints_hold_are_in_the_table():
    assert set(router_shapes(spec_of("deepseek_v3"))) == {
        f"layers.{index}.mlp.gate.e_score_correction_bias" for index in (1, 2, 3)
    }


def settings_of(folder: Path, name: str, *more: str) -> list[str]:
    return [
        f"model.from_hf={folder / 'in'}",
        f"run.dir={folder / name}",
        "model.code=transformers",
        *("run.device=cpu", "run.steps=2", "lr.warmup=1", "batch.sequence_length=32", "batch.global_size=2"),
        *(
            f"data.cache={folder / 'cache'}",
            "data.tokenizer=bytes",
            "data.sources.stdlib.limit=20",
            "logging.console=none",
        ),
        *("checkpoint.at_end=true", "eval.every=2", "eval.sequences=4", *more),
    ]


def test_a_run_resumes_and_its_export_is_a_model_of_transformers(tmp_path):
    """And goes on with another code only under another name."""
    saved_folder(tmp_path / "in", "deepseek_v3", vocab_size=300)
    first = run(compose(settings_of(tmp_path, "run")))
    again = run(compose(settings_of(tmp_path, "run", "run.steps=3")))
    assert (first.code, again.code) == (0, 0) and [line["step"] for line in again.metrics if "loss" in line][-1] == 3
    with pytest.raises(ConfigError, match="set model.code=transformers"):
        run(compose(settings_of(tmp_path, "run", "run.steps=4", "model.code=spec")))
    saved = open_saved(str(tmp_path / "run"))
    export_model(
        saved.spec, saved.tensor, tmp_path / "out", torch.float32, saved.tokenizer, generation=saved.generation
    )
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and theirs.config.eos_token_id == 256 in theirs.generation_config.eos_token_id
    stage = stage_of(saved.spec, value=lambda name, info: saved.tensor(name)).eval()
    for name, buffer in stage.named_buffers():
        if name in router_shapes(saved.spec):
            buffer.copy_(saved.tensor(name))
            assert buffer.any()
    tokens = torch.randint(3, 300, (2, 16))
    assert torch.allclose(stage(tokens), theirs.eval()(tokens).logits, atol=1e-5)
    prompts = [[5, 6, 7, 8, 9], [11, 12]]
    model = place_saved(saved, CPU, "fp32")
    with model.inference():
        generator = TokenGenerator(model, prompts, 12, SamplingOptions())
        generated = list(zip(*generator))
    theirs.generation_config.eos_token_id = None
    for prompt, tokens in zip(prompts, generated):
        again = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert again[0, len(prompt) :].tolist() == list(tokens)


@pytest.mark.parametrize(
    "settings, message",
    [(["model.extend={max_length: 128}"], "model.extend"), (["activation.tile=8"], "activation.tile=8")],
)
def test_a_run_that_the_code_cannot_follow_leaves_nothing(tmp_path, settings, message):
    AutoConfig.for_model(**small_values("cohere2", vocab_size=300)).save_pretrained(tmp_path / "in")
    with pytest.raises(ConfigError, match=message):
        run(compose(settings_of(tmp_path, "run", *settings)))
    assert not (tmp_path / "run").exists()


def test_the_choice_of_code_needs_a_folder():
    with pytest.raises(ConfigError, match="model.code=transformers says whose code runs model.from_hf"):
        compose(["model.code=transformers"])


def test_options_that_scale_or_cap_logits_are_known_of_every_accepted_type():
    for name, facts in ACCEPTED.items():
        guessed = guess_facts(guess_values(name))
        read = {"logit_scale"} if name == "mpt" else set()  # its code does not read this option of its own
        read |= {facts.head_factor, facts.head_divisor, facts.soft_cap}
        assert {guessed.head_factor, guessed.head_divisor, guessed.soft_cap} <= read | {""}, name
