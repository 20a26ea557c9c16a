"""A trained model on disk, in a checkpoint of a run or in a transformers folder: for sampling, export and merging."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trainer.checkpointing.files import DamagedCheckpoint, format_foreign
from trainer.checkpointing.loading import CheckpointContents
from trainer.checkpointing.manifest import MANIFEST, list_checkpoints, verify_checkpoint
from trainer.checkpointing.retention import find_newest
from trainer.checkpointing.states import saved_spec
from trainer.config import ConfigError
from trainer.config.model import ModelSpec
from trainer.hf import HFWeights, spec_from_hf
from trainer.optim.average import PREFIX as EMA
from trainer.planning.cost.parameters import declare_parameters

CONFIG = "config.json"
"""By which a transformers folder is known."""


@dataclass(frozen=True)
class SavedModel:
    """A model on disk. path: the checkpoint's own folder, or a transformers folder; tensor: name -> the whole
    parameter, read from disk; tokenizer: the folder of the model's tokenizer, if there is one; run: the folder of its
    run."""

    path: Path
    spec: ModelSpec
    tensor: Callable[[str], Tensor]
    tokenizer: Path | None
    run: Path | None


def open_saved(checkpoint: str, weights: str = "trained") -> SavedModel:
    """The model at `checkpoint`: a run's folder, of which the newest whole checkpoint is taken, a checkpoint's folder,
    or a transformers folder. weights: one of `options.WEIGHTS`.

    Checksums are verified. Raises `ConfigError` naming the folder and what is wrong with it.
    """
    folder = Path(checkpoint).expanduser()
    if (folder / CONFIG).is_file() and not (folder / MANIFEST).is_file():
        return open_transformers(checkpoint, weights)
    path = find_whole(checkpoint)
    run = path.resolve().parent.parent
    tokenizer = run / "tokenizer"
    try:
        contents = CheckpointContents(path)
        spec = saved_spec(path, contents.manifest)
        prefix = "model."
        if weights == "ema":
            prefix = EMA
            if not any(name.startswith(EMA) for name in contents.names):
                raise ConfigError(
                    f"weights=ema: {path} holds no average of the weights, as its run had optimizer.ema.decay=0; leave "
                    "weights=ema out"
                )
        check_model(contents, spec, prefix)
    except DamagedCheckpoint as damage:
        way_out = "" if "imports=" in str(damage) else "; give another checkpoint"
        raise ConfigError(f"checkpoint={checkpoint}: {damage}{way_out}") from None

    def tensor(name: str) -> Tensor:
        return contents.read([prefix + name])[prefix + name]

    return SavedModel(path, spec, tensor, tokenizer if tokenizer.is_dir() else None, run)


def find_whole(checkpoint: str) -> Path:
    """The checkpoint folder that `checkpoint` names, verified."""
    folder = Path(checkpoint).expanduser()
    if (folder / MANIFEST).is_file():
        try:
            verify_checkpoint(folder, checksums=True)
        except DamagedCheckpoint as damage:
            raise ConfigError(
                f"checkpoint={checkpoint}: {damage}; give the run's folder to take its newest whole checkpoint"
            ) from None
        return folder
    ways = "give a run's folder (runs/NAME), one of its checkpoints (runs/NAME/checkpoints/step-00000100), or a "
    ways += "transformers folder"
    if not folder.is_dir():
        raise ConfigError(f"checkpoint={checkpoint} is no folder; {ways}")
    nested = folder / "checkpoints"
    path, warnings = find_newest(nested if list_checkpoints(nested) else folder, True)
    for warning in warnings:
        print(warning, file=sys.stderr)
    if path is None:
        raise ConfigError(
            f"checkpoint={checkpoint} holds no whole checkpoint, which runs save with checkpoint.every=STEPS or "
            f"checkpoint.at_end=true; {ways}"
        )
    return path


def open_transformers(folder: str, weights: str) -> SavedModel:
    """The model in a transformers folder."""
    if weights == "ema":
        raise ConfigError(
            f"weights=ema: {folder} is a transformers folder, which holds one set of weights; leave it out"
        )
    path = Path(folder).expanduser()
    spec = spec_from_hf(path)
    values = HFWeights(path, spec)
    tokenizer = path if (path / "tokenizer_config.json").is_file() else None
    return SavedModel(path, spec, lambda name: values(name, values.infos[name]), tokenizer, None)


def check_model(contents: CheckpointContents, spec: ModelSpec, prefix: str) -> None:
    """Raises DamagedCheckpoint unless a checkpoint holds the parameters of `spec`, behind `prefix`; before memory is
    asked for."""
    where = contents.path / MANIFEST
    if spec.depth > len(contents.names):
        raise DamagedCheckpoint(
            f"{where}: a model of {format_foreign(spec.depth)} layers, but {len(contents.names)} tensors"
        )
    try:
        wanted = {prefix + name: info.shape for name, info in declare_parameters(spec).items()}
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise DamagedCheckpoint(f"{where}: a model that cannot be: {format_foreign(str(error))}") from None
    held = {name: tensor for name in wanted if (tensor := contents.find(name)) is not None}
    if differing := [name for name, shape in wanted.items() if name not in held or held[name].shape != shape]:
        raise DamagedCheckpoint(f"{where}: the model in it has a {differing[0]} that is not here, or of another shape")
    contents.check_whole(held)
    if problems := spec.check():
        raise DamagedCheckpoint(f"{where}: {problems[0]}")
