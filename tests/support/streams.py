"""Streams of a GPU that fall behind, so that work which does not wait for what it needs goes wrong in a test too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

CYCLES = 400_000
"""Of a GPU's clock, at most, that a stream falls behind at once: some 0.2 ms."""


@contextmanager
def delay_streams(seed: int) -> Iterator[None]:
    """Lets a stream fall behind by a random time wherever it waits for another one and wherever another one may wait
    for it. Work that another stream queues without waiting then meets memory that is not ready, or is in use."""
    choose = random.Random(seed)

    def delayed(really: Callable[..., Any]) -> Callable[..., Any]:
        def call(stream: torch.cuda.Stream, *which: Any) -> Any:
            result = really(stream, *which)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(choose.randrange(CYCLES))
            return result

        return call

    kind = torch.cuda.Stream
    with (
        patch.object(kind, "wait_event", delayed(kind.wait_event)),
        patch.object(kind, "record_event", delayed(kind.record_event)),
    ):
        yield
