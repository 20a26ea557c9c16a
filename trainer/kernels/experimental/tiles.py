"""How a product is cut into tiles: what the kernels of `tensor_parallel.py` are compiled for, and which cut a product
takes by the waves in which its tiles run. Needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TileShape:
    """How a product is cut. rows, columns, step: of a tile, and along the sum; group: rows of tiles whose columns are
    taken together; programs: of a kernel that waits, one a multiprocessor; copiers: that send beside them, on the
    multiprocessors that are left, which a product that waits for nothing takes too; limit: looks at a flag before an
    error, 0 for no end."""

    rows: int = 128
    columns: int = 256
    step: int = 64
    group: int = 8
    programs: int = 112
    copiers: int = 16
    limit: int = 0
    warps: int = 8
    stages: int = 3

    def tiles(self, tokens: int, widths: Sequence[int], size: int) -> int:
        """Of the products of `tokens` of each of `size` ranks that are `widths` wide."""
        return size * -(-tokens // self.rows) * sum(-(-width // self.columns) for width in widths)

    def flags(self, tokens: int, width: int, size: int) -> int:
        """How many a product of `tokens` of a rank with a result `width` wide may need in a region."""
        return self.tiles(tokens, [width], size)

    def waves(self, tokens: int, widths: Sequence[int], size: int, waits: bool) -> int:
        """How many tiles come after each other on the busiest multiprocessor."""
        return -(-self.tiles(tokens, widths, size) // (self.programs + self.copiers * (not waits)))

    def filled(self, tokens: int, widths: Sequence[int], size: int, waits: bool) -> float:
        """Share of the places in all waves that hold numbers of the result: the rest are empty in the last wave, or
        stand out of the result at its edges."""
        tiles = self.waves(tokens, widths, size, waits) * (self.programs + self.copiers * (not waits))
        return size * tokens * sum(widths) / (tiles * self.rows * self.columns)


RATES = {(128, 256): 1.0, (128, 128): 0.85, (64, 256): 0.8}
"""Rows and columns of tiles that registers and shared memory hold, and how fast one multiplies beside the largest.
The second was measured with loads by TMA, 0.79 to 0.91 by shape
(bench/results/2026-11-tensor-parallel-h200-h100.md); the third is a guess by the numbers that a tile loads for each
1,024 products, which are 12, 16 and 20."""


def choose_tiles(base: TileShape, tokens: int, widths: Sequence[int], size: int, waits: bool) -> TileShape:
    """`base` with the tiles of `RATES` that take the least time in whole waves; the first of equals. Of tiles with
    twice as many rows as there are tokens, half would be loaded for nothing."""

    def seconds(tile: tuple[int, int]) -> float:
        shape = replace(base, rows=tile[0], columns=tile[1])
        return shape.waves(tokens, widths, size, waits) * tile[0] * tile[1] / RATES[tile]

    least = min(rows for rows, _ in RATES)
    rows, columns = min((tile for tile in RATES if tile[0] <= max(least, 2 * tokens - 1)), key=seconds)
    return replace(base, rows=rows, columns=columns)
