"""Every family against transformers: weights in, logits, loss and all gradients equal; weights out, logits equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.estimates import shipped
from torch import Tensor

from trainer.config import ConfigError
from trainer.config.model import ModelSpec, RopeSpec
from trainer.data.tokenizer import load_tokenizer
from trainer.hf import HFWeights, export_model, spec_from_hf
from trainer.hf.config import config_from_spec, first_difference, spec_from_config
from trainer.hf.families import FAMILIES
from trainer.model.initial import fill_parameters, initialize_model, parameter_infos
from trainer.model.stage import split_report
from trainer.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 61, 24
MARKS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    **MARKS,
}
GROUPED = {**DECODER, "num_key_value_heads": 2}
MIXTURE = {**GROUPED, "num_experts_per_tok": 2}
NARROW = {"moe_intermediate_size": 16}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, **MARKS}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # kept, blended, stretched
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 1.5,
    "beta_slow": 0.1,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 2.0, 3.0, 4.0]}
DEEPSEEK = {
    **DECODER,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DEEPSEEK_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
CASES = {
    "llama": ("llama", GROUPED),
    "llama tied, biases, wide heads": (
        "llama",
        {
            **GROUPED,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 12,
            "rms_norm_eps": 1e-3,
        },
    ),
    "llama linear rope": (
        "llama",
        {**DECODER, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 4.0}},
    ),
    "llama llama3 rope": ("llama", {**GROUPED, "rope_parameters": LLAMA3_ROPE}),
    "llama dynamic rope": (
        "llama",
        {
            **DECODER,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0},
        },
    ),
    "qwen3 yarn": ("qwen3", {**GROUPED, "rope_parameters": YARN}),
    "qwen2 yarn, its factor and temperature left out": (
        "qwen2",
        {**GROUPED, "rope_parameters": {**YARN, "factor": None, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "gpt_neox yarn, bounds as they are": (
        "gpt_neox",
        {**DECODER, "rope_parameters": {**YARN, "truncate": False, "partial_rotary_factor": 0.5}},
    ),
    "phi3 longrope, short": ("phi3", {**GROUPED, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE}),
    "phi3 longrope, long": ("phi3", {**GROUPED, "original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    "mistral longrope, its attention factor": (
        "mistral",
        {
            **GROUPED,
            "rope_parameters": {
                **LONGROPE,
                "rope_theta": 500.0,
                "factor": 8.0,
                "attention_factor": 1.3,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 8, "head_dim": 16}),
    "mistral without window": ("mistral", {**GROUPED, "sliding_window": None}),
    "qwen2": ("qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2 wide heads, last windows": (
        "qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "head_dim": 12},
    ),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {**GROUPED, "head_dim": 8, "attention_bias": True}),
    "olmo2": ("olmo2", {**GROUPED, "rms_norm_eps": 1e-6}),
    "mixtral": ("mixtral", {**MIXTURE, "num_local_experts": 4}),
    "mixtral window, each token to all experts": (
        "mixtral",
        {**MIXTURE, "num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 8, "head_dim": 12},
    ),
    "qwen2_moe": ("qwen2_moe", {**MIXTURE, **NARROW, "shared_expert_intermediate_size": 24, "num_experts": 6}),
    "qwen2_moe, some layers dense, windows, normalised": (
        "qwen2_moe",
        {
            **MIXTURE,
            **NARROW,
            "num_experts": 4,
            "shared_expert_intermediate_size": 20,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            "qkv_bias": False,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**MIXTURE, **NARROW, "num_experts": 6, "num_experts_per_tok": 3, "head_dim": 16}),
    "qwen3_moe, first layer dense, normalised, window": (
        "qwen3_moe",
        {
            **MIXTURE,
            **NARROW,
            "num_experts": 4,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
    "olmoe": ("olmoe", {**MIXTURE, "num_experts": 5, "tie_word_embeddings": True}),
    "olmoe one of two experts": (
        "olmoe",
        {**MIXTURE, "num_experts": 2, "num_experts_per_tok": 1, "attention_bias": True},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **MIXTURE,
            "num_local_experts": 6,
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "gpt_oss no projection biases, last window, each token to all experts": (
        "gpt_oss",
        {
            **MIXTURE,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "attention_bias": False,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss without windows": ("gpt_oss", {**MIXTURE, "num_local_experts": 2, "layer_types": ["full_attention"] * 3}),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK),
    "deepseek_v2 low-rank queries, groups, yarn, biases, all layers of experts": (
        "deepseek_v2",
        {
            **DEEPSEEK,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "attention_bias": True,
            "v_head_dim": 20,
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek_v3 tied, no low-rank queries, not normalised, biases": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "n_shared_experts": 3,
            "first_k_dense_replace": 2,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {**YARN, "mscale_all_dim": 1.0},
        },
    ),
    "gemma2": (
        "gemma2",
        {
            **GROUPED,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2 untied, no caps": (
        "gemma2",
        {
            **GROUPED,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "phi3": ("phi3", {**GROUPED, "sliding_window": 8}),
    "phi3 partial rotary": ("phi3", {**GROUPED, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("gpt_neox", {**DECODER}),
    "gpt_neox sequential, no biases": (
        "gpt_neox",
        {
            **DECODER,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied, inner width": (
        "gpt2",
        {**GPT2, "tie_word_embeddings": False, "n_inner": 40, "activation_function": "relu"},
    ),
}


def theirs(family: str, options: dict) -> torch.nn.Module:
    """A random transformers model whose norms and biases matter."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def ours(folder: Path) -> Transformer:
    """Built on the meta device, as a run builds it."""
    spec = spec_from_hf(folder)
    with torch.device("meta"):
        model = Transformer(spec)
    model.to_empty(device="cpu")
    fill_parameters(model, HFWeights(folder, spec))
    return model.eval()  # in training a mixture reports besides


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, VOCAB, (2, 2, LENGTH), generator=generator)
    targets[0, 3:6] = -100
    return tokens, targets


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return a.shape == b.shape and ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() <= tolerance


