"""Small models of transformers' types, and one process of transformers as what plans are compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trainer.config.model import CodeSpec
from trainer.data.batches import MicroBatch
from trainer.hf.code_weights import code_name
from trainer.model.initial import name_seed
from trainer.model.loss import IGNORE
from trainer.planning.parameters import ADAPTER_NAMES, DOWN, UP, ParameterInfo, declare_parameters

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


def small_values(name: str, **changes: Any) -> dict[str, Any]:
    """The complete config.json of a small model."""
    known = CONFIG_MAPPING[name]().to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    return AutoConfig.for_model(name, **{**sizes, **(MODELS | MIXTURES).get(name, {}), **changes}).to_dict()


COMMON: dict[str, Any] = {
    **SIZES,
    **EXPERTS,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 24),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "first_k_dense_replace", "n_group", "topk_group"), 1),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_start_index"), 1),
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers", "hidden_size_per_layer_input"), 0),
    **dict.fromkeys(("n_embd", "d_model", "embedding_size"), 32),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp", "ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "global_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    # Options of the head, which the code's own forward is not asked for, and others that pipelines could repeat.
    **{"logit_scale": 0.7, "logits_scaling": 2.0, "final_logit_softcapping": 5.0},
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attn_logit_softcapping": 4.0},
    "num_global_key_value_heads": 2,
    "n_positions": 64,
    "use_cache": False,
    "tie_word_embeddings": False,
}
"""Option -> its value in a small copy of a type that is not in `MODELS`, where the type has the option."""


def guess_values(name: str) -> dict[str, Any]:
    """The complete config.json of a small copy of any type. Raises whatever the type's configuration raises."""
    if name in MODELS:
        return small_values(name)
    known = CONFIG_MAPPING[name]().to_dict()
    sizes = {key: value for key, value in COMMON.items() if key in known}
    layers = known.get("num_hidden_layers")
    for key, value in known.items():
        if isinstance(value, list) and layers and len(value) == layers and key not in sizes:
            sizes[key] = value[:2] + value[-2:]
        elif isinstance(value, float) and ("drop" in key or "jitter" in key):
            sizes[key] = 0.0
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    if known.get("qk_rope_head_dim") is not None:
        sizes |= {key: value for key, value in {"head_dim": 4, "qk_head_dim": 12}.items() if key in known}
        if known.get("kv_lora_rank") and known.get("num_key_value_heads"):
            sizes["num_key_value_heads"] = 4
    if isinstance(known.get("moe_intermediate_size"), list):
        sizes["moe_intermediate_size"] = [24] * 4
    return AutoConfig.for_model(name, **sizes).to_dict()


def guess_facts(values: dict[str, Any]) -> dict[str, Any]:
    """`CodeFacts` of a type by the names of its options."""
    names = {"head_factor": "logit_scale", "head_divisor": "logits_scaling", "soft_cap": "final_logit_softcapping"}
    return {fact: option for fact, option in names.items() if option in values}


def drawn_weight(name: str, info: ParameterInfo) -> Tensor:
    """A whole parameter of a small model, by its name."""
    value = torch.randn(info.shape, generator=torch.Generator().manual_seed(name_seed(0, name)))
    return 1 + 0.1 * value if info.role == "norm" and not name.endswith("bias") else 0.1 * value


def train_transformers(spec: CodeSpec, batches: list[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of each trained parameter, by our names, of one process of transformers with eager attention.
    Documents are computed one by one, so that they need no mask. Adapters are a part of the weights W + scale B A: the
    gradients of A and B follow from that of the sum."""
    config = AutoConfig.for_model(**spec.transformers["config"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    infos, own = declare_parameters(spec), dict(model.named_parameters())
    modules = [name.removesuffix(DOWN) for name in infos if name.endswith(f".{DOWN}")]
    pairs = {one: [drawn_weight(one + end, infos[one + end]) for end in ADAPTER_NAMES] for one in modules}
    with torch.no_grad():
        for name, info in infos.items():
            if info.adapter:
                continue
            value = drawn_weight(name, info)
            if (module := name.removesuffix("weight")) in pairs:
                down, up = pairs[module]
                value = value + spec.adapter.factor * up @ down
            own[code_name(name, model.base_model_prefix)].copy_(value)
    valid = sum(int((batch.targets != IGNORE).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        for row in range(len(batch.tokens)):
            tokens, targets = batch.tokens[row], batch.targets[row]
            documents = torch.zeros_like(tokens) if batch.documents is None else batch.documents[row]
            for document in documents.unique():
                here = documents == document
                logits = model(input_ids=tokens[here][None], use_cache=False).logits[0].float()
                loss = F.cross_entropy(logits, targets[here], ignore_index=IGNORE, reduction="sum") / valid
                loss.backward()
                total += loss.item()
    found = {
        name: own[code_name(name, model.base_model_prefix)].grad for name, info in infos.items() if not info.adapter
    }
    for module, (down, up) in pairs.items():
        scaled = spec.adapter.factor * found[f"{module}weight"]
        found |= {module + DOWN: up.t() @ scaled, module + UP: scaled @ down.t()}
    return total, {name: gradient for name, gradient in found.items() if infos[name].trained}
