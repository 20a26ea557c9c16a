"""Parameters gathered from their shards, and gradients added up to them, by copies between the GPUs of a node.

Copy engines move what travels, so that all multiprocessors compute. No flat buffer has all of it: a shard is copied
from its rank to its place in the whole parameter, a gradient's rows from where they were computed to the rank that adds
them up, in pieces, each of which is an epoch of the boxes (`boxes.py`) and goes through them on one stream. Gradients
travel in the type in which they were computed and are added up in fp32, as if they were cast before: half the bytes.
What a rank adds up of its own does not travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.symmetric_memory import buffers_of, other_ranks
from trainer.planning.cost.memory import MAX_IN_FLIGHT

SMALL = 2**20
"""Bytes below which work on a GPU is left to a kernel that does many at once."""
ALIGNED = 16
"""Elements of which pieces have a multiple, so that kernels move 16 bytes at a time."""

Part = tuple[int, int, int]
"""Of a list of tensors: which, from which of its elements on, up to which."""


def split_pieces(lengths: Sequence[int], most: int) -> Iterator[list[Part]]:
    """Tensors of these lengths, end to end, cut into pieces of `most` elements; the last piece may have fewer."""
    piece: list[Part] = []
    room = most
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            piece.append((number, start, stop))
            start, room = stop, room - (stop - start)
            if room == 0:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


class CopyEngineShards:
    """The ranks that share parameters. All of them make the same calls in the same order.

    Each call runs beside the current stream, behind what that has done so far, and returns an event behind it; on CPUs
    it has ended then, and the event is None."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def gather(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> torch.Event | None:
        """Fills `wholes`, [ranks, n] each, with all ranks' `shards`, [n] each, which are cast to their type."""
        return run_beside("gathers", wholes[0].device, lambda: self._gather(shards, wholes))

    def sum(self, gradients: Sequence[Tensor], total: Tensor) -> torch.Event | None:
        """Writes to `total` this rank's rows of the sum over ranks of each gradient, end to end.

        gradients: contiguous, of one type, kept by the caller until the event. Their first dimension is cut into equal
        numbers of rows, one for each rank, where it divides; else the last ranks have fewer, and what stands in their
        place in `total` means nothing."""
        return run_beside("sums", total.device, lambda: self._sum(gradients, total))

    def _gather(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        boxes, away = buffers_of("shards", self.group, wholes[0].dtype), other_ranks(self.rank, self.size)
        for piece in split_pieces([len(shard) for shard in shards], MAX_IN_FLIGHT):
            length = sum(stop - start for _, start, stop in piece)
            boxes.begin(length, self.size, wholes[0].device)
            own = place_parts(boxes.box(self.rank, (1, length)), piece)
            mine = [wholes[number][self.rank, start:stop] for number, start, stop in piece]
            cast_tensors([shards[number][start:stop] for number, start, stop in piece], own, mine)
            for to in away:
                boxes.signal(to)
            for source in reversed(away):
                boxes.wait(source)
                into = [wholes[number][source, start:stop] for number, start, stop in piece]
                with boxes.sends():
                    copy_tensors(into, place_parts(boxes.box(source, (1, length)), piece))

    def _sum(self, gradients: Sequence[Tensor], total: Tensor) -> None:
        rows = [-(-len(gradient) // self.size) * gradient[0].numel() for gradient in gradients]
        boxes, away, first = buffers_of("sums", self.group, gradients[0].dtype), other_ranks(self.rank, self.size), 0
        for piece in split_pieces(rows, MAX_IN_FLIGHT // (self.size - 1) // ALIGNED * ALIGNED):
            lengths = [stop - start for _, start, stop in piece]
            shape = self.size - 1, sum(lengths)
            boxes.begin(shape[0] * shape[1], self.size, total.device)

            def rows_of(rank: int, piece: list[Part] = piece) -> list[Tensor]:
                wholes = [(gradients[number].view(-1), rows[number], start, stop) for number, start, stop in piece]
                return [whole[rank * own :][:own][start:stop] for whole, own, start, stop in wholes]

            for to in away:
                place = boxes.box(to, shape)[(self.rank - to - 1) % self.size]
                with boxes.sends():
                    copy_tensors(shorten_places(place.split(lengths), sent := rows_of(to)), sent)
                boxes.signal(to)
            for source in reversed(away):
                boxes.wait(source)
            mine = rows_of(self.rank)
            arrived = [
                part[:, : len(own)] for part, own in zip(boxes.box(self.rank, shape).split(lengths, dim=1), mine)
            ]
            add_up(mine, arrived, shorten_places(total[first : first + shape[1]].split(lengths), mine), self.rank)
            first += shape[1]


@cache
def use_stream(use: str, device: torch.device) -> torch.cuda.Stream:
    """One for each use: a box is written again in the order of its epochs. Its kernels are short and go first: others
    wait for them."""
    return torch.cuda.Stream(device, priority=-1)


def run_beside(use: str, device: torch.device, work: Callable[[], None]) -> torch.Event | None:
    if device.type != "cuda":
        work()
        return None
    side = use_stream(use, device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    return side.record_event()


def go_on(ended: torch.Event | None) -> None:
    """The current stream goes on behind an event."""
    if ended is not None:
        torch.cuda.current_stream().wait_event(ended)


def place_parts(box: Tensor, piece: Sequence[Part]) -> list[Tensor]:
    """Where the parts of a piece stand in a box, end to end."""
    return list(box.view(-1).split([stop - start for _, start, stop in piece]))


def shorten_places(places: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """The first elements of places, as many as parts have."""
    return [place[: len(part)] for place, part in zip(places, parts)]


def by_size(*lists: Sequence[Tensor]) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]:
    """What stands at one place of all lists, where there is anything: large tensors on a GPU, and all others."""
    there = [some for some in zip(*lists) if some[0].numel()]
    large = [some[0].is_cuda and some[0].nbytes >= SMALL for some in there]
    return [some for some, of in zip(there, large) if of], [some for some, of in zip(there, large) if not of]


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies between ranks of tensors of one type: large ones by copy engines."""
    large, small = by_size(targets, sources)
    for target, source in large:
        target.copy_(source)
    if small:
        copy_together(*zip(*small))


def cast_tensors(sources: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor]) -> None:
    """Copies each source to two places, cast to their types."""
    large, small = by_size(firsts, sources, seconds)
    if large:
        from trainer.kernels import shards  # Triton, which is needed on a GPU only

        for first, source, second in large:
            shards.cast_twice(source, first, second)
    if small:
        firsts, sources, seconds = zip(*small)
        copy_together(firsts, sources)
        copy_together(seconds, firsts)


def add_up(owns: Sequence[Tensor], arrived: Sequence[Tensor], totals: Sequence[Tensor], rank: int) -> None:
    """Sums over ranks in fp32, in their order. owns, totals: [n] each; arrived: [ranks - 1, n] each, of the ranks
    behind this one in turn."""
    large, small = by_size(owns, arrived, totals)
    if large:
        from trainer.kernels import shards

        for own, rest, total in large:
            shards.add_up(own, rest, total, rank)
    if small:
        owns, arrived, totals = zip(*small)
        size = len(arrived[0]) + 1
        exact = totals[0].dtype is torch.float32
        wide = totals if exact else [torch.empty_like(total, dtype=torch.float32) for total in totals]
        for source in range(size):
            parts = owns if source == rank else [rest[(source - rank - 1) % size] for rest in arrived]
            if source == 0:
                copy_together(wide, parts)
                continue
            for added, part in zip(wide, parts):
                added += part
        if not exact:
            copy_together(totals, wide)


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors, of other types too, by as few kernels as there can be."""
    torch._foreach_copy_(list(targets), list(sources))
