"""Scaled dot-product attention with causal, sliding-window and document masks.

A query sees a contiguous run of keys that ends with its own. A mask says where each query's run begins. Plain causal
attention goes to the fastest kernel of the device. Windows, documents, soft caps and sinks go to FlexAttention on a GPU
(a block mask, never N x N scores or masks), and to a dense mask on a CPU.
"""

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

from trainer.model.stage import compile_function
from trainer.planning.documents import block_size

# Block masks of FlexAttention, computed from where each query's run of keys begins, without evaluating pairs of tokens.
# For a block of queries, the keys that at least one query sees are one run of blocks, and the keys that every query
# sees are a run inside of it. Both follow from the first and the last query of the block. torch's `create_block_mask`
# evaluates every pair: 10^12 for a million tokens.


def block_mask(first: Tensor, places: Tensor, keys: int) -> Any:
    """The BlockMask of queries at `places` [queries], which increase, among `keys` keys. A query sees the keys from
    `first` [batch or 1, queries], which never decreases along a row, to its own place."""
    from torch.nn.attention.flex_attention import BlockMask

    size, queries = block_size(len(first), len(places), keys), len(places)
    by_query, by_key = query_tables(first, places, size, keys), key_tables(first, places, size, keys)
    place, start = places.int(), first.int()
    # FlexAttention evaluates `mask_mod` inside of blocks that are seen in part. With one row of `first` all sequences
    # share it.
    if len(start) == 1:
        start = start[0]

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= place[query]) & (key >= start[query])
    else:

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= place[query]) & (key >= start[batch, query])

    return BlockMask((queries, keys), *by_query, *by_key, BLOCK_SIZE=(size, size), mask_mod=mask_mod)


