"""Scaled dot-product attention with causal, sliding-window and document masks.

A query sees a run of keys that ends with itself; a mask says where each query's run begins. Plain causal attention goes
to the fastest kernel of the device (`plain_attention.py`). Windows, documents and soft caps go to FlexAttention on a
GPU (a block mask, never N x N scores or masks) and to a dense mask on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, CausalVariant

from trainer.model.compiled import compile_function
from trainer.planning.cost.masks import block_size

# Block masks of FlexAttention from where each query's run of keys begins, without looking at pairs of tokens. Of a
# block of queries, the keys that some query sees are one run of blocks, and those that every query sees whole are a
# run inside of it; both follow from the first and the last query. torch's `create_block_mask` evaluates every pair:
# 10^12 for a million tokens.


def block_mask(first: Tensor, places: Tensor, keys: int) -> Any:
    """The BlockMask of queries at `places` [queries], which rise, among `keys` keys: a query sees those from `first`
    [batch or 1, queries], which never falls along a row, to its own place."""
    from torch.nn.attention.flex_attention import BlockMask

    size, queries = block_size(len(first), len(places), keys), len(places)
    by_query, by_key = query_tables(first, places, size, keys), key_tables(first, places, size, keys)
    place, start = places.int(), first.int()
    if len(start) == 1:  # of every sequence of the batch
        start = start[0]

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= place[query]) & (key >= start[query])
    else:

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= place[query]) & (key >= start[batch, query])

    return BlockMask((queries, keys), *by_query, *by_key, BLOCK_SIZE=(size, size), mask_mod=mask_mod)


def seen_blocks(first: Tensor, places: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each block of `size` queries the first and last block of keys that it sees, and the first and last that each
    of its queries sees whole (the last before the first: none). All int32 [batch or 1, blocks of queries]; all rise."""
    heads = torch.arange(0, len(places), size, device=places.device)
    tails = (heads + size - 1).clamp(max=len(places) - 1)
    low, high = first[:, heads] // size, (places[tails] // size).expand(len(first), -1)
    whole_low, whole_high = -(-first[:, tails] // size), ((places[heads] + 1) // size - 1).expand(len(first), -1)
    return low.int(), high.int(), whole_low.int(), whole_high.int()


def query_tables(first: Tensor, places: Tensor, size: int, keys: int) -> tuple[Tensor, ...]:
    """Numbers and indices of the blocks of keys that each block of queries sees in part, and of those it sees whole."""
    return block_tables(*seen_blocks(first, places, size), -(-keys // size))


def key_tables(first: Tensor, places: Tensor, size: int, keys: int) -> tuple[Tensor, ...]:
    """The same from the other side: the blocks of queries that see each block of keys."""
    low, high, whole_low, whole_high = (bound.contiguous() for bound in seen_blocks(first, places, size))
    blocks = torch.arange(-(-keys // size), device=places.device, dtype=torch.int32).expand(len(first), -1).contiguous()

    def between(bottom: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """The first and last block of queries whose run of keys, from `bottom` to `top`, holds each block of keys."""
        after = torch.searchsorted(bottom, blocks, right=True, out_int32=True)
        return torch.searchsorted(top, blocks, out_int32=True), after - 1

    return block_tables(*between(low, high), *between(whole_low, whole_high), low.shape[1])


def block_tables(low: Tensor, high: Tensor, whole_low: Tensor, whole_high: Tensor, width: int) -> tuple[Tensor, ...]:
    """Of runs of blocks with a run inside: how many are outside of the inner one and which, how many inside and which.
    Numbers are int32 [batch or 1, 1, rows], indices [..., width], of which so many count. There is never more for each
    pair of blocks than the two tables and a bool."""
    whole = (whole_high - whole_low + 1).clamp(min=0)
    seen = (high - low + 1).clamp(min=0)
    before = torch.where(whole > 0, whole_low - low, seen)[..., None]  # of those in part, how many stand first
    column = torch.arange(width, device=low.device, dtype=torch.int32)
    part = torch.where(column < before, low[..., None], whole_high[..., None] + 1 - before).add_(column)
    inside = whole_low[..., None] + column
    found = seen - whole, part.clamp_(0, width - 1), whole, inside.clamp_(0, width - 1)
    return tuple(table[:, None] for table in found)


# Plain causal attention, without a mask, by kernels that hold no matrix of scores. Of torch's kernels, flash
# attention (and cuDNN's) takes types of 16 bits, heads of at most 256 and shared key-value heads; the memory-
# efficient one takes the rest, where every query head has keys of its own and head_dim fits its loads
# (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). For what neither takes, torch holds N x N scores without a
# word. So what does not fit is made to: keys are repeated, heads filled up with zeros, bf16 widened. No value changes
# by it.


FLASH_HEADS = 256
"""The largest head_dim of flash attention."""


class KernelFit(NamedTuple):
    """What a kernel is given: the type, head_dim, and whether it is flash attention (or cuDNN's), whose query heads
    share key-value heads, or the memory-efficient one."""

    dtype: torch.dtype
    head_dim: int
    flash: bool


def fit_kernel(capability: int, dtype: torch.dtype, head_dim: int) -> KernelFit:
    """What a GPU of a compute capability (90: 9.0) has to be given for a kernel that holds no scores. fp64 has none."""
    ampere, narrow = capability >= 80, dtype.itemsize == 2
    small = 86 <= capability <= 89 or capability >= 120  # too little shared memory for some backward passes
    if ampere and narrow and head_dim <= FLASH_HEADS and not (small and 192 < head_dim <= 224):
        return KernelFit(dtype, -(-head_dim // 8) * 8, flash=True)
    if dtype == torch.bfloat16 and not ampere:
        dtype, narrow = torch.float32, False
    multiple = 8 if narrow else 4 if ampere else 1
    return KernelFit(dtype, -(-head_dim // multiple) * multiple, flash=False)


@torch.compiler.assume_constant_result
def device_capability(device: torch.device) -> int:
    """A number, since torch 2.11 cannot compare tuples that a compiled function takes for constant."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def attend_plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention, of which the last query sees all keys. Shapes: `attention.causal_attention`."""
    if not query.is_cuda:  # whose flash attention takes all of it
        return attend_causal(query, key, value, scale)
    return attend_fitted(
        query, key, value, scale, fit_kernel(device_capability(query.device), query.dtype, query.shape[3])
    )


def attend_fitted(query: Tensor, key: Tensor, value: Tensor, scale: float, given: KernelFit) -> Tensor:
    """The same by a kernel that is given what it takes."""
    size, dtype, copies = query.shape[3], query.dtype, query.shape[1] // key.shape[1]
    if copies > 1 and not given.flash:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    query, key, value = (x.to(given.dtype) for x in (query, key, value))
    if given.head_dim > size:
        query, key, value = (F.pad(x, (0, given.head_dim - size)) for x in (query, key, value))
    return attend_causal(query, key, value, scale, given.flash and query.is_cuda)[..., :size].to(dtype)


def attend_causal(query: Tensor, key: Tensor, value: Tensor, scale: float, flash: bool = False) -> Tensor:
    """The same by whichever kernel torch chooses; for the last queries of a sequence by flash attention, if it is
    said that it takes them."""
    if query.shape[2] < key.shape[2]:
        return (attend_last_by_flash if flash else attend_last)(query, key, value, scale)
    shared = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=shared)


def attend_last_by_flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The same for the last queries of a sequence on a GPU, by the kernel that torch takes for `last_queries`: its
    `causal` is from the lower right. Called by its name it stays in what is compiled."""
    dropout, causal, debug = 0.0, True, False
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(query, key, value, dropout, causal, debug, scale=scale)[0]


@torch.compiler.disable
def attend_last(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The same by whichever kernel torch chooses. Not compiled: torch 2.11 can not compile the backward pass of the one
    that it takes in fp32."""
    last, shared = last_queries(query.shape[2], key.shape[2]), query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=last, scale=scale, enable_gqa=shared)


def last_queries(queries: int, keys: int) -> CausalBias:
    """What says that the last of the queries sees all keys, without a mask.

    `causal_lower_right` says it too, but holds two numbers for each query and key, and torch 2.11 to 2.13 refuse it
    where operators are recorded."""
    bias = torch.Tensor._make_subclass(CausalBias, torch.empty(0))
    CausalBias.__init__(bias, CausalVariant.LOWER_RIGHT, queries, keys)
    return bias


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
