"""Scaled dot-product attention with causal, sliding-window and document masks.

Plain causal attention goes to `scaled_dot_product_attention`, which picks the fastest kernel of the device. Windows,
documents and soft caps go to FlexAttention on a GPU (a block mask, never N x N scores or masks) and to a dense mask on
a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.model.compiled import compiled


def sees(query: Any, key: Any, window: int) -> Any:
    """Which positions a causal query sees, of indices that broadcast (tensors)."""
    seen = query >= key
    return seen & (query - key < window) if window else seen


def build_mask(documents: Tensor | None, length: int, window: int, soft_cap: float, device: torch.device) -> Any:
    """The mask of one kind of layer for one micro-batch: None (plain causal), a BlockMask (GPU) or a bool tensor (CPU).

    documents: int [batch, length], the number of the document each token belongs to, or None. A window that spans the
    whole sequence is no window.
    """
    window = 0 if window >= length else window
    if documents is None and not window and not soft_cap:
        return None
    if device.type == "cuda":

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = sees(query, key, window)
            return seen if documents is None else seen & (documents[batch, query] == documents[batch, key])

        batch = None if documents is None else documents.shape[0]
        return compiled_block_mask()(mask_mod, batch, None, length, length, device=str(device))
    index = torch.arange(length, device=device)
    seen = sees(index[:, None], index[None, :], window)[None, None]
    return seen if documents is None else seen & (documents[:, None, :, None] == documents[:, None, None, :])


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, soft_cap: float = 0.0) -> Tensor:
    """Causal attention. query: [batch, heads, length, head_dim]; key, value: [batch, kv_heads, length, head_dim].

    mask: what `build_mask` returned for the same soft_cap. Returns [batch, heads, length, head_dim].
    """
    grouped = query.shape[1] != key.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    if not isinstance(mask, Tensor):
        score_mod = partial(cap_score, cap=soft_cap) if soft_cap else None
        return compiled_flex()(query, key, value, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=grouped)
    if not soft_cap:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = cap_score(query @ key.transpose(-1, -2) * scale, cap=soft_cap).masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype) @ value


def cap_score(score: Tensor, *_: Any, cap: float) -> Tensor:
    """cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118)."""
    return cap * torch.tanh(score / cap)


def kernel_priority(deterministic: bool) -> contextlib.AbstractContextManager:
    """Context in which plain attention takes the fastest kernel that the device has (cuDNN on Hopper and newer), or the
    fastest one with a deterministic backward."""
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order if deterministic else [SDPBackend.CUDNN_ATTENTION, *order], set_priority=True)


@cache
def compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return compiled(flex_attention)


@cache
def compiled_block_mask() -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask

    return compiled(create_block_mask)
