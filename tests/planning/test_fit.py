"""Whether a plan's states fit into memory, and whether what a refusal offers does."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ConfigError
from trainer.planning.fit import Memory, check_fit, kept, lacking
from trainer.planning.resolve import compose, resolve
from trainer.util import tables

GIB = 2**30
LLAMA = ["+config=llama3_8b", "batch.accumulation=null", "batch.global_size=64"]


def fitted(overrides: list[str], world: int, memory: Memory, node: int | None = None) -> None:
    config = compose(overrides, world_size=world)
    check_fit(config, resolve(config, world, config.model), world, node or world, memory)


@pytest.mark.parametrize(
    "overrides, world, memory, way",
    [
        (["parallel=ddp"], 8, Memory(80 * GIB, 2048 * GIB), "parallel.zero.stage=1"),
        (["parallel=ddp"], 4, Memory(60 * GIB, 2048 * GIB), "parallel.zero.stage=2"),
        (["model=llama3_70b"], 8, Memory(80 * GIB, 2048 * GIB), "parallel.zero.offload=true"),
        (["parallel=ddp"], 1, Memory(80 * GIB, 512 * GIB), "parallel.zero.stage=1 parallel.zero.offload=true"),
        (["model=llama3_70b"], 8, Memory(80 * GIB, 200 * GIB), "parallel.zero.stage=3 and start 16 processes"),
        (["parallel=ddp"], 2, Memory(None, 200 * GIB), "parallel.zero.stage=1"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_smallest_override_that_does(overrides, world, memory, way):
    with pytest.raises(ConfigError, match=f"set {re.escape(way)}(,|$)") as refusal:
        fitted([*LLAMA, *overrides], world, memory)
    assert "activations come on top" in str(refusal.value)
    more = re.search(r"start (\d+) processes", way)
    fitted([*LLAMA, *overrides, *re.findall(r"parallel\S+", way)], int(more[1]) if more else world, memory, world)
    fitted([*LLAMA, *overrides, "run.force=true"], world, memory)


def test_nothing_fits_into_nothing():
    with pytest.raises(ConfigError, match="take a smaller model, or go on all the same with run.force=true"):
        fitted(LLAMA, 1, Memory(None, 1))


def test_processes_of_a_machine_share_its_memory_and_gpus_do_not():
    config = compose([*LLAMA, "parallel=ddp"], world_size=2)
    states = kept(config, resolve(config, 2, config.model), 2)
    assert lacking(states, 2, Memory(states.total, 0)) is None
    assert "on each GPU" in lacking(states, 2, Memory(states.total - 1, 10 * states.total))
    assert lacking(states, 2, Memory(None, 2 * states.total)) is None
    assert "2 processes" in lacking(states, 2, Memory(None, 2 * states.total - 1))


@given(st.lists(st.integers(0, 2**50), min_size=1))
def test_sizes_of_a_table_have_one_unit_that_of_the_largest(values):
    shown = tables.sizes(values)
    assert len({text.split()[1] for text in shown}) == 1
    assert shown[values.index(max(values))].split()[1] == tables.size(max(values)).split()[1] or max(values) % 1024
