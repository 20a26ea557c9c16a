"""What makes errors in protocols over shared memory show: late ranks, memory that is full of NaN, parts left out."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.symmetric_memory import SymmetricBuffers, SymmetricMemory, allocate_symmetric


def poisoned(size: int, device: torch.device, group: dist.ProcessGroup) -> SymmetricMemory:
    """Memory of NaN, and flags of -1."""
    shared = allocate_symmetric(size, device, group)
    shared.parts[dist.get_rank(group)].fill_(0xFF)
    dist.barrier(group)
    return shared


def late(function: Callable, rank: int) -> Callable:
    """The function after a while, which is another one on each rank."""
    draw = random.Random(rank)

    def later(*arguments: object) -> object:
        time.sleep(draw.choice((0, 0, 0, 3e-4, 3e-3)))
        return function(*arguments)

    return later


def one_half(box: Callable) -> Callable:
    """Of a box, for all epochs."""

    def same(self: SymmetricBuffers, *arguments: object) -> Tensor:
        with patch.object(self, "epoch", 0):
            return box(self, *arguments)

    return same


class Without:
    """A part of the protocol, `SymmetricBuffers.wait` or `SymmetricBuffers.signal`, that is left out where it is done
    for one purpose. A purpose is the kind of box, and the function of the project for which it is done.

    seen: the purposes that there were, each with what `now` was then."""

    now: Any = None

    def __init__(self, part: Callable, left_out: str = ""):
        self.part, self.left_out, self.seen = part, left_out, {}

    def __get__(self, boxes: SymmetricBuffers, _: type) -> Callable:
        return partial(self.do, boxes)

    def do(self, boxes: SymmetricBuffers, *arguments: object) -> None:
        purpose = f"{self.part.__name__} for {boxes.kind} in {purpose_of(sys._getframe(1))}"
        self.seen.setdefault(purpose, self.now)
        if purpose != self.left_out:
            self.part(boxes, *arguments)


HELPERS = ("receive_parts", "send", "total", "__init__", "<listcomp>")
"""Functions that do it for others."""


def purpose_of(frame: FrameType) -> str:
    """The first function behind helpers."""
    while frame.f_code.co_name in HELPERS:
        frame = frame.f_back
    return frame.f_code.co_name


def error_of_late_ranks(measure: Callable[[float], float]) -> float:
    """The error that `measure` finds, equal on all ranks, where the others are late by so many seconds. They are later
    where it finds none: on a busy machine the first rank may be as late."""
    for seconds in (5e-3, 5e-2, 0.5):
        if (error := measure(seconds)) > 0.1:
            break
    return error


def late_first(function: Callable, rank: int, seconds: float) -> Callable:
    """The function, after a while on all ranks but the first, which then sees what comes of not waiting."""

    def later(*arguments: object) -> object:
        time.sleep(seconds if rank else 0)
        return function(*arguments)

    return later


def error_of(work: Callable[[], object]) -> str:
    """In which it ends; nothing if in none."""
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return ""
