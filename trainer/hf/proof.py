"""A type of transformers that nobody has compared yet: a small copy of its configuration, computed by transformers and
here, before a run with it begins."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config import ConfigError
from trainer.config.model import CodeSpec
from trainer.hf.accepted import CodeFacts, describe_code, plain_values
from trainer.hf.code import CodeStage
from trainer.hf.code_weights import code_name
from trainer.model.initial import fill_parameters, name_seed
from trainer.model.loss import IGNORE
from trainer.model.stage import split_report
from trainer.planning.parameters import ADAPTER_NAMES, DOWN, UP, ParameterInfo, declare_parameters
from trainer.util.reading import shorten_foreign

EXACT = 5e-5
"""The largest relative error of a gradient of code that computes the same. Rounding makes up to 1e-5."""

MOST = 20_000_000
"""Parameters of a small copy: where sizes have other names than usual, it may be large."""

SEQUENCES, LENGTH, FIRST = 4, 16, 3
"""Of the compared batch. FIRST: its smallest token, behind those that are padding."""

SIZES: dict[str, Any] = {
    **dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, max_position_embeddings=64),
    **dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=6),
    **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, num_experts_per_tok=2, moe_intermediate_size=24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"), 24),
    "moe_shared_expert_intermediate_size": 24,
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "first_k_dense_replace", "n_group", "topk_group"), 1),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_start_index"), 1),
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers", "hidden_size_per_layer_input"), 0),
    **dict.fromkeys(("n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "attention_hidden_size"), 32),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp", "ffn_dim", "n_inner", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "block_ff_dim"), 48),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "lru_width"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "global_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("n_mamba_heads", "mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("n_positions", "n_ctx", "max_seq_len"), 64),
    "linear_num_key_heads": 2,
    "num_global_key_value_heads": 2,
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


def guess_facts(values: dict[str, Any]) -> CodeFacts:
    """`CodeFacts` of a type by the names of its options."""
    names: dict[str, Any] = {"head_factor": "logit_scale", "head_divisor": "logits_scaling"}
    names["soft_cap"] = "final_logit_softcapping"
    return replace(
        CodeFacts(packed=None), **{fact: name for fact, name in names.items() if values.get(name) is not None}
    )


def prove_code(values: dict[str, Any]) -> CodeFacts:
    """The facts of a type that is not in `ACCEPTED`, by the gradients of a small copy of a complete config.json: here,
    in one stage and in two, and in one process of transformers. It is computed on the CPU in seconds, and once in a
    process. Raises `ConfigError` where they differ."""
    return prove_text(json.dumps(values, sort_keys=True))


@lru_cache(8)
def prove_text(text: str) -> CodeFacts:
    values = json.loads(text)
    name = values.get("model_type")
    refused = f"model.code_unproven=true: the comparison of model_type={name} with transformers"
    try:
        small = plain_values(shrink_config(values))
        facts = replace(guess_facts(values), tp=False)
        spec = describe_code(small, facts)
        size = sum(info.size for info in declare_parameters(spec).values())
        if size > MOST:
            raise ConfigError(f"a small copy of it would have {size} parameters")
        with torch.random.fork_rng(devices=[]):
            whole, halves = compare_code(spec, [range(spec.depth)]), None
            if whole <= EXACT and spec.depth > 1:
                halves = compare_code(spec, [range(spec.depth // 2), range(spec.depth // 2, spec.depth)])
    except ConfigError as error:
        raise ConfigError([f"{refused} is not possible: {problem}" for problem in error.problems]) from error
    except Exception as error:  # whatever code raises for sizes that are not its own
        raise ConfigError(f"{refused} is not possible: {shorten_foreign(error)}; take another model") from error
    if not whole <= EXACT:
        raise ConfigError(
            f"{refused} has failed: a gradient differs by {whole:.1e} of its norm, more than {EXACT:.0e}; take another "
            "model, or train this one with transformers"
        )
    return replace(facts, pp=halves is not None and halves <= EXACT)


def compare_code(spec: CodeSpec, split: list[range]) -> float:
    """The largest relative error of a gradient of stages with the layers of `split`, infinite where one is missing. The
    loss is compared as well."""
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(FIRST, spec.vocab_size, (SEQUENCES, LENGTH + 1), generator=generator)
    borders = torch.arange(2, 2 + 3 * SEQUENCES, 3)[:, None] % LENGTH
    documents = (torch.arange(LENGTH) >= borders).int() + (torch.arange(LENGTH) >= borders + 5).int()
    given = documents if spec.transformers["outer"]["packed"] else None
    loss, expected = train_transformers(spec, tokens[:, :-1], tokens[:, 1:], given)
    stages = []
    for layers in split:
        with torch.device("meta"):
            stage = CodeStage(spec, layers)
        stage.to_empty(device=device)
        for module in stage.modules():  # in fp32, as a run keeps them
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.float() if buffer.is_floating_point() else buffer)
        fill_parameters(stage, drawn_weight)
        stages.append(stage)
    hidden: Any = None
    for stage in stages:
        hidden, _ = split_report(stage(tokens[:, :-1], tokens[:, 1:] if stage.last else None, given, hidden))
    objective = hidden[0] / (SEQUENCES * LENGTH)
    objective.backward()
    found: dict[str, Tensor] = {}
    for stage in stages:  # a tied head has a copy of the embedding on the last stage
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    wanted = {name: one for name, one in expected.items() if one is not None}
    floor = 1e-3 * torch.stack([one.norm() for one in wanted.values()]).norm()
    errors = [
        ((found[name] - one).norm() / torch.maximum(one.norm(), floor)).item() if name in found else float("inf")
        for name, one in wanted.items()
    ]
    error = max(
        [*errors, abs(objective.item() - loss) / abs(loss)], key=lambda one: one if one == one else float("inf")
    )
    return error if error == error and found.keys() == wanted.keys() else float("inf")


def drawn_weight(name: str, info: ParameterInfo) -> Tensor:
    """A whole parameter of a small model, by its name."""
    value = torch.randn(info.shape, generator=torch.Generator().manual_seed(name_seed(0, name)))
    return 1 + 0.1 * value if info.role == "norm" and not name.endswith("bias") else 0.1 * value


def train_transformers(
    spec: CodeSpec, tokens: Tensor, targets: Tensor, documents: Tensor | None
) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradient of each parameter, by our names, of one process of transformers with eager attention; None for
    one that is not trained. Documents are computed one by one, so that they need no mask. Adapters are a part of the
    weights W + scale B A: the gradients of A and B follow from that of the sum. tokens, targets, documents: [batch,
    length]."""
    config = AutoConfig.for_model(**spec.transformers["config"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().train()
    infos, own = declare_parameters(spec), dict(model.named_parameters(remove_duplicate=False))
    modules = [name.removesuffix(DOWN) for name in infos if name.endswith(f".{DOWN}")]
    pairs = {one: [drawn_weight(one + end, infos[one + end]) for end in ADAPTER_NAMES] for one in modules}
    base = {name: info for name, info in infos.items() if not info.adapter}
    with torch.no_grad():
        for name, info in base.items():
            value = drawn_weight(name, info)
            if (module := name.removesuffix("weight")) in pairs:
                down, up = pairs[module]
                value = value + spec.adapter.factor * up @ down
            own[code_name(name, spec)].copy_(value)
    valid, total = int((targets != IGNORE).sum()), 0.0
    for row in range(len(tokens)):
        numbers = torch.zeros_like(tokens[row]) if documents is None else documents[row]
        for document in numbers.unique():
            here = numbers == document
            logits = model(input_ids=tokens[row][here][None], use_cache=False).logits[0].float()
            loss = F.cross_entropy(logits, targets[row][here], ignore_index=IGNORE, reduction="sum") / valid
            loss.backward()
            total += loss.item()
    found = {name: own[code_name(name, spec)].grad for name in base}
    for module, (down, up) in pairs.items():
        scaled = spec.adapter.factor * found[f"{module}weight"]
        found |= {module + DOWN: up.t() @ scaled, module + UP: scaled @ down.t()}
    return total, {name: gradient if infos[name].trained else None for name, gradient in found.items()}
