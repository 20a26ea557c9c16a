"""Checkpoint folders: what is written is read back bit by bit under any layout, or known to be damaged."""

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import read_tensors
from support.launch import WORKERS, launch

from trainer.checkpointing import checkpointer as state
from trainer.checkpointing import manifest
from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.chunks import assign_writers
from trainer.checkpointing.loading import load_tensors
from trainer.checkpointing.manifest import list_checkpoints, read_manifest, step_folder, verify_checkpoint
from trainer.checkpointing.resume import find_start
from trainer.checkpointing.retention import find_resume, steps_to_keep
from trainer.config import CheckpointConfig, ConfigError

sys.path.insert(0, str(WORKERS))
from checkpoint_values import expected  # noqa: E402


def save(folder: Path, *steps: int, config: CheckpointConfig | None = None) -> None:
    """Checkpoints whose tensor and manifest tell the step."""
    checkpointer = Checkpointer(folder, config or CheckpointConfig(keep_last=0))
    for step in steps:
        checkpointer.save(step, {"weights": torch.full((300,), float(step))}, {"tokens": step * 10}, wait=True)
        assert checkpointer.saved_step == step, checkpointer.poll()
    checkpointer.close()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_reshards_between_layouts_and_world_sizes(tmp_path):
    save_single = Checkpointer(tmp_path / "single", CheckpointConfig())
    save_single.save(3, expected(), {}, wait=True)
    launch("checkpoint_reshard.py", 4, tmp_path)
    for layout in ("dp4", "hsdp", "fsdp_tp", "plain"):
        path = step_folder(tmp_path / layout, 3)
        assert read_manifest(path)["layout"] == layout
        whole = read_tensors(path)
        assert whole.keys() == expected().keys()
        tensors = {name: torch.full_like(value, 7) for name, value in expected().items()}
        load_tensors(path, tensors)
        for name, value in expected().items():
            assert torch.equal(whole[name], value) and whole[name].dtype == value.dtype
            assert torch.equal(tensors[name], value)


def test_killed_while_saving_leaves_the_previous_checkpoint(tmp_path):
    assert launch("checkpoint_killed.py", 2, tmp_path, check=False).returncode != 0
    assert names(tmp_path) == {"step-00000001", "step-00000002.tmp"}
    path, warnings = find_resume("auto", tmp_path)
    assert path == tmp_path / "step-00000001" and not warnings
    assert torch.equal(read_tensors(path)["layers.5"], torch.full((100, 100), 5.0))
    Checkpointer(tmp_path, CheckpointConfig())
    assert names(tmp_path) == {"step-00000001"}


@pytest.mark.parametrize("step", [3, 2], ids=["new", "replacing"])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(tmp_path, monkeypatch, step):
    """Dies at the first, second, ... change of the file system: within writing, publishing or deleting."""

    class Crash(BaseException):
        pass

    config = CheckpointConfig(keep_last=2)
    save(tmp_path / "before", 1, 2, config=config)
    crashes = 0
    while True:
        folder = tmp_path / f"crash{crashes}"
        shutil.copytree(tmp_path / "before", folder)
        remaining = crashes

        def at_risk(action):
            def act(*arguments, **options):
                nonlocal remaining
                remaining -= 1
                if remaining < 0:
                    raise Crash
                return action(*arguments, **options)

            return act

        unlink = at_risk(Path.unlink)

        def rmtree(path, ignore_errors=False, erase=shutil.rmtree):
            for file in sorted(Path(path).glob("*")):
                unlink(file)
            erase(path, ignore_errors=ignore_errors)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", at_risk(Path.rename))
            patch.setattr(shutil, "rmtree", rmtree)
            patch.setattr(os, "fsync", at_risk(os.fsync))
            try:
                save(folder, step, config=config)
                crashed = False
            except (Crash, AssertionError):
                crashed = True
        path, warnings = find_resume("auto", folder)
        saved_step, weights = read_manifest(path)["step"], read_tensors(path)["weights"]
        assert not warnings and saved_step >= 2
        assert all(verify_checkpoint(checkpoint, True) for checkpoint in list_checkpoints(folder).values())
        assert torch.equal(weights, torch.full((300,), float(saved_step)))
        save(folder, 4, config=config)
        assert names(folder) <= {f"step-0000000{i}" for i in (2, 3, 4)} | {"step-00000002.replaced"}
        if not crashed:
            break
        crashes += 1
    assert crashes > 6


