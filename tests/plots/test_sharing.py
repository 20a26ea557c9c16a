"""The picture of who computes what of a shared sequence."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(ROOT / "bench/sharing.py"))


def test_the_page_shows_who_holds_which_token(script):
    page = (ROOT / "docs/long_sequences.md").read_text()
    shown = dict(re.findall(r"^(contiguous|zigzag|blocks) +([0-3]{32})  ", page, re.MULTILINE))
    assert len(shown) == 3
    for order, text in shown.items():
        # Of the page's blocks each is a token, of the picture's two.
        tokens = script["holders"](order, 64).tolist()[::2]
        assert "".join(map(str, tokens)) == text


def test_every_pair_is_computed_once_and_balance_is_counted(script):
    panels = script["panels"]()
    assert len(panels) == 8
    for title, computed in panels.items():
        if "heads" in title:
            counts = [(computed == rank).sum().item() for rank in range(4)]
            assert len(set(counts)) == 1
            continue
        documents, window = "documents" in title, script["WINDOW"] * ("window" in title)
        assert ((computed >= 0) == script["pairs"](documents, window)).all()
        assert float(title.split(": ")[1]) == round(script["busiest"](computed), 2)
    balance = {title.split(":")[0]: script["busiest"](computed) for title, computed in panels.items()}
    assert balance["zigzag"] == 1.0 < balance["contiguous"]
    assert balance["blocks, documents"] < balance["zigzag, documents"] < balance["contiguous, documents"]


def test_it_is_drawn(script, tmp_path):
    script["main"](str(tmp_path / "sharing.png"))
    assert (tmp_path / "sharing.png").stat().st_size > 10_000