def seen_blocks(first: Tensor, places: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each block of `size` queries: the first and last block of keys that any of its queries sees, and the first
    and last that each of its queries sees whole (none, where the last is before the first). All int32 [batch or 1,
    blocks of queries]; all increase."""
    heads = torch.arange(0, len(places), size, device=places.device)
    tails = (heads + size - 1).clamp(max=len(places) - 1)
    # `first` and `places` increase, so the first query of a block has the earliest begin and the last query the latest
    # end.
    low, high = first[:, heads] // size, (places[tails] // size).expand(len(first), -1)
    whole_low, whole_high = -(-first[:, tails] // size), ((places[heads] + 1) // size - 1).expand(len(first), -1)
    return low.int(), high.int(), whole_low.int(), whole_high.int()


def query_tables(first: Tensor, places: Tensor, size: int, keys: int) -> tuple[Tensor, ...]:
    """BlockMask's tables by blocks of queries: numbers and indices of the blocks of keys seen in part, then of those
    seen whole."""
    return block_tables(*seen_blocks(first, places, size), -(-keys // size))


def key_tables(first: Tensor, places: Tensor, size: int, keys: int) -> tuple[Tensor, ...]:
    """The transposed tables, which FlexAttention's backward pass needs: the blocks of queries that see each block of
    keys."""
    low, high, whole_low, whole_high = (bound.contiguous() for bound in seen_blocks(first, places, size))
    blocks = torch.arange(-(-keys // size), device=places.device, dtype=torch.int32).expand(len(first), -1).contiguous()

    def between(bottom: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """The first and last block of queries whose run of keys, from `bottom` to `top`, contains each block of
        keys."""
        # Both bounds increase with the block of queries, so a binary search finds where they pass each block of keys.
        after = torch.searchsorted(bottom, blocks, right=True, out_int32=True)
        return torch.searchsorted(top, blocks, out_int32=True), after - 1

    return block_tables(*between(low, high), *between(whole_low, whole_high), low.shape[1])


def block_tables(low: Tensor, high: Tensor, whole_low: Tensor, whole_high: Tensor, width: int) -> tuple[Tensor, ...]:
    """Tables of runs of blocks, each with an inner run: number and indices of the blocks outside of the inner run, then
    number and indices of those inside. Numbers: int32 [batch or 1, 1, rows]. Indices: [batch or 1, 1, rows, width], of
    which only that many count. Memory: the two tables of indices and a bool for each pair of blocks."""
    whole = (whole_high - whole_low + 1).clamp(min=0)
    seen = (high - low + 1).clamp(min=0)
    before = torch.where(whole > 0, whole_low - low, seen)[..., None]  # seen in part, before the inner run
    column = torch.arange(width, device=low.device, dtype=torch.int32)
    part = torch.where(column < before, low[..., None], whole_high[..., None] + 1 - before).add_(column)
    inside = whole_low[..., None] + column
    tables = seen - whole, part.clamp_(0, width - 1), whole, inside.clamp_(0, width - 1)
    return tuple(table[:, None] for table in tables)


# Plain causal attention by kernels that never store the matrix of scores. Of torch's kernels, flash attention (and
# cuDNN's) takes 16-bit types, head_dim up to 256 and shared key-value heads. The memory-efficient kernel takes the
# rest, if every query head has keys of its own and head_dim fits its loads
# (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). For anything else torch silently stores N x N scores. Inputs
# that fit neither are therefore changed without changing the result: keys are repeated, heads padded with zeros, bf16
# widened to fp32.


FLASH_HEADS = 256
"""The largest head_dim of flash attention."""


class KernelFit(NamedTuple):
    """What a kernel is given. dtype, head_dim: after widening and padding. flash: whether it is flash attention (or
    cuDNN's), where query heads share key-value heads, or the memory-efficient kernel."""

    dtype: torch.dtype
    head_dim: int
    flash: bool


def fit_kernel(capability: int, dtype: torch.dtype, head_dim: int) -> KernelFit:
    """What a GPU of this compute capability (90 means 9.0) has to be given to use a kernel that stores no scores. fp64
    has no such kernel."""
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
    """Compute capability times ten. A number, because torch 2.11 cannot compare tuples that a compiled function takes
    as constant."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@torch.compiler.assume_constant_result
def takes_narrow_values(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """Whether cuDNN's attention takes value heads that are smaller than query heads: on Hopper and newer, and of the
    sizes of DeepSeek (192 and 128). Flash attention wants heads of one size."""
    sizes = (head_dim, head_dim, value_dim)
    options = {"device": device, "dtype": dtype, "requires_grad": True}
    query, key, value = (torch.empty(1, 1, 128, size, **options) for size in sizes)
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, False)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


def attend_plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention where the last query sees all keys. Shapes: `causal_attention`."""
    size, narrow = query.shape[3], value.shape[3]
    if not query.is_cuda:  # the CPU's flash attention takes all types, and heads of any one size
        return attend_fitted(query, key, value, scale, KernelFit(query.dtype, size, flash=True))
    if (
        narrow < size
        and query.shape[2] == key.shape[2]
        and takes_narrow_values(query.device, query.dtype, size, narrow)
    ):
        return attend_causal(query, key, value, scale)
    return attend_fitted(query, key, value, scale, fit_kernel(device_capability(query.device), query.dtype, size))


def attend_fitted(query: Tensor, key: Tensor, value: Tensor, scale: float, fit: KernelFit) -> Tensor:
    """`attend_plain` by a kernel whose inputs are first changed to what `fit` says."""
    size, dtype, copies = value.shape[3], query.dtype, query.shape[1] // key.shape[1]
    if copies > 1 and not fit.flash:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    query, key, value = (x.to(fit.dtype) for x in (query, key, value))
    # Zeros add nothing to scores; the padded columns of the values are cut off from the result.
    query, key, value = (pad_heads(x, fit.head_dim) for x in (query, key, value))
    return attend_causal(query, key, value, scale, fit.flash and query.is_cuda)[..., :size].to(dtype)


def pad_heads(x: Tensor, size: int) -> Tensor:
    """Heads [..., at most size] with zeros behind them: [..., size]."""
    return F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x


def attend_causal(query: Tensor, key: Tensor, value: Tensor, scale: float, flash: bool = False) -> Tensor:
    """`attend_plain` by the kernel that torch chooses. flash: whether flash attention takes the last queries of a
    sequence."""
    if query.shape[2] < key.shape[2]:
        return (attend_last_by_flash if flash else attend_last)(query, key, value, scale)
    shared = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=shared)


def attend_last_by_flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`attend_plain` for the last queries of a sequence on a GPU, by the kernel that torch chooses for `last_queries`.
    The kernel aligns its causal mask at the lower right, as needed here. Called by its name, it stays inside of
    compiled code."""
    dropout, causal, debug = 0.0, True, False
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(query, key, value, dropout, causal, debug, scale=scale)[0]


@torch.compiler.disable
def attend_last(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`attend_plain` for the last queries of a sequence, by the kernel that torch chooses. Not compiled: torch 2.11
    cannot compile the backward pass of the fp32 kernel."""
    last, shared = last_queries(query.shape[2], key.shape[2]), query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=last, scale=scale, enable_gqa=shared)


