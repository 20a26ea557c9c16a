"""The user's YAML files, as Hydra reads them: plain values, within limits.

YAML's aliases let a few lines stand for a billion values, and Hydra makes a copy of each. A recipe may come from
somebody else, so a file is looked through, by the parser's events alone, before anything is made of it."""

from __future__ import annotations

from pathlib import Path

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult

from trainer.config.fields import ConfigError

BYTES, VALUES, DEPTH = 1 << 20, 10_000, 50
"""Of one file, aliases counted as often as they are used; the largest shipped file has some 40 values."""


class UserFiles(FileConfigSource):
    """A folder of the user's on Hydra's search path. `load_config` raises `ConfigError` naming the file."""

    @staticmethod
    def scheme() -> str:
        return "user"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, config_path if config_path.endswith(".yaml") else f"{config_path}.yaml")
        try:
            if path.exists():
                check(path)
            return super().load_config(config_path)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}; mend it") from None


Plugins.instance().register(UserFiles)


def check(path: Path) -> None:
    """Raises `ValueError` for a file beyond the limits."""
    if not path.is_file():
        raise ValueError("it is no file")
    with open(path, "rb") as file:
        content = file.read(BYTES + 1)
    if len(content) > BYTES:
        raise ValueError(f"it has more than {BYTES} bytes")
    anchored: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # anchor, and values so far
    for event in yaml.parse(content.decode("utf-8-sig"), Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            if len(open_nodes) > DEPTH:
                raise ValueError(f"it is nested more than {DEPTH} deep")
            continue
        if isinstance(event, yaml.AliasEvent):
            anchor, values = None, anchored.get(event.anchor, 0)
            if not values:
                raise ValueError(f"*{event.anchor} stands for nothing, or for what it is a part of")
        elif isinstance(event, yaml.ScalarEvent):
            anchor, values = event.anchor, 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values = open_nodes.pop()
        else:
            continue
        if anchor:
            anchored[anchor] = values
        around, so_far = open_nodes[-1]
        open_nodes[-1] = around, so_far + values
        if so_far + values > VALUES:
            raise ValueError(f"it stands for more than {VALUES} values")
