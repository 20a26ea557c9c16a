"""Keys and values of earlier tokens, kept so that a further token costs a pass over itself alone.

A cache has a row for each sequence and a slot for each of its tokens. Its shapes stay, and where a pass reads and
writes is in tensors, so that a pass of one token a row can be captured as a CUDA graph for each `extent`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.attention import build_mask, cap_score, causal_attention

BLOCK = 64
"""The fewest slots by which the part of a cache that attention looks at grows."""


class KVCache:
    """Keys and values of `rows` sequences of at most `capacity` tokens, by layer; storage comes with the first pass.

    keeps: whether keys and values are kept at all; without, every pass has to be over whole contexts. lengths: int
    [rows]: in a pass over contexts, their lengths; in a pass of one token a row, the tokens before it. extent: slots
    that such a pass looks at. Who runs the passes sets both.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device, keeps: bool = True):
        self.rows, self.capacity, self.device, self.keeps = rows, capacity, device, keeps
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.extent = 0
        self.layers: dict[str, tuple[Tensor, Tensor]] = {}

    def look(self, length: int) -> None:
        """Sets `extent` for sequences of a length: to few different values, since a graph is made for each. At most a
        quarter of the slots, or a block, is looked at in vain."""
        step = max(BLOCK, 1 << max(0, length.bit_length() - 3))
        self.extent = -(-length // step) * step

    def enter(self, shape: tuple[int, int]) -> CachedPass:
        """A pass of tokens of this shape (rows, length): one token a row goes on, more are whole contexts."""
        rows, length = shape
        if length > 1:
            positions, lengths = torch.arange(length, device=self.device), self.lengths[:rows]
            return CachedPass(self, True, positions, lengths, {})
        positions = self.lengths.clamp(max=self.capacity - 1)  # a row that has ended may be full
        return CachedPass(self, False, positions[:, None], positions + 1, {})

    def of(self, layer: str, key: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of a layer's keys and values, each [rows, kv_heads, slots, head_dim]."""
        if layer not in self.layers:
            shape = self.rows, key.shape[1], self.capacity, key.shape[3]
            self.layers[layer] = key.new_zeros(shape), key.new_zeros(shape)
        return self.layers[layer]

    def fill(self, layer: str, key: Tensor, value: Tensor) -> None:
        """Writes the contexts of the first rows: [rows, kv_heads, length, head_dim]. What pads a context is written
        too, and overwritten before it is seen."""
        for kept, new in zip(self.of(layer, key), (key, value)):
            fitting = new[:, :, : kept.shape[2]]
            kept[: len(fitting), :, : fitting.shape[2]] = fitting

    def put(self, layer: str, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Writes one token a row: [rows, kv_heads, 1, head_dim], at `positions` [rows, 1]. Returns the slots within
        `extent`."""
        rows, found = torch.arange(self.rows, device=self.device), self.of(layer, key)
        for kept, new in zip(found, (key[:, :, 0], value[:, :, 0])):
            kept[rows, :, positions[:, 0]] = new
        return found[0][:, :, : self.extent], found[1][:, :, : self.extent]

    def visible(self, positions: Tensor, window: int) -> Tensor:
        """Which slots within `extent` the token at each of `positions` [rows, 1] sees: bool [rows, 1, 1, slots]."""
        place = torch.arange(min(self.extent, self.capacity), device=self.device)
        seen = place <= positions
        return (seen & (place > positions - window) if window else seen)[:, None, None]


class CachedPass(NamedTuple):
    """One pass through the model. contexts: whether over whole contexts; positions: of its tokens, [length] or [rows,
    1]; lengths: of the sequences with them, [rows]; masks: those made so far, by kind of layer."""

    cache: KVCache
    contexts: bool
    positions: Tensor
    lengths: Tensor
    masks: dict[tuple[int, bool], Any]

    def mask(self, layer: str, window: int, changed: bool) -> Any:
        """What a layer's attention is given for a mask."""
        kind = window, changed
        if kind not in self.masks:
            self.masks[kind] = self.build(*kind)
        mask = self.masks[kind]
        return CachedMask(self, layer, mask) if self.cache.keeps else mask

    def build(self, window: int, changed: bool) -> Any:
        if self.contexts:
            return build_mask(None, len(self.positions), window, changed, self.cache.device)
        return self.cache.visible(self.positions, window)

    def last(self, x: Tensor) -> Tensor:
        """Of hidden states of contexts [rows x length, width] that of each row's last token: [rows of the cache,
        width], zeros in rows without a context."""
        rows, length = len(self.lengths), len(self.positions)
        first = torch.arange(rows, device=x.device) * length
        return F.pad(x[first + self.lengths - 1], (0, 0, 0, self.cache.rows - rows))


class CachedMask(NamedTuple):
    """The mask of one layer, and where its keys are."""

    entered: CachedPass
    layer: str
    mask: Any


def attend_cached(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cached: CachedMask,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """`causal_attention` for new tokens, whose keys and values are kept, among them and all that were kept before."""
    (cache, contexts, positions, *_), layer, mask = cached
    if contexts:
        cache.fill(layer, key, value)
        return causal_attention(query, key, value, mask, scale, soft_cap, sinks)
    keys, values = cache.put(layer, key, value, positions)
    return attend_new_tokens(query, keys, values, mask, scale, soft_cap, sinks)


def attend_new_tokens(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one token a row. query, result: [rows, heads, 1, head_dim]; keys, values: [rows, kv_heads, slots,
    head_dim]; visible: bool [rows, 1, 1, slots], of each row at least one."""
    # Heads that share keys are queries of one head: no copies of keys.
    grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[3])
    if not soft_cap and sinks is None:
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=scale).view_as(query)
    scores = grouped @ keys.transpose(-1, -2) * scale
    if soft_cap:
        scores = cap_score(scores, cap=soft_cap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~visible, -math.inf)
    if sinks is not None:
        logits = sinks.to(scores.dtype).view(1, keys.shape[1], -1, 1)
        scores = torch.cat([scores, logits.expand(len(scores), -1, -1, -1)], -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
    return (weights @ values).view_as(query)
