"""Batch arithmetic: exact, whichever two sizes are given; what does not divide is refused with sizes that do."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import BatchConfig, ConfigError
from trainer.planning.plan import MICRO_TOKENS, BatchPlan, resolve_batch

sizes, lengths, ranks = st.integers(1, 48), st.integers(1, 9000), st.integers(1, 16)


@given(micro=sizes, accumulation=sizes, dp=ranks, length=lengths)
def test_any_sufficient_sizes_give_the_same_plan(micro, accumulation, dp, length):
    size = micro * accumulation * dp
    plan = BatchPlan(length, size, micro, accumulation)
    assert plan.tokens == size * length
    for total in (
        {"global_size": size},
        {"global_tokens": size * length},
        {"global_size": size, "global_tokens": size * length},
        {},
    ):
        for rest in (
            {"micro_size": micro},
            {"accumulation": accumulation},
            {"micro_size": micro, "accumulation": accumulation},
        ):
            if total or len(rest) == 2:
                assert resolve_batch(BatchConfig(sequence_length=length, **total, **rest), dp) == plan


@given(share=st.integers(1, 400), dp=ranks, length=lengths)
def test_micro_size_is_the_largest_that_divides_and_fits(share, dp, length):
    plan = resolve_batch(BatchConfig(sequence_length=length, global_size=share * dp), dp)
    assert plan.global_size == share * dp == plan.micro_size * plan.accumulation * dp
    assert plan.micro_size == max(
        n for n in range(1, share + 1) if share % n == 0 and (n == 1 or n * length <= MICRO_TOKENS)
    )


@given(length=lengths, dp=ranks, accumulation=st.none() | sizes, micro=st.none() | sizes)
def test_without_a_global_size_the_rest_decides_it(length, dp, accumulation, micro):
    plan = resolve_batch(BatchConfig(sequence_length=length, micro_size=micro, accumulation=accumulation), dp)
    assert plan.micro_size == (micro or max(1, MICRO_TOKENS // length)) and plan.accumulation == (accumulation or 1)
    assert plan.global_size == plan.micro_size * plan.accumulation * dp


@given(
    size=st.integers(1, 300),
    length=st.integers(1, 64),
    dp=ranks,
    micro=st.none() | sizes,
    accumulation=st.none() | sizes,
    tokens=st.booleans(),
)
def test_never_rounded_and_named_sizes_are_legal(size, length, dp, micro, accumulation, tokens):
    total = {"global_tokens": size * length} if tokens else {"global_size": size}
    given_sizes = dict(sequence_length=length, micro_size=micro, accumulation=accumulation, **total)
    unit = (micro or 1) * (accumulation or 1) * dp
    try:
        plan = resolve_batch(BatchConfig(**given_sizes), dp)
    except ConfigError as error:
        assert size != unit if micro and accumulation else size % unit
        (text,) = error.problems
        for name, values in re.findall(r"batch\.(\w+)=(\d+(?: or \d+)*)", re.split("legal: |; set ", text)[1]):
            for value in values.split(" or "):
                resolve_batch(BatchConfig(**{**given_sizes, name: int(value)}), dp)
    else:
        assert plan.global_size == size == plan.micro_size * plan.accumulation * dp
        assert micro in (None, plan.micro_size) and accumulation in (None, plan.accumulation)


@pytest.mark.parametrize(
    "batch, dp, words",
    [
        (dict(global_size=10), 4, ["batch.global_size=10", "4 data-parallel ranks", "batch.global_size=8 or 12"]),
        (dict(global_size=3), 4, ["batch.global_size=4"]),
        (
            dict(global_size=24, micro_size=5),
            2,
            ["batch.micro_size=5 x 2 data-parallel ranks = 10", "20 or 30", "batch.micro_size=4 or 6"],
        ),
        (dict(global_size=24, accumulation=5), 1, ["batch.accumulation=5", "20 or 25", "batch.accumulation=4 or 6"]),
        (
            dict(global_size=24, micro_size=2, accumulation=5),
            2,
            ["is not batch.micro_size=2 x batch.accumulation=5 x 2", "batch.global_size=20"],
        ),
        (dict(global_tokens=1000, sequence_length=64), 1, ["batch.global_tokens=1000", "960 or 1024"]),
        (
            dict(global_tokens=1024, sequence_length=64),
            3,
            ["batch.global_tokens=1024 (16 sequences)", "batch.global_tokens=960 or 1152"],
        ),
        (
            dict(global_tokens=1024, global_size=8, sequence_length=64),
            1,
            ["batch.global_size=8", "512 tokens", "batch.global_tokens=1024"],
        ),
    ],
)
def test_errors_name_sizes_and_neighbours(batch, dp, words):
    with pytest.raises(ConfigError) as caught:
        resolve_batch(BatchConfig(**batch), dp)
    for word in words:
        assert word in str(caught.value)


def test_all_sizes_below_one_at_once():
    with pytest.raises(ConfigError) as caught:
        resolve_batch(BatchConfig(sequence_length=0, global_size=-4, micro_size=0), 1)
    assert [text.split("=")[0] for text in caught.value.problems] == [
        "batch.sequence_length",
        "batch.global_size",
        "batch.micro_size",
    ]
