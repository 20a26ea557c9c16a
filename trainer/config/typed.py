"""Plain values into the typed configuration, with everything that is wrong found at once.

Hydra composes plain values; here they meet the dataclasses: names, types and legal values of every setting, at any
depth. A structured config inside Hydra would stop at the first mistake and let `+parallel.tpp=3` pass.

Why not pydantic: docs/decisions/01-settings.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from omegaconf import BooleanNode, FloatNode, IntegerNode, OmegaConf, StringNode, ValidationError

from trainer.config import synonyms
from trainer.config.fields import describe_outside, option, suggest_nearest
from trainer.config.model import LayerSpec
from trainer.config.registry import KindRegistry
from trainer.config.schema import Config, CorpusConfig, SourceConfig, TypePolicy

Problems = dict[str, str]
"""What is wrong, by setting."""

EMPTY: Mapping[str, Any] = types.MappingProxyType({})

LEAVES = {
    int: (IntegerNode, "a whole number"),
    float: (FloatNode, "a number"),
    bool: (BooleanNode, "true or false"),
    str: (StringNode, "text"),
}


@cache
def types_of(schema: type) -> dict[str, Any]:
    """The type of each field of a dataclass, by its name."""
    return typing.get_type_hints(schema)


@dataclass
class PatternEntry(LayerSpec):
    repeat: int = dataclasses.field(
        metadata=option(None, "layers in a row of this kind", unit="layers").metadata  # without a default
    )


# Settings that hold partial dataclasses: only the fields that are given count, so they stay mappings.
PARTIAL = {"model.pattern": PatternEntry, "model.overrides": LayerSpec, "precision.types.rules": TypePolicy}

ENTRIES: dict[str, tuple[str, type]] = {
    "data.sources": ("NAME", SourceConfig),
    "eval.sets": ("NAME", CorpusConfig),
    "model.pattern": ("PLACE", PatternEntry),
    "model.overrides": ("LAYER", LayerSpec),
    "precision.types.rules": ("PATTERN", TypePolicy),
}
"""Settings that hold any number of entries: what stands for the name of one, and what it is."""


class Setting(NamedTuple):
    """One leaf of the schema."""

    path: str
    default: Any
    doc: str
    choices: tuple | None
    unit: str | None
    range: str | None
    registry: KindRegistry | None
    hint: Any
    """Its type."""


def list_settings(section: Any = None, path: str = "") -> Iterator[Setting]:
    """Every setting of the schema, in its order, with those of what is registered."""
    section = Config() if section is None else section
    hints = types_of(type(section))  # type: ignore[arg-type]
    for field in dataclasses.fields(section):
        value, name = getattr(section, field.name), join_path(path, field.name)
        if dataclasses.is_dataclass(value):
            yield from list_settings(value, name)
        else:
            yield Setting(name, to_plain(value), **field.metadata, hint=hints[field.name])
            yield from _registered_settings(field, name)


def entry_settings(path: str) -> Iterator[Setting]:
    """Every setting of one entry of the setting `path`, which is in `ENTRIES`. Where what an entry leaves out stays as
    it is elsewhere, the default is null."""
    name, schema = ENTRIES[path]
    for setting in list_leaves(schema, join_path(path, name)):
        yield Setting(setting.path, None, *setting[2:]) if path in PARTIAL else setting


def list_leaves(schema: type, path: str) -> Iterator[Setting]:
    """Every setting of a dataclass."""
    hints = types_of(schema)
    for field in dataclasses.fields(schema):
        name, hint = join_path(path, field.name), hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from list_leaves(typing.cast(type, hint), name)
        else:
            yield Setting(name, _default(field), **field.metadata, hint=hint)
            yield from _registered_settings(field, name)


def _default(field: dataclasses.Field) -> Any:
    """Of a field, as plain data; None where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return to_plain(field.default_factory())
    return None if field.default is dataclasses.MISSING else field.default


def _registered_settings(field: dataclasses.Field, path: str) -> Iterator[Setting]:
    """The settings of what is registered, where a field holds such."""
    if registry := field.metadata.get("registry"):
        for name, entry in registry.registered.items():
            yield from list_leaves(entry.settings, join_path(path, name))


