"""Which types of transformers' models run by their own code, and such a model as a `CodeSpec`.

A type is accepted when `tests/code_sweep.py` has compared the gradient of every parameter of a small copy, under plans,
with one process of transformers. The code says most of what a plan needs. `CodeFacts` has what it does not say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from trainer.config import ConfigError
from trainer.config.fields import assign_fields
from trainer.config.model import CodeSpec
from trainer.hf.code import UnsupportedAttention, base_of, build_model, can_share, try_attention
from trainer.hf.config import format_option, window_pattern
from trainer.planning.parameters import ParameterInfo


@dataclass(frozen=True)
class CodeFacts:
    """tp, pp: whether plans with tensor and pipeline parallelism are proven. head_factor, head_divisor, soft_cap: the
    options of config.json that scale the logits, divide them, and limit them by cap * tanh(logits / cap)."""

    tp: bool = True
    pp: bool = True
    head_factor: str = ""
    head_divisor: str = ""
    soft_cap: str = ""


PLAIN = """
    afmoe apertus apertus1p5_text arcee aria_text axk1 cwm deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe
    exaone exaone4 exaone_moe flex_olmo flint gemma glm glm4 glm4_moe glm4_moe_lite gpt_oss helium hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 internlm3 iquestcoder jais2 kolibri1 laguna llama mellum mimo_v2_flash minimax_m2
    minimax_m3_vl_text ministral ministral3 mistral mixtral nemotron olmo2 olmo3 olmoe phi3 qwen2 qwen2_moe qwen3
    qwen3_moe sarvam_mla sarvam_moe seed_oss smollm3 solar_open starcoder2 youtu
