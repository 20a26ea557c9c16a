"""The model in a checkpoint of a run, for sampling and export."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trainer.checkpointing.chunks import shown
from trainer.checkpointing.files import DamagedCheckpoint
from trainer.checkpointing.loading import Contents
from trainer.checkpointing.manifest import MANIFEST, list_checkpoints, verify
from trainer.checkpointing.retention import find_resume
from trainer.checkpointing.states import saved_spec
from trainer.config import ConfigError
from trainer.config.model import ModelSpec
from trainer.planning.cost.parameters import declarations


@dataclass(frozen=True)
class SavedModel:
    """A model on disk. contents: of its checkpoint; tokenizer: the run's tokenizer folder, if there is one."""

    contents: Contents
    spec: ModelSpec
    tokenizer: Path | None

    @property
    def path(self) -> Path:
        """The checkpoint's own folder."""
        return self.contents.path

    def tensor(self, name: str) -> Tensor:
        """The whole parameter `name`, read from disk."""
        return self.contents.read([f"model.{name}"])[f"model.{name}"]


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
                f"checkpoint={checkpoint} holds no whole checkpoint; give a run's folder (runs/NAME) or one of its "
                "checkpoints (runs/NAME/checkpoints/step-00000100)"
            )
    tokenizer = path.resolve().parent.parent / "tokenizer"
    try:
        contents = Contents(path)
        spec = saved_spec(path, contents.manifest)
        check_model(contents, spec)
    except DamagedCheckpoint as damage:
        way_out = "" if "imports=" in str(damage) else "; give another checkpoint"
        raise ConfigError(f"checkpoint={checkpoint}: {damage}{way_out}") from None
    return SavedModel(contents, spec, tokenizer if tokenizer.is_dir() else None)


def check_model(contents: Contents, spec: ModelSpec) -> None:
    """Raises DamagedCheckpoint unless a checkpoint holds the parameters of `spec`; before memory is asked for."""
    where = contents.path / MANIFEST
    if spec.depth > len(contents.names):
        raise DamagedCheckpoint(f"{where}: a model of {spec.depth} layers, but {len(contents.names)} tensors")
    try:
        wanted = {f"model.{name}": info.shape for name, info in declarations(spec).items()}
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise DamagedCheckpoint(f"{where}: a model that cannot be: {shown(str(error))}") from None
    held = {name: tensor for name in wanted if (tensor := contents.find(name)) is not None}
    if differing := [name for name, shape in wanted.items() if name not in held or held[name].shape != shape]:
        raise DamagedCheckpoint(f"{where}: the model in it has a {differing[0]} that is not here, or of another shape")
    contents.check_whole(held)
    if problems := spec.check():
        raise DamagedCheckpoint(f"{where}: {problems[0]}")
