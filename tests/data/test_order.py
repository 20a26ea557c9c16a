"""The order of samples is a bijection per epoch, keeps to the weights, and is a function of the sample number alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.batches import SampleOrder, permute_index
from trainer.data.mixture import PERIOD, Mixture, MixtureStage, interleave_sources, source_shares


def order_of(names, lengths, given_weights, seed):
    mixture = Mixture.plan([MixtureStage(0, dict(zip(names, given_weights)))], {})
    return SampleOrder(names, lengths, mixture, seed)


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_permutation_is_a_bijection(length, key):
    result = permute_index(np.arange(length), length, np.full(length, key, np.uint64))
    assert np.array_equal(np.sort(result), np.arange(length))


def test_permutation_looks_random():
    length = 20_000
    first, second = (permute_index(np.arange(length), length, np.full(length, key, np.uint64)) for key in (1, 2))
    assert abs(np.corrcoef(np.arange(length), first)[0, 1]) < 0.03
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert abs(np.diff(first) == 1).mean() < 0.001


@given(weights)
@settings(max_examples=50, deadline=None)
def test_shares_of_a_period(given_weights):
    counts = source_shares(given_weights)
    assert counts.sum() == PERIOD and counts.min() >= 1
    assert (
        np.abs(counts / PERIOD - np.array(given_weights) / sum(given_weights)).max()
        <= (len(given_weights) + 2) / PERIOD
    )


@given(weights)
@settings(max_examples=30, deadline=None)
def test_every_prefix_keeps_to_the_weights(given_weights):
    counts = source_shares(given_weights)
    pattern, rank = interleave_sources(counts)
    for source, count in enumerate(counts):
        mine = pattern == source
        assert np.array_equal(rank[mine], np.arange(count)), "a source is read in rising order within a period"
        deviation = np.cumsum(mine) - np.arange(1, PERIOD + 1) * count / PERIOD
        assert np.abs(deviation).max() <= 1 + len(counts) / 2


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0.1, 5)), min_size=1, max_size=4), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_each_epoch_of_each_source_reads_all_of_it_once(sources, seed):
    lengths, given_weights = map(list, zip(*sources))
    order = order_of([f"s{number}" for number in range(len(sources))], lengths, given_weights, seed)
    source, index = order(np.arange(3000))
    for number, length in enumerate(lengths):
        read = index[source == number]
        for start in range(0, len(read) - length + 1, length):
            assert np.array_equal(np.sort(read[start : start + length]), np.arange(length))


def test_epochs_and_sources_and_seeds_differ():
    source, index = order_of(["a", "b"], [500, 500], [1, 1], 0)(np.arange(4000))
    first, second = index[source == 0][:500], index[source == 0][500:1000]
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, index[source == 1][:500])
    assert not np.array_equal(first, order_of(["a"], [500], [1], 1)(np.arange(500))[1])
    assert np.array_equal(first, order_of(["a"], [500], [1], 0)(np.arange(500))[1]), (
        "other sources do not change a source's order"
    )


@given(st.integers(0, 10**12), st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_any_window_is_the_same_as_one_by_one(start, count):
    order = order_of(["a", "b", "c"], [1000, 7, None], [5, 1, 2], 3)
    numbers = start + np.arange(count)
    together = np.stack(order(numbers))
    alone = np.concatenate([np.stack(order(numbers[at : at + 1])) for at in range(count)], axis=1)
    assert np.array_equal(together, alone)


def test_a_stream_is_read_in_its_own_order():
    source, index = order_of(["stream", "b"], [None, 9], [1, 3], 0)(np.arange(3 * PERIOD))
    assert np.array_equal(index[source == 0], np.arange((source == 0).sum()))
