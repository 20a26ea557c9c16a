"""Attention to a cache of keys whose slots ranks share: the parts that they have computed become one.

Ranks bring their parts together by the log-sum-exp of their scores, which is exact (Dao et al., Flash-Decoding, 2023).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import ConfigError
from trainer.distributed.c10d_internals import list_groups
from trainer.distributed.collectives import GROUPS, TensorGroup
from trainer.distributed.symmetric_memory import SymmetricBuffers, buffers_of


class KernelBuffers(SymmetricBuffers):
    """Boxes as the kernels take them, which find flags by tile."""

    region: Any = None

    def grow(self, half: int, count: int, device: torch.device) -> None:
        from trainer.kernels.exchange import SymmetricRegion

        super().grow(half, count, device)
        self.tables = [
            torch.tensor([address + offset for address in self.shared.addresses], device=device)
            for offset in (0, self.bytes)
        ]
        self.region = SymmetricRegion(
            self.rank,
            self.size,
            *(table.data_ptr() for table in self.tables),
            half,
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(4, dtype=torch.int32, device=device),
        )

    def list_missing(self) -> list[str]:
        if self.shared is None:
            return []
        return [f"rank {dist.get_rank()} is in epoch {self.epoch} of the kernels' {self.kind}"]


def kernel_buffers(kind: str, group: str, dtype: torch.dtype) -> KernelBuffers:
    return buffers_of(kind, list_groups()[GROUPS[group].name], dtype, KernelBuffers)


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