""".split()
CAPPED = "beam gemma2 gemma3_text gemma4_text gemma4_unified_text vaultgemma".split()
SCALED = "granite granite_swa granitemoe granitemoe_swa granitemoeshared minicpm3".split()
ACCEPTED: dict[str, CodeFacts] = {
    **dict.fromkeys(PLAIN, CodeFacts()),
    **dict.fromkeys(("bitnet", "jetmoe", "stablelm"), CodeFacts(tp=False)),
    **dict.fromkeys(CAPPED, CodeFacts(soft_cap="final_logit_softcapping")),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), CodeFacts(head_factor="logit_scale")),
    **dict.fromkeys(SCALED, CodeFacts(head_divisor="logits_scaling")),
    "hyperclovax": CodeFacts(head_factor="logits_scaling"),
}
"""Type of a model -> facts."""

TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_experts_per_token", "experts_per_token", "top_k")
"""Names of the option that says to how many experts a token is sent."""

OF_THE_FOLDER = ("_", "transformers_version", "auto_map")
"""How the names of options begin that are not about the model."""

FOLLOWS_LENGTH = ("dynamic", "longrope")
"""Types of rotary positions whose frequencies follow the longest sequence of a batch."""


def code_spec(values: dict[str, Any], facts: CodeFacts | None = None) -> CodeSpec:
    """The spec of a complete config.json, whose model runs by transformers' own code. facts: of a type that is not in
    `ACCEPTED`. Raises `ConfigError` naming each option that is not supported."""
    name = values.get("model_type")
    facts = facts or ACCEPTED.get(str(name))
    if facts is None:
        raise ConfigError(
            f"model_type={format_option(name)} is not accepted for model.code=transformers: {find_obstacle(values)}; "
            "docs/transformers_code.md has the accepted types"
        )
    if problems := option_problems(values):
        raise ConfigError(problems)
    return describe_code(values, facts)


def describe_code(values: dict[str, Any], facts: CodeFacts) -> CodeSpec:
    """The spec of a complete config.json, by the code's own modules. Raises `ConfigError` for code that cannot be run
    in parts."""
    name, causal = values.get("model_type"), build_model(values)
    problems = structure_problems(causal)
    try:
        if not problems:
            try_attention(causal)
    except UnsupportedAttention as error:
        problems = [str(error)]
    if problems:
        raise ConfigError([f"model_type={name}: {problem}" for problem in problems])
    config, base, head = causal.config, base_of(causal), causal.get_output_embeddings()
    spec = CodeSpec(
        name=str(name), family=str(name), vocab_size=head.out_features, width=head.in_features, depth=len(base.layers)
    )
    spec.max_length = getattr(config, "max_position_embeddings", None) or spec.max_length
    spec.tied = bool(config.tie_word_embeddings)
    embedding = base.embed_tokens
    spec.embedding_scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
    spec.logit_soft_cap = float(getattr(config, facts.soft_cap, None) or 0.0) if facts.soft_cap else 0.0
    spec.norm.kind = "layer" if getattr(base.norm, "bias", None) is not None else "rms"
    scale = float(getattr(config, facts.head_factor)) if facts.head_factor else 1.0
    scale /= float(getattr(config, facts.head_divisor)) if facts.head_divisor else 1.0
    read_attention(spec, config)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    top_k = next((value for key in TOP_K if isinstance(value := getattr(config, key, None), int)), 1)
    tables: list[dict[str, Any]] = []
    numbers = []
    for index, layer in enumerate(base.layers):
        table = layer_code(layer, f"layers.{index}", plan, top_k)
        if table not in tables:
            tables.append(table)
        numbers.append(tables.index(table))
        if experts := next((f[0][0] for f in table["parameters"].values() if f[1][0] == "experts"), 0):
            spec.overrides.setdefault(str(index), {})["feed_forward"] = {"experts": {"count": experts, "top_k": top_k}}
    spec.transformers = {
        "config": values,
        "tables": tables,
        "layers": numbers,
        "head_scale": scale,
        "tp": facts.tp and bool(plan),
        "pp": facts.pp,
    }
    return spec


def find_obstacle(values: dict[str, Any]) -> str:
    """Why a type is not accepted."""
    try:
        describe_code(values, CodeFacts())
    except ConfigError as error:
        return error.problems[0].removeprefix(f"model_type={values.get('model_type')}: ")
    except Exception:  # whatever code raises that was not written to be run so
        return "its code does not run in parts"
    return "no plan of it has been compared with transformers"


def option_problems(values: dict[str, Any]) -> list[str]:
    """What of the options of a config.json is not supported."""
    found = [
        f"{key}={value} is not supported by model.code=transformers, which has no dropout; set {key}=0"
        for key, value in values.items()
        if re.search(r"drop(out)?($|_)|pdrop|jitter", key) and type(value) in (int, float) and value > 0
    ]
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    found += [
        f"rope_type={kind} is not supported by model.code=transformers: frequencies would follow the longest "
        "sequence of a batch, and not each document; set another rope_type"
        for kind in FOLLOWS_LENGTH
        if kind in kinds
    ]
    if values.get("quantization_config"):
        found.append("quantization_config: quantised weights are not supported; save the model in bf16")
    if values.get("num_kv_shared_layers"):
        found.append(
            f"num_kv_shared_layers={values['num_kv_shared_layers']} is not supported by model.code=transformers: "
            "layers that read the keys of others cannot be divided over stages or computed again"
        )
    if values.get("output_router_logits"):
        found.append(
            "output_router_logits=true adds a balance loss in the head's code, which model.code=transformers replaces; "
            "set output_router_logits=false"
        )
    return found


def structure_problems(causal: PreTrainedModel) -> list[str]:
    """What of a model's code plans cannot handle."""
    base, head, found = base_of(causal), causal.get_output_embeddings(), []
    names = [
        name for name in ("embed_tokens", "layers", "norm") if not isinstance(getattr(base, name, None), nn.Module)
    ]
    if names:
        return [f"its code has no module {', '.join(names)}, which pipelines and ZeRO units need"]
    if type(head) is not nn.Linear or head.bias is not None:
        found.append("its head is no linear layer without bias, which the loss over parts of the vocabulary needs")
    embedding = base.embed_tokens
    if type(embedding) is not nn.Embedding and not hasattr(embedding, "scalar_embed_scale"):
        found.append(f"its embedding is a {type(embedding).__name__}, which is not known")
    inside = [f"{base_name(causal)}.{name}." for name in ("embed_tokens", "layers", "norm")]
    outside = [
        name
        for name, one in causal.named_parameters()
        if not name.startswith(tuple(inside)) and one is not getattr(head, "weight", None)
    ]
    if outside:
        found.append(f"{outside[0]} is a parameter outside of embedding, layers, final norm and head")
    found += [
        f"{name} is {kind}, which is not supported"
        for name, module in causal.named_modules()
        for kind, wrong in (
            ("dropout", isinstance(module, nn.Dropout) and module.p > 0),
            ("a convolution", isinstance(module, nn.Conv1d)),
            ("non-causal attention", getattr(module, "is_causal", True) is False),
        )
        if wrong
    ]
    return found[:5]


def base_name(causal: PreTrainedModel) -> str:
    """The name of the model without the head, in names of parameters."""
    return causal.base_model_prefix


def read_attention(spec: CodeSpec, config: PreTrainedConfig) -> None:
    """Sets heads and windows of all layers by the usual options."""
    layers = getattr(config, "per_layer_config", None) or [config] * spec.depth
    common = heads_of(layers[0], spec.width)
    assign_fields(spec.attention, common, "model.attention")
    spec.feed_forward.width = getattr(layers[0], "intermediate_size", None) or 4 * spec.width
    for index, layer in enumerate(layers):
        if (own := heads_of(layer, spec.width)) != common:
            spec.overrides[str(index)] = {"attention": own}
    window, types = getattr(layers[0], "sliding_window", None) or 0, getattr(config, "layer_types", None)
    kinds = types or ["sliding_attention"] * spec.depth
    windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
    if any(windows):
        spec.pattern = window_pattern(windows)