def test_training_goes_on_while_the_checkpoint_is_written(tmp_path, monkeypatch):
    go, write = threading.Event(), state.write_parts
    monkeypatch.setattr(state, "write_parts", lambda *arguments: go.wait(30) and write(*arguments))
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    tensors, about = {"weights": torch.arange(50.0)}, {"position": [1]}
    checkpointer.save(1, tensors, about)
    for _ in range(3):
        tensors["weights"] += 1
        about["position"].append(2)
    assert checkpointer.saving and checkpointer.poll() == [] and not (tmp_path / "step-00000001").exists()
    go.set()
    checkpointer.save(2, tensors, about)  # waits for the first
    assert (tmp_path / "step-00000001").exists()
    checkpointer.close()
    assert not checkpointer.saving and len(checkpointer.poll()) == 2
    assert torch.equal(read_tensors(tmp_path / "step-00000001")["weights"], torch.arange(50.0))
    assert read_manifest(tmp_path / "step-00000001")["position"] == [1]
    assert torch.equal(read_tensors(tmp_path / "step-00000002")["weights"], torch.arange(50.0) + 3)


def test_synchronous_saves_are_complete_when_save_returns(tmp_path):
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(asynchronous=False))
    checkpointer.save(1, {"weights": torch.ones(3)}, {})
    assert not checkpointer.saving and checkpointer.stall_seconds > 0
    assert find_resume("auto", tmp_path)[0] == tmp_path / "step-00000001"


def test_host_memory_that_runs_out_fails_the_save_not_the_run(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    with monkeypatch.context() as patch:

        def no_memory(*arguments, **options):
            raise RuntimeError("cannot allocate 9 TB")

        patch.setattr(torch, "empty", no_memory)
        checkpointer.save(1, {"weights": torch.ones(3)}, {})
        checkpointer.wait()
    (message,) = checkpointer.poll()
    assert "step 1 could not be saved" in message and "cannot allocate 9 TB" in message
    assert checkpointer.saved_step is None and list_checkpoints(tmp_path) == {}


def test_a_folder_that_cannot_be_made_fails_the_save_not_the_run(tmp_path):
    (tmp_path / "file").touch()
    checkpointer = Checkpointer(tmp_path / "file" / "checkpoints", CheckpointConfig())
    checkpointer.save(1, {"weights": torch.ones(3)}, {}, wait=True)
    (message,) = checkpointer.poll()
    assert "step 1 could not be saved" in message and "Not a directory" in message


@pytest.mark.parametrize("module, kind", [(manifest, ".bin"), (manifest, "manifest.json")])
def test_a_file_that_cannot_be_made_fails_the_save_not_the_run(tmp_path, monkeypatch, module, kind):
    save(tmp_path, 1)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())

    def refuse(path, mode, **options):
        if str(path).endswith(kind) and mode.startswith("w"):
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "open", refuse, raising=False)
        checkpointer.save(2, {"weights": torch.ones(3)}, {})
        checkpointer.wait()
    (message,) = checkpointer.poll()
    assert "step 2 could not be saved" in message and "Permission denied" in message and kind in message
    assert names(tmp_path) == {"step-00000001"}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def another_step(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 5}))


