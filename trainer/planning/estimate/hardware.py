"""Files of `configs/hardware/`, and those of one's own."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import ConfigError
from trainer.config.fields import CONFIGS, suggest_nearest
from trainer.config.hardware import HardwareConfig, build_hardware
from trainer.util.reading import read_yaml, shorten_foreign

MAX_PROBLEMS = 20
"""The most problems of a file that a message names."""


def load_hardware(
    name: str, changes: Sequence[str] = (), config_dir: str | os.PathLike | None = None
) -> HardwareConfig:
    """The hardware of the file `hardware/NAME.yaml` of the user's folder or of the shipped one, or of a path.

    changes: `node.bandwidth=300` and the like. Raises `ConfigError` with everything that is wrong.
    """
    folders = hardware_folders(config_dir)
    places = [*(folder / f"{name}.yaml" for folder in folders), Path(name)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        known = sorted(hardware_names(config_dir))
        raise ConfigError(f"hardware={name}: there is no such file; {suggest_nearest(name, known)}")
    try:
        values = read_yaml(path)
        if not isinstance(values, dict):
            raise ConfigError(f"hardware={name}: {path} holds {shorten_foreign(values)} instead of settings; mend it")
        if values and not values.keys() & {field.name for field in fields(HardwareConfig)}:
            raise ConfigError(f"hardware={name}: {path} holds no settings of hardware; name a file of it")
        merged = OmegaConf.to_container(OmegaConf.merge(values, OmegaConf.from_dotlist(list(changes))))
    except (OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"hardware={name}: cannot read {path} ({shorten_foreign(error)}); mend it") from None
    assert isinstance(merged, dict)
    try:
        return build_hardware({str(key): value for key, value in merged.items()})
    except ConfigError as error:
        named = f"hardware={name}: " if path == places[-1] else ""
        raise ConfigError([named + problem for problem in error.problems[:MAX_PROBLEMS]]) from None


def hardware_folders(config_dir: str | os.PathLike | None = None) -> list[Path]:
    """Where files of hardware are looked for: the user's own folder, then the shipped one."""
    own = [] if config_dir is None else [Path(config_dir).expanduser() / "hardware"]
    return [*own, CONFIGS / "hardware"]


def hardware_names(config_dir: str | os.PathLike | None = None) -> list[str]:
    """The names of all of them, one's own first."""
    found = (file.stem for folder in hardware_folders(config_dir) for file in sorted(folder.glob("*.yaml")))
    return [*dict.fromkeys(found)]


def shipped_for(device: str) -> str:
    """The shipped file of a kind of device; for a GPU that has none, one whose GPUs have no link of their own."""
    names = {load_hardware(name).device: name for name in hardware_names()}
    return names.get(device, "l40s")


def hardware_text(hardware: HardwareConfig, comments: Sequence[str]) -> str:
    """The file of a machine: paragraphs of comments, then every value that is not a default, with four digits."""
    lines = [line for comment in comments for line in textwrap.wrap(comment, 118, subsequent_indent="  ")]
    values = {name: value for name, value in round_value(asdict(hardware)).items() if value != {}}
    settings = [
        f"{name}: {yaml.safe_dump(value, default_flow_style=True, sort_keys=False)}"
        if isinstance(value, dict)
        else yaml.safe_dump({name: value})
        for name, value in values.items()
    ]
    return "".join([*(f"# {line}\n" for line in lines), *settings])


def round_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: round_value(part) for name, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
