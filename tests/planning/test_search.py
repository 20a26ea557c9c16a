"""Splits of the model into stages, and the search over schedules, micro-batches and splits."""

from __future__ import annotations

import itertools

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainer.config import ConfigError
from trainer.planning.schedules import search as searching
from trainer.planning.schedules.costs import (
    LayerCosts,
    balance_ranks,
    even_split,
    explicit_split,
    from_sizes,
    partition_layers,
)
from trainer.planning.schedules.lower import validate_schedule
from trainer.planning.schedules.search import SearchSpace, makespan_bound, reorder_actions, search_schedules
from trainer.planning.schedules.simulate import simulate_schedule
from trainer.planning.schedules.templates import TEMPLATES, build_schedule, place_stages


def costs(
    layers: list[float], head: float = 0.0, embedding: float = 0.0, activation: list[float] | None = None, **rest
) -> LayerCosts:
    """Layers whose F, I and W take as long as each other."""
    units = (embedding, *layers, head)
    return LayerCosts(f=units, i=units, w=units, activation=(0.0, *(activation or [1.0] * len(layers)), 0.0), **rest)


def splits(depth: int, stages: int) -> list[tuple[range, ...]]:
    """All splits into stages of at least one layer."""
    return [
        from_sizes([b - a for a, b in itertools.pairwise((0, *cuts, depth))])
        for cuts in itertools.combinations(range(1, depth), stages - 1)
    ]


def stage_costs(layers: LayerCosts, split: tuple[range, ...]) -> list[float]:
    stage = layers.stage(split)
    return [f + b for f, b in zip(stage.f, stage.b)]


def largest_rank(layers: LayerCosts, split: tuple[range, ...], placement: tuple[int, ...]) -> float:
    return max(
        sum(cost for cost, rank in zip(stage_costs(layers, split), placement) if rank == mine) for mine in placement
    )


numbers = st.integers(0, 20).map(float)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(1, 5), numbers, numbers)
def test_partition_equals_brute_force(data, depth, stages, head, embedding):
    """Largest stage cost, then the sum of squares."""
    assume(stages <= depth)
    layers = costs(data.draw(st.lists(numbers, min_size=depth, max_size=depth)), head, embedding)

    def score(split: tuple[range, ...]) -> tuple[float, float]:
        each = stage_costs(layers, split)
        return max(each), sum(cost**2 for cost in each)

    assert score(partition_layers(layers, stages)) == min(map(score, splits(depth, stages)))


def test_partition_counts_embedding_and_head():
    assert partition_layers(costs([1.0] * 8), 4) == even_split(8, 4)
    assert [len(part) for part in partition_layers(costs([1.0] * 8, head=2.0), 4)] == [2, 2, 3, 1]
    assert [len(part) for part in partition_layers(costs([1.0] * 8, head=2.0, embedding=2.0), 4)] == [1, 3, 3, 1]


def test_partition_breaks_ties_towards_equal_costs():
    assert [len(part) for part in partition_layers(costs([4, 1, 1, 1, 1]), 3)] == [1, 2, 2]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.1, 3), min_size=4, max_size=8), st.floats(0, 6))
def test_balancing_ranks_never_makes_the_largest_worse(seconds, head):
    layers, placement = costs(seconds, head), place_stages(2, 2, "v")
    split = partition_layers(layers, 4)
    balanced = partition_layers(layers, 4, placement)
    least = min(largest_rank(layers, other, placement) for other in splits(len(seconds), 4))
    assert (
        least * (1 - 1e-9)
        <= largest_rank(layers, balanced, placement)
        <= largest_rank(layers, split, placement) * (1 + 1e-9)
    )
    assert balanced == balance_ranks(layers, split, placement)


def test_balancing_ranks_gives_the_rank_with_the_head_fewer_layers():
    """In a V the rank with the head holds the first layers too."""
    layers, placement = costs([1.0] * 16, head=3.0), place_stages(4, 2, "v")
    balanced = partition_layers(layers, 8, placement)
    assert largest_rank(layers, partition_layers(layers, 8), placement) > 15.5
    assert largest_rank(layers, balanced, placement) == 15 and min(map(len, balanced)) >= 1


