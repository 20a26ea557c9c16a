"""Files of `configs/hardware/`, and those of one's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import ConfigError
from trainer.config.compose import CONFIGS
from trainer.config.fields import nearest
from trainer.config.hardware import HardwareConfig, build_hardware
from trainer.util.reading import brief, read_yaml


def load_hardware(
    name: str, changes: Sequence[str] = (), config_dir: str | os.PathLike | None = None
) -> HardwareConfig:
    """The hardware of the file `hardware/NAME.yaml` of the user's folder or of the shipped one, or of a path.

    changes: `node.bandwidth=300` and the like. Raises `ConfigError` with everything that is wrong.
    """
    folders = [Path(config_dir).expanduser() / "hardware"] if config_dir is not None else []
    folders.append(CONFIGS / "hardware")
    places = [*(folder / f"{name}.yaml" for folder in folders), Path(name)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        known = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
        raise ConfigError(f"hardware={name}: there is no such file; {nearest(name, known)}")
    try:
        values = read_yaml(path)
        if not isinstance(values, dict):
            raise ConfigError(f"hardware={name}: {path} holds {brief(values)} instead of settings; mend it")
        merged = OmegaConf.to_container(OmegaConf.merge(values, OmegaConf.from_dotlist(list(changes))))
    except (OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"hardware={name}: cannot read {path} ({brief(error)}); mend it") from None
    assert isinstance(merged, dict)
    return build_hardware({str(key): value for key, value in merged.items()})
