"""Tokens and rows of experts between ranks of a node, through memory that they share.

A rank leaves its tokens in its own buffer, and the others copy each one from there to the rows of its choices. Sums of
rows go into the buffer of the token's rank, which adds up what the ranks have sent. Streams wait for flags in the
buffers (`symmetric_memory.py`); the host waits for nothing, and no size has to be known on it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.distributed.c10d_internals import list_groups
from trainer.distributed.collectives import GROUPS, register_operator
from trainer.distributed.symmetric_memory import SymmetricBuffers, buffers_of, other_ranks


class RowBuffers(SymmetricBuffers):
    """Buffers of tokens. Kernels find those of all ranks by a table of addresses."""

    def grow(self, half: int, flags: int, device: torch.device) -> None:
        super().grow(half, flags, device)
        step = half * self.dtype.itemsize
        self.tables = torch.tensor(
            [[address + parity * step for address in self.shared.addresses] for parity in range(2)],
            dtype=torch.int64,
            device=device,
        )

    @property
    def table(self) -> int:
        """Address of the table of the addresses of all ranks' buffers, in this epoch."""
        return self.tables[self.epoch % 2].data_ptr()

    def exchange(self) -> None:
        """Makes the current stream wait until every rank's stream has come here in this epoch."""
        for to in other_ranks(self.rank, self.size):
            self.signal(to)
        for source in other_ranks(self.rank, self.size):
            self.wait(source)


def row_buffers(kind: str, group: str, like: Tensor) -> RowBuffers:
    return buffers_of(kind, list_groups()[GROUPS[group].name], like.dtype, RowBuffers)


def round_up(elements: int) -> int:
    """To a multiple of 64, so that both halves of a buffer are aligned for kernels."""
    return -(-elements // 64) * 64


@register_operator("spread_rows")
def spread_rows(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Copies tokens [tokens, width] to the rows of their choices: [rows, width]. order: for each row its number in the
    list of all choices, int64 [rows]. places: the row of each choice, -1 for none, int64 [tokens, top_k]. Rows that no
    choice has are undefined."""
    if not x.is_cuda:
        return x[order // places.shape[1]]
    from trainer.kernels import rows as kernels

    rows, x = x.new_empty(len(order), x.shape[1]), x.contiguous()
    kernels.copy_to_rows(x.data_ptr(), False, places, len(x), rows)
    return rows


@torch.library.register_fake("trainer::spread_rows")
def _(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


@register_operator("gather_rows")
def gather_rows(rows: Tensor, places: Tensor) -> Tensor:
    """For each token the sum of its own rows, added in fp32 or wider: [tokens, width]. places: as for `spread_rows`."""
    if not rows.is_cuda:
        return add_rows(rows, places)
    from trainer.kernels import rows as kernels

    result, rows = rows.new_empty(len(places), rows.shape[1]), rows.contiguous()
    kernels.add_up_rows(rows, places, len(places), result.data_ptr(), False)
    return result


@torch.library.register_fake("trainer::gather_rows")
def _(rows: Tensor, places: Tensor) -> Tensor:
    return rows.new_empty(places.shape[0], rows.shape[1])


def add_rows(rows: Tensor, places: Tensor) -> Tensor:
    """`gather_rows` without a kernel."""
    padded = F.pad(rows, (0, 0, 0, 1))  # -1 is the row of zeros behind the others
    return padded[places].sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)


@register_operator("pull_tokens")
def pull_tokens(x: Tensor, order: Tensor, places: Tensor, group: str) -> Tensor:
    """`spread_rows` of the tokens of all ranks: x [tokens, width] is this rank's part of them."""
    buffers = row_buffers("tokens of experts", group, x)
    buffers.begin(round_up(x.numel()), buffers.size, x.device)
    buffers.buffer(buffers.rank, tuple(x.shape)).copy_(x)
    buffers.exchange()
    if not x.is_cuda:
        return spread_rows(
            torch.cat([buffers.buffer(rank, tuple(x.shape)) for rank in range(buffers.size)]), order, places
        )
    from trainer.kernels import rows as kernels

    rows = x.new_empty(len(order), x.shape[1])
    kernels.copy_to_rows(buffers.table, True, places, len(x), rows)
    return rows


@torch.library.register_fake("trainer::pull_tokens")
def _(x: Tensor, order: Tensor, places: Tensor, group: str) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


@register_operator("push_sums")
def push_sums(rows: Tensor, places: Tensor, chosen: Tensor, each: int, group: str) -> Tensor:
    """For each of this rank's tokens the sum of its rows on all ranks: [tokens, width].

    places: for the tokens of all ranks, as for `spread_rows`. chosen: the experts of this rank's tokens, int64 [tokens,
    top_k]; rank r has the experts from r x each on. A rank adds up its rows of a token in fp32, and sends the sum in
    their type.
    """
    buffers, rows = row_buffers("sums of experts", group, rows), rows.contiguous()
    tokens, width = len(chosen), rows.shape[1]
    buffers.begin(round_up(buffers.size * tokens * width), buffers.size, rows.device)
    own = buffers.buffer(buffers.rank, (buffers.size * tokens, width)).view(buffers.size, tokens, width)
    if not rows.is_cuda:
        for rank, part in enumerate(add_rows(rows, places).split(tokens)):
            buffers.buffer(rank, (buffers.size * tokens, width)).view_as(own)[buffers.rank] = part
        buffers.exchange()
        return own.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)
    from trainer.kernels import rows as kernels

    kernels.add_up_rows(rows, places, tokens, buffers.table, True, buffers.rank)
    buffers.exchange()
    return kernels.add_parts(own, chosen, each)


@torch.library.register_fake("trainer::push_sums")
def _(rows: Tensor, places: Tensor, chosen: Tensor, each: int, group: str) -> Tensor:
    return rows.new_empty(chosen.shape[0], rows.shape[1])
