"""YAML groups, recipes and overrides become plain values, and those the typed `Config`.

Hydra composes plain values (`configs/`, the user's folder, its override grammar); `typed.py` gives them their types.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import CommonTokenStream, InputStream, OverrideLexer  # type: ignore[attr-defined]
from hydra.grammar.gen.OverrideParser import OverrideParser
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config, typed
from trainer.config.fields import BYTES, CONFIGS, ConfigError, check_yaml, suggest_nearest, yaml_fault
from trainer.config.registry import REGISTRIES, KindRegistry
from trainer.config.synonyms import SETTINGS

# The setting `imports`: modules of the user, which are run and register what they add.


def import_modules(names: Any) -> None:
    """Imports the modules, which are looked for where Python looks and in the current folder. Raises `ConfigError` for
    what cannot be imported, and for settings that are declared wrongly. What is no list of names is left to the
    types."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return
    if names and not {"", os.getcwd()} & set(sys.path):  # an installed command does not look there by itself
        sys.path.append(os.getcwd())
    for name in names:
        _load(name)
    problems = [text for registry in REGISTRIES for text in _wrong_settings(registry)]
    if problems:
        raise ConfigError(problems)


def _load(name: str) -> None:
    setting = f"imports=[{name}]"
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"{setting}: '{name}' is no name of a module; name it as Python's import does, such as my_package.hooks"
        )
    try:
        importlib.import_module(name)
    except ConfigError as error:
        raise ConfigError([f"{setting}: {problem}" for problem in error.problems]) from error
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{setting}: there is no module '{error.name}' in this environment or in {os.getcwd()}; install its "
                "package, or start from the folder that holds it (or put that on PYTHONPATH)"
            ) from None
        place = _last_own_line(error)
        raise ConfigError(
            f"{setting}: {type(error).__name__}: {error} ({place}); mend the module, or leave it out of imports"
        ) from error


def _last_own_line(error: Exception) -> str:
    """File and line where the import broke, but for Python's own machinery."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    last = (theirs or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def _wrong_settings(registry: KindRegistry) -> list[str]:
    """What is wrong with how settings are declared."""
    found = []
    for entry in registry.registered.values():
        of = f"settings of the {registry.kind} '{entry.name}' ({entry.home})"
        found += [f"{of}: {text}" for text in _wrong_schema(entry.settings)]
    return found


def _wrong_schema(schema: Any) -> list[str]:
    """What is wrong with a dataclass of settings, its defaults included."""
    if not isinstance(schema, type) or not dataclasses.is_dataclass(schema):
        return [f"{schema!r} is no dataclass"]
    try:
        hints = typing.get_type_hints(schema)
    except NameError as error:
        return [f"{error}; declare {schema.__name__} and the types of its fields at the top of a module"]
    problems: typed.Problems = {}
    for field in dataclasses.fields(schema):
        if "doc" not in field.metadata:
            problems[field.name] = f"{field.name} has no meaning; write {field.name}: TYPE = option(DEFAULT, 'meaning')"
        elif not _known(hints[field.name]):
            kinds = "int, float, bool, str, lists and mappings of them, each with or without None"
            problems[field.name] = f"{field.name} is of type {hints[field.name]}; legal: {kinds}"
    if problems:
        return list(problems.values())
    try:
        typed.build_typed(typed.to_plain(schema()), problems, schema)
        return [*problems.values(), *typed.out_of_range(schema())]
    except ValueError as error:  # of a schema that compares its settings
        return [f"its defaults: {error}"]


def _known(hint: Any) -> bool:
    """Whether a value can be checked against a type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        first, *others = typing.get_args(hint)
        return _known(first) and others == [type(None)]
    if typing.get_origin(hint) in (list, dict):
        return _known(typing.get_args(hint)[-1])
    return hint in (*typed.LEAVES, Any)


# The user's YAML files, as Hydra reads them: plain values, within limits, since a recipe may come from somebody else.


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


# Hydra's grammar turns an unquoted 12e4567 into infinity, and a key 1e3 into 1000.0, before the type of the setting is
# known. So each override is read twice: as Hydra reads it, and with the characters that were written. Which of the two
# holds for a setting is decided by its type (`typed.choose_written`).


class PlainValues(HydraOverrideVisitor):
    """Reads the tree of an override as Hydra does, but keys of mappings are always texts."""

    def visitDictKey(self, ctx: Any) -> str:
        key = super().visitDictKey(ctx)
        return key if isinstance(key, str) else ctx.getText().strip(" \t")


class WrittenValues(PlainValues):
    """Reads unquoted numbers and booleans as the characters that were written."""

    def visitPrimitive(self, ctx: Any) -> Any:
        value = super().visitPrimitive(ctx)
        return ctx.getText().strip(" \t") if isinstance(value, (bool, int, float)) else value

    def visitFunction(self, ctx: Any) -> Any:
        try:
            return super().visitFunction(ctx)
        except HydraException:  # `range` takes numbers only
            return PlainValues(self.functions).visitFunction(ctx)