def last_queries(queries: int, keys: int) -> CausalBias:
    """A bias that makes the last query see all keys, without a mask in memory.

    `causal_lower_right` means the same but stores two numbers for each query and key, and torch 2.11 to 2.13 refuse it
    where operators are recorded.
    """
    bias = torch.Tensor._make_subclass(CausalBias, torch.empty(0))
    CausalBias.__init__(bias, CausalVariant.LOWER_RIGHT, queries, keys)
    return bias


def build_mask(documents: Tensor | None, length: int, window: int, changed: bool, device: torch.device) -> Any:
    """The mask of one kind of layer for one micro-batch: None (plain causal), a BlockMask (GPU) or a bool tensor (CPU).

    documents: int [batch, length], the number of each token's document, or None. window: number of keys that a query
    sees, including its own; 0 for all. A window that spans the whole sequence is none. changed: whether the layer has
    a soft cap or sinks (`AttentionSpec.changes_softmax`).
    """
    if is_plain(documents, length, window, changed):
        return None
    places = torch.arange(length, device=device)
    return mask_of(first_seen(documents, length, window, device), places, length)


def is_plain(documents: Tensor | None, length: int, window: int, changed: bool) -> bool:
    """Whether a query sees all keys before it, through a plain softmax."""
    return documents is None and not 0 < window < length and not changed


def first_seen(documents: Tensor | None, length: int, window: int, device: torch.device) -> Tensor:
    """The first key that each query sees: int [batch or 1, length], never decreasing along a row."""
    index = torch.arange(length, device=device)[None]
    first = torch.zeros_like(index) if documents is None else document_starts(documents)
    return torch.maximum(first, index - window + 1) if window else first


def document_starts(documents: Tensor) -> Tensor:
    """The place of the first token of each token's document. documents, result: int [batch, length]. The tokens of a
    document are contiguous."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(starts, index, 0).cummax(1).values


def mask_of(first: Tensor, places: Tensor, keys: int) -> Any:
    """The mask of queries at `places` [queries], which increase, among `keys` keys. A query sees the keys from `first`
    [batch or 1, queries] to its own place."""
    if places.is_cuda:
        return block_mask(first, places, keys)
    key = torch.arange(keys, device=places.device)
    return (key <= places[:, None]) & (key >= first[:, None, :, None])


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention. query: [batch, heads, length, head_dim]; key: [batch, kv_heads, length, head_dim]; value:
    [batch, kv_heads, length, value_dim], where value_dim is at most head_dim.

    mask: from `build_mask` for the same soft_cap and sinks. Where it is None, there may be fewer queries than keys, and
    the last query sees all keys. sinks: [heads], a logit of each head that joins the denominator of its softmax.
    Returns [batch, heads, length, value_dim].
    """
    grouped = query.shape[1] != key.shape[1]
    if mask is None:
        return attend_plain(query, key, value, scale)
    if not isinstance(mask, Tensor):
        score_mod = partial(cap_score, cap=soft_cap) if soft_cap else None
        options = dict(score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=grouped)
        if sinks is None:
            return flex_attention()(query, key, value, **options)
        attended, more = flex_attention()(query, key, value, **options, return_aux=lse_request())
        return scale_by_sinks(attended, more.lse, sinks)
    if not soft_cap and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    # torch's fused kernels have neither soft cap nor sinks, so on a CPU the scores are computed in plain operators.
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(-1, -2) * scale
    scores = (cap_score(scores, cap=soft_cap) if soft_cap else scores).masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., : key.shape[2]].to(query.dtype) @ value


def scale_by_sinks(attended: Tensor, logsum: Tensor, sinks: Tensor) -> Tensor:
    """The result of attention [batch, heads, length, head_dim] with sinks [heads] in the denominators of its softmax.
    logsum: of the scores of each query, [batch, heads, length]. A sink multiplies a denominator e^logsum by 1 + e^(sink
    - logsum)."""
    return (attended * torch.sigmoid(logsum - sinks[:, None])[..., None]).to(attended.dtype)


def cap_score(score: Tensor, *_: Any, cap: float) -> Tensor:
    """Soft cap of scores: cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118)."""
    return cap * torch.tanh(score / cap)


def kernel_priority(deterministic: bool) -> contextlib.AbstractContextManager:
    """Context in which plain attention uses the device's fastest kernel (cuDNN's on Hopper and newer), or with
    `deterministic` the fastest one that has a deterministic backward pass."""
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order if deterministic else [SDPBackend.CUDNN_ATTENTION, *order], set_priority=True)


def lse_request() -> Any:
    """Asks FlexAttention for the log-sum-exp of the scores."""
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def flex_attention() -> Callable:
    """FlexAttention, which is a part of the code being compiled, or otherwise compiled by itself."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else compiled_flex()


@cache
def compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return compile_function(flex_attention)
