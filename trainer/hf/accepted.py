"""Which types of transformers' models run by their own code, and such a model as a `CodeSpec`.

A type is accepted when `tests/code_sweep.py` has compared the gradient of every parameter of a small copy, under plans,
with one process of transformers. The code says most of what a plan needs. `CodeFacts` has what it does not say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from trainer.config import ConfigError
from trainer.config.fields import assign_fields
from trainer.config.model import CodeSpec
from trainer.hf.code import UnsupportedAttention, build_model, can_share
from trainer.hf.config import format_option, window_pattern
from trainer.hf.parts import UnsupportedCode, find_parts, holds_experts
from trainer.planning.parameters import ParameterInfo


@dataclass(frozen=True)
class CodeFacts:
    """tp, pp: whether plans with tensor and pipeline parallelism are proven. masks: whether its code is given
    dense masks although it looks up the attention function. packed: whether documents of a sequence stay apart; None:
    as its structure says, see `CodeParts`. embedding_factor, head_factor, head_divisor, soft_cap: the options of
    config.json that scale the embedding where the layers are not given it, scale the logits, divide them, and limit
    them by cap * tanh(logits / cap)."""

    tp: bool = True
    pp: bool = True
    masks: bool = False
    packed: bool | None = True
    embedding_factor: str = ""
    head_factor: str = ""
    head_divisor: str = ""
    soft_cap: str = ""


PLAIN = """
    afmoe apertus apertus1p5_text arcee aria_text axk1 bamba codegen cwm deepseek_v2 deepseek_v3 diffllama dots1
    ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint gemma glm glm4 glm4_moe glm4_moe_lite gpt_neox
    gpt_oss gptj helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 internlm3 iquestcoder jais2 jamba kolibri1 laguna
    lara_mini lfm2 lfm2_moe lfm3 llama mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
    mixtral nemotron olmo olmo2 olmo3 olmoe phi phi3 qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next sarvam_mla sarvam_moe seed_oss smollm3 solar_open starcoder2 youtu
""".split()
WITHOUT_TP = """
    bert biogpt bitnet bloom camembert data2vec-text electra ernie falcon falcon_mamba gpt-sw3 gpt2 gpt_bigcode
    gpt_neo gpt_neox_japanese jetmoe mamba mamba2 megatron-bert modernbert-decoder mpt nemotron_h opt persimmon
    rembert roberta roberta-prelayernorm roformer stablelm xglm xlm-roberta xlm-roberta-xl
