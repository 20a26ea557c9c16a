"""Numbers of a manifest that no run would write: each ends in one error that names the checkpoint, or does not
matter."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import malformed
from support.damage import places
from test_malformed import use

from trainer.checkpointing.loading import CheckpointContents
from trainer.checkpointing.manifest import list_checkpoints, read_digest
from trainer.checkpointing.retention import find_newest
from trainer.config import ConfigError

EXTREME = [1e999, -1e999, float("nan"), 1e308, -1e308, 5e-324, -0.0, 0.5, 2**31, 2**53, 2**62, 2**63, 2**64, -(2**63)]
EXTREME += [10**30, 10**308, 10**309, -(10**309), 10**4000, True]
NUMBER = st.one_of(
    st.sampled_from(EXTREME), st.integers(), st.floats(), st.integers(0, 4000).map(lambda digits: 10**digits - 1)
)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return malformed.save(tmp_path_factory.mktemp("numbers"))


def numbers(value: Any) -> list[tuple]:
    """Where numbers stand in a JSON value."""

    def at(place: tuple) -> Any:
        inner = value
        for key in place:
            inner = inner[key]
        return inner

    return [place for place in places(value) if type(at(place)) in (int, float)]


def meet(good: Path, turn: int) -> list[tuple]:
    """The places that meet the number of a turn: all but those that are alike, such as shapes of tensors, of which in
    each turn others do."""
    alike: dict[tuple, list[tuple]] = {}
    for place in numbers(malformed.manifest(good)):
        alike.setdefault((place[0], len(place), place[-1] if place[0] != "tensors" else type(place[-1])), []).append(
            place
        )
    return [some[index] for some in alike.values() for index in range(turn % len(some), len(some), len(EXTREME))]


def find_all(contents: CheckpointContents) -> None:
    for name in contents.names:
        contents.find(name)


def check(good: Path, folder: Path, place: tuple, number: Any) -> None:
    path = folder / "run" / good.name
    shutil.copytree(good, path, copy_function=os.link)
    malformed.at(place, number)(path)
    for read in (
        lambda: find_newest(path.parent),
        lambda: (read_digest(path), list_checkpoints(path.parent)),
        lambda: use(path),
        lambda: find_all(CheckpointContents(path)),
    ):
        try:
            read()
        except ConfigError as error:
            assert str(path.parent) in str(error) and len(str(error)) < 2000, (place, number)


def test_all_kinds_of_numbers_are_found(good):
    found = {place[0] for place in numbers(malformed.manifest(good))}
    assert found >= {"format", "saved", "step", "tokens", "samples", "skipped", "scaler", "files", "tensors", "spec"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("turn", range(len(EXTREME)), ids=lambda turn: str(EXTREME[turn])[:12])
def test_every_number_may_be_an_extreme_one(turn, good, tmp_path):
    for index, place in enumerate(meet(good, turn)):
        check(good, tmp_path / str(index), place, EXTREME[turn])


def test_every_number_meets_some_extreme_one(good):
    met = {place for turn in range(len(EXTREME)) for place in meet(good, turn)}
    assert met == {*numbers(malformed.manifest(good))}


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_any_number_may_be_any_other(data, good, tmp_path_factory):
    place = data.draw(st.sampled_from(numbers(malformed.manifest(good))))
    check(good, tmp_path_factory.mktemp("any"), place, data.draw(NUMBER))
