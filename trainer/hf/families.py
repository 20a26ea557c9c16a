"""The transformers architectures as data: how each names its options and tensors.

One table serves both directions: `config.py` reads and writes config.json by it, `weights.py` reads and writes the
tensors. Every name below is checked against transformers by the tests of logits and gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class ModuleRule:
    """One module of a transformers checkpoint (`theirs`), and the modules of this project that it holds (`ours`).

    Several modules are joined along their outputs, in order.
    per_head: the rows of the modules alternate head by head (GPT-NeoX) instead of following one another.
    interleaved: they alternate row by row (GPT-OSS).
    transposed: weights are stored [inputs, outputs] (GPT-2's Conv1D).
    bare: the name of the weight has no suffix, and that of the bias ends in `_bias`.
    A `*` in `theirs` is the number of an expert: the matrices of one expert are apart in the files, and ours hold those
    of all. Without it, a tensor holds the matrices of all experts, [experts, outputs, inputs].
    """

    theirs: str
    ours: tuple[str, ...]
    per_head: bool = False
    interleaved: bool = False
    transposed: bool = False
    bare: bool = False


@dataclass(frozen=True)
class ModelFamily:
    """One architecture of transformers.

    fields: option of config.json -> field (or fields) of the spec.
    fixed: fields whose value the architecture implies; a callable computes the value from the spec.
    required: options with the only supported value, which is also written on export.
    written: options that do not change the function computed here, with the value to write on export.
    rope: options of rotary positions outside of rope_parameters -> field of `RopeSpec`; an architecture that always
        rotates whole heads, whatever config.json says, has none for `fraction`.
    windows: which layers can have a sliding window: 'none', 'all', or 'layers', those that layer_types names.
    window_needed: sliding_window must be a number even where no layer has a window.
    stacked_rules: for layers of experts, instead of `layer_rules`, in files that hold experts as transformers 5 does in
        memory.
    needed: options that must not be null, of those that transformers does not refuse by name.
    renamed: options that some versions of transformers write under another name, by that name.
    dense_layers: the option that says which layers are dense, of width intermediate_size: mlp_only_layers (beside
        decoder_sparse_step) or first_k_dense_replace; empty where none can be.
    shared_experts: the option that counts the experts that make up the shared block.
    grouped_by: the value of topk_method with which a token uses the experts of some groups; with `greedy` it uses all.
    balance: `Router.balance` by its name within a layer, where there is such a bias: with any bias_rate above 0.
    predicts: files can hold further layers, which predict further tokens and are not read.
    quantised: `quant_method` of the published files whose weights are read all the same: `weights.dequantise_mxfp4`.
    """

    architecture: str
    base: str
    layers: str
    fields: dict[str, str | tuple[str, ...]]
    rules: tuple[ModuleRule, ...]
    layer_rules: tuple[ModuleRule, ...]
    fixed: dict[str, Any] = field(default_factory=dict)
    required: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, str] = field(default_factory=dict)
    windows: str = "none"
    window_needed: bool = False
    stacked_rules: tuple[ModuleRule, ...] = ()
    needed: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    dense_layers: str = ""
    shared_experts: str = ""
    grouped_by: str = ""
    balance: str = ""
    predicts: bool = False
    quantised: str = ""


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}

DECODER = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "max_position_embeddings": "max_length",
    "tie_word_embeddings": "tied",
    "num_attention_heads": "attention.heads",
    "intermediate_size": "feed_forward.width",
    "initializer_range": "init.std",
}
LLAMA = {
    **DECODER,
    "num_key_value_heads": "attention.kv_heads",
    "head_dim": "attention.head_dim",
    "rms_norm_eps": "norm.eps",
}
ACTIVATION = {"hidden_act": "feed_forward.activation"}
ROPE = {"rope_theta": "theta"}
BIAS = {"attention_bias": ("attention.bias", "attention.output_bias")}

OUTER = (
    ModuleRule("model.embed_tokens", ("embedding",)),
    ModuleRule("model.norm", ("norm",)),
    ModuleRule("lm_head", ("head",)),
)
QKV = (
    ModuleRule("self_attn.q_proj", ("attention.q",)),
    ModuleRule("self_attn.k_proj", ("attention.k",)),
    ModuleRule("self_attn.v_proj", ("attention.v",)),
)
OUTPUT = (ModuleRule("self_attn.o_proj", ("attention.o",)),)
QK_NORM = (ModuleRule("self_attn.q_norm", ("attention.q_norm",)), ModuleRule("self_attn.k_norm", ("attention.k_norm",)))
GATED = (ModuleRule("mlp.gate_proj", ("feed_forward.gate",)), ModuleRule("mlp.up_proj", ("feed_forward.up",)))
DOWN = (ModuleRule("mlp.down_proj", ("feed_forward.down",)),)
PRE_NORM = (
    ModuleRule("input_layernorm", ("attention_norm",)),
    ModuleRule("post_attention_layernorm", ("feed_forward_norm",)),
)
EXPERTS = (
    ModuleRule("mlp.experts.*.gate_proj", ("feed_forward.experts.gate",)),
    ModuleRule("mlp.experts.*.up_proj", ("feed_forward.experts.up",)),
    ModuleRule("mlp.experts.*.down_proj", ("feed_forward.experts.down",)),
)
STACKED_EXPERTS = (
    ModuleRule("mlp.experts.gate_up_proj", ("feed_forward.experts.gate", "feed_forward.experts.up"), bare=True),
    ModuleRule("mlp.experts.down_proj", ("feed_forward.experts.down",), bare=True),
)
ROUTER = (ModuleRule("mlp.gate", ("feed_forward.router",)),)
SHARED = (
    ModuleRule("mlp.shared_expert.gate_proj", ("feed_forward.shared.gate",)),
    ModuleRule("mlp.shared_expert.up_proj", ("feed_forward.shared.up",)),
    ModuleRule("mlp.shared_expert.down_proj", ("feed_forward.shared.down",)),
    ModuleRule("mlp.shared_expert_gate", ("feed_forward.shared_gate",)),
)
TOP_K = {"num_experts_per_tok": "feed_forward.experts.top_k"}
CHOICE = {**TOP_K, "num_experts": "feed_forward.experts.count", "norm_topk_prob": "feed_forward.experts.normalise"}
LATENT = (
    ModuleRule("self_attn.q_proj", ("attention.q",)),
    ModuleRule("self_attn.q_a_proj", ("attention.q_a",)),
    ModuleRule("self_attn.q_a_layernorm", ("attention.q_norm",)),
    ModuleRule("self_attn.q_b_proj", ("attention.q_b",)),
    ModuleRule("self_attn.kv_a_proj_with_mqa", ("attention.kv_a",)),
    ModuleRule("self_attn.kv_a_layernorm", ("attention.kv_norm",)),
    ModuleRule("self_attn.kv_b_proj", ("attention.kv_b",)),
)
SHARED_EXPERTS = (
    ModuleRule("mlp.shared_experts.gate_proj", ("feed_forward.shared.gate",)),
    ModuleRule("mlp.shared_experts.up_proj", ("feed_forward.shared.up",)),
    ModuleRule("mlp.shared_experts.down_proj", ("feed_forward.shared.down",)),
)
FUSED_QKV = ("attention.q", "attention.k", "attention.v")


def llama_like(
    architecture: str,
    fields: dict,
    layer_rules: tuple[ModuleRule, ...] = QKV + OUTPUT + GATED + DOWN + PRE_NORM,
    **differences: Any,
) -> ModelFamily:
    return ModelFamily(
        architecture,
        "model.",
        "model.layers.",
        {**LLAMA, **ACTIVATION, **fields},
        OUTER,
        layer_rules,
        written={"attention_dropout": 0.0, **differences.pop("written", {})},
        rope={**ROPE, **differences.pop("rope", {})},
        **differences,
    )


def mixture_like(
    architecture: str,
    fields: dict,
    experts: tuple[ModuleRule, ...] = EXPERTS,
    router: tuple[ModuleRule, ...] = ROUTER,
    others: tuple[ModuleRule, ...] = (),
    without: tuple[str, ...] = (),
    attention: tuple[ModuleRule, ...] = QKV,
    **differences: Any,
) -> ModelFamily:
    """A family with experts. others: rules of what its layers have besides. without: options of Llama that it has
    not."""
    rules = attention + OUTPUT + PRE_NORM + others
    family = llama_like(
        architecture,
        fields,
        rules + router + experts,
        stacked_rules=() if experts[0].bare else rules + ROUTER + STACKED_EXPERTS,
        written={"output_router_logits": False, **differences.pop("written", {})},
        **differences,
    )
    for option in without:
        del family.fields[option]
    return family


def latent_like(architecture: str, fields: dict, fixed: dict, required: dict, **differences: Any) -> ModelFamily:
    """A family of DeepSeek's, with latent attention. fields, fixed, required: beside those that all have."""
    return mixture_like(
        architecture,
        {
            **BIAS,
            **TOP_K,
            "q_lora_rank": "attention.latent.q_rank",
            "kv_lora_rank": "attention.latent.kv_rank",
            "qk_nope_head_dim": "attention.latent.nope_dim",
            "qk_rope_head_dim": "attention.latent.rope_dim",
            "v_head_dim": "attention.latent.value_dim",
            "moe_intermediate_size": "feed_forward.width",
            "n_routed_experts": "feed_forward.experts.count",
            "n_group": "feed_forward.experts.groups",
            "topk_group": "feed_forward.experts.top_groups",
            "routed_scaling_factor": "feed_forward.experts.scale",
            **fields,
        },
        attention=LATENT,
        others=SHARED_EXPERTS + GATED + DOWN,
        without=("intermediate_size", "head_dim"),
        fixed={"attention.kind": "latent", **fixed},
        required={"moe_layer_freq": 1, **required},
        dense_layers="first_k_dense_replace",
        shared_experts="n_shared_experts",
        needed=("num_experts_per_tok", "first_k_dense_replace", *differences.pop("needed", ())),
        **differences,
    )


FAMILIES: dict[str, ModelFamily] = {
    "llama": llama_like("LlamaForCausalLM", {**BIAS, "mlp_bias": "feed_forward.bias"}),
    "mistral": llama_like("MistralForCausalLM", {}, windows="all"),
    "qwen2": llama_like(
        "Qwen2ForCausalLM", {}, fixed={"attention.bias": True}, windows="layers", written={"use_sliding_window": True}
    ),
    "qwen3": llama_like(
        "Qwen3ForCausalLM",
        BIAS,
        QKV + QK_NORM + OUTPUT + GATED + DOWN + PRE_NORM,
        fixed={"attention.qk_norm": "head"},
        windows="layers",
        written={"use_sliding_window": True},
    ),
    "olmo2": llama_like(
        "Olmo2ForCausalLM",
        BIAS,
        QKV
        + QK_NORM
        + OUTPUT
        + GATED
        + DOWN
        + (
            ModuleRule("post_attention_layernorm", ("attention_post_norm",)),
            ModuleRule("post_feedforward_layernorm", ("feed_forward_post_norm",)),
        ),
        fixed={"attention.qk_norm": "full", "norm.placement": "post"},
    ),
    "phi3": llama_like(
        "Phi3ForCausalLM",
        {},
        (ModuleRule("self_attn.qkv_proj", FUSED_QKV),)
        + OUTPUT
        + (ModuleRule("mlp.gate_up_proj", ("feed_forward.gate", "feed_forward.up")),)
        + DOWN
        + PRE_NORM,
        rope={"partial_rotary_factor": "fraction", "original_max_position_embeddings": "original_length"},
        windows="all",
        written={"embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "mixtral": mixture_like(
        "MixtralForCausalLM",
        {**TOP_K, "num_local_experts": "feed_forward.experts.count"},
        (
            ModuleRule("block_sparse_moe.experts.*.w1", ("feed_forward.experts.gate",)),
            ModuleRule("block_sparse_moe.experts.*.w3", ("feed_forward.experts.up",)),
            ModuleRule("block_sparse_moe.experts.*.w2", ("feed_forward.experts.down",)),
        ),
        (ModuleRule("block_sparse_moe.gate", ("feed_forward.router",)),),
        required={"router_jitter_noise": 0.0},
        windows="all",
    ),
    "qwen2_moe": mixture_like(
        "Qwen2MoeForCausalLM",
        {
            **CHOICE,
            "moe_intermediate_size": "feed_forward.width",
            "shared_expert_intermediate_size": "feed_forward.experts.shared_width",
            "qkv_bias": "attention.bias",
        },
        others=SHARED + GATED + DOWN,
        without=("intermediate_size",),
        needed=("num_key_value_heads",),
        fixed={"feed_forward.experts.shared_gate": True},
        windows="layers",
        window_needed=True,
        written={"use_sliding_window": True},
        dense_layers="mlp_only_layers",
    ),
    "qwen3_moe": mixture_like(
        "Qwen3MoeForCausalLM",
        {**CHOICE, **BIAS, "moe_intermediate_size": "feed_forward.width"},
        others=QK_NORM + GATED + DOWN,
        without=("intermediate_size",),
        needed=("num_experts",),
        renamed={"num_local_experts": "num_experts"},
        fixed={"attention.qk_norm": "head"},
        windows="all",
        written={"use_sliding_window": True},
        dense_layers="mlp_only_layers",
    ),
    "olmoe": mixture_like(
        "OlmoeForCausalLM",
        {**CHOICE, **BIAS},
        others=QK_NORM,
        without=("head_dim",),
        fixed={"attention.qk_norm": "full"},
        required={"clip_qkv": None},
    ),
    "gpt_oss": mixture_like(
        "GptOssForCausalLM",
        {**TOP_K, **BIAS, "num_local_experts": "feed_forward.experts.count"},
        tuple(replace(rule, transposed=True, interleaved=True) for rule in STACKED_EXPERTS),
        (ModuleRule("mlp.router", ("feed_forward.router",)),),
        others=(ModuleRule("self_attn.sinks", ("attention.sinks",), bare=True),),
        without=("hidden_act",),
        fixed={
            "attention.sinks": True,
            "feed_forward.activation": "clamped_swiglu",
            "feed_forward.bias": True,
            "feed_forward.experts.router_bias": True,
        },
        required={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        windows="layers",
        window_needed=True,
        quantised="mxfp4",
    ),
    "deepseek_v2": latent_like(
        "DeepseekV2ForCausalLM",
        {},
        {"feed_forward.experts.normalise": False},
        {"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False},
        grouped_by="group_limited_greedy",
    ),
    "deepseek_v3": latent_like(
        "DeepseekV3ForCausalLM",
        {"norm_topk_prob": "feed_forward.experts.normalise"},
        {
            "feed_forward.experts.score": "sigmoid",
            "feed_forward.experts.group_score": "top2",
            "feed_forward.experts.bias_rate": 1e-3,
        },
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
        written={"num_nextn_predict_layers": 0},
        needed=("n_group", "topk_group"),
        balance="mlp.gate.e_score_correction_bias",
        predicts=True,
    ),
    "gemma2": ModelFamily(
        "Gemma2ForCausalLM",
        "model.",
        "model.layers.",
        {
            **LLAMA,
            **BIAS,
            "hidden_activation": "feed_forward.activation",
            "query_pre_attn_scalar": "attention.scale",
            "attn_logit_softcapping": "attention.soft_cap",
            "final_logit_softcapping": "logit_soft_cap",
        },
        OUTER,
        QKV
        + OUTPUT
        + GATED
        + DOWN
        + (
            ModuleRule("input_layernorm", ("attention_norm",)),
            ModuleRule("post_attention_layernorm", ("attention_post_norm",)),
            ModuleRule("pre_feedforward_layernorm", ("feed_forward_norm",)),
            ModuleRule("post_feedforward_layernorm", ("feed_forward_post_norm",)),
        ),
        fixed={"norm.offset": 1.0, "norm.placement": "both", "embedding_scale": lambda spec: spec.width**0.5},
        required={"use_bidirectional_attention": None},
        written={"attention_dropout": 0.0},
        rope=ROPE,
        windows="layers",
        window_needed=True,
    ),
    "gpt_neox": ModelFamily(
        "GPTNeoXForCausalLM",
        "gpt_neox.",
        "gpt_neox.layers.",
        {**DECODER, **ACTIVATION, **BIAS, "layer_norm_eps": "norm.eps", "use_parallel_residual": "parallel_residual"},
        (
            ModuleRule("gpt_neox.embed_in", ("embedding",)),
            ModuleRule("gpt_neox.final_layer_norm", ("norm",)),
            ModuleRule("embed_out", ("head",)),
        ),
        (
            ModuleRule("attention.query_key_value", FUSED_QKV, per_head=True),
            ModuleRule("attention.dense", ("attention.o",)),
            ModuleRule("mlp.dense_h_to_4h", ("feed_forward.up",)),
            ModuleRule("mlp.dense_4h_to_h", ("feed_forward.down",)),
            *PRE_NORM,
        ),
        fixed={"norm.kind": "layer", "feed_forward.kind": "plain", "feed_forward.bias": True},
        written={"attention_dropout": 0.0, "hidden_dropout": 0.0},
        rope={"rotary_emb_base": "theta", "rotary_pct": "fraction"},
    ),
    "gpt2": ModelFamily(
        "GPT2LMHeadModel",
        "transformer.",
        "transformer.h.",
        {
            "vocab_size": "vocab_size",
            "n_embd": "width",
            "n_layer": "depth",
            "n_positions": "max_length",
            "tie_word_embeddings": "tied",
            "n_head": "attention.heads",
            "n_inner": "feed_forward.width",
            "activation_function": "feed_forward.activation",
            "layer_norm_epsilon": "norm.eps",
            "initializer_range": "init.std",
        },
        (
            ModuleRule("transformer.wte", ("embedding",)),
            ModuleRule("transformer.wpe", ("positions",)),
            ModuleRule("transformer.ln_f", ("norm",)),
            ModuleRule("lm_head", ("head",)),
        ),
        (
            ModuleRule("attn.c_attn", FUSED_QKV, transposed=True),
            ModuleRule("attn.c_proj", ("attention.o",), transposed=True),
            ModuleRule("mlp.c_fc", ("feed_forward.up",), transposed=True),
            ModuleRule("mlp.c_proj", ("feed_forward.down",), transposed=True),
            ModuleRule("ln_1", ("attention_norm",)),
            ModuleRule("ln_2", ("feed_forward_norm",)),
        ),
        fixed={
            "norm.kind": "layer",
            "feed_forward.kind": "plain",
            "feed_forward.bias": True,
            "attention.bias": True,
            "attention.output_bias": True,
            "attention.positions": "none",
            "learned_positions": True,
        },
        required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        written={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
}