def their_logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("case", CASES)
def test_parity_and_round_trip(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    tokens, targets = batch()
    reference = theirs(family, options)
    reference.save_pretrained(tmp_path / "in", **({"max_shard_size": "20KB"} if "tied" in case else {}))
    assert (tmp_path / "in/model.safetensors.index.json").exists() == ("tied" in case)

    model = ours(tmp_path / "in")
    logits = their_logits(reference, tokens)
    assert close(split_report(model(tokens))[0], logits)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    (objective, entropy), _ = split_report(model(tokens, targets))
    assert close(objective, loss, 1e-6) and close(entropy.sum(), loss, 1e-6)

    loss.backward()
    objective.backward()
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None, name
        parameter.data = parameter.grad
    reference.save_pretrained(tmp_path / "gradients")  # gradients come back under our names by the table under test
    gradients, infos = HFWeights(tmp_path / "gradients", model.spec), parameter_infos(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        expected = gradients(name, infos[name])
        if name.endswith("k.bias") and model.spec.attention.positions == "none":
            # Adds the same to the scores of all keys, which the softmax does not see: exactly zero but for rounding.
            assert max(parameter.grad.abs().max(), expected.abs().max()) < 1e-5, name
        else:
            assert close(parameter.grad, expected), name

    weights = {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
    export_model(model.spec, weights, tmp_path / "out", torch.float32, shard_size=20_000 if "tied" in case else "5GB")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(opened) is type(reference)
    assert close(their_logits(opened, tokens), logits.detach())
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in").state_dict()
    assert opened.state_dict().keys() == original.keys()
    for name, tensor in opened.state_dict().items():
        assert torch.equal(tensor, original[name]), name
    back = spec_from_hf(tmp_path / "out")
    assert first_difference(back, model.spec) is None and back.init == model.spec.init


def test_every_family_has_a_case() -> None:
    assert {family for family, _ in CASES.values()} == set(FAMILIES)
    assert set(FAMILIES) == set(ModelSpec.__dataclass_fields__["family"].metadata["choices"])


def saved(tmp_path: Path, family: str = "llama", **options: object) -> Path:
    """A folder with a tiny model."""
    theirs(family, {**GROUPED, **options}).save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_old_config_files_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, rope_parameters=LLAMA3_ROPE)
    expected = spec_from_hf(folder)
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "attention_bias", "mlp_bias", "head_dim"):
        del config[key]
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0, "rope_scaling": scaling}))
    assert spec_from_hf(folder) == expected


