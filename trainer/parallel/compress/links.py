"""One hop of a reduction: ranks that exchange parts of a tensor, encoded by a codec or in the tensor's own type.

Encoded parts are exchanged by an all-to-all, and added up in fp32 in the order of ranks. So each contribution is
quantised once, where a ring would quantise partial sums again and again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel.compress.codec import BlockCodec, BlockLayout, ErrorFeedback, pack_blocks, unpack_blocks

# torch 2.13 renames these functions and warns of the old names; 2.11 has the old names only.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class CompressedLink:
    """A group of ranks and how gradients travel between them.

    kind: inner or outer. sent: bytes that this rank has sent since the last reset.
    """

    kind: str
    group: dist.ProcessGroup
    codec: BlockCodec | None
    sent: int = 0

    def __post_init__(self) -> None:
        self.size = self.group.size()

    def scatter(
        self,
        flat: Tensor,
        blocks: BlockLayout,
        target: Tensor,
        places: BlockLayout,
        errors: ErrorFeedback | None = None,
        unit: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """Reduce-scatter. The rows of `blocks` in `flat` go to the ranks in order; each rank sums up the rows it
        receives.

        places: where this rank's sum is written in `target`. errors, unit, seed: see `codec.pack_blocks`."""
        if self.codec is None:
            rows = blocks.gather(flat)
            total = rows.new_empty(places.rows, places.count, places.block)
            self.scatter_plain(rows.view(-1), total.view(-1))
            places.scatter(total, target)
            return
        payload = pack_blocks(self.codec, flat, blocks, errors, unit, seed)
        received = torch.empty_like(payload)
        dist.all_to_all_single(received, payload, group=self.group)
        self.sent += payload.numel() // self.size * (self.size - 1)
        unpack_blocks(self.codec, received.view(self.size, places.rows, -1), places, target)

    def scatter_plain(self, flat: Tensor, total: Tensor) -> None:
        """Reduce-scatter in the tensors' own type."""
        reduce_scatter(total, flat, group=self.group)
        self.sent += total.nbytes * (self.size - 1)

    def gather(self, part: Tensor) -> Tensor:
        """All-gather of bytes or values: [...] -> [ranks x ...]."""
        whole = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        all_gather(whole, part.contiguous(), group=self.group)
        self.sent += part.nbytes * (self.size - 1)
        return whole

    def sum_plain(self, flat: Tensor) -> None:
        """All-reduce in the tensor's own type."""
        dist.all_reduce(flat, group=self.group)
        self.sent += 2 * flat.nbytes * (self.size - 1) // self.size
