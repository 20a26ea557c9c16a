"""How much a YAML text may stand for.

Aliases let a few lines stand for a billion values, which whoever copies them finds out late; and PyYAML takes half a
minute to find that a text is nested too deeply. So a text is looked through first, by the parser's events alone."""

from __future__ import annotations

import yaml

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
