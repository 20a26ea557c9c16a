"""All-gather of parameters and reduce-scatter of gradients by copies between the GPUs of a node (ZeRO).

Copy engines move the data, so all multiprocessors compute. There is no flat buffer of a whole unit. A shard is copied
from its rank to its place in the whole parameter. The rows of a gradient are copied from where they were computed to
the rank that sums them. Both go in pieces, each of which is an epoch of the symmetric buffers
(`distributed/symmetric_memory.py`), on one stream. Gradients travel in the type in which they were computed, and are
summed in fp32: the result is as if they had been cast before, for half the bytes. What a rank sums of its own gradient
does not travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.overlap import run_on_side_stream
from trainer.distributed.symmetric_memory import buffers_of, other_ranks
from trainer.planning.states import MAX_IN_FLIGHT

SMALL = 2**20
"""Size in bytes below which copies are batched into one kernel instead of given to a copy engine each."""
ALIGNED = 16
"""Pieces have a multiple of this number of elements, so that kernels load and store 16 bytes at a time."""

Part = tuple[int, int, int]
"""A part of a list of tensors: index of the tensor, first element, end."""


def split_pieces(lengths: Sequence[int], most: int) -> Iterator[list[Part]]:
    """Tensors of these lengths, concatenated and cut into pieces of `most` elements. The last piece may have fewer."""
    piece: list[Part] = []
    free = most
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + free)
            piece.append((number, start, stop))
            start, free = stop, free - (stop - start)
            if free == 0:
                yield piece
                piece, free = [], most
    if piece:
        yield piece


class CopyEngineShards:
    """The ranks that share parameters. All of them make the same calls in the same order.

    Each call runs on a side stream, after the work that the current stream has queued so far, and returns an event that
    marks its end. On CPUs it is complete when it returns, and the event is None.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def gather(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> torch.Event | None:
        """Fills `wholes`, [ranks, n] each, with all ranks' `shards`, [n] each, cast to the type of `wholes`."""
        return run_on_side_stream("gathers", wholes[0].device, lambda: self._gather_by_type(shards, wholes))

    def sum(self, gradients: Sequence[Tensor], total: Tensor, adds: bool = False) -> torch.Event | None:
        """Writes to `total` this rank's rows of the sum over ranks of each gradient, one after the other, or adds them
        to what it holds (`adds`).

        gradients: contiguous, of one type; the caller keeps them until the event. Their first dimension is split into
        equal numbers of rows, one for each rank. Where it does not divide, the last ranks have fewer rows, and the rest
        of their places in `total` is undefined.
        """
        return run_on_side_stream("sums", total.device, lambda: self._sum(gradients, total, adds))

    def _gather_by_type(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        # A buffer has one type. fp8 travels as bytes.
        pairs = [
            (shard, whole) if whole.dtype.itemsize > 1 else (shard.view(torch.uint8), whole.view(torch.uint8))
            for shard, whole in zip(shards, wholes)
        ]
        for dtype in dict.fromkeys(whole.dtype for _, whole in pairs):
            self._gather(*zip(*(pair for pair in pairs if pair[1].dtype is dtype)))

    def _gather(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        buffers, peers = buffers_of("shards", self.group, wholes[0].dtype), other_ranks(self.rank, self.size)
        for piece in split_pieces([len(shard) for shard in shards], MAX_IN_FLIGHT):
            length = sum(stop - start for _, start, stop in piece)
            # Each piece is an epoch. Epochs use the two halves of the buffers in turn, so ranks need not be at the same
            # piece.
            buffers.begin(length, self.size, wholes[0].device)
            # A gather pulls: each rank casts its shard into its own buffer, signals, and the others copy from there.
            own = place_parts(buffers.buffer(self.rank, (1, length)), piece)
            mine = [wholes[number][self.rank, start:stop] for number, start, stop in piece]
            cast_tensors([shards[number][start:stop] for number, start, stop in piece], own, mine)
            for to in peers:
                buffers.signal(to)
            # The rank before this one signals first, see `other_ranks`.
            for source in reversed(peers):
                buffers.wait(source)
                into = [wholes[number][source, start:stop] for number, start, stop in piece]
                with buffers.label_sends():
                    copy_tensors(into, place_parts(buffers.buffer(source, (1, length)), piece))

    def _sum(self, gradients: Sequence[Tensor], total: Tensor, adds: bool) -> None:
        rows = [-(-len(gradient) // self.size) * gradient[0].numel() for gradient in gradients]
        buffers, peers, first = buffers_of("sums", self.group, gradients[0].dtype), other_ranks(self.rank, self.size), 0
        # A sum pushes: each rank writes its rows into the buffer of the rank that sums them, which has a row for each
        # other rank. Pieces are that much smaller.
        for piece in split_pieces(rows, MAX_IN_FLIGHT // (self.size - 1) // ALIGNED * ALIGNED):
            lengths = [stop - start for _, start, stop in piece]
            shape = self.size - 1, sum(lengths)
            buffers.begin(shape[0] * shape[1], self.size, total.device)

            def rows_of(rank: int, piece: list[Part] = piece) -> list[Tensor]:
                wholes = [(gradients[number].view(-1), rows[number], start, stop) for number, start, stop in piece]
                return [whole[rank * own :][:own][start:stop] for whole, own, start, stop in wholes]

            for to in peers:
                # Row d - 1 of a buffer is for the rank d places after its owner.
                place = buffers.buffer(to, shape)[(self.rank - to - 1) % self.size]
                with buffers.label_sends():
                    copy_tensors(shorten_places(place.split(lengths), sent := rows_of(to)), sent)
                buffers.signal(to)
            for source in reversed(peers):
                buffers.wait(source)
            mine = rows_of(self.rank)
            arrived = [
                part[:, : len(own)] for part, own in zip(buffers.buffer(self.rank, shape).split(lengths, dim=1), mine)
            ]
            totals = shorten_places(total[first : first + shape[1]].split(lengths), mine)
            add_up(mine, arrived, totals, self.rank, adds)
            first += shape[1]


def place_parts(buffer: Tensor, piece: Sequence[Part]) -> list[Tensor]:
    """The parts of a piece in a buffer, one after the other."""
    return list(buffer.view(-1).split([stop - start for _, start, stop in piece]))


def shorten_places(places: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """The first elements of each place, as many as the part has."""
    return [place[: len(part)] for place, part in zip(places, parts)]


def by_size(*lists: Sequence[Tensor]) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]:
    """Transposes lists of tensors to tuples, without empty ones: those of large tensors on a GPU, and all others."""
    there = [some for some in zip(*lists) if some[0].numel()]
    large = [some[0].is_cuda and some[0].nbytes >= SMALL for some in there]
    return [some for some, of in zip(there, large) if of], [some for some, of in zip(there, large) if not of]


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors of one type between ranks, large ones by copy engines."""
    large, small = by_size(targets, sources)
    for target, source in large:
        # Between GPUs a contiguous copy without a cast is a memcpy, which the driver gives to a copy engine.
        target.copy_(source)
    if small:
        copy_together(*zip(*small))


def cast_tensors(sources: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor]) -> None:
    """Copies each source to two places, cast to the types of these."""
    large, small = by_size(firsts, sources, seconds)
    if large:
        from trainer.kernels import multi_tensor  # Triton, which is needed on a GPU only

        for first, source, second in large:
            multi_tensor.cast_twice(source, first, second)
    if small:
        firsts, sources, seconds = zip(*small)
        copy_together(firsts, sources)
        copy_together(seconds, firsts)


def add_up(owns: Sequence[Tensor], arrived: Sequence[Tensor], totals: Sequence[Tensor], rank: int, adds: bool) -> None:
    """Sums over ranks in fp32, in the order of ranks, so that the bits do not depend on timing. owns, totals: [n] each;
    arrived: [ranks - 1, n] each, of the ranks after this one in turn. adds: to what `totals` hold."""
    large, small = by_size(owns, arrived, totals)
    if large:
        from trainer.kernels import multi_tensor

        for own, rest, total in large:
            multi_tensor.add_up(own, rest, total, rank, adds)
    if small:
        owns, arrived, totals = zip(*small)
        size, wide = len(arrived[0]) + 1, [torch.empty_like(total, dtype=torch.float32) for total in totals]
        for source in range(size):
            parts = owns if source == rank else [rest[(source - rank - 1) % size] for rest in arrived]
            if source == 0:
                copy_together(wide, parts)
                continue
            for added, part in zip(wide, parts):
                added += part
        if adds:
            wide = [total + added for total, added in zip(totals, wide)]
        copy_together(totals, wide)


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors, also between types, by as few kernels as possible."""
    torch._foreach_copy_(list(targets), list(sources))