DAMAGE = {
    "truncated": ("rank-00000.bin", lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
    "flipped byte": ("rank-00000.bin", flip, "checksum"),
    "missing file": ("rank-00000.bin", Path.unlink, "missing"),
    "missing manifest": ("manifest.json", Path.unlink, "missing"),
    "garbage manifest": ("manifest.json", lambda path: path.write_bytes(b"\xff\x00{"), "not a manifest"),
    "manifest of another kind": ("manifest.json", lambda path: path.write_text("[1, 2]"), "not a manifest"),
    "edited manifest": ("manifest.json", another_step, "checksum"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_passed_over(tmp_path, damage):
    save(tmp_path, 1, 2)
    file, spoil, complaint = DAMAGE[damage]
    spoil(tmp_path / "step-00000002" / file)
    path, warnings = find_resume("auto", tmp_path)
    assert path == tmp_path / "step-00000001"
    assert len(warnings) == 1 and f"step-00000002/{file}" in warnings[0] and complaint in warnings[0]
    with pytest.raises(ConfigError) as refusal:
        find_resume(str(tmp_path / "step-00000002"), tmp_path)
    assert "checkpoint.resume=" in str(refusal.value) and complaint in str(refusal.value)
    assert f"set checkpoint.resume={tmp_path / 'step-00000001'}" in str(refusal.value)


def test_a_later_format_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 99)
        save(tmp_path, 1)
    with pytest.raises(ConfigError, match="no checkpoint in .* is whole.*format 99.*checkpoint.resume=none"):
        find_resume("auto", tmp_path)


def test_resume_settings(tmp_path):
    assert find_resume("auto", tmp_path / "nowhere") == (None, [])
    save(tmp_path, 1, 12)
    (tmp_path / "step-00000020.tmp").mkdir()
    assert find_resume("none", tmp_path) == (None, [])
    assert find_resume("auto", tmp_path) == (tmp_path / "step-00000012", [])
    assert find_resume(str(tmp_path / "step-00000012"), tmp_path) == (tmp_path / "step-00000012", [])
    assert find_resume(str(tmp_path / "step-00000001"), tmp_path) == (tmp_path / "step-00000001", [])
    with pytest.raises(ConfigError, match="no such folder.*resume=.*step-00000012"):
        find_resume(str(tmp_path / "step-00000007"), tmp_path)
    with pytest.raises(ConfigError, match="checkpoint.resume=none"):
        find_resume(str(tmp_path / "elsewhere" / "step-00000007"), tmp_path / "nowhere")


def test_mismatching_tensors_are_named(tmp_path):
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    checkpointer.save(1, {"a": torch.ones(3), "b": torch.ones(2, 2)}, {}, wait=True)
    tensors = {"a": torch.zeros(4), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}
    tensors |= {f"new{i}": torch.zeros(1) for i in range(5)}
    with pytest.raises(ConfigError) as error:
        load_tensors(tmp_path / "step-00000001", tensors)
    missing, differing = error.value.problems
    assert "5 of 7 tensors are not in the checkpoint: new0, new1, new2, ..." in missing
    assert "a (torch.float32 [3] there, torch.float32 [4] here)" in differing and "b (torch.float32" in differing
    assert not tensors["a"].any() and not tensors["b"].any()
    only_a = {"a": torch.zeros(3)}
    load_tensors(tmp_path / "step-00000001", only_a)
    assert only_a["a"].all()


def test_the_manifest_describes_the_checkpoint(tmp_path):
    save(tmp_path, 7)
    about = read_manifest(tmp_path / "step-00000007")
    assert (about["step"], about["tokens"], about["torch"]) == (7, 70, torch.__version__)
    chunk = {"offsets": [0], "sizes": [300], "file": "rank-00000.bin", "start": 0}
    assert about["tensors"] == {"weights": {"shape": [300], "dtype": "float32", "chunks": [chunk]}}
    assert about["files"].keys() == names(tmp_path / "step-00000007") - {"manifest.json"}
    with pytest.raises(ValueError, match="files"):
        Checkpointer(tmp_path, CheckpointConfig()).save(8, {}, {"files": 1})
    with pytest.raises(TypeError):
        Checkpointer(tmp_path, CheckpointConfig()).save(8, {}, {"path": tmp_path})


def test_old_checkpoints_leave_and_milestones_stay(tmp_path):
    save(tmp_path, *range(1, 8), config=CheckpointConfig(keep_last=2, keep_every=3))
    assert list(list_checkpoints(tmp_path)) == [7, 6, 3]
    save(tmp_path, 8, config=CheckpointConfig(keep_last=1))
    assert list(list_checkpoints(tmp_path)) == [8, 7], "nobody knows yet whether the newest one is good"
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=1))
    checkpointer.save(9, {"weights": torch.ones(3)}, {}, wait=True, keep_older=True)
    assert list(list_checkpoints(tmp_path)) == [9, 8, 7]


def test_a_clock_that_goes_back_changes_nothing(tmp_path, monkeypatch):
    for step, clock in ((3, 2e9), (13, 1e9), (7, 3e9)):
        monkeypatch.setattr(time, "time", lambda: clock)  # noqa: B023
        save(tmp_path, step, config=CheckpointConfig(keep_last=0))
        os.utime(tmp_path / f"step-{step:08d}", (clock, clock))
    assert list(list_checkpoints(tmp_path)) == [13, 7, 3]
    assert find_resume("auto", tmp_path)[0].name == "step-00000013"
    (tmp_path / "step-00000013" / "manifest.json").unlink()
    assert find_resume("auto", tmp_path)[0].name == "step-00000007"
    save(tmp_path, 14, config=CheckpointConfig(keep_last=2))
    assert list(list_checkpoints(tmp_path)) == [14, 13]


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
@pytest.mark.parametrize("name", ["step-00000002.tmp", "step-00000001.replaced"])
def test_leftovers_of_any_kind_are_no_obstacle(tmp_path, kind, name):
    save(tmp_path, 1)
    leftover, elsewhere = tmp_path / name, tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    make = {"file": leftover.touch, "link": lambda: leftover.symlink_to(elsewhere), "folder": leftover.mkdir}
    make[kind]()
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    assert not checkpointer.poll() and not os.path.lexists(leftover) and (elsewhere / "mine").exists()
    make[kind]()  # of another process, meanwhile
    save(tmp_path, 2)
    assert find_resume("auto", tmp_path)[0].name == "step-00000002"