@pytest.mark.parametrize(
    "family, rope",
    [
        ("gpt_neox", RopeSpec(theta=500.0, fraction=0.5)),
        ("gpt_neox", RopeSpec(theta=500.0, scaling="linear", factor=4.0)),
        ("phi3", RopeSpec(fraction=0.25)),
        ("llama", RopeSpec(scaling="linear", factor=4.0)),
        ("llama", RopeSpec(theta=500.0, scaling="llama3", factor=8.0, low_frequency_factor=2.0, original_length=64)),
    ],
)
def test_either_generation_of_rope_options_is_enough(family: str, rope: RopeSpec, tmp_path: Path) -> None:
    """What is exported can be read by transformers 4 (rope_theta, rope_scaling) as well as 5 (rope_parameters)."""
    theirs(family, GROUPED if family != "gpt_neox" else DECODER).save_pretrained(tmp_path)
    spec = spec_from_hf(tmp_path)
    spec.attention.rope = rope
    config = config_from_spec(spec)
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    replaced = ("rope_theta", "rope_scaling", "rotary", "partial")
    new = {key: value for key, value in config.items() if not key.startswith(replaced)}
    assert spec_from_config(old).attention.rope == spec_from_config(new).attention.rope == rope
    for options in (old, new):
        (tmp_path / "config.json").write_text(json.dumps({**options, **MARKS}))
        assert spec_from_hf(tmp_path).attention.rope == rope


GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
"""Of the published folder, which transformers 4.55 wrote."""


def test_the_published_gpt_oss_is_the_shipped_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    assert first_difference(spec_from_hf(tmp_path), shipped("gpt_oss_20b")) is None


def test_checkpoints_of_the_bare_base_model_are_read(tmp_path: Path) -> None:
    """The published GPT-2 has no `transformer.` prefix and holds the causal mask as a buffer."""
    from safetensors.torch import load_file, save_file

    reference = theirs("gpt2", GPT2)
    reference.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    tokens, _ = batch()
    assert close(ours(tmp_path)(tokens), their_logits(reference, tokens))
    (note,) = HFWeights(tmp_path, spec_from_hf(tmp_path)).notes
    assert "h.0.attn.bias not read" in note


def test_half_precision_export(tmp_path: Path) -> None:
    spec = ModelSpec(vocab_size=VOCAB, width=32, depth=2)
    spec.feed_forward.width = 40
    model = Transformer(spec)
    initialize_model(model, spec, 0, torch.device("cpu"))
    export_model(spec, dict(model.named_parameters()), tmp_path / "out", torch.bfloat16)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert opened.dtype is torch.bfloat16 and opened.generation_config.eos_token_id is None
    weight = model.layers["1"].attention.q.weight
    assert torch.equal(opened.model.layers[1].self_attn.q_proj.weight, weight.bfloat16())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "xlm"}, ["'xlm'", "is not accepted for model.code=transformers", "once each and in turn"]),
        ({"model_type": None}, ["model_type=None", "supported: llama"]),
        ({"hidden_act": "mish"}, ["hidden_act='mish'", "silu"]),
        ({"rope_parameters": {**LLAMA3_ROPE, "rope_type": "ntk"}}, ["'ntk'", "default", "yarn"]),
        ({"num_key_value_heads": 3}, ["kv_heads=3", "legal: 1, 2, 4"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config"]),
        ({"hidden_size": "wide"}, ["hidden_size"]),
    ],
)
def test_unsupported_options_are_refused_by_name(tmp_path: Path, changes: dict, words: list[str]) -> None:
    folder = saved(tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        spec_from_hf(folder)
    assert all(word in str(caught.value) for word in ["model.from_hf", str(folder), *words]), caught.value


@pytest.mark.parametrize(
    "family, options, word",
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 .*supported: 7.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 .*supported: 1.702"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
    ],
)
def test_variants_of_a_family_are_refused_by_name(tmp_path: Path, family: str, options: dict, word: str) -> None:
    common = GPT2 if family == "gpt2" else GROUPED
    transformers.AutoConfig.for_model(family, **{**common, **options}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=word):
        spec_from_hf(tmp_path)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(ConfigError, match="model.from_hf=.*config.json"):
        spec_from_hf(tmp_path / "nothing")
    folder = saved(tmp_path / "model")
    spec, file = spec_from_hf(folder), folder / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    whole = file.read_bytes()

    def refused(*words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            HFWeights(folder, spec)
        assert all(word in str(caught.value) for word in (f"model.from_hf={folder}", *words)), caught.value

    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    refused(name, "missing")
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, file)
    refused("model.safetensors", name, "[39, 32]", "[40, 32]")
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, file)
    refused("self_attn.q_proj.bias", "not part of the model")
    file.write_bytes(whole[:-100])
    refused("model.safetensors", "cannot be read")
    file.unlink()
    refused("neither model.safetensors nor")
    index, shard = folder / "model.safetensors.index.json", "model-00001-of-00001.safetensors"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
    refused(shard, "cannot be read")
    other = folder / "other.safetensors"
    other.write_bytes(whole)
    for elsewhere in ("../model/other.safetensors", str(other), "", "a\0b", ".."):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, elsewhere)}))
        refused("is no name of a file in its folder")
    index.write_text("[]")
    refused(index.name)
    index.unlink()
    other.unlink()
    save_file({**tensors, name: tensors[name].to(torch.int64)}, file)
    refused(name, "I64")
    torch.save(tensors, folder / "pytorch_model.bin")
    file.unlink()
    refused("pytorch_model.bin", "pickle", "save_pretrained")


