"""The setting `imports`: modules of the user, which are run and register what they add."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import traceback
import types
import typing
from typing import Any

from trainer.config import typed
from trainer.config.fields import ConfigError
from trainer.config.registry import REGISTRIES, KindRegistry


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
