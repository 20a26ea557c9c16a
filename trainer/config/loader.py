"""Hydra's loader of groups and recipes, over a folder of the user's and the shipped one.

Hydra's own settings (the node `hydra`: job logging, launchers, output folders) have no effect on what is composed here,
and to load and merge them takes longer than everything else. So this loader leaves them out."""

from __future__ import annotations

from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf

from trainer.config.user_files import MAIN, UserFiles

HERE = Path(__file__).parents[1]

CONFIGS = HERE / "configs" if (HERE / "configs").is_dir() else HERE.parent / "configs"
"""The shipped groups and recipes: inside the package in a wheel, beside it in a checkout."""


class ConfigLoader(ConfigLoaderImpl):
    """folder: the user's, which wins over the shipped one."""

    def __init__(self, folder: Path | None = None) -> None:
        path = ConfigSearchPathImpl()
        if folder is not None:
            path.append("user", f"{UserFiles.scheme()}://{folder}")
        path.append("main", f"file://{CONFIGS}")
        path.append("schema", "structured://")
        super().__init__(path)
        setup_globals()  # Hydra's interpolations, such as ${now:%Y}

    def names(self, group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
        """Options of a group, or the groups in it; "" is the folder itself."""
        holders = [source for source in self.get_sources() if source.is_group(group)]
        return sorted({name for source in holders for name in source.list(group, kind)})

    def compose(self, overrides: list[str]) -> DictConfig:
        """The main file with its groups, recipes and overrides, interpolations unresolved. Raises what Hydra and
        OmegaConf raise."""
        parsed, repository = self._parse_overrides_and_create_caching_repo(MAIN, overrides)
        chosen = create_defaults_list(repository, MAIN, parsed, prepend_hydra=False, skip_missing=False)
        composed = self._compose_config_from_defaults_list(chosen.defaults, repository)
        OmegaConf.set_struct(composed, True)
        self._apply_overrides_to_config(chosen.config_overrides, composed)
        return composed
