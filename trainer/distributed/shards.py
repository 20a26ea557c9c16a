"""Parameters gathered from their shards, and gradients added up to them, by copies between the GPUs of a node.

Copy engines move what travels, so that all multiprocessors compute. No flat buffer has all of it: a shard is copied
from its rank to its place in the whole parameter, a gradient's rows from where they were computed to the rank that adds
them up, in pieces, each of which is an epoch of the boxes (`boxes.py`) and goes through them on one stream. Gradients
travel in the type in which they were computed and are added up in fp32, as if they were cast before: half the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.boxes import boxes_of, others
from trainer.planning.cost.memory import BOX

SMALL = 2**20
"""Bytes below which a copy on a GPU is left to a kernel, which does many at once."""

Part = tuple[int, int, int]
"""Of a list of tensors: which, from which of its elements on, up to which."""


def pieces(lengths: Sequence[int], most: int) -> Iterator[list[Part]]:
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


class Shards:
    """The ranks that share parameters. All of them make the same calls in the same order. looks: see `Boxes.wait`.

    Each call runs beside the current stream, behind what that has done so far, and returns an event behind it; on CPUs
    it has ended then, and the event is None."""

    def __init__(self, group: dist.ProcessGroup, looks: int = 0):
        self.group, self.rank, self.size, self.looks = group, group.rank(), group.size(), looks

    def gather(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> torch.Event | None:
        """Fills `wholes`, [ranks, n] each, with all ranks' `shards`, [n] each, which are cast to their type."""
        return beside("gathers", wholes[0].device, lambda: self._gather(shards, wholes))

    def sum(self, gradients: Sequence[Tensor], total: Tensor) -> torch.Event | None:
        """Writes to `total` this rank's rows of the sum over ranks of each gradient, end to end.

        gradients: contiguous, of one type, kept by the caller until the event. Their first dimension is cut into equal
        numbers of rows, one for each rank, where it divides; else the last ranks have fewer, and what stands in their
        place in `total` means nothing."""
        return beside("sums", total.device, lambda: self._sum(gradients, total))

    def _gather(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        boxes, away = boxes_of("shards", self.group, wholes[0].dtype), others(self.rank, self.size)
        for piece in pieces([len(shard) for shard in shards], BOX):
            length = sum(stop - start for _, start, stop in piece)
            boxes.begin(length, self.size, wholes[0].device)
            own = placed(boxes.box(self.rank, (1, length)), piece)
            copy_together(own, [shards[number][start:stop] for number, start, stop in piece])
            for to in away:
                boxes.signal(to)
            copy_together([wholes[number][self.rank, start:stop] for number, start, stop in piece], own)
            for source in reversed(away):
                boxes.wait(source, self.looks)
                into = [wholes[number][source, start:stop] for number, start, stop in piece]
                copy(into, placed(boxes.box(source, (1, length)), piece))

    def _sum(self, gradients: Sequence[Tensor], total: Tensor) -> None:
        rows = [-(-len(gradient) // self.size) * gradient[0].numel() for gradient in gradients]
        boxes, away, first = boxes_of("sums", self.group, gradients[0].dtype), others(self.rank, self.size), 0
        for piece in pieces(rows, max(BOX // self.size, 1)):
            length = sum(stop - start for _, start, stop in piece)
            boxes.begin(self.size * length, self.size, total.device)
            for to in [*away, self.rank]:
                sent = [
                    gradients[number].view(-1)[to * rows[number] :][: rows[number]][start:stop]
                    for number, start, stop in piece
                ]
                places = placed(boxes.box(to, (self.size, length))[self.rank], piece)
                copy([place[: len(part)] for place, part in zip(places, sent)], sent)
                if to != self.rank:
                    boxes.signal(to)
            for source in reversed(away):
                boxes.wait(source, self.looks)
            arrived, part = boxes.box(self.rank, (self.size, length)), total[first : first + length]
            if part.dtype is torch.float32:
                torch.sum(arrived, 0, dtype=torch.float32, out=part)
            else:
                part.copy_(arrived.sum(0, dtype=torch.float32))
            first += length


@cache
def stream(use: str, device: torch.device) -> torch.cuda.Stream:
    """One for each use: a box is written again in the order of its epochs. Its kernels are short and go first: others
    wait for them."""
    return torch.cuda.Stream(device, priority=-1)


def beside(use: str, device: torch.device, work: Callable[[], None]) -> torch.Event | None:
    if device.type != "cuda":
        work()
        return None
    side = stream(use, device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    return side.record_event()


def go_on(ended: torch.Event | None) -> None:
    """The current stream goes on behind an event."""
    if ended is not None:
        torch.cuda.current_stream().wait_event(ended)


def placed(box: Tensor, piece: Sequence[Part]) -> list[Tensor]:
    """Where the parts of a piece stand in a box, end to end."""
    return list(box.view(-1).split([stop - start for _, start, stop in piece]))


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies between ranks of tensors of one type: large ones by copy engines."""
    pairs = [pair for pair in zip(targets, sources) if len(pair[0])]
    large = [pair for pair in pairs if pair[0].is_cuda and pair[0].nbytes >= SMALL]
    for target, source in large:
        target.copy_(source)
    if small := [pair for pair in pairs if not pair[0].is_cuda or pair[0].nbytes < SMALL]:
        copy_together(*zip(*small))


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors, of other types too, by as few kernels as there can be."""
    torch._foreach_copy_(list(targets), list(sources))