def out_of_range(section: Any, path: str = "") -> list[str]:
    """What is wrong with the values of a typed section that lie outside of their setting's range."""
    found = (describe_outside(*ranged) for ranged in _ranged(type(section), vars(section), path))
    return [text for text in found if text]


def _ranged(schema: type, values: dict[str, Any], path: str) -> Iterator[tuple[str, Any, str]]:
    """(setting, value, range) of each value that has a range, in entries of mappings and partial sections too."""
    hints = types_of(schema)
    for field in dataclasses.fields(schema):
        value, place, hint = values.get(field.name), join_path(path, field.name), hints[field.name]
        if value is None:
            continue
        if interval := field.metadata.get("range"):
            yield from ((place, item, interval) for item in (value if isinstance(value, list) else [value]))
        if registry := field.metadata.get("registry"):
            for name, entry in ((name, entry) for name, entry in value.items() if name in registry.registered):
                yield from _ranged(registry[name].settings, entry, join_path(place, name))
            continue
        kind = PARTIAL.get(place) or (typing.get_args(hint) or (hint,))[-1]
        if dataclasses.is_dataclass(kind):
            named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            entries = [(place, value)] if kind is hint else [(join_path(place, name), entry) for name, entry in named]
            for name, entry in entries:
                yield from _ranged(kind, entry if isinstance(entry, dict) else vars(entry), name)


