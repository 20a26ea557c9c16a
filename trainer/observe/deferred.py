"""Brings a step's scalars from the device to the host without making the device wait."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor

Ready = tuple[int, dict[str, float | numpy.ndarray], dict[str, Any]]
"""Step, its numbers from the device, and the host's own data about it."""


@dataclass
class _Pending:
    step: int
    shapes: dict[str, torch.Size]
    values: Tensor  # [all numbers of the step], float64, on the host
    began: TimePoint
    ended: TimePoint
    host: dict[str, Any]

    @cached_property
    def ready(self) -> Ready:
        """The step's numbers, which are waited for."""
        self.ended.wait()
        parts = self.values.numpy().copy()  # the pinned buffer goes back to its pool
        parts = numpy.split(parts, numpy.cumsum([shape.numel() for shape in self.shapes.values()])[:-1])
        values = {
            name: part if len(shape) else float(part[0]) for (name, shape), part in zip(self.shapes.items(), parts)
        }
        return self.step, values | {"seconds": self.began.seconds_to(self.ended)}, self.host


class TimePoint:
    """A point in time: on a GPU an event in its stream, timed by the GPU; without a GPU the host's clock."""

    def __init__(self, device: torch.device):
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.time = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def seconds_to(self, later: TimePoint) -> float:
        return later.time - self.time if self.event is None else self.event.elapsed_time(later.event) / 1000


class DeferredScalars:
    """A short queue of steps whose scalars are still being copied from the device to the host.

    On CUDA one asynchronous copy into pinned memory carries all numbers of a step. The step is handed out after the
    next `push`: by then the device has the next step's work queued, so that waiting for the copy does not make it idle.
    How many steps a call hands out depends on the calls alone, never on timing. All ranks therefore see a step at the
    same point, and may decide on it together. On a CPU a step is handed out at once.

    Each step also has its duration, `seconds`, on the device's clock. It lasts from `begin` to its `push`, or from the
    `push` of the step before, if that one was still in the queue at `begin`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: deque[_Pending] = deque()
        self._last: TimePoint | None = None

    def begin(self) -> None:
        """Marks the start of a step, unless the one before it is still running on the device."""
        if not self._pending:
            self._last = TimePoint(self.device)

    def push(self, step: int, tensors: dict[str, Tensor], host: dict[str, Any] | None = None) -> None:
        """Adds a step: its tensors (0-d or 1-D, on the device, already reduced over ranks) and the host's data."""
        values = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors.values()])
        values = values.to("cpu", non_blocking=True)  # pinned, where it comes from a GPU
        began, self._last = self._last, TimePoint(self.device)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._pending.append(_Pending(step, shapes, values, began or self._last, self._last, dict(host or {})))

    def peek(self, block: bool = False) -> list[Ready]:
        """What `pop_ready` would hand out; it stays in the queue."""
        newest = block or self.device.type != "cuda"
        return [pending.ready for pending in [*self._pending][: None if newest else -1]]

    def discard(self) -> None:
        """Forgets all steps in the queue, which are taken again."""
        self._pending.clear()

    def pop_ready(self, block: bool = False) -> list[Ready]:
        """Steps that can be read, oldest first, as (step, numbers, host): all but the newest on CUDA, all elsewhere.

        With `block` the newest is waited for and handed out too: before a checkpoint, an evaluation, or the end. 0-d
        tensors become floats, 1-D tensors float64 arrays.
        """
        ready = self.peek(block)
        for _ in ready:
            self._pending.popleft()
        return ready