@pytest.mark.parametrize("model_type", ["llama", "of_its_own"])
def test_code_of_a_folder_is_never_run(tmp_path: Path, model_type: str, monkeypatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks, where it is not told
    folder, canary = saved(tmp_path / "model"), tmp_path / "canary"
    edit_config(
        folder, model_type=model_type, auto_map={"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
    )
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(canary)!r})\nclass Own:\n    pass\n")
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="is not a transformers tokenizer folder"):
        load_tokenizer(folder)
    if model_type == "llama":
        assert spec_from_hf(folder).width == 32
    else:
        with pytest.raises(ConfigError, match="model_type='of_its_own' is not supported"):
            spec_from_hf(folder)
    assert not canary.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**18},
        {"num_hidden_layers": "two"},
        {"num_hidden_layers": -1},
        {"head_dim": [8]},
        {"rope_parameters": "default"},
        {"vocab_size": None},
        {"layer_types": 7},
        {"max_position_embeddings": {}},
    ],
)
def test_numbers_and_types_of_no_model_are_refused(tmp_path: Path, changes: dict) -> None:
    folder = saved(tmp_path / "model")
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match="config.json"):
        spec_from_hf(folder)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda spec: setattr(spec.attention, "qk_norm", "head"),
            ["model.attention.qk_norm=head", "model.family=llama"],
        ),
        (lambda spec: setattr(spec.attention, "window", 8), ["model.attention.window=8"]),
        (lambda spec: setattr(spec, "embedding_scale", 2.0), ["model.embedding_scale=2.0"]),
        (
            lambda spec: setattr(spec, "overrides", {"1": {"feed_forward": {"width": 24}}}),
            ["model.feed_forward.width=24 (layer 1)"],
        ),
        (lambda spec: setattr(spec.norm, "kind", "layer"), ["model.norm", "layer"]),
        (lambda spec: setattr(spec.attention, "output_bias", True), ["model.attention.output_bias=True"]),
    ],
)
def test_a_spec_that_a_family_cannot_express_is_not_exported(tmp_path: Path, change, words: list[str]) -> None:
    spec = ModelSpec(vocab_size=VOCAB, width=32, depth=2)
    change(spec)
    with pytest.raises(ConfigError) as caught:
        export_model(spec, {}, tmp_path / "out")
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "out").exists()


