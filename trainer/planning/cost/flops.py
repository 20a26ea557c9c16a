"""What a model costs: parameters, floating-point operations, bytes of state. Pure functions of the spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config.model import ModelSpec
from trainer.model.axes import ROLES
from trainer.model.transformer import declarations

if TYPE_CHECKING:
    pass


def parameter_counts(spec: ModelSpec) -> dict[str, int]:
    """Numbers of parameters: `total`; `embedding` (token and position tables); `matmul`, those that every token is
    multiplied with. A tied head is counted once in `total`, and in `matmul` as well as in `embedding`."""
    infos = declarations(spec)
    sizes = dict.fromkeys(ROLES, 0)
    for info in infos.values():
        sizes[info.role] += info.size
    head = infos["embedding.weight"].size if spec.tied else sizes["head"]
    return {"total": sum(sizes.values()), "embedding": sizes["embedding"], "matmul": sizes["matrix"] + head}


def flops_per_token(spec: ModelSpec, length: int, causal: bool) -> float:
    """Floating-point operations of one training step per token of a sequence of `length`: the forward pass and twice as
    much for the backward pass, matrix products only, recompute not counted (PaLM, arXiv 2204.02311, appendix B).

    causal: whether attention counts the keys that a token sees, averaged over the positions and within the window, or
    all `length` keys (as published MFU figures often do).
    """
    flops = 6.0 * parameter_counts(spec)["matmul"]
    for index in range(spec.depth):
        a = spec.layer(index).attention
        flops += 12.0 * a.heads * a.head_dim * (seen_keys(length, a.window) if causal else length)
    return flops


def seen_keys(length: int, window: int = 0) -> float:
    """Keys that a token sees under causal attention, on average over the positions of a sequence."""
    window = min(window or length, length)
    # The first `window` positions see 1, 2, ... window keys; the others see `window`.
    return window * (length - (window - 1) / 2) / length
