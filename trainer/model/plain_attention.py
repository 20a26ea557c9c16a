"""Plain causal attention, without a mask, by kernels that hold no matrix of scores.

Of torch's kernels, flash attention (and cuDNN's) takes types of 16 bits, heads of at most 256 and shared key-value
heads; the memory-efficient one takes the rest, where every query head has keys of its own and head_dim fits its loads
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). For what neither takes, torch holds N x N scores without a word.
So what does not fit is made to: keys are repeated, heads filled up with zeros, bf16 widened. No value changes by it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

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
