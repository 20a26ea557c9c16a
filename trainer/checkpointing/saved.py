"""The model in a checkpoint of a run, for sampling and export."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trainer.checkpointing.checkpointer import read_tensors
from trainer.checkpointing.manifest import MANIFEST, DamagedCheckpoint, list_checkpoints, read_manifest, verify
from trainer.checkpointing.retention import find_resume
from trainer.config import ConfigError
from trainer.config.model import ModelSpec


@dataclass(frozen=True)
class SavedModel:
    """A model on disk. path: the checkpoint's own folder; tokenizer: the run's tokenizer folder, if there is one."""

    path: Path
    spec: ModelSpec
    tokenizer: Path | None

    def tensor(self, name: str) -> Tensor:
        """The whole parameter `name`, read from disk."""
        return read_tensors(self.path, [f"model.{name}"])[f"model.{name}"]


def open_saved(checkpoint: str) -> SavedModel:
    """The model at `checkpoint`: a run's folder, of which the newest whole checkpoint is taken, or a checkpoint's
    folder.

    Checksums are verified. Raises `ConfigError` naming the folder and what is wrong with it.
    """
    folder = Path(checkpoint).expanduser()
    if (folder / MANIFEST).is_file():
        try:
            verify(folder, checksums=True)
        except DamagedCheckpoint as damage:
            raise ConfigError(
                f"checkpoint={checkpoint}: {damage}; give the run's folder to take its newest whole checkpoint"
            ) from None
        path = folder
    else:
        nested = folder / "checkpoints"
        path, warnings = find_resume("auto", nested if list_checkpoints(nested) else folder, True)
        for warning in warnings:
            print(warning, file=sys.stderr)
        if path is None:
            raise ConfigError(
                f"checkpoint={checkpoint} holds no whole checkpoint; give a run's folder (runs/NAME) or "
                "one of its checkpoints (runs/NAME/checkpoints/step-00000100)"
            )
    tokenizer = path.resolve().parent.parent / "tokenizer"
    return SavedModel(path, ModelSpec.from_dict(read_manifest(path)["spec"]), tokenizer if tokenizer.is_dir() else None)