def heads_of(config: PreTrainedConfig, width: int) -> dict[str, int]:
    """The heads of a layer. width: of the residual stream."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or width // heads
    return {"heads": heads, "kv_heads": getattr(config, "num_key_value_heads", None) or heads, "head_dim": head_dim}


def layer_code(layer: nn.Module, path: str, plan: dict[str, str], top_k: int) -> dict[str, Any]:
    """The table of a layer, see `CodeSpec`. path: its name, by which `plan` names modules. Raises `ConfigError` where
    the layer has no attention block."""
    mixtures = {name for name, child in layer.named_children() if any(p.dim() == 3 for p in child.parameters())}
    attention = next((name for name, child in layer.named_children() if "Attention" in type(child).__name__), None)
    if attention is None:
        raise ConfigError(f"{path} of {type(layer).__name__} has no attention block; its mixer is not supported")
    parameters: dict[str, list] = {}
    styles = block_styles(layer, path, plan)
    whole = {block for block, some in styles.items() if not some <= CUT_STYLES} | mixtures
    blocks = {attention: "whole"}
    for name, module in layer.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            block, full, linear = name.split(".")[0], f"{name}.{key}", isinstance(module, nn.Linear)
            if block in mixtures:
                info = mixture_info(module, full, parameter, top_k)
            else:
                style = None if block in whole else style_of(plan, f"{path}.{name}" if linear else f"{path}.{full}")
                cut = cut_dimension(style, key, parameter.dim(), linear)
                if cut is not None:
                    blocks[block] = "cut"
                axes = ["outputs", "inputs"][: parameter.dim()]
                if cut is not None:
                    axes[cut] = "heads" if block == attention else "mlp"
                info = ParameterInfo(tuple(parameter.shape), tuple(axes), role_of(module, key, parameter.dim()))
            parameters[full] = [
                *([*part] for part in (info.shape, info.axes)),
                info.role,
                info.residual,
                info.units,
                info.active,
            ]
    kept = {name for name, _ in layer.named_buffers()} & set(layer.state_dict())
    buffers = {name: list(buffer.shape) for name, buffer in layer.named_buffers() if name in kept}
    stacked = [module for module in layer.modules() if any(p.dim() == 3 for p in module.parameters(recurse=False))]
    shared = {"shared": len(stacked) == 1 and can_share(stacked[0])} if stacked else {}
    return {"parameters": parameters, "buffers": buffers, "blocks": blocks, "attention": attention} | shared


def mixture_info(module: nn.Module, name: str, parameter: nn.Parameter, top_k: int) -> ParameterInfo:
    """A parameter of a block with experts, which treats tokens alone, so ranks do not cut it. name: in the layer."""
    stack = [one for one in module.parameters(recurse=False) if one.dim() == 3]
    shape = tuple(parameter.shape)
    if stack:
        axes, role = ("experts", "inner", "embed")[: len(shape)], "matrix" if len(shape) == 3 else "bias"
        return ParameterInfo(shape, axes, role, active=top_k / shape[0])
    # Some routers are linear layers like any other; they do not multiply in fp8.
    router = len(shape) == 2 and (not isinstance(module, nn.Linear) or {"gate", "router"} & set(name.split(".")))
    axes = ("experts" if router else "outputs", "inputs")[: len(shape)]
    return ParameterInfo(shape, axes, role_of(module, name, len(shape)))


def role_of(module: nn.Module, key: str, dimensions: int) -> str:
    """The role of a parameter, by which it is updated."""
    if dimensions == 2:
        return "matrix"
    return "norm" if "norm" in type(module).__name__.lower() else "bias"


CUT_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate"}
"""Styles of a block whose weights are cut. The last three say that a module stays whole. Parts of packed matrices are
no rectangles, and where outputs are gathered inside of a block, each rank needs all heads: such blocks stay whole."""


def style_of(plan: dict[str, str], name: str) -> str | None:
    """What the plan says of a module, or of a parameter outside of linear layers."""
    return next((style for pattern, style in plan.items() if re.fullmatch(plan_pattern(pattern), name)), None)


def plan_pattern(pattern: str) -> str:
    """A name of a plan as a regular expression; * stands for the number of a layer."""
    return re.escape(pattern).replace(r"\*", r"\d+")


def block_styles(layer: nn.Module, path: str, plan: dict[str, str]) -> dict[str, set[str]]:
    """The styles that the plan has for each block of a layer."""
    names = [name for name, _ in layer.named_modules()] + [name for name, _ in layer.named_parameters()]
    found: dict[str, set[str]] = {}
    for name in names:
        if style := style_of(plan, f"{path}.{name}"):
            found.setdefault(name.split(".")[0], set()).add(style)
    return found


def cut_dimension(style: str | None, key: str, dimensions: int, linear: bool) -> int | None:
    """The dimension along which a style cuts a parameter, None where it cuts none."""
    if style == "colwise":
        return 0 if linear else max(dimensions - 2, 0)
    if style == "rowwise" and not (linear and key == "bias"):
        return dimensions - 1
    return None


def open_config(folder: Path) -> dict[str, Any]:
    """The complete config.json of a folder, with the defaults of its class. No code of the folder is run."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # The version and the folder are no part of the model.
    return plain_values({key: value for key, value in config.to_dict().items() if not key.startswith(OF_THE_FOLDER)})


def plain_values(value: Any) -> Any:
    """The value as JSON has it."""
    if isinstance(value, dict):
        return {str(key): plain_values(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
