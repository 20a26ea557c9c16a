"""Brings a step's scalars from the device to the host without making the device wait."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor


@dataclass
class _Pending:
    step: int
    shapes: dict[str, torch.Size]
    values: Tensor  # [all numbers of the step], float64, on the host
    copied: torch.cuda.Event | None
    host: dict[str, Any]

    def unpack(self) -> tuple[int, dict[str, float | numpy.ndarray], dict[str, Any]]:
        if self.copied is not None:
            self.copied.synchronize()
        numbers = self.values.numpy().copy()  # the pinned buffer goes back to its pool
        parts = numpy.split(numbers, numpy.cumsum([shape.numel() for shape in self.shapes.values()])[:-1])
        values = {name: part if len(shape) else float(part[0])
                  for (name, shape), part in zip(self.shapes.items(), parts)}
        return self.step, values, self.host


class DeferredScalars:
    """A short queue of steps whose numbers are still on their way from the device.

    On CUDA one asynchronous copy into pinned memory carries all of a step's numbers, and the step is handed out one
    `push` later: by then the device has the next step's work queued, so waiting for the copy costs it nothing. How many
    steps come out of a call depends on the calls alone, never on timing, so all ranks see a step at the same point and
    may act on it together. Without CUDA tensors a step is handed out at once.
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()

    def __len__(self) -> int:
        """Steps that were pushed and not yet handed out."""
        return len(self._pending)

    def push(self, step: int, tensors: dict[str, Tensor], host: dict[str, Any] | None = None) -> None:
        """Takes a step's tensors (0-d or 1-D, on one device, already reduced over ranks) and what the host knows."""
        values = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors.values()])
        copied = None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            pinned.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            values = pinned
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._pending.append(_Pending(step, shapes, values, copied, dict(host or {})))

    def pop_ready(self, block: bool = False) -> list[tuple[int, dict[str, float | numpy.ndarray], dict[str, Any]]]:
        """Steps that can be read, oldest first, as (step, numbers, host): all but the newest on CUDA, all elsewhere.

        `block` hands out the newest too: before a checkpoint, an evaluation, or the end. 0-d tensors come as float,
        vectors as float64 arrays.
        """
        ready = []
        while self._pending and (block or len(self._pending) > 1 or self._pending[0].copied is None):
            ready.append(self._pending.popleft().unpack())
        return ready
