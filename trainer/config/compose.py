"""YAML groups, recipes and overrides become plain values, and those the typed `Config`.

Hydra composes plain values (`configs/`, the user's folder, its override grammar); `typed.py` gives them their types.
"""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config, ConfigError, imports, typed
from trainer.config.fields import suggest_nearest
from trainer.config.loader import CONFIGS, ConfigLoader
from trainer.config.synonyms import SETTINGS
from trainer.config.user_files import MAIN

SWEEP = "several values are a sweep, which --multirun runs, a trial each"


def gather_values(overrides: Sequence[str], config_dir: str | os.PathLike | None = None) -> tuple[dict, typed.Problems]:
    """Plain values of all settings, interpolations unresolved, and the overrides that had to be left out. What
    `imports` names has then been imported.

    Raises `ConfigError` where Hydra cannot compose what is left.
    """
    problems: typed.Problems = {}
    with hydra_over(config_dir) as loader:
        groups = groups_of(loader)
        accepted = [text for override in overrides if (text := _accept(override, loader, groups, problems))]
        try:
            composed = loader.compose(accepted)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
            raise ConfigError([*problems.values(), _sentence(error)]) from None
    values = typing.cast(dict, OmegaConf.to_container(composed))
    values.pop("hydra", None)
    try:
        imports.import_modules(values.get("imports"))  # before names and types are looked at
    except ConfigError as error:
        raise ConfigError([*problems.values(), *error.problems]) from error
    return typed.complete_values(Config(), values), problems


@contextmanager
def hydra_over(config_dir: str | os.PathLike | None) -> Iterator[ConfigLoader]:
    """Hydra over the user's folder, then the shipped one; the version that Hydra behaved like is put back."""
    folder = None if config_dir is None else Path(config_dir).expanduser().resolve()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: there is no folder {folder}")
    base = version.VersionBase.instance()
    before = base.version_base
    version.setbase("1.3")
    try:
        yield ConfigLoader(folder)
    finally:
        base.version_base = before


def groups_of(loader: ConfigLoader) -> list[str]:
    """The groups that a run can choose from."""
    return [group for group in loader.names("", ObjectType.GROUP) if group not in ("hydra", "hardware")]


def _accept(override: str, loader: ConfigLoader, groups: list[str], problems: typed.Problems) -> str | None:
    """The override as Hydra shall see it; None, and a problem, if it can mean nothing."""
    if "=" not in override and not override.startswith("~"):
        problems[override] = _word(override, loader, groups)
        return None
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        problems[override] = (
            f"'{override}' is not SETTING=VALUE, GROUP=OPTION or +config=RECIPE ({_sentence(error)}); quote values "
            "with special characters ('run.name=\"a=b\"'), but not keys within braces, where a colon is written as \\:"
        )
        return None
    key = parsed.key_or_group
    if parsed.is_sweep_override():
        problems[key] = f"{override}: {SWEEP}; for a list write {key}=[...]"
    elif key.startswith("sweep."):
        problems[key] = f"{override}: the settings of a sweep need --multirun"
    elif re.match(r"hydra\b", key):
        problems[key] = (
            f"{override}: Hydra only composes here, its own settings have no effect; a folder of groups and recipes "
            "is named by --config-dir DIR"
        )
    elif parsed.is_delete():
        if typed.is_entry(key):
            return override
        problems[key] = f"{override}: only entries of mappings can be removed, such as ~data.sources.NAME"
        if not typed.is_setting(key):
            known = [setting.path for setting in typed.list_settings()] + groups
            problems[key] += "; " + typed.describe_unknown("", key, known)
    elif key in groups:
        return _choose(key, parsed.value(), override, loader, groups, problems)
    elif "/" in key or "@" in override.split("=")[0]:  # a group in a group, or a package: Hydra's own answer is exact
        return override
    else:  # the schema decides which settings exist, not the YAML files that happen to name them
        return "++" + override.lstrip("+")
    return None


def _word(word: str, loader: ConfigLoader, groups: list[str]) -> str:
    """What to say of a word that is no override."""
    if word.endswith((".yaml", ".yml")):
        return _path(word, "config", groups)
    holders = [group for group in ("config", *groups) if word in loader.names(group)]
    ways = [("+" if group == "config" else "") + f"{group}={word}" for group in dict.fromkeys(holders)]
    some = ", ".join(loader.names("config")[:3])
    hint = f"did you mean {' or '.join(ways)}?" if ways else f"recipes: {some}, and those of python -m trainer --help"
    return f"'{word}' is not SETTING=VALUE, GROUP=OPTION or +config=RECIPE; {hint}"


def _path(given: str, group: str, groups: list[str]) -> str:
    """What to say of a path where the name of a recipe, or of a group's option, is expected."""
    path = Path(given)
    group = path.parent.name if path.parent.name in ("config", *groups) else group
    folder = path.parent.parent if path.parent.name == group else Path("FOLDER")
    put = "" if path.parent.name == group else f"put it into {folder / group}/ and "
    plus, kind = ("+", "a recipe") if group == "config" else ("", f"an option of {group}")
    return f"{given}: {kind} is named, not given as a path; {put}say --config-dir {folder} {plus}{group}={path.stem}"


def _choose(
    group: str, chosen: Any, override: str, loader: ConfigLoader, groups: list[str], problems: typed.Problems
) -> str | None:
    """The override that chooses options of a group, with the + that Hydra asks for where the group has no default."""
    options = loader.names(group)
    for option in chosen if isinstance(chosen, list) else [chosen]:
        if str(option).endswith((".yaml", ".yml")):
            problems[group] = _path(str(option), group, groups)
        elif "/" not in str(option) and str(option) not in options:
            kind = "recipe" if group == "config" else "option"
            setting = f"{SETTINGS.get(group, f'{group}.NAME')}=VALUE"
            single = f" (one setting: {setting})" if typed.is_setting(group) else ""
            problems[group] = (
                f"{group}={option}: there is no such {kind}; {suggest_nearest(str(option), options)}{single}"
            )
    if group in problems:
        return None
    return ("" if group in _chosen_by_default() else "+") + override.lstrip("+")


@cache
def _chosen_by_default() -> set[str]:
    """The groups of which a run has an option whatever is asked for."""
    defaults = yaml.safe_load((CONFIGS / f"{MAIN}.yaml").read_text())["defaults"]
    return {group for default in defaults if isinstance(default, dict) for group in default}


def quote_value(text: str) -> str:
    """A value as Hydra's grammar reads it back."""
    return QuotedString(text, Quote.double).with_quotes()


def to_config(values: dict, problems: typed.Problems, world: int = 1) -> Config:
    """The values with interpolations resolved and types checked; what is wrong is added to `problems`.

    Besides OmegaConf's own interpolations there is `${from_processes:4,2}`: 2 where at least 4 processes run, else 1.
    """
    OmegaConf.register_new_resolver(
        "from_processes", lambda least, degree: degree if world >= least else 1, replace=True
    )
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([*problems.values(), f"{error.full_key}: {str(error).splitlines()[0]}"]) from None
    return typed.build_typed(typing.cast(dict, resolved), problems)


def _sentence(error: BaseException) -> str:
    """An error, or its cause where it says nothing itself, on one line."""
    return " ".join((str(error) or str(error.__cause__)).split())