@pytest.mark.parametrize(
    "sizes, depth, stages, text",
    [
        ([2, 2], 4, 3, "has 2 entries"),
        ([2, 2, 1], 4, 3, "adds up to 5 layers"),
        ([4, 0, 0], 4, 3, "at least one layer"),
        ([2.0, 1, 1], 4, 3, "at least one layer"),
        ([-1, 3, 2], 4, 3, "at least one layer"),
    ],
)
def test_explicit_splits_are_checked(sizes, depth, stages, text):
    with pytest.raises(ConfigError, match=r"parallel\.pipeline\.split=\[.*legal: for example \[2,1,1\]") as error:
        explicit_split(sizes, depth, stages)
    assert text in str(error.value)


def test_explicit_and_even_splits():
    assert explicit_split([1, 2, 1], 4, 3) == (range(0, 1), range(1, 3), range(3, 4))
    assert [len(part) for part in even_split(10, 4)] == [3, 3, 2, 2]
    with pytest.raises(ConfigError, match="parallel.pp x parallel.pipeline.chunks=5 stages, but model.depth=4"):
        partition_layers(costs([1.0] * 4), 5)


UNBALANCED = costs([1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 2.0], head=2.5, transfer=0.1, host=0.01)


def test_search_finds_the_best_of_brute_force():
    """Over all templates, chunks and micro-batches with every split there is; greedy schedules may only do better."""
    ranks, samples = 2, 4
    best = float("inf")
    for name, template in TEMPLATES.items():
        for chunks in template.chunks or (1, 2):
            for count in (1, 2, 4):
                try:
                    schedule = build_schedule(name, ranks, count, chunks)
                except ConfigError:
                    continue
                layers = UNBALANCED.scaled(samples / count)
                best = min(
                    best,
                    *(
                        simulate_schedule(schedule, layers.stage(split)).makespan
                        for split in splits(8, schedule.stages)
                    ),
                )
    templates = search_schedules(
        UNBALANCED.scaled, ranks, samples, space=SearchSpace(schedules=tuple(TEMPLATES), chunks=(1, 2))
    )
    assert templates.predicted.makespan == pytest.approx(best)
    assert search_schedules(UNBALANCED.scaled, ranks, samples).predicted.makespan <= best * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0.2, 3), min_size=6, max_size=6), st.floats(0, 5))
def test_pruning_loses_nothing(seconds, head):
    """With the split fixed, the search equals simulating everything."""
    layers, split = costs(seconds, head), from_sizes([2, 1, 2, 1])
    best = min(
        simulate_schedule(build_schedule(name, 2, count, 2), layers.scaled(6 / count).stage(split)).makespan
        for name in ("interleaved", "zb_v", "v_half", "v_min", "dualpipe_v")
        for count in (2, 3, 6)
    )
    found = search_schedules(
        layers.scaled, 2, 6, space=SearchSpace(schedules=tuple(TEMPLATES), split=split, microbatches=(2, 3, 6))
    )
    assert found.predicted.makespan == pytest.approx(best, rel=1e-5)
    assert found.split == split and found.chunks == 2


def test_bounds_are_below_every_makespan(monkeypatch):
    seen = []
    original = searching.ScheduleSearch.consider

    def consider(self, name, setup, schedule):
        makespan = simulate_schedule(schedule, setup.costs).makespan
        splits = any(action.kind == "W" for order in schedule.orders for action in order)
        assert makespan_bound(setup, splits) <= makespan * (1 + 1e-9)
        seen.append((name, makespan))
        original(self, name, setup, schedule)

    monkeypatch.setattr(searching.ScheduleSearch, "consider", consider)
    found = search_schedules(UNBALANCED.scaled, 2, 8)
    assert len(seen) > 10 and found.predicted.makespan == pytest.approx(min(makespan for _, makespan in seen), rel=1e-5)


def test_a_memory_limit_is_kept_at_the_price_of_time():
    constant = (3.0, 1.0)
    free = search_schedules(UNBALANCED.scaled, 2, 8, constant_bytes=constant)
    limit = max(free.memory) * 0.6
    tight = search_schedules(UNBALANCED.scaled, 2, 8, limit, constant)
    assert max(tight.memory) <= limit and tight.predicted.makespan > free.predicted.makespan
    assert all(row.memory <= limit for row in tight.table)
    assert tight.memory == tuple(held + fixed for held, fixed in zip(tight.predicted.memory, constant))
    with pytest.raises(ConfigError, match="no schedule fits 0.00 GiB: the one with the least memory needs"):
        search_schedules(UNBALANCED.scaled, 2, 8, 3.5, constant)


