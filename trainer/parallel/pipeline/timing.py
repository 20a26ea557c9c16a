"""When actions run, and how long each layer takes within them: by the host's clock on a CPU, by events in the stream on
CUDA."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn

from trainer.model.stage import Stage, split_report
from trainer.planning.schedules.ir import COMPUTE, Action
from trainer.planning.schedules.simulate import ActionSpan


class StepTimes:
    """When the compute actions of one step ran: by the host's clock on a CPU, by events in the stream's work on CUDA.

    The events are used again when the object is."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self._actions: list[Action] = []
        self._used = 0

    def restart(self) -> None:
        """Marks the start of a step."""
        self._actions.clear()
        self._used = 0
        self._mark()

    @contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        self._actions.append(action)
        self._mark()
        yield
        self._mark()

    def finished(self) -> bool:
        """Whether the step has ended on the device too."""
        return not self._cuda or self._marks[self._used - 1].query()

    def spans(self) -> tuple[ActionSpan, ...]:
        """In seconds from the step's start; waits for the step to end."""
        if self._cuda:
            self._marks[self._used - 1].synchronize()
        first, *marks = self._marks[: self._used]
        seconds = [first.elapsed_time(mark) / 1000 if self._cuda else mark - first for mark in marks]
        return tuple(ActionSpan(action, *seconds[2 * i : 2 * i + 2]) for i, action in enumerate(self._actions))

    def busy(self, kinds: tuple[str, ...] = (*COMPUTE, "OVERLAP_F_B")) -> float:
        """Seconds within actions of these kinds."""
        return sum(span.end - span.start for span in self.spans() if span.action.kind in kinds)

    def finish(self) -> float:
        return max((span.end for span in self.spans()), default=0.0)

    def _mark(self) -> None:
        if self._used == len(self._marks):
            self._marks.append(torch.cuda.Event(enable_timing=True) if self._cuda else 0.0)
        if self._cuda:
            self._marks[self._used].record()
        else:
            self._marks[self._used] = perf_counter()
        self._used += 1


@dataclass
class MeasuredCosts:
    """What one rank has measured of a micro-batch.

    seconds: by unit of the model (0 the embedding, then the layers, last norm, head and loss) and kind of action (F, I,
    B);
    weights: seconds of W by stage; bytes: by stage, what a forward pass has left allocated.
    """

    seconds: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    weights: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    bytes: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


class LayerProbe:
    """Takes the time of each layer within the actions of a rank's stages.

    A mark says which unit of the model works from then on. In a forward pass the marks are the calls of the layers; in
    a backward pass, the arrival of the gradient of what each layer returned."""

    def __init__(self, stages: dict[int, Stage], device: torch.device):
        self.stages, self.device = stages, device
        self.marks: list[tuple[int, Any]] = []
        self.actions: list[tuple[Action, list[tuple[int, Any]], int]] = []
        self.handles = [
            handle
            for model in stages.values()
            for index, layer in model.layers.items()
            for handle in (
                layer.register_forward_pre_hook(self.entered(model, int(index))),
                layer.register_forward_hook(self.left(model, int(index))),
            )
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    @contextmanager
    def timed(self, action: Action, times: StepTimes) -> Iterator[None]:
        model, before = self.stages[action.stage], self.allocated()
        layers = [int(index) for index in model.layers]
        ahead = (
            (0 if model.first else layers[0] + 1)
            if action.kind == "F"
            else model.depth + 1
            if model.last
            else layers[-1] + 1
        )
        self.marks = []
        with times.timed(action):
            self.mark(ahead)
            yield
            self.mark(-1)
        self.actions.append((action, self.marks, self.allocated() - before))

    def mark(self, unit: int) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((unit, event))
        else:
            self.marks.append((unit, perf_counter()))

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def entered(self, model: Stage, layer: int) -> Any:
        def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            if torch.is_grad_enabled():
                self.mark(layer + 1)
                if layer == 0:
                    arguments[0].register_hook(lambda _: self.mark(0))

        return before

    def left(self, model: Stage, layer: int) -> Any:
        ends = layer + 1 == model.depth

        def after(_: nn.Module, __: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                split_report(output)[0].register_hook(lambda _: self.mark(layer + 1))
                if ends:
                    self.mark(layer + 2)

        return after

    def measured(self) -> MeasuredCosts:
        """What the marks so far say; they are then forgotten. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = MeasuredCosts()
        for action, marks, held in self.actions:
            units: dict[int, float] = defaultdict(float)
            for (unit, start), (_, end) in zip(marks, marks[1:]):
                units[unit] += end - start if self.device.type != "cuda" else start.elapsed_time(end) / 1000
            if action.kind == "W":
                found.weights[action.stage].append(sum(units.values()))
                continue
            for unit, seconds in units.items():
                found.seconds[unit, action.kind].append(seconds)
            if action.kind == "F":
                found.bytes[action.stage].append(held)
        self.actions.clear()
        return found
