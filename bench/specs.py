"""Our models as peers know them: read from a file of configs/model, and as flavor `spec` of torchtitan's models.

torchtitan imports this module by `--experimental.custom_import specs`, and finds the file's name in the environment
(TITAN_SPEC)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from trainer.config.model import ModelSpec


def read_values(path: str | Path) -> dict[str, Any]:
    """The values of a model's file, over those of the files of its folder that its `defaults` name."""
    own = yaml.safe_load(Path(path).read_text())
    values: dict[str, Any] = {}
    for name in own.pop("defaults", []):
        if name != "_self_":
            merge_values(values, read_values(Path(path).with_name(f"{name}.yaml")))
    return merge_values(values, own)


def merge_values(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Writes changes into nested values, and returns these."""
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            merge_values(values[name], value)
        else:
            values[name] = value
    return values


def read_spec(path: str | Path) -> ModelSpec:
    return ModelSpec.from_dict(read_values(path))


def run_by_transformers(spec: ModelSpec) -> ModelSpec:
    """The same model, run by transformers' own code."""
    from transformers import AutoConfig

    from trainer.hf.accepted import code_spec, plain_values
    from trainer.hf.config import config_from_spec

    return code_spec(plain_values(AutoConfig.for_model(**config_from_spec(spec)).to_dict()))


TORCHTITAN = {"llama": "llama3", "qwen3_moe": "qwen3", "deepseek_v2": "deepseek_v3"}
"""Our family -> torchtitan's model."""


def torchtitan_name(spec: ModelSpec) -> str:
    return TORCHTITAN[spec.family]


def torchtitan_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Arguments of the class of torchtitan's flavors, without those of experts."""
    first, last = spec.layer(0), spec.layer(spec.depth - 1)
    attention, hidden = last.attention, last.feed_forward.width
    arguments = {
        "dim": spec.width,
        "n_layers": spec.depth,
        "n_heads": attention.heads,
        "vocab_size": spec.vocab_size,
        "norm_eps": last.norm.eps,
        "rope_theta": attention.rope.theta,
    }
    if spec.family == "llama":
        # torchtitan rounds 8/3 of the width up to a multiple.
        assert not spec.tied and int(8 * spec.width / 3) <= hidden
        return arguments | {"n_kv_heads": attention.kv_heads, "multiple_of": hidden}
    arguments["moe_inter_dim"] = hidden
    if spec.family == "qwen3_moe":
        heads = {"n_kv_heads": attention.kv_heads, "head_dim": attention.head_dim, "qk_norm": True}
        return arguments | heads | {"moe_enabled": True, "enable_weight_tying": spec.tied}
    latent = attention.latent
    return arguments | {
        "inter_dim": first.feed_forward.width,
        "n_dense_layers": sum(not spec.layer(index).feed_forward.experts.count for index in range(spec.depth)),
        "q_lora_rank": latent.q_rank or 0,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_factor": attention.rope.factor,
        "mscale": attention.rope.mscale,
    }


def expert_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Of torchtitan's `MoEArgs`. Its other values are those of its own flavors."""
    feed_forward = spec.layer(spec.depth - 1).feed_forward
    experts = feed_forward.experts
    return {
        "num_experts": experts.count,
        "num_shared_experts": experts.shared_width // feed_forward.width,
        "top_k": experts.top_k,
        "score_func": experts.score,
        "route_norm": experts.normalise,
        "route_scale": experts.scale,
        "score_before_experts": False,
    }


def add_flavors(spec: ModelSpec) -> None:
    """Makes the model a flavor `spec` of torchtitan's, whose attention is causal. Where torchtitan's own flavors keep
    documents apart by flex attention, that is flavor `spec_flex`."""
    from torchtitan.models.deepseek_v3 import deepseekv3_args
    from torchtitan.models.llama3 import llama3_args
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import qwen3_args

    tables = {"llama": llama3_args, "qwen3_moe": qwen3_args, "deepseek_v2": deepseekv3_args}
    flavors, arguments = tables[spec.family], torchtitan_arguments(spec)
    if spec.family != "llama":
        arguments["moe_args"] = MoEArgs(**expert_arguments(spec))
    flavors["spec"] = type(next(iter(flavors.values())))(**arguments)
    if spec.family == "deepseek_v2":
        flavors["spec_flex"] = replace(flavors["spec"], attn_type="flex", attn_mask_type="block_causal")


if "TITAN_SPEC" in os.environ:
    add_flavors(read_spec(os.environ["TITAN_SPEC"]))
