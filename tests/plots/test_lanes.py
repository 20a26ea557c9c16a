"""Pictures of streams: products and transfers of a layer under each way of fusion."""

from __future__ import annotations

import itertools
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from trainer.plots.lanes import Bar, draw_lanes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        return runpy.run_path(str(ROOT / "bench/timelines.py"))
    finally:
        sys.path.remove(str(ROOT / "bench"))


def test_a_layer_is_as_long_as_was_measured_and_no_stream_does_two_things_at_once(script):
    measured = script["read"]((ROOT / "docs/kernels.md").read_text())
    assert list(measured) == ["q, k, v", "o", "gate, up", "down"]
    for way in ("off", "copy_engine", "triton"):
        bars = script["layer"](script[way], measured)
        for stream in (0, 1):
            own = sorted((bar for bar in bars if bar.stream == stream), key=lambda bar: bar.start)
            assert all(one.end <= other.start + 1e-9 for one, other in itertools.pairwise(own)), way
        assert max(bar.end for bar in bars) == pytest.approx(sum(getattr(one, way) for one in measured.values()))


def test_what_is_sent_was_multiplied_and_what_is_multiplied_has_come(script):
    one = script["Measured"](0.4, 1.0, 1.4, 1.4, 1.4)  # transfers that nothing hides
    gathered, reduced = (script["copy_engine"](name, one) for name in ("q, k, v", "o"))
    last_transfer = max(bar.end for bar in gathered if bar.kind == "transfer")
    assert max(bar.start for bar in gathered if bar.kind == "product") >= last_transfer
    first_product = min(bar.end for bar in reduced if bar.kind == "product")
    assert min(bar.start for bar in reduced if bar.kind == "transfer") >= first_product


def test_a_panel_a_variant_on_one_axis():
    bars = [Bar("product", 0, 0.0, 2.0, "o"), Bar("transfer", 1, 1.0, 3.0)]
    figure = draw_lanes({"before": bars, "after": bars[:1]}, ("products", "transfers"), "ms")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["before", "after"]
    assert [len(axes.patches) for axes in figure.axes] == [2, 1]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