def read_override(text: str) -> tuple[Override, Override]:
    """An override that Hydra's grammar accepts, as Hydra reads it and as it was written."""
    parser, functions = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(text)))), create_functions()
    tree = parser.override()
    plain, written = (kind(functions).visit(tree) for kind in (PlainValues, WrittenValues))
    plain.input_line = written.input_line = text
    return plain, plain if plain.is_delete() else written


# Hydra's loader of groups and recipes, over a folder of the user's and the shipped one. Hydra's own settings (the
# node `hydra`: job logging, launchers, output folders) have no effect on what is composed here, and to load and merge
# them takes longer than everything else. So this loader leaves them out.


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

    def compose(self, overrides: list[str]) -> tuple[DictConfig, DictConfig]:
        """The main file with its groups, recipes and overrides, interpolations unresolved: with the overrides as Hydra
        reads them, and as they were written. Raises what Hydra and OmegaConf raise."""
        parsed, repository = self._parse_overrides_and_create_caching_repo(MAIN, overrides)
        chosen = create_defaults_list(repository, MAIN, parsed, prepend_hydra=False, skip_missing=False)
        composed = self._compose_config_from_defaults_list(chosen.defaults, repository)
        OmegaConf.set_struct(composed, True)
        both = composed, copy.deepcopy(composed)
        readings = [read_override(str(override.input_line)) for override in chosen.config_overrides]
        for config, applied in zip(both, zip(*readings)):
            self._apply_overrides_to_config([*applied], config)
        return both


SWEEP = "several values are a sweep, which --multirun runs, a trial each"


def gather_values(overrides: Sequence[str], config_dir: str | os.PathLike | None) -> tuple[dict, typed.Problems]:
    """Plain values of all settings, interpolations unresolved, and the overrides that had to be left out. What
    `imports` names has then been imported.

    Raises `ConfigError` where Hydra cannot compose what is left.
    """
    problems: typed.Problems = {}
    with hydra_over(config_dir) as loader:
        groups = [group for group in loader.names("", ObjectType.GROUP) if group not in ("hydra", "hardware")]
        accepted = [text for override in overrides if (text := _accept(override, loader, groups, problems))]
        if sum(text.startswith("+config=") for text in accepted) > 1:
            problems["config"] = "+config is given more than once; write several recipes as one list, +config=[a,b]"
        try:
            composed = loader.compose(accepted)
        except RecursionError:
            raise ConfigError(
                "the defaults list of a recipe or option leads back to the file itself, since files of --config-dir "
                "win over shipped ones of the same name; give the file another name"
            ) from None
        except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
            raise ConfigError([*problems.values(), _sentence(error)]) from None
    plain, written = (typing.cast(dict, OmegaConf.to_container(config)) for config in composed)
    plain.pop("hydra", None)
    try:
        import_modules(written.get("imports"))  # before names and types are looked at
    except ConfigError as error:
        raise ConfigError([*problems.values(), *error.problems]) from error
    values = typed.choose_written(Config, plain, written, problems)
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


def _accept(override: str, loader: ConfigLoader, groups: list[str], problems: typed.Problems) -> str | None:
    """The override as Hydra shall see it; None, and a problem, if it can mean nothing."""
    if override.find("=") < 1 and not override.startswith("~"):
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
        return _choose(key, read_override(override)[1].value(), override, loader, groups, problems)
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
    hint = f"did you mean {' or '.join(ways)}?" if ways else f"recipes: {some}, and those of trainer --help"
    return f"'{word}' is not SETTING=VALUE, GROUP=OPTION or +config=RECIPE; {hint}"


def _path(given: str, group: str, groups: list[str]) -> str:
    """What to say of a path where the name of a recipe, or of a group's option, is expected."""
    path, folder, put = Path(given), Path("FOLDER"), f"put it into FOLDER/{group}/ and "
    if path.parent.name in ("config", *groups):
        group, folder, put = path.parent.name, path.parent.parent, ""
    plus, kind = ("+", "a recipe") if group == "config" else ("", f"an option of {group}")
    return f"{given}: {kind} is named, not given as a path; {put}say --config-dir {folder} {plus}{group}={path.stem}"


def _choose(
    group: str, chosen: Any, override: str, loader: ConfigLoader, groups: list[str], problems: typed.Problems
) -> str | None:
    """The override that chooses options of a group, with the + that Hydra asks for where the group has no default."""
    options, several = loader.names(group), chosen if isinstance(chosen, list) else [chosen]
    for option in several:
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
    names = ",".join(quote_value(str(option)) for option in several)  # Hydra takes no option that looks like a number
    named = f"{override.lstrip('+').partition('=')[0]}=[{names}]"
    return named if group in _chosen_by_default() else f"+{named}"


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
