"""What a run saves about itself beside tensors: all of it plain data in the manifest, checked before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.checkpointing.files import LARGEST, DamagedCheckpoint, format_foreign
from trainer.checkpointing.manifest import MANIFEST, read_manifest
from trainer.config.model import ModelSpec
from trainer.config.typed import InvalidValue, Problems, build_typed


def read_states(path: Path) -> dict[str, Any]:
    """The manifest of a run's checkpoint, whose states are of the kinds that `saving.describe_checkpoint` writes; its
    `spec` is complete. DamagedCheckpoint names the first that is not."""
    manifest = {"data": {}, "batch": {}, "callbacks": {}} | read_manifest(path)
    manifest["spec"] = saved_spec(path, manifest).to_dict()
    for name in ("data", "batch", "callbacks", "scaler"):
        state = manifest.get(name)
        _demand(path, name, isinstance(state, dict), state, "a mapping")
    counts = {name: (manifest.get(name), LARGEST) for name in ("tokens", "samples", "skipped")}
    if scaler := manifest["scaler"]:  # empty where the run had no loss scale
        scale = scaler.get("scale")
        _demand(path, "scaler.scale", type(scale) in (int, float) and 0 < scale < 2.0**127, scale, "a loss scale")
        counts["scaler._growth_tracker"] = scaler.get("_growth_tracker"), 2**31 - 1
    for name, (value, most) in counts.items():
        _demand(path, name, type(value) is int and 0 <= value <= most, value, "a whole number in its range")
    compression = manifest.setdefault("compression", None)
    known = compression is None or isinstance(compression, dict) and _texts(compression.get("chosen"))
    _demand(path, "compression", known, compression, "null or a mapping with what was chosen")
    return manifest


def read_launchers(path: Path) -> list[str]:
    """The launchers of the run that saved a checkpoint; see `session.list_launchers`."""
    launchers = read_manifest(path).get("launchers", [])
    _demand(path, "launchers", _texts(launchers), launchers, "a list of text")
    return launchers


def saved_spec(path: Path, manifest: dict[str, Any]) -> ModelSpec:
    """The model that a checkpoint says it is of; whether its tensors are there is another question. DamagedCheckpoint
    if that is no model."""
    problems: Problems = {}
    try:
        spec = build_typed(manifest.get("spec"), problems, ModelSpec, "model")
    except (InvalidValue, RecursionError) as error:
        problems[""] = str(error)
    if problems:
        raise DamagedCheckpoint(f"{path / MANIFEST}: spec: {next(iter(problems.values()))}")
    return spec


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _demand(path: Path, name: str, fits: bool, value: Any, kind: str) -> None:
    if not fits:
        raise DamagedCheckpoint(f"{path / MANIFEST}: {name} is {format_foreign(value)}, which is not {kind}")
