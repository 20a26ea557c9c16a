"""What long sequences need, predicted, and chosen where it is left open."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from support.estimates import estimated, every_way, h200, settings, shipped
from support.reference import changed

from trainer.config import Config, ConfigError
from trainer.parallel.context.plan import ContextPlan, load_imbalance
from trainer.planning.decide import MemoryLimit, decide, describe_measures
from trainer.planning.documents import USUAL
from trainer.planning.estimate.memory import find_peaks
from trainer.planning.estimate.plans import rank_plans
from trainer.planning.estimate.step import GIB
from trainer.planning.neighbours import TILE
from trainer.planning.resolve import config_problems, resolve_layout

DOCS = Path(__file__).parents[2] / "docs"
OFF = {"loss__tile": 0, "activation__tile": 0, "activation__offload": False}
FULL = {"activation__mode": "full", "compile": True, "batch__micro_size": 1, "parallel__zero__stage": 3}


def config_of(length: int, **changes: object):
    return settings(shipped("llama31_8b"), batch__sequence_length=length, **FULL | changes)


def chosen(length: int, world: int, room: MemoryLimit, **changes: object):
    config = config_of(length, **changes)
    found, layout, *_ = decide(config, resolve_layout(config, world, config.model, world), room, world)
    return (found.loss.tile, found.activation.tile, found.activation.offload), found, layout


def test_short_sequences_need_nothing():
    assert chosen(8192, 8, MemoryLimit(140 * GIB, 1e12))[0] == (0, 0, False)
    assert chosen(131072, 8, MemoryLimit(None, 1e12))[0] == (0, 0, False)  # the memory of a CPU is not predicted


def test_as_much_is_taken_as_is_needed():
    """With less and less memory, in the order of what it costs; what is set stays as it is."""
    lengths = [8192, 131072, 262144, 1048576]
    found = [chosen(length, 8, MemoryLimit(140 * GIB, 1e15))[0] for length in lengths]
    assert found[0] == (0, 0, False) and found[-1] == (TILE, TILE, True)
    assert all(sum(map(bool, one)) <= sum(map(bool, other)) for one, other in pairwise(found))
    assert chosen(1048576, 8, MemoryLimit(140 * GIB, 1e15), loss__tile=0, activation__tile=4096)[0] == (0, 4096, True)
    assert chosen(1048576, 8, MemoryLimit(140 * GIB, 1e15), activation__offload=False)[0][::2] == (TILE, False)


def test_what_the_host_does_not_hold_does_not_go_there():
    assert chosen(262144, 2, MemoryLimit(140 * GIB, 200 * GIB))[0][2] is True
    assert chosen(262144, 2, MemoryLimit(140 * GIB, 20 * GIB))[0][2] is False


def test_a_step_that_is_replayed_copies_nothing_to_the_host():
    room = MemoryLimit(70 * GIB, 1000 * GIB)
    for recorded, expected in ((False, True), (True, False)):
        changes = {"model__depth": 4, "run__cuda_graphs": recorded}
        assert chosen(524288, 1, room, **changes)[0][2] is expected


def test_the_choice_fits_and_is_said():
    for length, world in ((131072, 2), (524288, 2), (1048576, 8)):
        one = estimated(config_of(length), world, h200())
        plain = estimated(config_of(length, **OFF), world, h200())
        assert one.fits == "yes" and plain.fits != "yes"
        assert one.memory < plain.memory and one.seconds < 1.2 * plain.seconds
    assert describe_measures(one.config, one.fullest) == (
        f"loss in tiles of {TILE} tokens, feed-forward in tiles of {TILE}, inputs of recomputed layers in host memory "
        f"({one.fullest.host / GIB:.1f} GiB)"
    )
    assert describe_measures(config_of(8192, **OFF)) == ""


def test_the_search_takes_what_long_sequences_need():
    [best] = rank_plans(config_of(524288), h200(), 2, 2, most=1).best
    assert best.fits != "no" and (best.config.loss.tile, best.config.activation.offload) == (TILE, True)
    again = estimated(best.config, 2, h200())
    assert (again.seconds, again.memory) == (pytest.approx(best.seconds), pytest.approx(best.memory, rel=0.05))
    with pytest.raises(ConfigError, match="no plan of 2 processes"):
        rank_plans(config_of(524288, **OFF), h200(), 2, 2, most=1)


def test_a_run_without_memory_is_told_of_them():
    """What it has already, or its mode or engine cannot have, is not named."""
    said = {"tile": f"loss.tile={TILE}", "feed": f"activation.tile={TILE}", "host": "activation.offload=true"}

    def named(length: int = 131072, **changes: object) -> set[str]:
        offered = every_way(config_of(length, **changes), 2)
        return {name for name, text in said.items() if text in offered}

    assert named() == set(said) and named(8192) == {"host"}
    assert named(loss__tile=4096, activation__offload=True) == {"feed"}
    assert named(activation__mode="none") == {"tile", "feed"}
    assert named(parallel__zero__engine="deepspeed", compile=False) == {"tile", "host"}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_inputs_of_all_micro_batches_in_flight_wait_on_the_host(schedule):
    pipeline = {"parallel__pp": 4, "parallel__pipeline__schedule": schedule, "batch__accumulation": 8}
    config = config_of(65536, **pipeline, activation__offload=True, parallel__zero__stage=1)
    found = [peak.host for peak in find_peaks(config, resolve_layout(config, 4, config.model, 4))]
    layers = [len(part) for part in resolve_layout(config, 4, config.model, 4).pipeline.split]
    flights = {"1f1b": [4, 3, 2, 1], "gpipe": [8] * 4, "zb_h1": [4, 3, 2, 1]}[schedule]
    assert found == [flight * 65536 * 4096 * 2 * count for flight, count in zip(flights, layers)]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"activation__mode": "none", "activation__offload": True}, "activation.offload=true"),
        (
            {"activation__tile": 64, "parallel__zero__stage": 3, "parallel__zero__engine": "deepspeed"},
            "activation.tile=64",
        ),
    ],
)
def test_what_cannot_go_together_is_refused(changes, words):
    config = changed(Config(), changes)
    assert [problem for problem in config_problems(config) if problem.startswith(words)]


def test_documented_balances_are_those_of_today():
    page = " ".join((DOCS / "long_sequences.md").read_text().split())
    found = [load_imbalance(ContextPlan(1, 8, order), 2**17, 0, USUAL) for order in ("blocks", "zigzag")]
    words = (
        "of 131,072 tokens on 8 ranks the busiest one has {:.2f} times the mean of the keys, and {:.2f} times in zigzag"
    )
    assert words.format(*found) in page
