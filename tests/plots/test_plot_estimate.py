"""The picture of an estimate: what is told by colour can be told apart, and what is drawn is what was predicted."""

from __future__ import annotations

from itertools import pairwise

import numpy
import pytest
from support.estimates import estimated, h200, settings, shipped

from trainer.planning.estimate.memory import CATEGORIES
from trainer.planning.estimate.step import GIB

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from trainer.plots.estimate import category_style, draw_memory_timeline

PROTAN = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
DEUTAN = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
"""What is seen of red, green and blue without the one or the other cone (Machado et al. 2009, severity 1)."""


def seen(colour: str, cones: list[list[float]]) -> numpy.ndarray:
    from matplotlib.colors import to_rgb

    linear = numpy.power(to_rgb(colour), 2.2)
    return numpy.clip(numpy.array(cones) @ linear, 0, 1) ** (1 / 2.2)


def test_neighbouring_parts_are_told_apart_under_colour_blindness():
    looks = [category_style(place) for place in range(len(CATEGORIES))]
    assert len({(one["facecolor"], one["hatch"]) for one in looks}) == len(looks)
    for one, other in pairwise(looks):
        for cones in (numpy.eye(3).tolist(), PROTAN, DEUTAN):
            assert numpy.abs(seen(one["facecolor"], cones) - seen(other["facecolor"], cones)).max() > 0.4, (one, other)


def test_what_is_drawn_is_what_is_predicted():
    changes = {"parallel__pp": 2, "parallel__zero__stage": 1, "batch__accumulation": 4, "batch__sequence_length": 1024}
    one = estimated(settings(shipped("llama_60m"), **changes), 4, h200())
    axes = Figure().subplots()
    draw_memory_timeline(axes, one)
    [marker] = [line for line in axes.lines if line.get_marker() == "v"]
    assert marker.get_ydata()[0] == pytest.approx(one.fullest.allocated / GIB)
