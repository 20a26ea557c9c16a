"""The setting `imports`: modules of the user, which are run and register what they add."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from trainer.config import typed
from trainer.config.fields import ConfigError
from trainer.config.registry import REGISTRIES


def load(names: Any) -> None:
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
    lines = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in lines if frame.filename != __file__ and "importlib" not in frame.filename]
    where = frames[-1] if frames else None
    syntax = error if isinstance(error, SyntaxError) else None
    return (
        f"{syntax.filename}, line {syntax.lineno}"
        if syntax
        else f"{where.filename}, line {where.lineno}"
        if where
        else "no line"
    )


def _wrong_settings(registry: Any) -> list[str]:
    """What is wrong with how settings are declared."""
    found = []
    for entry in registry.registered.values():
        of = f"settings of the {registry.kind} '{entry.name}' ({entry.home})"
        found += [f"{of}: {text}" for text in typed.wrong_schema(entry.settings)]
    return found
