"""Small copies of configurations of transformers: the options of the given one, and sizes that a test computes fast."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES: dict[str, Any] = {
    **dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, max_position_embeddings=64),
    **dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=6),
    **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, num_experts_per_tok=2, moe_intermediate_size=24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 24),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "first_k_dense_replace", "n_group", "topk_group"), 1),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_start_index"), 1),
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers", "hidden_size_per_layer_input"), 0),
    **dict.fromkeys(("n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "attention_hidden_size"), 32),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp", "ffn_dim", "n_inner", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "block_ff_dim", "input_embedding_size", "lru_width"), 48),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "lru_width"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "global_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "n_groups", "mamba_n_groups", "mamba_ngroups"), 4),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("n_mamba_heads", "mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_global_key_value_heads",), 2),
    "attention_chunk_size": 6,
    "rotary_pct": 0.5,
    "mamba_d_ssm": 64,
    "mamba_expand": 2,
    "use_cache": False,
}
"""Option -> its value in a small copy of a type that has the option."""

DERIVED = ("dtype", "torch_dtype", "per_layer_config")
"""Options that are not the model's, or follow from others."""

OF_TYPES: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": False},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "codegen": {"n_head": 4, "n_ctx": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "xlnet": {"d_head": 8, "d_inner": 48},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "kimi_linear": {"num_expert_group": 1, "topk_group": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "xlstm": {"embedding_dim": 32, "hidden_size": 32},
    "zaya": {"num_experts_per_tok": 1},
    "xlm": {"causal": True, "emb_dim": 32, "n_words": 61},
}
"""Type -> what a small copy of it has besides."""


def shrink_config(values: dict[str, Any]) -> dict[str, Any]:
    """A complete config.json of the same type and options, but with small sizes. Lists with a value for each layer keep
    their first two and their last two. Raises whatever the type's configuration raises for sizes that are not its
    own."""
    name = values["model_type"]
    values = {key: value for key, value in values.items() if key not in DERIVED}
    sizes = {key: value for key, value in (SIZES | OF_TYPES.get(name, {})).items() if key in values}
    layers = values.get("num_hidden_layers")
    for key, value in values.items():
        if isinstance(value, list) and layers and len(value) == layers and key not in sizes:
            sizes[key] = value[:2] + value[-2:]
    kinds = list(dict.fromkeys(values.get("layer_types") or []))
    if len(kinds) > len(set(sizes.get("layer_types") or kinds)):
        sizes["layer_types"] = (kinds * 4)[:4]
    if values.get("qk_rope_head_dim") is not None:
        sizes |= {key: value for key, value in {"head_dim": 4, "qk_head_dim": 12}.items() if key in values}
        if values.get("kv_lora_rank") and values.get("num_key_value_heads"):
            sizes["num_key_value_heads"] = 4
    if isinstance(values.get("moe_intermediate_size"), list):
        sizes["moe_intermediate_size"] = [24] * 4
    return AutoConfig.for_model(**{**values, **sizes}).to_dict()


def default_values(name: str) -> dict[str, Any]:
    """The complete config.json of a type's defaults."""
    return CONFIG_MAPPING[name]().to_dict()
