"""Our models as peers know them: read from a file of configs/model, and as flavour `spec` of torchtitan's llama3.

torchtitan imports this module by `--experimental.custom_import specs`, and finds the file's name in the environment
(TITAN_SPEC)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from trainer.config.model import ModelSpec


def read_spec(path: str | Path) -> ModelSpec:
    values = yaml.safe_load(Path(path).read_text())
    return ModelSpec.from_dict({name: value for name, value in values.items() if name != "defaults"})


def torchtitan_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Of torchtitan's `TransformerModelArgs`, which rounds 8/3 of the width up to a multiple."""
    layer = spec.layer(0)
    hidden = layer.feed_forward.width
    assert spec.family == "llama" and not spec.tied and int(8 * spec.width / 3) <= hidden
    return {
        "dim": spec.width,
        "n_layers": spec.depth,
        "n_heads": layer.attention.heads,
        "n_kv_heads": layer.attention.kv_heads,
        "vocab_size": spec.vocab_size,
        "multiple_of": hidden,
        "norm_eps": layer.norm.eps,
        "rope_theta": layer.attention.rope.theta,
    }


if "TITAN_SPEC" in os.environ:
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

    llama3_args["spec"] = TransformerModelArgs(**torchtitan_arguments(read_spec(os.environ["TITAN_SPEC"])))