""".split()
UNPACKED = "bart blenderbot blenderbot-small mbart mvp pegasus plbart trocr whisper".split()
MASKED = "axk2 deepseek_v32 glm_moe_dsa".split()
CAPPED = "beam gemma2 gemma3_text gemma4_text gemma4_unified_text nanochat vaultgemma".split()
SCALED = "granite granite_swa granitemoe granitemoe_swa granitemoeshared minicpm3".split()
ACCEPTED: dict[str, CodeFacts] = {
    **dict.fromkeys(PLAIN, CodeFacts()),
    **dict.fromkeys(WITHOUT_TP, CodeFacts(tp=False)),
    "minimax": CodeFacts(packed=False),
    **dict.fromkeys(UNPACKED, CodeFacts(tp=False, packed=False)),
    "ctrl": CodeFacts(tp=False, pp=False),
    "openai-gpt": CodeFacts(tp=False, pp=False, packed=False),
    **dict.fromkeys(MASKED, CodeFacts(tp=False, masks=True)),
    **dict.fromkeys(CAPPED, CodeFacts(soft_cap="final_logit_softcapping")),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), CodeFacts(head_factor="logit_scale")),
    **dict.fromkeys(SCALED, CodeFacts(head_divisor="logits_scaling")),
    "granitemoehybrid": CodeFacts(tp=False, head_divisor="logits_scaling"),
    "hyperclovax": CodeFacts(head_factor="logits_scaling"),
    "falcon_h1": CodeFacts(tp=False, embedding_factor="embedding_multiplier", head_factor="lm_head_multiplier"),
}
"""Type of a model -> facts."""

TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_experts_per_token", "experts_per_token", "top_k")
"""Names of the option that says to how many experts a token is sent."""

OF_THE_FOLDER = ("_", "transformers_version", "auto_map")
"""How the names of options begin that are not about the model."""

MIXERS = re.compile("Attention|DeltaNet|Mixer|ShortConv")
"""What the class of the block of a layer that mixes tokens has in its name."""

TAPS = ("taps", "more_taps")
"""The axes of a convolution besides channels."""

DROPOUT = re.compile(r"drop(out)?($|_)|pdrop|jitter|layerdrop")
"""What the names of options contain that make results random."""

FOLLOWS_LENGTH = ("dynamic", "longrope")
"""Types of rotary positions whose frequencies follow the longest sequence of a batch."""


def code_spec(
    values: dict[str, Any], facts: CodeFacts | None = None, prove: Callable[[dict[str, Any]], CodeFacts] | None = None
) -> CodeSpec:
    """The spec of a complete config.json, whose model runs by transformers' own code. facts: of a type that is not in
    `ACCEPTED`; prove: finds them out. Raises `ConfigError` naming each option that is not supported."""
    name = values.get("model_type")
    facts = facts or ACCEPTED.get(str(name))
    if facts is None and prove is None:
        obstacle = find_obstacle(values)
        raise ConfigError(
            f"model_type={format_option(name)} is not accepted for model.code=transformers: {obstacle or UNPROVEN}; "
            "docs/data_and_models.md has the accepted types"
        )
    if problems := option_problems(values):
        raise ConfigError(problems)
    if facts is None:
        assert prove is not None
        facts = prove(values)
    return describe_code(values, facts)


UNPROVEN = (
    "no plan of it has been compared with transformers; set model.code_unproven=true, which compares a small copy first"
)


def describe_code(values: dict[str, Any], facts: CodeFacts) -> CodeSpec:
    """The spec of a complete config.json, by the code's own modules. Raises `ConfigError` for code that cannot be run
    in parts."""
    name = values.get("model_type")
    masks = facts.masks or reads_masks(str(name))
    causal = build_model(values, masks)
    try:
        if problems := structure_problems(causal):
            raise UnsupportedCode(*problems)
        parts = find_parts(causal, masks)
    except (UnsupportedAttention, UnsupportedCode) as error:
        raise ConfigError([f"model_type={name}: {problem}" for problem in error.args]) from error
    config, paths = causal.config, parts.paths
    head, embedding, layers = (causal.get_submodule(paths[part]) for part in ("head", "embedding", "layers"))
    spec = CodeSpec(
        name=str(name), family=str(name), vocab_size=head.out_features, width=head.in_features, depth=len(layers)
    )
    spec.max_length = getattr(config, "max_position_embeddings", None) or spec.max_length
    spec.tied = bool(config.tie_word_embeddings)
    spec.embedding_scale = embedding_scale(embedding) * getattr(config, facts.embedding_factor, 1.0)
    spec.logit_soft_cap = float(getattr(config, facts.soft_cap, None) or 0.0) if facts.soft_cap else 0.0
    spec.norm.kind = (
        "rms" if "norm" in paths and len(list(causal.get_submodule(paths["norm"]).parameters())) == 1 else "layer"
    )
    scale = float(getattr(config, facts.head_factor)) if facts.head_factor else 1.0
    scale /= float(getattr(config, facts.head_divisor)) if facts.head_divisor else 1.0
    read_attention(spec, config)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    top_k = next((value for key in TOP_K if isinstance(value := getattr(config, key, None), int)), 1)
    tables: list[dict[str, Any]] = []
    numbers = []
    stem = paths["layers"].removeprefix(f"{causal.base_model_prefix}.")
    for index, layer in enumerate(layers):
        unused = {name.partition(".")[2] for name in parts.unused if name.startswith(f"{index}.")}
        table = layer_code(layer, f"{stem}.{index}", plan, top_k, unused)
        if table not in tables:
            tables.append(table)
        numbers.append(tables.index(table))
        if experts := next((f[0][0] for f in table["parameters"].values() if f[1][0] == "experts"), 0):
            spec.overrides.setdefault(str(index), {})["feed_forward"] = {"experts": {"count": experts, "top_k": top_k}}
    spec.transformers = {
        "config": values,
        "tables": tables,
        "layers": numbers,
        "paths": paths,
        "outer": parts.plain() | ({} if facts.packed is None else {"packed": facts.packed}),
        "outer_tables": {side: outer_table(causal, paths, getattr(parts, side)) for side in ("before", "behind")},
        "head_scale": scale,
        "masks": masks,
        "tp": facts.tp and bool(plan) and all(table["attention"] for table in tables),
        "pp": facts.pp,
    }
    return spec


def reads_masks(model_type: str) -> bool:
    """Whether a type's code computes attention itself, by a mask that transformers makes."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[model_type], None)
    names = vars(sys.modules[kind.__module__]) if kind else {}
    return "create_causal_mask" in names and "ALL_ATTENTION_FUNCTIONS" not in names


def embedding_scale(embedding: nn.Module) -> float:
    """The factor on the rows of an embedding."""
    if type(embedding) is nn.Embedding:
        return 1.0
    scale = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", None))
    if not isinstance(scale, int | float):
        raise ConfigError(f"its embedding is a {type(embedding).__name__}, which is not known")
    return float(scale)


def outer_table(causal: PreTrainedModel, paths: dict[str, str], names: list[str]) -> dict[str, list]:
    """The table of modules outside of the layers. names: of ours."""
    found = {}
    for name in names:
        for path, module in causal.get_submodule(paths[name]).named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                role = "embedding" if isinstance(module, nn.Embedding) else role_of(module, key, parameter.dim())
                axes = "embed" if role == "norm" else "outputs"
                info = ParameterInfo(tuple(parameter.shape), (axes, "inputs", *TAPS)[: parameter.dim()], role)
                found[".".join(filter(None, (name, path, key)))] = plain_info(info)
    return found


