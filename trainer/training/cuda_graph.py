"""Training steps as one CUDA graph: a small model's kernels are shorter than the host takes to start them.

`train_step` reads nothing back and keeps its state in place, so that a process that is alone on its GPU can record it
as it is. What it allocates lies in memory of the graph's own."""

from __future__ import annotations

import gc
from functools import partial

import torch
from torch import Tensor

from trainer.config import Config, ConfigError
from trainer.data.batches import MicroBatch
from trainer.model.compiled import capture_graph
from trainer.training.state import TrainState
from trainer.training.step import ControlFlag, train_step

WARM = 2
"""Steps that run as they come: they compile, measure kernels, and leave tables on the device."""


class CUDAGraphStep:
    """`train_step` of a state: the first `WARM` steps as they come, the next is recorded, and replayed like all that
    follow. Raises `ConfigError` where it cannot be recorded."""

    def __init__(self, state: TrainState):
        self.state = state
        self.before = WARM
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batches: list[MicroBatch] = []
        self.scalars: dict[str, Tensor] = {}

    def __call__(self, batches: list[MicroBatch], asked: int) -> dict[str, Tensor]:
        if self.before:
            self.before -= 1
            return train_step(self.state, batches, asked)
        if self.graph is None:
            self.record(batches)
        else:
            for mine, batch in zip(self.batches, batches, strict=True):
                mine.copy_(batch)
            self.state.step += 1
        self.graph.replay()
        scalars = {name: value.clone() for name, value in self.scalars.items()}  # the next replay overwrites its own
        if asked:
            bits = [float(bool(asked & ask)) for ask in ControlFlag]
            scalars["asked"] = torch.tensor(bits, dtype=torch.float64, device=self.state.world.device)
        return scalars

    def record(self, batches: list[MicroBatch]) -> None:
        device = self.state.world.device
        self.batches = [batch.clone() for batch in batches]
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()  # what steps took so far, the graph will take
        step = partial(train_step, self.state, self.batches, ControlFlag(0))
        try:
            self.graph, self.scalars = capture_graph(step, torch.cuda.Stream(device))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"run.cuda_graphs=true: a step of this run cannot be recorded ({str(error).splitlines()[0]}); set "
                "run.cuda_graphs=false"
            ) from error


def check_recording(config: Config, device: torch.device) -> None:
    """Raises `ConfigError` where the device has no CUDA graphs."""
    if config.run.cuda_graphs and device.type != "cuda":
        raise ConfigError(
            "run.cuda_graphs=true: this process runs on the CPU, which has none; set run.cuda_graphs=false"
        )
