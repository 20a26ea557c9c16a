"""How a setting is declared, what a wrong one is answered with, and the error that says so. Imports nothing of the
project."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
from collections.abc import Collection
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parents[1]

CONFIGS = HERE / "configs" if (HERE / "configs").is_dir() else HERE.parent / "configs"
"""The shipped groups and recipes: inside the package in a wheel, beside it in a checkout."""


def option(
    default: Any,
    doc: str,
    choices: Collection | None = None,
    unit: str | None = None,
    range: str | None = None,
    registry: Any = None,
) -> Any:
    """A documented setting: default, meaning, legal values and unit live here and nowhere else.

    choices: all legal values, or the `Registry` of their names; range: an interval as in mathematics, `[0, 1)` includes
    its lower bound alone; of a list, it holds for each item. registry: of a mapping, the `Registry` of what its entries
    are the settings of.
    """
    metadata = {"doc": doc, "choices": choices, "unit": unit, "range": range, "registry": registry}
    if isinstance(default, (list, dict)) or dataclasses.is_dataclass(default) and not isinstance(default, type):
        # A search makes hundreds of thousands of these, and a constructor is faster than a deep copy.
        fresh = type(default) if default == type(default)() else partial(copy.deepcopy, default)
        return field(default_factory=fresh, metadata=metadata)
    return field(default=default, metadata=metadata)


def parse_bounds(interval: str) -> tuple[float, float]:
    low, high = map(float, interval[1:-1].split(","))
    return low, high


def describe_outside(path: str, value: float, interval: str) -> str | None:
    """What is wrong with a value outside an interval such as `[0, 1)`; NaN lies in none."""
    low, high = parse_bounds(interval)
    if (low < value or interval[0] == "[" and value == low) and (value < high or interval[-1] == "]" and value == high):
        return None
    bound = "at least" if interval[0] == "[" else "above"
    words = f"lie in {interval}" if high < math.inf or value == high else f"be {bound} {low:g}"
    return f"{path}={value} must {words}"


def suggest_nearest(word: str, legal: list[str]) -> str:
    """`, did you mean 'x'?` when a legal name is close to `word`, else the list of legal names."""
    close = difflib.get_close_matches(str(word), [str(name) for name in legal], 1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else "legal: " + ", ".join(map(str, legal))


def list_divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(max(n, 0)) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def assign_fields(target: Any, values: dict[str, Any], path: str) -> None:
    """Sets fields of a (nested) dataclass from a mapping. Raises `ValueError` for a name that is no field."""
    fields = {f.name: f for f in dataclasses.fields(target)}
    for name, value in values.items():
        if name not in fields:
            raise ValueError(f"unknown field '{path}.{name}'; {suggest_nearest(name, list(fields))}")
        current = getattr(target, name)
        if dataclasses.is_dataclass(current) and isinstance(value, dict):
            assign_fields(current, value, f"{path}.{name}")
        elif fields[name].metadata.get("registry"):  # what several places say of one kind adds up
            setattr(target, name, current | {kind: current.get(kind, {}) | given for kind, given in value.items()})
        else:
            setattr(target, name, value)


class ConfigError(Exception):
    """One or several things that are wrong with a configuration; the command line prints them and exits with 2."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


# How much a YAML text may stand for. Aliases let a few lines stand for a billion values, which whoever copies them
# finds out late; and PyYAML takes half a minute to find that a text is nested too deeply. So a text is looked through
# first, by the parser's events alone.


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Plain data alone; in C where PyYAML was built with it."""

BYTES, VALUES, DEPTH = 1 << 20, 10_000, 50
"""Of one file, aliases counted as often as they are used; the largest shipped file has some 40 values."""


def check_yaml(content: bytes) -> None:
    """Raises `ValueError`, or `yaml.YAMLError`, for a text beyond the limits, or that cannot be parsed."""
    if len(content) > BYTES:
        raise ValueError(f"it has more than {BYTES} bytes")
    anchored: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # anchor, and values so far
    for event in yaml.parse(content.decode("utf-8-sig"), Loader=LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            if len(open_nodes) > DEPTH:
                raise ValueError(f"it is nested more than {DEPTH} deep")
            continue
        if isinstance(event, yaml.AliasEvent):
            anchor, values = None, anchored.get(str(event.anchor), 0)
            if not values:
                raise ValueError(f"*{event.anchor} stands for nothing, or for what it is a part of")
        elif isinstance(event, yaml.ScalarEvent):
            anchor, values = event.anchor, 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values = open_nodes.pop()
        else:
            continue
        if anchor:
            anchored[anchor] = values
        around, so_far = open_nodes[-1]
        open_nodes[-1] = around, so_far + values
        if so_far + values > VALUES:
            raise ValueError(f"it stands for more than {VALUES} values")


def yaml_fault(error: yaml.YAMLError) -> str:
    """What is wrong with a text and where, without the lines of it that PyYAML quotes."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())[:200]
    return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {str(error.problem)[:100]}"
