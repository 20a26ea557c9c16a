"""How products are cut into tiles, by the waves in which they run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.kernels.experimental.tiles import TileShape, choose_tiles

H200 = TileShape(programs=116, copiers=16)


def test_a_product_that_waits_for_nothing_has_all_multiprocessors():
    # Tokens and width of `o` of an 8B model on two ranks: 1,024 tiles on 116 and on 132 multiprocessors.
    assert H200.tiles(4096, [4096], 2) == 1024
    assert (H200.waves(4096, [4096], 2, True), H200.waves(4096, [4096], 2, False)) == (9, 8)


def test_filled_is_the_share_of_places_that_hold_numbers():
    assert H200.filled(4096, [4096], 2, False) == pytest.approx(1024 / (8 * 132))
    assert H200.filled(100, [300], 1, True) == pytest.approx(100 * 300 / (116 * 128 * 256)), "edges count as empty"


@pytest.mark.parametrize(
    "tokens, widths, size, expected",
    [
        (4096, [14336], 2, (128, 256)),  # many waves: the tile that multiplies fastest
        (4096, [2048, 512, 512], 2, (128, 256)),
        (512, [1024], 8, (128, 128)),  # 128 tiles take two waves, 256 half as large ones three: one and a half
        (32, [14336], 2, (64, 256)),  # tiles of 128 rows would be three quarters empty
    ],
)
def test_the_cut_that_takes_the_least_time_in_whole_waves(tokens, widths, size, expected):
    chosen = choose_tiles(H200, tokens, widths, size, True)
    assert (chosen.rows, chosen.columns) == expected
    assert replace(chosen, rows=H200.rows, columns=H200.columns) == H200, "nothing else changes"
