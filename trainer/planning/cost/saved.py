"""Entries of `activation.save`: which operations of which layers selective recompute keeps.

An entry is OPERATION[/N][@LAYERS]. OPERATION: `attention` (its kernel), `matmul` (products of linear layers), products
by the name of their layer (`attention.q`, `feed_forward.*`), a torch operator (`aten.mm`), or `all`, with which a layer
recomputes nothing. N: every N-th call of it. LAYERS: `7`, `4-31`, or `1-31/2`, every second of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from trainer.config import ConfigError

ALL = "all"
MATMULS = ("matmul", "aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_mm")
"""Names that mean every product of a layer."""

FORM = re.compile(r"(?P<name>[^/@\s]+)(/(?P<every>[1-9]\d*))?(@(?P<first>\d+)(-(?P<last>\d+)(/(?P<step>[1-9]\d*))?)?)?")


class SaveEntry(NamedTuple):
    """name: of the operation; every: which of its calls are kept, the last of so many; layers: None means all."""

    name: str
    every: int
    layers: range | None

    def products(self, names: Sequence[str]) -> list[str]:
        """Of a layer's products, in the order in which they run, those that are kept."""
        return match_operations(self.name, tuple(names))[self.every - 1 :: self.every]


@lru_cache(4096)
def match_operations(name: str, products: tuple[str, ...]) -> list[str]:
    """The products of a layer that a name means."""
    return [product for product in products if name in MATMULS or fnmatchcase(product, name)]


@lru_cache(4096)
def parse_entry(entry: str) -> SaveEntry:
    """Raises `ConfigError`."""
    if (found := FORM.fullmatch(entry)) is None:
        raise ConfigError(
            f"activation.save: '{entry}' names no operation; write OPERATION, OPERATION/2 for every second call, "
            "OPERATION@4-31 for some layers, OPERATION@1-31/2 for every second of them"
        )
    name, every, first, last, step = found.group("name", "every", "first", "last", "step")
    layers = None if first is None else range(int(first), int(last or first) + 1, int(step or 1))
    if layers is not None and not layers:
        raise ConfigError(f"activation.save: '{entry}' names no layer; write the smaller number first")
    return SaveEntry(name, int(every or 1), layers)


def entry_problems(save: Sequence[str], depth: int | None = None) -> Iterator[str]:
    """What is wrong with entries for a model of `depth` layers, if that is known."""
    for entry in save:
        try:
            layers = parse_entry(entry).layers
        except ConfigError as error:
            yield from error.problems
            continue
        if depth is not None and layers is not None and layers[-1] >= depth:
            yield f"activation.save: '{entry}' names layers that are not there; the model has 0 to {depth - 1}"


def saved_in(save: Sequence[str], layer: int) -> tuple[SaveEntry, ...]:
    """The entries that hold for a layer, as entries for every layer: equal where two layers keep the same."""
    entries = (parse_entry(entry) for entry in save)
    return tuple(SaveEntry(name, every, None) for name, every, layers in entries if layers is None or layer in layers)


def by_layer(save: Sequence[str]) -> bool:
    """Whether some layers keep other operations than others."""
    return any(parse_entry(entry).layers is not None for entry in save)


def entries_of(kept: Sequence[Collection[str]], order: Sequence[str]) -> list[str]:
    """The entries with which each layer keeps the operations `kept` of it, and no others. order: of all operations."""
    where = {name: [layer for layer, names in enumerate(kept) if name in names] for name in order}
    entries: dict[str, list[int]] = {}
    for name, layers in where.items():
        block = name.partition(".")[0]
        products = [other for other in order if other.startswith(f"{block}.")]
        together = name in products and all(where[other] == layers for other in products)
        entries[f"{block}.*" if together else name] = layers
    everywhere = len(kept)
    return [
        text
        for name, layers in entries.items()
        for text in ([name] if len(layers) == everywhere else (f"{name}@{part}" for part in format_layers(layers)))
    ]


def format_layers(layers: Sequence[int]) -> Iterator[str]:
    """Layers in ascending order as few texts, as an entry has them."""
    for piece in split_ranges(layers):
        many = f"-{piece[-1]}" + f"/{piece.step}" * (piece.step > 1)
        yield f"{piece[0]}" + many * (len(piece) > 1)


def split_ranges(layers: Sequence[int]) -> Iterator[range]:
    """The same as ranges: of neighbours, or else with the step to the next."""
    start = 0
    while start < len(layers):
        step = layers[start + 1] - layers[start] if start + 1 < len(layers) else 1
        stop = start + 1
        while stop < len(layers) and layers[stop] - layers[stop - 1] == step:
            stop += 1
        if step > 1 and stop - start == 2:  # two that are apart
            stop -= 1
        yield range(layers[start], layers[stop - 1] + 1, step)
        start = stop
