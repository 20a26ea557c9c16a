"""Whether a plan's states fit into memory, and whether what a refusal offers does."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ConfigError
from trainer.planning.decide import MachineMemory, check_fit, find_missing_memory, persistent_bytes
from trainer.planning.resolve import compose, resolve_layout
from trainer.util import tables

GIB = 2**30
LLAMA = ["+config=llama3_8b", "batch.accumulation=null", "batch.global_size=64"]


def fitted(overrides: list[str], world: int, memory: MachineMemory, node: int | None = None) -> None:
    config = compose(overrides, world_size=world)
    check_fit(config, resolve_layout(config, world, config.model), world, node or world, memory)


@pytest.mark.parametrize(
    "overrides, world, memory, way",
    [
        (["parallel=ddp"], 8, MachineMemory(80 * GIB, 2048 * GIB), "parallel.zero.stage=1"),
        (["parallel=ddp"], 4, MachineMemory(60 * GIB, 2048 * GIB), "parallel.zero.stage=2"),
        (["model=llama3_70b"], 8, MachineMemory(80 * GIB, 2048 * GIB), "parallel.zero.offload=true"),
        (["parallel=ddp"], 1, MachineMemory(80 * GIB, 512 * GIB), "parallel.zero.stage=1 parallel.zero.offload=true"),
        (["model=llama3_70b"], 8, MachineMemory(80 * GIB, 200 * GIB), "parallel.zero.stage=3 and start 16 processes"),
        (["parallel=ddp"], 2, MachineMemory(None, 200 * GIB), "parallel.zero.stage=1"),
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
        fitted(LLAMA, 1, MachineMemory(None, 1))


def test_processes_of_a_machine_share_its_memory_and_gpus_do_not():
    config = compose([*LLAMA, "parallel=ddp"], world_size=2)
    states = persistent_bytes(config, resolve_layout(config, 2, config.model), 2)
    assert find_missing_memory(states, 2, MachineMemory(states.total, 0)) is None
    assert "on each GPU" in find_missing_memory(states, 2, MachineMemory(states.total - 1, 10 * states.total))
    assert find_missing_memory(states, 2, MachineMemory(None, 2 * states.total)) is None
    assert "2 processes" in find_missing_memory(states, 2, MachineMemory(None, 2 * states.total - 1))


@given(st.lists(st.integers(0, 2**50), min_size=1))
def test_sizes_of_a_table_have_one_unit_that_of_the_largest(values):
    shown = tables.format_sizes(values)
    assert len({text.split()[1] for text in shown}) == 1
    assert (
        shown[values.index(max(values))].split()[1] == tables.format_bytes(max(values)).split()[1] or max(values) % 1024
    )
