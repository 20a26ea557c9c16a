"""Small models of transformers' types, and one process of transformers as what plans are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trainer.config.model import CodeSpec
from trainer.data.batches import MicroBatch
from trainer.hf.accepted import DROPOUT
from trainer.hf.proof import shrink_config, train_transformers

SIZES: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    sliding_window=6,
)
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=24)
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen3": {},
    "gemma2": dict(query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"] * 2),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": dict(
        EXPERTS,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
        head_dim=4,
    ),
    "phi3": {},
    "cohere2": dict(logit_scale=0.5, layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "exaone4": dict(layer_types=["sliding_attention"] * 3 + ["full_attention"], sliding_window_pattern=4),
}
"""Type -> what a small model of it has besides `SIZES`. Each type stands for something that can go wrong: biases of
row-parallel layers and tied weights (llama), norms of heads (qwen3), soft caps and a scaled embedding (gemma2), experts
(mixtral), latent attention, shared experts and buffers that are weights (deepseek_v3), packed matrices (phi3), a scaled
head and kinds of layers by place (cohere2), windows in some layers only (exaone4)."""

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(EXPERTS, num_experts=12),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
}
"""More types with experts: more of them than ten, whose files are in no alphabetic order (qwen3_moe), transposed stacks
with biases (gpt_oss), weights that are not normalised (olmoe)."""


PARTS = ("gpt2", "phi", "falcon", "roberta", "bart", "olmo", "qwen3_next", "mamba2", "jamba", "falcon_h1", "lfm2_moe")
"""Types whose parts differ from those of `MODELS`: learned positions and modules that are no linear layers (gpt2), a
head with a bias (phi), attention of its own with dense masks and layers that return tuples (falcon), modules between
layers and head, and positions that do not begin at 0 (roberta), parameters that are not used and no positions for
documents (bart), a norm without weights (olmo), recurrent layers (qwen3_next, mamba2, jamba) and convolutions
(lfm2_moe), a scaled embedding and recurrence beside attention in one layer (falcon_h1)."""


def small_values(name: str, **changes: Any) -> dict[str, Any]:
    """The complete config.json of a small model."""
    if name in PARTS:
        return guess_values(name) | changes
    known = CONFIG_MAPPING[name]().to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    return AutoConfig.for_model(name, **{**sizes, **(MODELS | MIXTURES).get(name, {}), **changes}).to_dict()


EXERCISED: dict[str, Any] = {
    # Options of the head, which the code's own forward is not asked for, and others that pipelines could repeat.
    **{"logit_scale": 0.7, "logits_scaling": 2.0, "final_logit_softcapping": 5.0},
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attn_logit_softcapping": 4.0},
    **{"lm_head_multiplier": 0.7, "key_multiplier": 0.6, "mlp_multipliers": [0.8, 1.3]},
    **{"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.7]},
    **{"ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.8, "mamba_rms_norm": True},
    "tie_word_embeddings": False,
    # Models of masked tokens are causal ones by this option.
    "is_decoder": True,
}
"""Option -> its value in a small copy of a type that is not in `MODELS`, where the type has the option."""


def guess_values(name: str) -> dict[str, Any]:
    """The complete config.json of a small copy of any type. Raises whatever the type's configuration raises."""
    if name in MODELS:
        return small_values(name)
    known = CONFIG_MAPPING[name]().to_dict()
    changes = {key: value for key, value in EXERCISED.items() if key in known}
    changes |= {key: 0.0 for key, value in known.items() if DROPOUT.search(key) and type(value) in (int, float)}
    if "type_vocab_size" in known:  # the bias of such a head is tied as its weight is
        changes.pop("tie_word_embeddings", None)
    if "linear_num_value_heads" in known:
        # A state that has just begun gives tiny outputs, whose rounding errors the norm behind it makes 1000 times
        # larger.
        changes["rms_norm_eps"] = 1e-3
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return shrink_config(known | changes)


def train_batches(spec: CodeSpec, batches: list[MicroBatch]) -> tuple[float, dict[str, Tensor | None]]:
    """`train_transformers` on all sequences of some batches."""
    tokens, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "targets"))
    documents = None if batches[0].documents is None else torch.cat([batch.documents for batch in batches])
    return train_transformers(spec, tokens, targets, documents)
