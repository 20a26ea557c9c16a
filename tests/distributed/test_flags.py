"""The protocol of `distributed/symmetric_memory.py` as a model, in every order in which its steps can happen.

A rank's call of an epoch writes a tile into a half of each other rank's box and raises a flag there. Beside that it
waits for each other rank's flag and reads its tile. The next call begins when both have ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest


class Rank(NamedTuple):
    """Calls that have ended, and the steps that the writer and the reader of the next have taken."""

    epochs: int = 0
    written: int = 0
    read: int = 0


class Protocol(NamedTuple):
    """halves: of a box; waits: for how many of the other ranks a reader waits, all if None; flag_first: whether writers
    raise flags before they write."""

    ranks: int = 2
    epochs: int = 4
    halves: int = 2
    waits: int | None = None
    flag_first: bool = False

    @property
    def others(self) -> int:
        return self.ranks - 1

    def newest(self, source: Rank, place: int, half: int, flag: bool) -> int:
        """The last epoch of which `source` has raised its flag at the rank at `place` behind it, or else written its
        tile into a half of the box there."""
        due = 2 * place + (1 if flag != self.flag_first else 0)
        last = source.epochs + (source.written > due)
        return last if flag else max((one for one in range(1, last + 1) if one % self.halves == half), default=0)

    def steps(self, state: tuple[Rank, ...]) -> Iterator[tuple[Rank, ...]]:
        """What can happen next. Raises `ValueError` where a reader finds another epoch than its own."""
        for number, rank in enumerate(state):
            epoch = rank.epochs + 1
            if epoch > self.epochs:
                continue
            moves = [rank._replace(written=rank.written + 1)] if rank.written < 2 * self.others else []
            if rank.read < 2 * self.others:
                ahead, reads = rank.read % self.others, rank.read >= self.others
                source = state[(number + 1 + ahead) % self.ranks]
                place = self.others - 1 - ahead  # this rank among those behind the source
                if reads and self.newest(source, place, epoch % self.halves, flag=False) != epoch:
                    raise ValueError(f"rank {number} reads another epoch than {epoch}")
                patient = not reads and ahead < (self.others if self.waits is None else self.waits)
                if not patient or self.newest(source, place, 0, flag=True) >= epoch:
                    moves.append(rank._replace(read=rank.read + 1))
            for moved in moves:
                ended = moved.written == moved.read == 2 * self.others
                yield (*state[:number], Rank(epoch) if ended else moved, *state[number + 1 :])

    def explore(self) -> None:
        """Raises `ValueError` for a wrong read, and where nothing can happen before all have ended."""
        known = {(Rank(),) * self.ranks}
        pending = list(known)
        while pending:
            state = pending.pop()
            found = set(self.steps(state))
            if not found and any(rank.epochs < self.epochs for rank in state):
                raise ValueError("all wait")
            pending += found - known
            known |= found


@pytest.mark.parametrize("protocol", [Protocol(), Protocol(ranks=3, epochs=3)], ids=["2 ranks", "3 ranks"])
def test_readers_find_their_epoch_in_every_order(protocol):
    protocol.explore()


@pytest.mark.parametrize(
    "protocol",
    [Protocol(halves=1), Protocol(waits=0), Protocol(flag_first=True), Protocol(ranks=3, epochs=3, waits=1)],
    ids=["one half", "no wait", "flags before tiles", "a wait for one of two"],
)
def test_every_part_of_it_is_needed(protocol):
    with pytest.raises(ValueError, match="reads another epoch"):
        protocol.explore()
