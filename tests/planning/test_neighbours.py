"""The changes of one decision that advice is drawn from."""

from __future__ import annotations

import functools
import random

import pytest

from trainer.config import ConfigError, typed
from trainer.diagnosis.suggestions import MOVES
from trainer.planning.estimate.memory import find_peaks
from trainer.planning.neighbours import SCHEDULES, change_settings, divisors_below, generate_neighbours
from trainer.planning.resolve import check_config, compose, resolve_layout

WORLD = 16
RUNS = [
    ["parallel=zero3", "batch.accumulation=4"],
    ["parallel=zero2", "parallel.tp=2", "parallel.tp_overlap=copy_engine", "batch.accumulation=2"],
    ["parallel.tp=2", "parallel.pp=4", "batch.micro_size=2", "batch.accumulation=8", "activation=full"],
    ["parallel=zero3", "parallel.cp=2", "batch.sequence_length=32768", "batch.accumulation=2"],
    ["parallel=zero3_offload", "batch.micro_size=4", "batch.accumulation=1", "activation=selective"],
    ["parallel=ddp", "precision.compute=fp32", "batch.micro_size=2", "batch.accumulation=1"],
]
EVERY = dict.fromkeys(move for moves in MOVES.values() for move in moves)


@functools.cache
def run(number: int):
    config = compose(["+config=llama3_8b", *RUNS[number]], world_size=WORLD)
    return config, resolve_layout(config, WORLD, config.model, 8)


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_a_change_names_settings_and_takes_their_values(number):
    config, layout = run(number)
    before = typed.flatten_values(typed.to_plain(config))
    for changes in generate_neighbours(config, layout, EVERY):
        changed = change_settings(config, changes)
        assert set(changes) <= set(before), changes
        now = typed.changed_settings(changed, config)
        assert now == {name: value for name, value in changes.items() if value != before[name]}
        assert typed.flatten_values(typed.to_plain(config)) == before, "the run's own settings stay"


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_most_neighbours_are_legal(number):
    """What is tried is illegal only by chance: because of another setting of the run, or of its batch."""
    config, layout = run(number)
    legal = total = 0
    for changes in generate_neighbours(config, layout, EVERY):
        changed = change_settings(config, changes)
        total += 1
        try:
            resolve_layout(changed, WORLD, config.model, 8)
        except ConfigError:
            continue
        legal += not check_config(changed, WORLD, 8)
    assert total >= 12 and legal >= 0.5 * total, (legal, total)


@pytest.mark.parametrize("number", range(len(RUNS)))
@pytest.mark.parametrize("move", ["more recompute", "more sharding", "smaller micro-batches"])
def test_moves_against_a_lack_of_memory_need_less(number, move):
    config, layout = run(number)
    peak = max(one.reserved for one in find_peaks(config, layout, False, 8))
    for changes in generate_neighbours(config, layout, [move]):
        changed = change_settings(config, changes)
        if move == "smaller micro-batches":
            changed.batch.accumulation = None
        try:
            other = resolve_layout(changed, WORLD, config.model, 8)
        except ConfigError:
            continue
        assert max(one.reserved for one in find_peaks(changed, other, False, 8)) < 1.01 * peak, changes


def test_moves_come_in_the_order_in_which_they_are_asked_for():
    config, layout = run(2)
    moves = random.Random(0).sample(list(EVERY), len(EVERY))
    found = [[*generate_neighbours(config, layout, [move])] for move in moves]
    assert [*generate_neighbours(config, layout, moves)] == [changes for some in found for changes in some]


def test_every_schedule_of_the_search_is_a_neighbour():
    config, layout = run(2)
    found = [*generate_neighbours(config, layout, ["other schedules"])]
    assert [changes["parallel.pipeline.schedule"] for changes in found] == [name for name, _ in SCHEDULES]


def test_a_model_is_spread_over_as_many_times_its_ranks_as_asked():
    config, layout = run(0)
    [*near], [*far] = (generate_neighbours(config, layout, ["more ranks a model"], factor) for factor in (2, 16))
    assert near == [{"parallel.pp": 2}, {"parallel.tp": 2}]
    assert {"parallel.tp": 16} in far and {"parallel.tp": 32} not in far and len(far) == 8


@pytest.mark.parametrize("degree", [1, 2, 7, 12, 64])
def test_divisors_below(degree):
    assert divisors_below(degree) == [n for n in range(degree - 1, 0, -1) if degree % n == 0]
