"""Scaled dot-product attention with causal, sliding-window and document masks.

A query sees a run of keys that ends with itself; a mask says where each query's run begins. Plain causal attention goes
to the fastest kernel of the device (`plain_attention.py`). Windows, documents and soft caps go to FlexAttention on a
GPU (a block mask, never N x N scores or masks) and to a dense mask on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.model.block_mask import block_mask
from trainer.model.compiled import compile_function
from trainer.model.plain_attention import attend_plain


def build_mask(documents: Tensor | None, length: int, window: int, soft_cap: float, device: torch.device) -> Any:
    """The mask of one kind of layer for one micro-batch: None (plain causal), a BlockMask (GPU) or a bool tensor (CPU).

    documents: int [batch, length], the number of the document each token belongs to, or None. A window that spans the
    whole sequence is no window.
    """
    if is_plain(documents, length, window, soft_cap):
        return None
    places = torch.arange(length, device=device)
    return mask_of(first_seen(documents, length, window, device), places, length)


def is_plain(documents: Tensor | None, length: int, window: int, soft_cap: float) -> bool:
    """Whether a query sees all keys before it, at their plain scores."""
    return documents is None and not 0 < window < length and not soft_cap


def first_seen(documents: Tensor | None, length: int, window: int, device: torch.device) -> Tensor:
    """The first key that the query at each place sees: int [batch or 1, length], which never falls."""
    index = torch.arange(length, device=device)[None]
    first = torch.zeros_like(index) if documents is None else document_starts(documents)
    return torch.maximum(first, index - window + 1) if window else first


def document_starts(documents: Tensor) -> Tensor:
    """The place of the first token of each token's document. documents, result: int [batch, length]; tokens of a
    document are neighbours."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(starts, index, 0).cummax(1).values


def mask_of(first: Tensor, places: Tensor, keys: int) -> Any:
    """The mask of queries at `places` [queries], which rise, among `keys` keys: a query sees those from `first` [batch
    or 1, queries] to its own place."""
    if places.is_cuda:
        return block_mask(first, places, keys)
    key = torch.arange(keys, device=places.device)
    return (key <= places[:, None]) & (key >= first[:, None, :, None])


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, soft_cap: float = 0.0
) -> Tensor:
    """Causal attention. query: [batch, heads, length, head_dim]; key, value: [batch, kv_heads, length, head_dim].

    mask: what `build_mask` returned for the same soft_cap. Where it is None, there may be fewer queries than keys, and
    the last query sees all keys. Returns [batch, heads, length, head_dim].
    """
    grouped = query.shape[1] != key.shape[1]
    if mask is None:
        return attend_plain(query, key, value, scale)
    if not isinstance(mask, Tensor):
        score_mod = partial(cap_score, cap=soft_cap) if soft_cap else None
        return flex_attention()(
            query, key, value, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=grouped
        )
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


def flex_attention() -> Callable:
    """FlexAttention: a part of what is being compiled, else compiled by itself."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else compiled_flex()


@cache
def compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return compile_function(flex_attention)
