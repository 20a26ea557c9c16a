"""Checkpoints as tests look at them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from trainer.checkpointing.loading import CheckpointContents


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Whole tensors of the checkpoint folder `path` on the CPU. Needs no process group."""
    contents = CheckpointContents(path)
    return contents.read(contents.names)
