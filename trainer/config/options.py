"""Small commands, `python -m trainer.NAME key=value ...`: a dataclass of documented options and a function."""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from trainer.config.fields import ConfigError, nearest

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")
KINDS = {int: "a whole number", float: "a number"}


def parse(schema: type[Options], arguments: Sequence[str]) -> Options:
    """`key=value` arguments as an instance of `schema`; an option whose default is None has to be given.

    Values are taken literally, spaces and all. Raises `ConfigError` with everything that is wrong.
    """
    fields, hints = {f.name: f for f in dataclasses.fields(schema)}, typing.get_type_hints(schema)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name not in fields or not equals:
            problems.append(f"'{argument}' is not an option of the form key=value; {nearest(name, list(fields))}")
            continue
        try:
            values[name] = hints[name](text)
        except ValueError:
            problems.append(f"{name}={text} must be {KINDS[hints[name]]}")
            continue
        choices = fields[name].metadata["choices"]
        if choices and values[name] not in choices:
            problems.append(f"{name}={text} is not legal; {nearest(text, list(choices))}")
    given = {argument.partition("=")[0] for argument in arguments}
    problems += [
        f"{name}=... is needed: {field.metadata['doc']}"
        for name, field in fields.items()
        if field.default is None and name not in given
    ]
    if problems:
        raise ConfigError(problems)
    return schema(**values)


def usage(schema: type[DataclassInstance], program: str) -> str:
    lines = [
        f"usage: python -m {program} "
        + " ".join(
            f"{f.name}=..." if f.default is None else f"[{f.name}={f.default}]" for f in dataclasses.fields(schema)
        ),
        "",
    ]
    width = max(len(f.name) for f in dataclasses.fields(schema))
    for f in dataclasses.fields(schema):
        choices = f" ({', '.join(f.metadata['choices'])})" if f.metadata["choices"] else ""
        lines.append(f"  {f.name:<{width}}  {f.metadata['doc']}{choices}")
    return "\n".join(lines)


def run_command(
    schema: type[Options], action: Callable[[Options], Any], program: str, arguments: Sequence[str] | None = None
) -> int:
    """Parses and runs; the exit code is 0, or 2 after one message on stderr about what is wrong with the options."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(usage(schema, program))
        return 0
    try:
        action(parse(schema, arguments))
    except ConfigError as error:
        print("\n".join(f"{program}: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    return 0
