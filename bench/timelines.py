"""A picture of how each way of `parallel.fusion` puts products and transfers of a layer beside each other.

    python bench/timelines.py docs/kernels.md docs/timelines.png

Reads the measured milliseconds of the page's table (`bench/fusion.py OUT.jsonl only=layers`): of each product and each
collective by itself, and of both together by each way. Which part is done when follows from the way's order; a product
and its transfers are then stretched to what both together took. Attention, norms and activations between the products
are left out."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trainer.plots.files import save
from trainer.plots.lanes import Bar, draw_lanes

SUM = 0.024
"""Milliseconds in which 8,192 x 4,096 sums of two ranks in bf16 are added up by one of them, at a copy's rate."""
NAMES = {"8B q, k, v": "q, k, v", "8B o": "o", "8B gate, up": "gate, up", "8B down": "down"}
REDUCED = ("o", "down")


class Measured(NamedTuple):
    """Milliseconds: of the product and the collective alone, and of both by way."""

    product: float
    collective: float
    off: float
    copy_engine: float
    triton: float


def read(page: str) -> dict[str, Measured]:
    """By product, in the order of the layer."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in NAMES and len(cells) == 8 and all(re.fullmatch(r"[\d.]+", cell) for cell in cells[1:]):
            product, collective, off, _, copy_engine, triton, _ = map(float, cells[1:])
            found[NAMES[cells[0]]] = Measured(product, collective, off, off / copy_engine, off / triton)
    return {name: found[name] for name in NAMES.values()}


def off(name: str, one: Measured) -> list[Bar]:
    if name in REDUCED:
        return [Bar("product", 0, 0, one.product, name), Bar("transfer", 1, one.product, one.product + one.collective)]
    return [
        Bar("transfer", 1, 0, one.collective),
        Bar("product", 0, one.collective, one.collective + one.product, name),
    ]


def copy_engine(name: str, one: Measured) -> list[Bar]:
    half = one.product / 2
    if name in REDUCED:
        end = max(one.product, half + one.collective)
        products = [Bar("product", 0, 0, half, name), Bar("product", 0, half, one.product)]
        return [*products, Bar("transfer", 1, half, half + one.collective), Bar("sum", 0, end, end + SUM)]
    other = max(half, one.collective)
    products = [Bar("product", 0, 0, half, name), Bar("product", 0, other, other + half)]
    return [*products, Bar("transfer", 1, 0, one.collective)]


def triton(name: str, one: Measured) -> list[Bar]:
    if name in REDUCED:
        return [
            *(Bar("product", 0, 0, one.triton - SUM, name), Bar("transfer", 1, 0, one.triton - SUM)),
            Bar("sum", 0, one.triton - SUM, one.triton),
        ]
    return [Bar("transfer", 1, 0, min(one.collective, one.triton)), Bar("product", 0, 0, one.triton, name)]


def layer(way: Callable[[str, Measured], list[Bar]], measured: dict[str, Measured]) -> list[Bar]:
    """All products one after the other, each with its transfers as long as was measured of both."""
    found, at = [], 0.0
    for name, one in measured.items():
        bars = way(name, one)
        length = max(bar.end for bar in bars)
        total = getattr(one, way.__name__)
        for bar in bars:
            found.append(bar._replace(start=at + bar.start * total / length, end=at + bar.end * total / length))
        at += total
    return found


def main(page: str, out: str) -> None:
    measured, variants = read(Path(page).read_text()), {}
    before = sum(one.off for one in measured.values())
    for way in (off, copy_engine, triton):
        bars = layer(way, measured)
        end = max(bar.end for bar in bars)
        ratio = f": {before / end:.2f} x as fast" * (way is not off)
        variants[f"{way.__name__}: {end:.2f} ms{ratio}"] = bars
    save(draw_lanes(variants, ("products", "transfers"), "milliseconds"), Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
