"""Ranks that share the slots of a cache of keys bring their parts of attention together by the log-sum-exp of their
scores, which is exact (Dao et al., Flash-Decoding, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.config import ConfigError
from trainer.distributed.collectives import TensorGroup

OUT_OF_REACH: set[str] = set()
"""Groups whose GPUs cannot share memory."""


class ShardedKVGroup(TensorGroup):
    """Ranks that gather each other's parts."""

    def combine(self, attended: Tensor, logsum: Tensor, dtype: torch.dtype) -> Tensor:
        """Attention to the slots of all ranks [rows, heads, 1, head_dim], the same bits on each. attended: [rows,
        heads, parts, head_dim], of this rank; logsum: [rows, heads, parts]; zeros and -inf of parts that see nothing,
        which are not all parts of all ranks."""
        mine = merge_attention(attended, logsum)
        everyone = self.wait(self.gather(torch.cat(mine, -1)[None]))
        parts = everyone.movedim(0, 2).squeeze(3)
        return merge_attention(parts[..., :-1], parts[..., -1])[0].to(dtype)


class NodeShardedKVGroup(ShardedKVGroup):
    """The GPUs of a node, which write their parts into each other's memory, within the kernel that adds them up; where
    they cannot, they gather."""

    def combine(self, attended: Tensor, logsum: Tensor, dtype: torch.dtype) -> Tensor:
        from trainer.distributed.fused_kernels import kernel_buffers
        from trainer.kernels import decode

        rows, heads, _, dim = attended.shape
        made = kernel_buffers(f"slots of {rows * heads}", self.key, torch.float32)  # whose programs count by that
        sizes = decode.buffer_elements(rows, heads, dim, self.size), decode.flag_count(rows, heads, self.size)
        if self.name not in OUT_OF_REACH:
            try:
                epoch = made.begin(*sizes, attended.device)
            except ConfigError:
                OUT_OF_REACH.add(self.name)
        if self.name in OUT_OF_REACH:
            return super().combine(attended, logsum, dtype)
        return decode.combine_parts(attended, logsum, dtype, made.region, epoch)


def merge_attention(attended: Tensor, logsum: Tensor) -> tuple[Tensor, Tensor]:
    """Parts as one: [..., parts, head_dim] and [..., parts] -> [..., 1, head_dim] and [..., 1, 1], the log of the sum
    of all."""
    total = logsum.logsumexp(-1, keepdim=True)
    weights = torch.exp(logsum - torch.where(total == -torch.inf, 0.0, total))
    return (weights[..., None] * attended).sum(-2, keepdim=True), total[..., None]
