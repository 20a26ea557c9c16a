"""Mixtures over time: stages, limits of sources, and other weights when a run is resumed."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.batches import SampleOrder
from trainer.data.mixture import PERIOD, Mixture, MixtureStage

NAMES = ["a", "b", "c"]

weights_of = st.dictionaries(st.sampled_from(NAMES), st.floats(0.01, 5), min_size=1)
limits_of = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 400), max_size=3)


@st.composite
def stages_of(draw):
    starts = [0, *sorted(draw(st.sets(st.integers(1, 900), max_size=3)))]
    return [MixtureStage(start, draw(weights_of)) for start in starts]


def draw_samples(mixture, count):
    """Source and number in the source of the first samples."""
    source, index = mixture.locate(np.arange(count), NAMES)
    return [(NAMES[place], number) for place, number in zip(source.tolist(), index.tolist())]


@given(stages_of(), limits_of)
@settings(max_examples=120, deadline=None)
def test_every_source_is_read_in_order_within_its_limit_and_its_weights(stages, limits):
    mixture = Mixture.plan(stages, limits)
    count = min(1200, mixture.end if mixture.end is not None else 1200)
    read = dict.fromkeys(NAMES, 0)
    for number, (source, index) in enumerate(draw_samples(mixture, count)):
        weights = [stage.weights for stage in stages if stage.start <= number][-1]
        assert weights.get(source, 0) > 0, "a source without a weight is not read"
        assert index == read[source], "each source goes on where it stands"
        read[source] += 1
        assert read[source] <= limits.get(source, math.inf)
    assert {name: number for name, number in read.items() if number} == {
        name: number for name, number in mixture.consumed(count).items() if number
    }
    if mixture.end is not None and mixture.end < 1200:
        weights = [stage.weights for stage in stages if stage.start <= mixture.end][-1]
        assert all(read[name] == limits[name] for name in weights), "the data end only where nothing is left"


@given(stages_of(), limits_of, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_phase_keeps_to_its_weights(stages, limits, number):
    mixture = Mixture.plan(stages, limits)
    for phase, following in zip(mixture.phases, [*mixture.phases[1:], None]):
        end = following.start if following else phase.start + number * 100
        total = sum(
            [stage.weights for stage in stages if stage.start <= phase.start][-1][name] for name in phase.shares
        )
        for name, count in mixture.consumed(end, phase.start).items():
            share = [stage.weights for stage in stages if stage.start <= phase.start][-1][name] / total
            assert abs(count - (end - phase.start) * share) <= 1 + len(phase.shares) / 2 + 0.1


@given(stages_of(), limits_of, st.lists(st.integers(1, 1500), max_size=4))
@settings(max_examples=80, deadline=None)
def test_a_run_that_is_resumed_with_the_same_settings_draws_what_it_would_have_drawn(stages, limits, stops):
    whole = Mixture.plan(stages, limits)
    resumed = whole
    for position in sorted(stops):
        if whole.end is None or position < whole.end:
            resumed = Mixture.plan(stages, limits, Mixture.parse(json.loads(json.dumps(resumed.to_json()))), position)
    assert resumed == whole


@given(stages_of(), stages_of(), limits_of, st.integers(1, 1000))
@settings(max_examples=80, deadline=None)
def test_other_weights_take_every_source_on_from_where_it_stands(before, after, limits, position):
    old = Mixture.plan(before, {})
    new = Mixture.plan(after, limits, old, position)
    count = min(position + 500, new.end if new.end is not None else position + 500)
    samples = draw_samples(new, count)
    assert samples[:position] == draw_samples(old, position)
    read = {name: old.consumed(position).get(name, 0) for name in NAMES}
    for source, index in samples[position:]:
        assert index == read[source]
        read[source] += 1
        assert read[source] <= limits.get(source, math.inf)


def test_a_source_that_is_gone_and_comes_back_goes_on():
    first = Mixture.plan([MixtureStage(0, {"a": 1, "b": 1})], {})
    second = Mixture.plan([MixtureStage(0, {"a": 1})], {}, first, 100)
    third = Mixture.plan([MixtureStage(0, {"b": 1})], {}, Mixture.parse(second.to_json()), 150)
    source, index = third.locate(np.arange(150, 160), ["b"])
    assert index.tolist() == list(range(50, 60)) and not source.any()


def test_phases_longer_than_a_period():
    mixture = Mixture.plan([MixtureStage(0, {"a": 3, "b": 1}), MixtureStage(3 * PERIOD + 17, {"b": 1})], {"a": PERIOD})
    counted = mixture.consumed(4 * PERIOD)
    assert counted["a"] == PERIOD and sum(counted.values()) == 4 * PERIOD
    source, _ = mixture.locate(np.arange(4 * PERIOD), ["a", "b"])
    assert (source == 0).sum() == PERIOD and source[np.flatnonzero(source == 0)[-1] + 1 :].all()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        [[0]],
        [[1, {"a": PERIOD}]],
        [[0, {"a": PERIOD - 1}]],
        [[0, {"a": PERIOD}], [0, {"a": PERIOD}]],
        [[0, {"a": PERIOD + 1, "b": -1}]],
        [[0, {"a": float(PERIOD)}]],
        [[True, {"a": PERIOD}]],
        [[0, {"a": PERIOD}], [2**70, {"a": PERIOD}]],
    ],
)
def test_a_record_that_no_run_has_written_is_refused(value):
    with pytest.raises(ValueError):
        Mixture.parse(value)


def test_the_order_within_a_source_does_not_depend_on_the_mixture():
    def read(mixture, count):
        source, index = SampleOrder(NAMES, [50, 70, None], mixture, 3)(np.arange(count))
        return [index[source == place].tolist() for place in range(3)]

    plain = read(Mixture.plan([MixtureStage(0, dict.fromkeys(NAMES, 1.0))], {}), 900)
    staged = read(Mixture.plan([MixtureStage(0, {"a": 1}), MixtureStage(40, {"b": 2, "c": 1})], {"b": 100}), 300)
    for one, other in zip(plain, staged):
        shared = min(len(one), len(other))
        assert one[:shared] == other[:shared] and shared
