"""Small commands, `python -m trainer.NAME key=value ...`: a dataclass of documented options and a function."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from trainer.config.fields import ConfigError, suggest_nearest

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance

WEIGHTS = ("trained", "ema")
"""What there may be of a model in a checkpoint: the parameters as trained, or their average."""

Options = TypeVar("Options", bound="DataclassInstance")
KINDS = {int: "a whole number", float: "a number", list[str]: "a list [a,b]", list[float]: "a list of numbers [1,2]"}

ITEMS = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^,]*?))\s*(?:,|$)""")
"""The items of a list: in quotes of either kind, or up to the next comma."""


def parse_options(schema: type[Options], arguments: Sequence[str], words: Sequence[str] = ()) -> Options:
    """`key=value` arguments as an instance of `schema`; an option whose default is None has to be given.

    words: options that arguments without a key stand for, in this order; the first takes several if it is a list.
    Values are taken literally, spaces and all; those of a list stand in brackets, between commas, and may be quoted, as
    they have to be with commas, spaces at an end, or nothing in them. Raises `ConfigError` with everything that is
    wrong.
    """
    fields, hints = {f.name: f for f in dataclasses.fields(schema)}, typing.get_type_hints(schema)
    values: dict[str, Any] = {}
    problems: list[str] = []
    if words:
        plain = [argument for argument in arguments if "=" not in argument]
        arguments = [argument for argument in arguments if "=" in argument]
        first, *others = words
        if len(plain) > len(words) and typing.get_origin(hints[first]) is not list:
            problems.append(f"'{plain[len(words)]}' is one word too many; {' '.join(words)} can stand without a key")
        some = max(1, len(plain) - len(others)) if typing.get_origin(hints[first]) is list else 1
        if plain:
            values[first] = plain[:some] if typing.get_origin(hints[first]) is list else plain[0]
        values |= dict(zip(others, plain[some:]))
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name not in fields or not equals:
            problems.append(
                f"'{argument}' is not an option of the form key=value; {suggest_nearest(name, list(fields))}"
            )
            continue
        try:
            values[name] = _value(hints[name], text)
        except ValueError:
            problems.append(f"{name}={text} must be {KINDS[hints[name]]}")
            continue
        choices = fields[name].metadata["choices"]
        if choices and values[name] not in choices:
            problems.append(f"{name}={text} is not legal; {suggest_nearest(text, list(choices))}")
    given = {argument.partition("=")[0] for argument in arguments} | values.keys()
    problems += [
        f"{name}=... is needed: {field.metadata['doc']}"
        for name, field in fields.items()
        if field.default is None and name not in given
    ]
    if problems:
        raise ConfigError(problems)
    return schema(**values)


def _value(kind: Any, text: str) -> Any:
    """Raises `ValueError` for a text that is none of the kind."""
    if typing.get_origin(kind) is not list:
        return kind(text)
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError
    (item,) = typing.get_args(kind)
    parts = (match.groups() for match in ITEMS.finditer(text[1:-1]))
    return [item(next(part for part in groups if part is not None)) for groups in parts if groups != (None, None, "")]


def format_usage(schema: type[DataclassInstance], program: str, words: Sequence[str] = ()) -> str:
    def shown(field: dataclasses.Field) -> str:
        if field.name in words:
            return field.name.upper() + (" ..." if str(field.type).startswith("list") else "")
        default = [] if field.default is dataclasses.MISSING else field.default
        return f"{field.name}=..." if default is None else f"[{field.name}={default}]"

    lines = [f"usage: python -m {program} " + " ".join(map(shown, dataclasses.fields(schema))), ""]
    width = max(len(f.name) for f in dataclasses.fields(schema))
    for f in dataclasses.fields(schema):
        choices = f" ({', '.join(f.metadata['choices'])})" if f.metadata["choices"] else ""
        lines.append(f"  {f.name:<{width}}  {f.metadata['doc']}{choices}")
    return "\n".join(lines)


def escape_unprintable() -> None:
    """Makes the standard output write what its encoding lacks as escapes, as the standard error does, where it would
    raise: what commands print may come from anybody's files."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def run_command(
    schema: type[Options],
    action: Callable[[Options], Any],
    program: str,
    arguments: Sequence[str] | None = None,
    words: Sequence[str] = (),
) -> int:
    """Parses and runs; the exit code is 0, or 2 after one message on stderr about what is wrong with the options."""
    escape_unprintable()
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(format_usage(schema, program, words))
        return 0
    try:
        action(parse_options(schema, arguments, words))
    except ConfigError as error:
        print("\n".join(f"{program}: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    return 0