def test_export_does_not_write_over_a_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        export_model(ModelSpec(), {}, tmp_path)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.stacked_rules])
def test_both_layouts_of_experts_are_read_and_one_is_written(family: str, tmp_path: Path) -> None:
    """A tensor for each expert, as published files have them, and those of all in one, as in transformers' memory."""
    options = {**MIXTURE, **NARROW, "num_experts": 4, "num_local_experts": 4}
    reference = theirs(family, DEEPSEEK if family.startswith("deepseek") else options)
    for name, original in (("apart", True), ("stacked", False)):
        reference.save_pretrained(tmp_path / name, save_original_format=original)
    names = {name: safe_open(tmp_path / name / "model.safetensors", "pt").keys() for name in ("apart", "stacked")}
    assert any(".experts.3." in name for name in names["apart"])
    assert any("experts.gate_up_proj" in name for name in names["stacked"])
    models = {name: ours(tmp_path / name) for name in names}
    for one, other in zip(models["apart"].parameters(), models["stacked"].parameters()):
        assert torch.equal(one, other)
    for folder in names:
        weights = HFWeights(tmp_path / folder, models[folder].spec)
        for name, info in parameter_infos(models[folder]).items():
            for numbers in (range(1, 3), range(0, 0)) if info.stacked else ():
                found = weights.experts(name, info, numbers)
                assert torch.equal(found, weights(name, info)[numbers.start : numbers.stop])
    model = models["stacked"]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    export_model(model.spec, tensors, tmp_path / "out", torch.float32, shard_size="20KB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert {*index["weight_map"]} == {*names["apart"]}


@pytest.mark.parametrize("stored", ["zero", "biased", "longer", "missing"])
def test_biases_of_the_choice_of_experts_are_read(stored: str, tmp_path: Path) -> None:
    reference = theirs("deepseek_v3", DEEPSEEK)
    reference.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    names = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)]
    assert not any(weights[name].any() for name in names)
    changes = {"zero": {}, "biased": {names[1]: torch.eye(8)[3]}, "longer": {names[1]: torch.zeros(9)}, "missing": {}}
    weights |= changes[stored]
    if stored == "missing":
        del weights[names[1]]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    spec = spec_from_hf(tmp_path)
    if stored in ("zero", "biased"):
        assert HFWeights(tmp_path, spec).notes == []
        tokens, model = batch()[0], ours(tmp_path)
        again = type(reference).from_pretrained(tmp_path)
        assert close(model(tokens), their_logits(again, tokens))
        assert close(model(tokens), their_logits(reference, tokens)) == (stored == "zero")
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        export_model(spec, tensors, tmp_path / "out", torch.float32)
        assert torch.equal(load_file(tmp_path / "out/model.safetensors")[names[1]], weights[names[1]])
        return
    with pytest.raises(ConfigError) as caught:
        HFWeights(tmp_path, spec)
    words = {"longer": "[9]", "missing": "missing"}
    assert names[1] in str(caught.value) and names[0] not in str(caught.value) and words[stored] in str(caught.value)


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("count", [1, 2])
def test_layers_that_predict_further_tokens_are_named_and_not_read(count: int, prefix: str, tmp_path: Path) -> None:
    """A layer behind the last one without what makes it one is refused."""
    reference = theirs("deepseek_v3", DEEPSEEK)
    reference.save_pretrained(tmp_path)
    weights = {
        name.removeprefix("model.") if not prefix else name: tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    more = {}
    for layer in range(3, 3 + count):
        copied = {name: tensor for name, tensor in weights.items() if name.startswith(f"{prefix}layers.2.")}
        more |= {name.replace("layers.2.", f"layers.{layer}."): tensor.clone() for name, tensor in copied.items()}
        more[f"{prefix}layers.{layer}.eh_proj.weight"] = torch.zeros(32, 64)
        more[f"{prefix}layers.{layer}.shared_head.head.weight"] = torch.zeros(VOCAB, 32)
    save_file(weights | more, tmp_path / "model.safetensors", {"format": "pt"})
    (note,) = HFWeights(tmp_path, spec_from_hf(tmp_path)).notes
    assert f"{prefix}layers.3." in note and f"{len(more) - 3} more not read" in note and "further tokens" in note
    tokens, _ = batch()
    assert close(ours(tmp_path)(tokens), their_logits(reference, tokens))
    last = f"{prefix}layers.{2 + count}.eh_proj.weight"
    del more[last]
    save_file(weights | more, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"layers.{2 + count}.* not part of the model"):
        HFWeights(tmp_path, spec_from_hf(tmp_path))


def test_weights_in_fp8_are_refused_with_the_way_out(tmp_path: Path) -> None:
    theirs("deepseek_v3", DEEPSEEK).save_pretrained(tmp_path)
    block = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    edit_config(tmp_path, quantization_config=block)
    with pytest.raises(ConfigError, match="quantization_config.*fp8_cast_bf16"):
        spec_from_hf(tmp_path)


def test_damaged_experts_are_refused_by_name(tmp_path: Path) -> None:
    theirs("olmoe", {**MIXTURE, "num_experts": 4}).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    for changed, words in (
        ({}, [name, "missing"]),
        ({name: weights[name][:-1].contiguous()}, [name, "[39, 32]", "[40, 32]"]),
        ({name: weights[name], name.replace("2", "4"): weights[name].clone()}, ["experts.4.up_proj", "not part"]),
    ):
        save_file(
            {key: value for key, value in weights.items() if key != name} | changed, tmp_path / "model.safetensors"
        )
        with pytest.raises(ConfigError) as caught:
            HFWeights(tmp_path, spec_from_hf(tmp_path))
        assert all(word in str(caught.value) for word in words), caught.value