def find_obstacle(values: dict[str, Any]) -> str:
    """Why code of a type that is not accepted cannot be run, empty where nothing is known of it."""
    try:
        describe_code(values, CodeFacts())
    except ConfigError as error:
        return error.problems[0].removeprefix(f"model_type={values.get('model_type')}: ")
    except Exception:  # whatever code raises that was not written to be run so
        return "its code does not run in parts"
    return ""


def option_problems(values: dict[str, Any]) -> list[str]:
    """What of the options of a config.json is not supported."""
    found = [
        f"{key}={value} is not supported by model.code=transformers, which has no dropout; set {key}=0"
        for key, value in values.items()
        if DROPOUT.search(key) and type(value) in (int, float) and value > 0
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
    found = [
        f"{name} is dropout, which is not supported"
        for name, module in causal.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0
    ]
    found += [f"{name} has no dimensions" for name, one in causal.named_parameters() if not one.dim()]
    return found[:5]


def read_attention(spec: CodeSpec, config: PreTrainedConfig) -> None:
    """Sets heads and windows of all layers by the usual options."""
    layers = getattr(config, "per_layer_config", None) or [config] * spec.depth
    common = heads_of(layers[0], spec.width)
    assign_fields(spec.attention, common, "model.attention")
    spec.feed_forward.width = option_number(layers[0], "intermediate_size") or 4 * spec.width
    for index, layer in enumerate(layers):
        if (own := heads_of(layer, spec.width)) != common:
            spec.overrides[str(index)] = {"attention": own}
    window, types = option_number(layers[0], "sliding_window") or 0, getattr(config, "layer_types", None)
    kinds = types or ["sliding_attention"] * spec.depth
    windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
    if any(windows):
        spec.pattern = window_pattern(windows)


def heads_of(config: PreTrainedConfig, width: int) -> dict[str, int]:
    """The heads of a layer. width: of the residual stream."""
    heads = option_number(config, "num_attention_heads") or 1
    head_dim = option_number(config, "qk_head_dim") or option_number(config, "head_dim") or width // heads
    return {"heads": heads, "kv_heads": option_number(config, "num_key_value_heads") or heads, "head_dim": head_dim}


def option_number(config: PreTrainedConfig, name: str) -> int | None:
    """An option that is one number; None where there is none, or one for each layer."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


def layer_code(layer: nn.Module, path: str, plan: dict[str, str], top_k: int, unused: Set[str]) -> dict[str, Any]:
    """The table of a layer, see `CodeSpec`. path: its name, by which `plan` names modules. unused: parameters that get
    no gradient."""
    mixtures = {name for name, child in layer.named_children() if any(map(holds_experts, child.modules()))}
    mixers = [name for name, child in layer.named_children() if MIXERS.search(type(child).__name__)]
    attention = mixers[0] if len(mixers) == 1 else ""
    parameters: dict[str, list] = {}
    styles = block_styles(layer, path, plan)
    whole = {block for block, some in styles.items() if not some <= CUT_STYLES} | mixtures
    blocks = {attention: "whole"} if attention else {}
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
                axes = ["outputs", "inputs", *TAPS][: parameter.dim()]
                if cut is not None:
                    axes[cut] = "heads" if block == attention else "mlp"
                info = ParameterInfo(tuple(parameter.shape), tuple(axes), role_of(module, key, parameter.dim()))
            parameters[full] = plain_info(replace(info, trained=full not in unused))
    kept = {name for name, _ in layer.named_buffers()} & set(layer.state_dict())
    buffers = {name: list(buffer.shape) for name, buffer in layer.named_buffers() if name in kept}
    stacked = [module for module in layer.modules() if holds_experts(module)]
    shared = {"shared": len(stacked) == 1 and can_share(stacked[0])} if stacked else {}
    return {"parameters": parameters, "buffers": buffers, "blocks": blocks, "attention": attention} | shared


def plain_info(info: ParameterInfo) -> list:
    """The fields of a `ParameterInfo` as JSON has them."""
    return [list(info.shape), list(info.axes), info.role, info.residual, info.units, info.active, info.trained]


def mixture_info(module: nn.Module, name: str, parameter: nn.Parameter, top_k: int) -> ParameterInfo:
    """A parameter of a block with experts, which treats tokens alone, so ranks do not cut it. name: in the layer."""
    stack = [one for one in module.parameters(recurse=False) if one.dim() == 3]
    shape = tuple(parameter.shape)
    if stack:
        axes, role = ("experts", "inner", "embed")[: len(shape)], "matrix" if len(shape) == 3 else "bias"
        return ParameterInfo(shape, axes, role, active=top_k / shape[0])
    # Some routers are linear layers like any other; they do not multiply in fp8.
    router = len(shape) == 2 and (not isinstance(module, nn.Linear) or {"gate", "router"} & set(name.split(".")))
    axes = ("experts" if router else "outputs", "inputs", *TAPS)[: len(shape)]
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
    """What the plan says of a module, or of a parameter outside of linear layers. In its names, * stands for the number
    of a layer."""
    patterns = {re.escape(pattern).replace(r"\*", r"\d+"): style for pattern, style in plan.items()}
    return next((style for pattern, style in patterns.items() if re.fullmatch(pattern, name)), None)


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
