"""The user's YAML files, as Hydra reads them: plain values, within limits, since a recipe may come from somebody
else."""

from __future__ import annotations

from pathlib import Path

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult

from trainer.config.fields import ConfigError
from trainer.config.yaml_limits import BYTES, check_yaml, yaml_fault

MAIN = "config"
"""The shipped file whose defaults list begins a composition."""


class UserFiles(FileConfigSource):
    """A folder of the user's on Hydra's search path. `load_config` raises `ConfigError` naming the file."""

    @staticmethod
    def scheme() -> str:
        return "user"

    def is_config(self, config_path: str) -> bool:
        """Whether there is such a file. A config.yaml of the user's, such as that of a run's folder, is no `MAIN`."""
        return config_path != MAIN and super().is_config(config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, config_path if config_path.endswith(".yaml") else f"{config_path}.yaml")
        try:
            if path.exists():
                if not path.is_file():
                    raise ValueError("it is no file")
                with open(path, "rb") as file:
                    check_yaml(file.read(BYTES + 1))
            return super().load_config(config_path)
        except HydraException:
            raise
        except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
            fault = yaml_fault(error) if isinstance(error, yaml.YAMLError) else " ".join(str(error).split())
            raise ConfigError(f"{path} cannot be read: {fault}; mend it") from None


Plugins.instance().register(UserFiles)
