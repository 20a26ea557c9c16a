"""The settings as JSON Schema (draft 7), with which editors complete and check recipes and the files of groups."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from trainer.config.fields import ConfigError, parse_bounds, suggest_nearest
from trainer.config.hardware import HardwareConfig
from trainer.config.schema import Config
from trainer.config.typed import PARTIAL, join_path

INTERPOLATION = {"type": "string", "pattern": r"^(\$\{.*\}|\?\?\?)$"}
"""What may stand in place of any value: another setting's, or none yet."""

DEFAULTS = {"type": "array", "description": "what this file builds on, in order; _self_ stands for the file itself"}

TYPES = {int: "integer", float: "number", bool: "boolean", str: ["string", "number"]}


def json_schema(section: str = "") -> dict[str, Any]:
    """The schema of a recipe, or of the files of one section's group. Raises `ConfigError` for an unknown section."""
    hints = typing.get_type_hints(Config) | {"hardware": HardwareConfig}
    if section and not dataclasses.is_dataclass(hints.get(section)):
        sections = [name for name, hint in hints.items() if dataclasses.is_dataclass(hint)]
        raise ConfigError(f"--schema {section}: there is no such section; {suggest_nearest(section, sections)}")
    schema = _value(hints[section] if section else Config, section, {})
    schema["properties"] = {"defaults": DEFAULTS, **schema["properties"]}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": section or "recipe", **schema}


def _value(hint: Any, path: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a value of type `hint` may be."""
    if registry := metadata.get("registry"):
        named = {name: _value(entry.settings, f"{path}.{name}", {}) for name, entry in registry.registered.items()}
        return {"type": "object", "properties": named, "additionalProperties": False}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        others = [{"type": "null"}] if arguments[0] is str else [{"type": "null"}, {"const": "auto"}]
        return {"anyOf": [_value(arguments[0], path, metadata), *others]}
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        fields = {field.name: _field(hints[field.name], path, field) for field in dataclasses.fields(hint)}
        return {"type": "object", "properties": fields, "additionalProperties": False}
    if origin in (dict, list):
        items = _value(PARTIAL.get(path, arguments[-1]), f"{path}.*", metadata)
        shape = (
            {"type": "object", "additionalProperties": items} if origin is dict else {"type": "array", "items": items}
        )
        return {"anyOf": [shape, INTERPOLATION]}
    if hint is Any:
        return {}
    legal = {"enum": list(metadata["choices"])} if metadata.get("choices") else {"type": TYPES[hint]}
    return {"anyOf": [legal | _limits(metadata.get("range")), INTERPOLATION]}


def _field(hint: Any, path: str, field: dataclasses.Field) -> dict[str, Any]:
    """A setting: what it may be, its meaning, unit and default."""
    described: dict[str, Any] = {}
    if doc := field.metadata.get("doc"):
        unit = field.metadata["unit"]
        described["description"] = f"{doc} (in {unit})" if unit else doc
    if field.default is not dataclasses.MISSING:
        described["default"] = field.default
    return described | _value(hint, join_path(path, field.name), field.metadata)


def _limits(interval: str | None) -> dict[str, float]:
    if interval is None:
        return {}
    low, high = parse_bounds(interval)
    limits = {"minimum" if interval[0] == "[" else "exclusiveMinimum": low}
    return limits | ({} if high == float("inf") else {"maximum" if interval[-1] == "]" else "exclusiveMaximum": high})
