"""From which checkpoint a run goes on after saves, skipped steps, kills, damage and jumps of the clock in any order."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpoints import read_tensors

from trainer.checkpointing import retention
from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.manifest import list_checkpoints, step_folder
from trainer.checkpointing.resume import find_start
from trainer.config import CheckpointConfig, ConfigError
from trainer.training import trainer as loop
from trainer.training.history import set_aside
from trainer.training.saving import find_newer


class Saves(loop.Trainer):
    """The part of a run that decides what is saved, with steps that do nothing but count. The weight of a checkpoint is
    the last step that made an update."""

    def __init__(self, folder: Path, config: CheckpointConfig, step: int, first: int):
        self.folder = folder
        self.config = SimpleNamespace(run=SimpleNamespace(steps=10**6), checkpoint=config)
        self.start = SimpleNamespace(step=step, in_memory=False)
        self.checkpointer = Checkpointer(folder / "checkpoints", config)
        self.state, self.weight = SimpleNamespace(step=step), float(step)
        self.memory, self.save_waits = None, False
        self.watchdog = SimpleNamespace(enter=lambda *_: None)
        self.replicas = SimpleNamespace(check=lambda _: None)
        self.pauses = SimpleNamespace(spent=lambda _: nullcontext())
        self.hooks = SimpleNamespace(run=SimpleNamespace(), call=lambda _: None)
        self.events: list[str] = []
        self.ledger = SimpleNamespace(
            first_skipped=None,
            skipped_in_row=0,
            stop=False,
            finished=False,
            take=lambda ask: False,
            log=SimpleNamespace(event=self.events.append),
        )

    def read_back(self, everything: bool = False) -> None:
        pass

    def check_state(self) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {}

    def checkpoint_contents(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"weight": torch.full((4,), self.weight)}, {"launchers": ["mine"]}

    def take_step(self, good: bool) -> None:
        self.state.step += 1
        ledger = self.ledger
        if good:
            self.weight, ledger.first_skipped, ledger.skipped_in_row = float(self.state.step), None, 0
        else:
            ledger.first_skipped = ledger.first_skipped or self.state.step
            ledger.skipped_in_row += 1
        self.save_if_due()


ACTIONS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 7)),
    st.tuples(st.just("fail"), st.integers(1, 4)),
    st.tuples(st.just("clock"), st.floats(-1e6, 1e6)),
    st.tuples(st.just("kill"), st.none()),
    st.tuples(st.just("stop"), st.none()),
    st.tuples(st.just("give up"), st.none()),
    st.tuples(st.just("go back"), st.integers(0, 5)),
    st.tuples(st.just("begin anew"), st.none()),
    st.tuples(st.just("damage"), st.integers(0, 3)),
)


@example([("train", 7), ("clock", -1e6), ("train", 7), ("kill", None)], 1, 2)
@example([("train", 6), ("fail", 3), ("stop", None), ("fail", 3), ("stop", None)], 3, 1)
@example([("train", 7), ("go back", 2), ("train", 1), ("kill", None)], 1, 0)
@given(st.lists(ACTIONS, max_size=12), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_a_run_goes_on_from_the_newest_good_checkpoint(actions, every, keep_last):
    """Good are the checkpoints that the present run wrote, that nothing damaged, and, after too many steps that were
    not finite, that a finite step followed."""
    config, clock = CheckpointConfig(every=every, keep_last=keep_last, asynchronous=False), [2e9]
    with tempfile.TemporaryDirectory() as folder, patch.object(time, "time", lambda: clock[0]):
        run = Path(folder)
        checkpoints, damaged = run / "checkpoints", set()
        saves = Saves(run, config, 0, 0)

        def restart(resume: str = "auto", proven: int | None = None) -> Saves:
            found = list_checkpoints(checkpoints)
            whole = [step for step in found if step not in damaged]
            good = [step for step in whole if proven is None or step <= proven] or whole
            asked = CheckpointConfig(resume=resume)
            if resume == "auto" and found and not whole:
                with pytest.raises(ConfigError) as refusal:
                    find_start(asked, checkpoints, [], proven)
                assert all(f"step-{step:08d}" in str(refusal.value) for step in found)
                asked = CheckpointConfig(resume="none")
            path, _ = find_start(asked, checkpoints, [], proven)
            step = int(path.name[5:13]) if path else 0
            if asked.resume == "auto":
                assert step == max(good, default=0)
            if path:
                assert torch.equal(read_tensors(path)["weight"], torch.full((4,), float(step))), (
                    "the weight of its step"
                )
            after = Saves(run, config, step, 0)
            set_aside(run, path, step)
            damaged.intersection_update(list_checkpoints(checkpoints))
            assert all(saved <= step for saved in list_checkpoints(checkpoints))
            return after

        for action, value in actions:
            found = list_checkpoints(checkpoints)
            newest_good = max((step for step in found if step not in damaged), default=None)
            if action in ("train", "fail"):
                for _ in range(value):
                    before = list_checkpoints(checkpoints)
                    saves.take_step(action == "train")
                    if action == "fail":
                        assert list_checkpoints(checkpoints) == before, "no save after a skipped step"
            elif action == "clock":
                clock[0] += value
            elif action == "kill":
                saves = restart()
            elif action == "stop":
                last, begun = saves.state.step - saves.failing, saves.start.step
                assert saves.save_now()
                assert last == begun or max(list_checkpoints(checkpoints)) == last
                saves = restart()
            elif action == "give up":
                first = saves.ledger.first_skipped
                saves = restart(proven=None if first is None else first - 2)
            elif action == "go back" and found:
                path = list(found.values())[value % len(found)]
                if int(path.name[5:13]) not in damaged:
                    saves = restart(str(path))
            elif action == "begin anew":
                saves = restart("none")
                assert not list_checkpoints(checkpoints)
            elif action == "damage" and found:
                step = list(found)[value % len(found)]
                (found[step] / "manifest.json").write_text("{")
                damaged.add(step)
            left = list_checkpoints(checkpoints)
            for path in {*left.values()} - {*found.values()}:
                for file in (path, path / "manifest.json"):
                    os.utime(file, (clock[0], clock[0]))
            if action in ("train", "fail", "clock", "stop") and newest_good is not None:
                assert any(step >= newest_good for step in left if step not in damaged), "the last good one stays"


def write(folder: Path, *steps: int, **manifest: Any) -> None:
    checkpointer = Checkpointer(folder, CheckpointConfig(keep_last=0))
    for step in steps:
        checkpointer.save(step, {"weight": torch.full((4,), float(step))}, manifest, wait=True)
        assert checkpointer.saved_step == step, checkpointer.poll()


def test_a_checkpoint_that_was_being_replaced_does_not_come_back(tmp_path):
    """A kill between the last rename and the removal leaves step 13 twice. Going back to step 3 moves one of them."""
    checkpoints = tmp_path / "checkpoints"
    write(checkpoints, 3, 13)
    shutil.copytree(step_folder(checkpoints, 13), checkpoints / "step-00000013.replaced")
    Checkpointer(checkpoints, CheckpointConfig())
    set_aside(tmp_path, step_folder(checkpoints, 3), 3)
    assert list(list_checkpoints(checkpoints)) == [3]
    # Without the new one, the replaced one is the only checkpoint of its step, and stays.
    shutil.copytree(step_folder(checkpoints, 3), checkpoints / "step-00000005.replaced")
    Checkpointer(checkpoints, CheckpointConfig())
    assert list(list_checkpoints(checkpoints)) == [5, 3]


@pytest.mark.parametrize("name", ["step-00000005.tmp", "step-00000003.replaced", "step-00000003.tmp"])
def test_a_leftover_that_cannot_be_removed_stands_in_no_ones_way(tmp_path, monkeypatch, name):
    """It is renamed: neither the save of its step nor what retention removes is blocked."""
    write(tmp_path, 3)
    (tmp_path / name).mkdir()
    (tmp_path / name / "stuck").touch()
    erase = shutil.rmtree

    def refuse(path, *arguments, **options):
        if (Path(path) / "stuck").exists():
            raise PermissionError(13, "Permission denied", str(path))
        return erase(path, *arguments, **options)

    monkeypatch.setattr(retention.shutil, "rmtree", refuse)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=1))
    [message] = checkpointer.poll()
    assert name in message and "Permission denied" in message
    for step in (5, 3, 5, 6, 7):
        checkpointer.save(step, {"weight": torch.ones(4)}, {}, wait=True)
        assert checkpointer.saved_step == step, checkpointer.poll()
        assert [text for text in checkpointer.poll() if "cannot be removed:" in text] == []
    assert list(list_checkpoints(tmp_path)) == [7, 6]
    [stuck] = tmp_path.glob("*/stuck")
    assert retention.remove_leftovers(tmp_path) and stuck.exists()


def test_one_old_checkpoint_that_cannot_be_removed_does_not_keep_the_others(tmp_path, monkeypatch):
    write(tmp_path, 1, 2, 3, 4)
    rename = Path.rename

    def refuse(path, target):
        if path.name == "step-00000002":
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    [message] = retention.prune_checkpoints(tmp_path, 4, CheckpointConfig(keep_last=1))
    assert "step-00000002" in message and list(list_checkpoints(tmp_path)) == [4, 3, 2]


def test_a_folder_that_cannot_be_read_is_not_one_without_checkpoints(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(ConfigError, match="checkpoints.* cannot be read"):
        find_start(CheckpointConfig(), tmp_path / "checkpoints", [])


def test_a_restart_whose_own_checkpoints_are_damaged_does_not_begin_anew(tmp_path):
    write(tmp_path, 2, launchers=["other"])
    write(tmp_path, 4, 6, launchers=["mine"])
    for step in (4, 6):
        (step_folder(tmp_path, step) / "rank-00000.bin").unlink()
    for resume in ("none", "runs/other"):
        with pytest.raises(ConfigError, match="step-00000006.*step-00000004") as refusal:
            find_start(CheckpointConfig(resume=resume), tmp_path, ["mine"])
        assert "step-00000002" not in str(refusal.value)
    assert find_start(CheckpointConfig(resume="none"), tmp_path, ["third"]) == (None, [])


@pytest.mark.parametrize("memory, expected", [(None, 5), (4, 5), (5, None), (7, None), (9, None)])
def test_a_damaged_checkpoint_hides_no_in_memory_one(tmp_path, memory, expected):
    write(tmp_path, 5, 8)
    (step_folder(tmp_path, 8) / "rank-00000.bin").unlink()
    path, _ = find_newer(CheckpointConfig(), tmp_path, [], None, memory)
    assert path == (None if expected is None else step_folder(tmp_path, expected))
    (step_folder(tmp_path, 5) / "rank-00000.bin").unlink()
    if memory is None:
        with pytest.raises(ConfigError, match="step-00000008.*step-00000005"):
            find_newer(CheckpointConfig(), tmp_path, [], None, memory)
    else:
        assert find_newer(CheckpointConfig(), tmp_path, [], None, memory)[0] is None


def test_a_path_takes_effect_once_and_again_after_a_start_without_it(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    write(other, 3)
    path = str(step_folder(other, 3))
    write(own, 5, began_from=path)
    assert find_start(CheckpointConfig(resume=path), own, [])[0] == step_folder(own, 5)
    write(own, 7, began_from=path)
    (step_folder(own, 7) / "manifest.json").write_text("{")
    found, (warning, _) = find_start(CheckpointConfig(resume=path), own, [])
    assert found == step_folder(own, 5) and "step-00000007" in warning
    write(own, 9, began_from="auto")
    assert find_start(CheckpointConfig(resume=path), own, []) == (step_folder(other, 3), [])