def test_a_leftover_that_cannot_be_removed_is_reported_and_passed_over(tmp_path, monkeypatch):
    save(tmp_path, 1)
    (tmp_path / "step-00000002.tmp").touch()

    def refuse(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        checkpointer = Checkpointer(tmp_path, CheckpointConfig())
        (message,) = checkpointer.poll()
        assert "step-00000002.tmp" in message and "Permission denied" in message
        checkpointer.save(2, {"weights": torch.ones(3)}, {}, wait=True)
    assert find_resume("auto", tmp_path)[0].name == "step-00000002", "the leftover got another name"


@given(
    steps=st.sets(st.integers(1, 9), max_size=5),
    damaged=st.sets(st.integers(1, 9)),
    proven=st.none() | st.integers(-1, 9),
)
@settings(max_examples=60, deadline=None)
def test_the_newest_good_checkpoint_is_resumed_or_all_damaged_ones_are_named(steps, damaged, proven):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for step in steps:
            write_empty_checkpoint(path, step, step not in damaged)
        whole = steps - damaged
        best = max((step for step in whole if proven is None or step <= proven), default=max(whole, default=None))
        if best is None and steps:
            with pytest.raises(ConfigError) as refusal:
                find_resume("auto", path, proven)
            assert "checkpoint.resume=none" in str(refusal.value)
            assert sum(f"step-{step:08d}" in str(refusal.value) for step in steps) == len(steps)
        else:
            found, warnings = find_resume("auto", path, proven)
            assert (int(found.name[5:]) if found else None) == best


def write_empty_checkpoint(folder: Path, step: int, whole: bool) -> None:
    path = step_folder(folder, step)
    path.mkdir()
    manifest.write_manifest(path, {"step": step, "files": {}, "tensors": {}})
    if not whole:
        (path / "manifest.json").write_text("{")


def test_a_restart_goes_on_from_what_its_own_launch_saved(tmp_path):
    mine, other = ["node1 11 100", "node2 22 200"], ["node1 11 300"]  # another process may get the number of a dead one
    save(tmp_path, 3)
    began_anew, here = CheckpointConfig(resume="none"), tmp_path / "step-00000004"
    assert find_start(began_anew, tmp_path, mine) == (None, [])  # nothing of this launch yet
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=0))
    checkpointer.save(4, {"weights": torch.zeros(3)}, {"launchers": mine, "began_from": "runs/other"}, wait=True)
    checkpointer.close()
    assert (
        find_start(began_anew, tmp_path, mine[1:])
        == find_start(CheckpointConfig(resume="auto"), tmp_path, [])
        == (here, [])
    )  # node1 was lost
    assert find_start(began_anew, tmp_path, other) == find_start(began_anew, tmp_path, []) == (None, [])
    back = CheckpointConfig(resume=str(tmp_path / "step-00000003"))
    assert find_start(back, tmp_path, other) == (tmp_path / "step-00000003", []) and find_start(
        back, tmp_path, mine
    ) == (here, [])
    once, [note] = find_start(CheckpointConfig(resume="runs/other"), tmp_path, other)
    assert once == here and "took effect before" in note, "a path acts once, or a preempted run would never get on"


@given(st.data(), st.lists(st.integers(0, 200), min_size=1, unique=True), st.integers(0, 5), st.integers(0, 20))
def test_retention_rule(data, steps, keep_last, keep_every):
    steps = sorted(steps, reverse=True)
    saved = data.draw(st.sampled_from(steps))
    stay = steps_to_keep(steps, saved, keep_last, keep_every)
    for age, step in enumerate(steps):
        milestone = keep_every > 0 and step % keep_every == 0
        proven = step == max((older for older in steps if older < saved), default=None)
        assert (step in stay) == (age < keep_last or keep_last == 0 or milestone or step == saved or proven)
    assert stay <= set(steps)


@given(st.data(), st.integers(1, 6))
def test_each_piece_is_written_once_and_by_a_holder(data, ranks):
    piece = st.tuples(st.integers(0, 1000), st.sets(st.integers(0, ranks - 1), min_size=1))
    held = data.draw(st.lists(piece, max_size=30), label="bytes and holders of each piece")
    layouts = [{piece: size for piece, (size, holders) in enumerate(held) if rank in holders} for rank in range(ranks)]
    dealt = assign_writers(layouts)
    assert sorted(piece for pieces in dealt for piece in pieces) == list(range(len(held)))
    assert all(piece in layout for layout, pieces in zip(layouts, dealt) for piece in pieces)
    if all(len(holders) == ranks for _, holders in held):
        loads = [sum(held[piece][0] for piece in pieces) for pieces in dealt]
        assert max(loads) - min(loads) <= max((size for size, _ in held), default=0)