def join_path(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def to_plain(value: Any) -> Any:
    """Dataclasses inside `value` as mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return {key: to_plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def flatten_values(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}."""
    return {
        name: leaf
        for key, value in values.items()
        for name, leaf in (
            flatten_values(value, f"{prefix}{key}.").items() if isinstance(value, dict) else [(prefix + key, value)]
        )
    }


def changed_settings(config: Any, base: Any) -> dict[str, Any]:
    """What a configuration sets otherwise than `base`, by the setting's name."""
    before, after = (flatten_values(dataclasses.asdict(one)) for one in (base, config))
    return {name: value for name, value in after.items() if value != before.get(name)}


def complete_values(section: Any, given: dict) -> dict:
    """`given` over the defaults of a dataclass instance, in the schema's order.

    Open mappings (`data.sources`) have no defaults here: what Hydra composed is all there is.
    """
    known = {}
    for field in dataclasses.fields(section):
        default, value = getattr(section, field.name), given.get(field.name)
        if dataclasses.is_dataclass(default) and isinstance(value, dict):
            known[field.name] = complete_values(default, value)
        else:
            known[field.name] = given.get(field.name, to_plain(default))
    return known | {name: value for name, value in given.items() if name not in known}


def to_yaml(config: Config) -> str:
    """The resolved configuration as text; `build_typed` of the parsed text is its inverse."""
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def choose_written(
    hint: Any, plain: Any, written: Any, problems: Problems, path: str = "", metadata: Mapping[str, Any] = EMPTY
) -> Any:
    """The values of a setting or section of type `hint`, in which texts have the characters that the user wrote.

    plain: the values as Hydra and YAML read them. written: the same, in which unquoted numbers and booleans of the
    command line are still texts. A text, or the name of an entry, that a YAML file has as a number or boolean has lost
    its characters and becomes a problem."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):  # Optional[T]
        hint = typing.get_args(hint)[0]
    origin, fields = typing.get_origin(hint), dict[str, tuple[Any, Mapping[str, Any]]]()
    item = PARTIAL.get(path, typing.get_args(hint)[-1]) if origin in (dict, list) else Any
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        fields = {field.name: (types_of(hint)[field.name], field.metadata) for field in dataclasses.fields(hint)}
    elif registry := metadata.get("registry"):
        fields = {name: (kind.settings, EMPTY) for name, kind in registry.registered.items()}
    if isinstance(plain, dict):
        chosen = {}
        for name, value in plain.items():
            place = join_path(path, str(name))
            if not (isinstance(name, str) or type(name) is int and path in PARTIAL):  # layers have numbers
                problems[place] = f"{place}: {explain_lost(name)}"
            its_type, its_metadata = fields.get(name, (item, EMPTY))
            chosen[str(name)] = choose_written(its_type, value, written[name], problems, place, its_metadata)
        return chosen
    if isinstance(plain, list):
        return [
            choose_written(item, *both, problems, join_path(path, str(number)))
            for number, both in enumerate(zip(plain, written))
        ]
    if hint is str and isinstance(written, (bool, int, float)) and not metadata.get("choices"):
        problems[path] = f"{path}={written}: {explain_lost(written)}"
    return written if hint is str else plain


def holds_number(path: str) -> bool:
    """Whether a setting is a number or a boolean."""
    numbers = (int, float, bool, int | None, float | None)
    return any(setting.path == path and setting.hint in numbers for setting in list_settings())


def explain_lost(value: Any) -> str:
    """What to say of a number or boolean that YAML has made of a text."""
    kind = "true or false" if isinstance(value, bool) else "a number"
    return f"a YAML file has a word here that YAML reads as {kind}; write it in quotes, such as 'no' or '1e3'"


def shorten_value(value: Any) -> str:
    """A value in a message, which may come from anybody's file: its beginning alone if it is long."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class InvalidValue(Exception):
    """A value that its setting cannot take."""


def build_typed(values: dict, problems: Problems, schema: type = Config, path: str = "") -> Any:
    """The typed configuration. What is wrong goes to `problems`, and the setting keeps its default."""
    return _convert(schema, values, path, problems)


def _convert(
    hint: Any, value: Any, path: str, problems: Problems, metadata: Mapping[str, Any] = EMPTY, partial: bool = False
) -> Any:
    """`value` as the type `hint`; raises `InvalidValue` where the whole of it is wrong."""
    choices = metadata.get("choices")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):  # Optional[T]
        hint = arguments[0]
        if value is None or (value == "auto" and hint is not str):
            return None
    if value == "???":
        raise InvalidValue(f"{path} has no value; set {path}=VALUE")
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _section(hint, value, path, problems, partial)
    if origin in (dict, list):
        if not isinstance(value, origin):
            kind = "mapping, such as {name: ...}" if origin is dict else "list, such as [a, b]"
            raise InvalidValue(f"{path}={shorten_value(value)} must be a {kind}")
        if registry := metadata.get("registry"):
            return _registered(registry, value, path, problems, partial)
        item, partial = PARTIAL.get(path, arguments[-1]), path in PARTIAL
        entries = value.items() if origin is dict else enumerate(value)
        converted = _collect(((str(key), item, entry, EMPTY) for key, entry in entries), path, problems, partial)
        return converted if origin is dict else list(converted.values())
    if hint is Any:
        return value
    if isinstance(value, bool) and choices is not None:  # which is what YAML takes a bare true, false or off for
        value = next((word for word in (str(value).lower(), "off" * (not value)) if word in choices), value)
    node, words = LEAVES[hint]
    whole = hint is int and isinstance(value, float) and value.is_integer()  # 20e9
    try:
        result = node().validate_and_convert(int(value) if whole else value)
    except (ValidationError, OverflowError):  # the latter for whole numbers beyond floats
        result = None
    if result is None or result != result:  # nan
        shown = "null" if value is None else shorten_value(value)
        wanted = f"one of {_list(choices)}" if choices else words
        if value is None and hint is str and not choices:
            wanted += "; put the word null in quotes where it is meant"
        raise InvalidValue(f"{path}={shown} must be {wanted}")
    if choices is not None and result not in choices:
        if removed := synonyms.REMOVED.get(f"{path}={result}"):
            raise InvalidValue(f"{path}={result} {removed}")
        close = difflib.get_close_matches(str(result), map(str, choices), 1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        more = "; imports=[PACKAGE] registers more" if isinstance(choices, KindRegistry) else ""
        raise InvalidValue(f"{path}={shorten_value(result)} is not one of {_list(choices)}{hint}{more}")
    return result


def _section(schema: type, values: Any, path: str, problems: Problems, partial: bool) -> Any:
    hints, fields = types_of(schema), {field.name: field for field in dataclasses.fields(schema)}
    if not isinstance(values, dict):
        example = f"one setting is {path}.{next(iter(fields))}=VALUE" if fields else f"it has none: {path}={{}}"
        raise InvalidValue(
            f"{path}={shorten_value(values)} must be a mapping of its settings ({_list(fields)}); {example}"
        )
    for name, value in values.items():
        if name not in fields:
            problems[join_path(path, name)] = describe_unknown(path, str(name), list(fields), value)
    values = values if partial else _with_chosen(fields, values)
    given = [name for name in fields if name in values]
    converted = _collect(
        ((name, hints[name], values[name], fields[name].metadata) for name in given), path, problems, partial
    )
    try:
        return converted if partial else schema(**converted)
    except ValueError as error:  # of a registered schema that compares its settings
        raise InvalidValue(f"{path}: {error}") from None


def _with_chosen(fields: dict[str, dataclasses.Field], values: dict) -> dict:
    """The values, in which something registered that is chosen has an entry with its settings, given or not."""
    for name, field in fields.items():
        choice = field.metadata.get("choices")
        if isinstance(choice, KindRegistry) and values.get(name) in choice.registered:
            for other in (other for other, its in fields.items() if its.metadata.get("registry") is choice):
                given = values.get(other) or {}
                values = values | {other: {values[name]: {}} | given if isinstance(given, dict) else given}
    return values


def _registered(registry: KindRegistry, values: dict, path: str, problems: Problems, partial: bool) -> dict[str, Any]:
    """Settings of what is registered, by its name: plain, with the defaults of those that are left out unless
    `partial`."""
    converted = {}
    for name, given in values.items():
        place = join_path(path, name)
        if name not in registry.registered:
            problems[place] = f"{place}: {registry.unknown(str(name))}"
            continue
        try:
            converted[name] = to_plain(_section(registry[name].settings, given, place, problems, partial))
        except InvalidValue as error:
            problems[place] = str(error)
    return converted


def _collect(
    entries: Iterable[tuple[str, Any, Any, Mapping[str, Any]]], path: str, problems: Problems, partial: bool
) -> dict[str, Any]:
    """Converts (name, type, value, metadata) one by one; what is invalid becomes a problem and is left out."""
    converted = {}
    for name, hint, value, metadata in entries:
        try:
            converted[name] = _convert(hint, value, join_path(path, name), problems, metadata, partial)
        except InvalidValue as error:
            problems[join_path(path, name)] = str(error)
    return converted


def _list(names: Iterable) -> str:
    return ", ".join(map(str, names))


def describe_unknown(path: str, name: str, names: list[str], value: Any = None) -> str:
    """Says that `path` has no `name`, and what was probably meant: a neighbour, or the same name in another section."""
    text = f"unknown setting '{join_path(path, name)}'"
    elsewhere = [setting.path for setting in list_settings() if setting.path.endswith(f".{name}")]
    elsewhere = [other for other in elsewhere if path and other.startswith(f"{path}.")] or elsewhere
    if known := synonyms.find_synonym(join_path(path, name)):
        text += f"; {known}"
    elif 0 < len(elsewhere) <= 3:
        text += "; did you mean " + " or ".join(map(repr, elsewhere)) + "?"
    elif close := difflib.get_close_matches(name, names, 1):
        text += f"; did you mean '{join_path(path, close[0])}'?"
    else:
        text += f"; {suggest_nearest(name, names)}"
    if not path and not known and isinstance(value, dict):
        text += " (a recipe, and a file of a group of one's own, starts with the line '# @package _global_')"
    return text


def is_setting(path: str) -> bool:
    """Whether the schema has a setting or section of this name."""
    return any(f"{setting.path}.".startswith(f"{path}.") for setting in list_settings())


def is_entry(path: str) -> bool:
    """Whether `path` names something inside an open mapping, such as `data.sources.stdlib`."""
    open_mappings = [setting.path for setting in list_settings() if isinstance(setting.default, dict)]
    return any(path.startswith(f"{mapping}.") for mapping in open_mappings)
