"""Attention to a cache of keys whose slots ranks share: the parts that they have computed become one.

Ranks bring their parts together by the log-sum-exp of their scores, which is exact (Dao et al., Flash-Decoding, 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.distributed.collectives import TensorGroup


class ShardedKVGroup(TensorGroup):
    """Ranks that gather each other's parts."""

    def combine(self, attended: Tensor, logsum: Tensor) -> Tensor:
        """Attention to the slots of all ranks [rows, heads, 1, head_dim], the same bits on each. attended: [rows,
        heads, parts, head_dim], of this rank; logsum: [rows, heads, parts]; zeros and -inf of parts that see nothing,
        which are not all parts of all ranks."""
        mine = merge_attention(attended, logsum)
        everyone = self.wait(self.gather(torch.cat(mine, -1)[None]))
        parts = everyone.movedim(0, 2).squeeze(3)
        return merge_attention(parts[..., :-1], parts[..., -1])[0]


def merge_attention(attended: Tensor, logsum: Tensor) -> tuple[Tensor, Tensor]:
    """Parts as one: [..., parts, head_dim] and [..., parts] -> [..., 1, head_dim] and [..., 1, 1], the log of the sum
    of all."""
    total = logsum.logsumexp(-1, keepdim=True)
    weights = torch.exp(logsum - torch.where(total == -torch.inf, 0.0, total))
    return (weights[..., None] * attended).sum(-2, keepdim=True), total[..., None]