def test_constant_bytes_may_depend_on_the_split():
    """Here a layer's state is heavy: splits that give a rank more than four layers do not fit."""

    def state(split, placement):
        return [sum(100.0 * len(part) for part, rank in zip(split, placement) if rank == mine) for mine in range(2)]

    found = search_schedules(UNBALANCED.scaled, 2, 8, 499.0, state)
    assert state(found.split, found.schedule.placement) == [400.0, 400.0]
    assert state(search_schedules(UNBALANCED.scaled, 2, 8).split, found.schedule.placement) != [400.0, 400.0]


def test_a_choice_says_how_to_make_it_again():
    found = search_schedules(UNBALANCED.scaled, 2, 8, space=SearchSpace(schedules=("1f1b", "interleaved")))
    nested = yaml.safe_load(found.to_yaml("run/schedule.csv"))
    pipeline, count = nested["parallel"]["pipeline"], nested["batch"]["accumulation"]
    assert pipeline["schedule"] == "run/schedule.csv"
    assert explicit_split(pipeline["split"], 8, found.schedule.stages) == found.split
    assert count * nested["batch"]["micro_size"] == 8
    assert build_schedule(found.name, 2, count, pipeline["chunks"]) == found.schedule
    assert [row.makespan for row in found.table] == sorted(row.makespan for row in found.table)


def test_a_greedy_schedule_can_be_chosen():
    found = search_schedules(UNBALANCED.scaled, 2, 4, space=SearchSpace(schedules=("greedy",)))
    assert found.name == "greedy" and validate_schedule(found.schedule) == []


@pytest.mark.parametrize("style, chunks", [("loop", 1), ("loop", 2), ("v", 2)])
def test_between_steps_only_the_order_changes(style, chunks):
    placement = place_stages(2, chunks, style)
    split = from_sizes([4, 4] if chunks == 1 else [3, 1, 2, 2])
    found = reorder_actions(UNBALANCED, split, placement, 6, 1)
    assert (found.split, found.schedule.placement) == (split, placement)
    assert (found.microbatches, found.micro_size, found.chunks) == (6, 1, chunks)
    assert len({(row.chunks, row.microbatches, row.split) for row in found.table}) == 1 < len(found.table)
    before = (
        build_schedule("1f1b", 2, 6)
        if chunks == 1
        else build_schedule("interleaved" if style == "loop" else "v_min", 2, 6, 2)
    )
    assert found.predicted.makespan <= simulate_schedule(before, UNBALANCED.stage(split)).makespan
    limit = min(row.memory for row in found.table)
    assert max(reorder_actions(UNBALANCED, split, placement, 6, 1, limit).memory) <= limit


def test_what_is_impossible_is_refused():
    with pytest.raises(
        ConfigError, match="batch.accumulation=3 does not divide the 8 sequences of each .*legal: 1, 2, 4, 8"
    ):
        search_schedules(UNBALANCED.scaled, 2, 8, space=SearchSpace(microbatches=(3,)))
    with pytest.raises(ConfigError, match="parallel.pp=9 .*no split of model.depth=8"):
        search_schedules(UNBALANCED.scaled, 9, 8)
    with pytest.raises(ValueError, match="constant bytes for 3 ranks, there are 2"):
        search_schedules(UNBALANCED.scaled, 2, 8, 1e9, (1.0, 1.0, 1.0))


def test_effort_is_bounded_and_a_heavy_head_is_worth_a_search():
    layers = costs([1.0] * 32, head=2.0, transfer=0.05, host=0.01)
    space = SearchSpace(effort=600_000)
    found = search_schedules(layers.scaled, 8, 32, space=space)
    baseline = simulate_schedule(build_schedule("1f1b", 8, 32), layers.stage(even_split(32, 8)))
    assert found.predicted.makespan < 0.75 * baseline.makespan
    assert found.schedule == search_schedules(layers.scaled, 8, 32, space=space).schedule  # no clock decides
    assert len(search_schedules(layers.scaled, 8, 32, space=SearchSpace(effort=1)).table) < 10 < len(found.table)
