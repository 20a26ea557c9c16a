"""Checkpoints in object stores: an upload is complete or no checkpoint, what fails is told and tried again, and a start
takes the newest whole checkpoint of disk and store."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import read_tensors
from support.launch import launch, program_of, warm_python
from support.stores import BUCKET, SECRET

import trainer
from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.loading import open_saved
from trainer.checkpointing.manifest import list_checkpoints
from trainer.checkpointing.remote import CheckpointUploader, FetchNeeded, StoredCheckpoints
from trainer.checkpointing.retention import steps_to_keep
from trainer.config import CheckpointConfig, ConfigError
from trainer.training.saving import StartSearch
from trainer.util import objects
from trainer.util.objects import ObjectStore, StoreDown, StoreError

URL = "memory://bucket/runs/one"


@pytest.fixture
def memory():
    """The objects of fsspec's store in memory: name -> content. Each test begins with none."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


class Alone:
    """What `fetch_together` asks of a world, for one rank."""

    rank, size = 0, 1

    def agree(self, decide):
        return decide()

    together = agree


class Run:
    """The checkpoints of a run without its training."""

    def __init__(self, folder: Path, launcher: str = "first", begin: int = -1, **options: object):
        self.folder, self.launcher = folder, launcher
        self.config = CheckpointConfig(**{"upload": URL, "keep_last": 2, **options})
        self.uploader = CheckpointUploader(folder, self.config)
        self.checkpointer = Checkpointer(folder, self.config, self.uploader)
        self.uploader.begin_run(begin)

    def save(self, *steps: int, **more: str) -> None:
        """Each is uploaded before the next."""
        for step in steps:
            manifest = {"launchers": [self.launcher], **more}
            self.checkpointer.save(step, {"w": torch.full((300,), float(step))}, manifest, wait=True)
            self.uploader.finish(lambda: None, 60)

    def end(self) -> list[str]:
        self.checkpointer.close()
        return self.checkpointer.poll()


def begin(folder: Path, launcher: str = "other", proven: int | None = None, **options: object):
    """What a start resumes from: the value of its checkpoint, and the messages."""
    config = CheckpointConfig(**{"upload": URL, **options})
    search = StartSearch(config, folder, [launcher], proven, None)
    for _ in range(20):
        try:
            path, notes = search.look()
            return (read_tensors(path)["w"][0].item() if path else None), notes, path
        except FetchNeeded as need:
            search.note(need, need.fetch_together(Alone()))
    raise AssertionError("it fetches without end")


def stored(memory) -> dict[int, set[str]]:
    """Steps in the store, with the names of their files."""
    found: dict[int, set[str]] = {}
    for name in memory.store:
        if name.startswith("/bucket/runs/one/step-"):
            found.setdefault(int(name.split("/")[4].removeprefix("step-")), set()).add(name.split("/")[5])
    return found


WHOLE = {"manifest.json", "rank-00000.bin"}


def test_uploads_keep_what_the_disk_keeps_and_a_wiped_disk_goes_on(tmp_path, memory):
    run = Run(tmp_path / "c", keep_last=2, keep_every=3)
    run.save(1, 2, 3, 4, 5, 6, 7)
    messages = run.end()
    assert stored(memory) == dict.fromkeys((3, 6, 7), WHOLE) and run.uploader.failure is None
    assert {*stored(memory)} == {*list_checkpoints(tmp_path / "c")} == steps_to_keep([7, 6, 5, 4, 3, 2, 1], 7, 2, 3)
    assert sum(text.startswith(f"uploaded {URL}/step-") for text in messages) == 7
    shutil.rmtree(tmp_path / "c")
    value, notes, path = begin(tmp_path / "c")
    assert value == 7 and path == tmp_path / "c" / "step-00000007" and notes == [f"fetched {URL}/step-00000007"]
    # Then it lies on the disk, and nothing is fetched.
    assert begin(tmp_path / "c")[:2] == (7, [])
    # A second empty node.
    assert begin(tmp_path / "d")[0] == 7


def test_the_manifest_is_the_last_to_come_and_the_first_to_go(tmp_path, memory, monkeypatch):
    events: list[tuple[str, str]] = []
    put, remove = ObjectStore.put, ObjectStore.remove

    def note_put(self, path, name):
        events.append(("put", name))
        put(self, path, name)

    def note_remove(self, names):
        names = [*names]
        events.extend(("remove", name) for name in names)
        remove(self, names)

    monkeypatch.setattr(ObjectStore, "put", note_put)
    monkeypatch.setattr(ObjectStore, "remove", note_remove)
    run = Run(tmp_path, keep_last=1)
    run.save(1, 2, 3)
    run.end()
    for step, kind in itertools.product((1, 2, 3), ("put", "remove")):
        names = [name.rpartition("/")[2] for what, name in events if what == kind and f"step-0000000{step}" in name]
        order = ["rank-00000.bin", "manifest.json"]
        assert names == {"put": order, "remove": order[::-1] if step == 1 else []}[kind], (step, kind)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    disk=st.sets(st.integers(1, 6)),
    there=st.sets(st.integers(1, 6)),
    bad_disk=st.sets(st.integers(1, 6)),
    bad_store=st.sets(st.integers(1, 6)),
    cut_off=st.sets(st.integers(1, 7)),
    proven=st.none() | st.integers(1, 6),
)
def test_the_best_whole_checkpoint_of_both_is_taken(disk, there, bad_disk, bad_store, cut_off, proven, template):
    """By the rule of the disk alone: the newest whole one up to the proven step, else the newest whole one."""
    folder, memory = template / "now", fsspec.filesystem("memory")
    shutil.rmtree(folder, ignore_errors=True)
    memory.store.clear()
    for step in disk:
        shutil.copytree(template / "all" / f"step-{step:08d}", folder / f"step-{step:08d}")
        if step in bad_disk:
            (folder / f"step-{step:08d}" / "rank-00000.bin").write_bytes(b"damaged" * 200)
    for step in there | cut_off:
        for path in (template / "all" / f"step-{step:08d}").iterdir():
            content = path.read_bytes()
            if path.suffix == ".bin" and step in bad_store:
                content = content[:-3] + b"bad"
            if path.name != "manifest.json" or step in there:
                memory.pipe(f"/bucket/runs/one/step-{step:08d}/{path.name}", content)
    whole = (disk - bad_disk) | (there - bad_store)
    good = {step for step in whole if proven is None or step <= proven} or whole
    if not good and disk | there:
        with pytest.raises(ConfigError, match="no checkpoint in .* is whole"):
            begin(folder, proven=proven)
        return
    value, notes, path = begin(folder, proven=proven)
    assert value == max(good, default=None)
    newest = max(good, default=0)
    fetched = any(text == f"fetched {URL}/step-{newest:08d}" for text in notes)
    assert fetched == (newest in there and newest not in disk - bad_disk and newest > 0)
    if folder.exists():
        assert {*list_checkpoints(folder)} == disk | ({newest} - {0}), "nothing else is brought, and nothing is lost"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    checkpointer = Checkpointer(folder / "all", CheckpointConfig(keep_last=0))
    for step in range(1, 8):
        checkpointer.save(step, {"w": torch.full((300,), float(step))}, {"launchers": ["first"]}, wait=True)
    checkpointer.close()
    return folder


def test_a_store_that_fails_at_any_request_costs_nothing(tmp_path, monkeypatch):
    """Every request from the first, the second, ... on fails. What the store then holds is no half checkpoint."""
    memory, explaining = fsspec.filesystem("memory"), ObjectStore.explaining
    for moment in itertools.count(1):
        memory.store.clear()
        folder, count, failed = tmp_path / str(moment) / "c", itertools.count(1), []

        def explain(self, what):
            if next(count) >= moment:
                failed.append(what)
                raise StoreDown(f"{self.named}: it is off")
            return explaining(self, what)

        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "explaining", explain)
            run = Run(folder, keep_last=1)
            run.save(1, 2, 3)
        told = " ".join(run.checkpointer.poll())
        assert {*list_checkpoints(folder)} == {2, 3}, "the run goes on, and its disk is as without a store"
        complete = [step for step, names in stored(memory).items() if "manifest.json" in names]
        assert all(stored(memory)[step] == WHOLE for step in complete)
        assert begin(folder.parent / "lost")[0] == max(complete, default=None)
        if max(complete, default=0) < 3:
            assert "it is off" in run.uploader.failure
            assert "it is off; training goes on, and it is tried again after the next save" in told
        run.save(4)  # the store is back
        assert run.uploader.failure is None
        run.end()
        assert stored(memory)[4] == WHOLE and begin(folder.parent / "lost")[0] == 4
        if not failed:
            break
    assert moment > 15


def test_a_file_that_does_not_arrive_whole_is_no_checkpoint(tmp_path, memory, monkeypatch):
    def put(self, path, name):
        memory.pipe(f"/{name.lstrip('/')}", path.read_bytes()[:-1])

    run = Run(tmp_path / "c")
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "put", put)
        run.save(1)
    assert "rank-00000.bin did not arrive whole" in run.uploader.failure and begin(tmp_path / "lost")[0] is None
    # What an upload of other ranks has left of a step is no part of its checkpoint.
    memory.pipe("/bucket/runs/one/step-00000002/rank-00007.bin", b"left")
    run.save(2)
    run.end()
    assert stored(memory) == dict.fromkeys((1, 2), WHOLE)


def test_another_run_and_an_earlier_step_set_later_ones_aside(tmp_path, memory):
    run = Run(tmp_path / "a", keep_last=0)
    run.save(1, 2, 3)
    run.end()
    run = Run(tmp_path / "a", begin=1, keep_last=0)
    assert {*stored(memory)} == {1}
    aside = [name for name in memory.store if "/earlier/" in name]
    assert len(aside) == 4 and sum("manifest.json" in name for name in aside) == 2
    [told] = [text for text in run.end() if "is now in" in text]
    place = told.rpartition(" ")[2]
    assert begin(tmp_path / "x", upload=None, resume=f"{place}/step-00000002")[0] == 2, "they stay checkpoints"
    run = Run(tmp_path / "new", begin=-1)
    run.end()
    assert not stored(memory) and begin(tmp_path / "empty")[0] is None


def test_setting_aside_is_tried_again_before_the_first_upload(tmp_path, memory, monkeypatch):
    run = Run(tmp_path / "a", keep_last=0)
    run.save(5)
    run.end()
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "copy", lambda self, old, new: (_ for _ in ()).throw(StoreDown("off")))
        run = Run(tmp_path / "b", keep_last=0)
        assert {*stored(memory)} == {5} and "is set aside with the first upload" in run.checkpointer.poll()[0]
    run.save(1)
    run.end()
    assert {*stored(memory)} == {1}


def test_what_was_not_uploaded_follows(tmp_path, memory, monkeypatch):
    """An upload that takes longer than the next saves: what is still kept follows it, and is kept until then."""
    put, go = ObjectStore.put, threading.Event()
    monkeypatch.setattr(ObjectStore, "put", lambda self, path, name: (go.wait(60), put(self, path, name)))
    run = Run(tmp_path, keep_last=1, keep_every=2)
    for step in range(1, 6):
        run.checkpointer.save(step, {"w": torch.full((300,), float(step))}, {}, wait=True)
        time.sleep(0.2 if step == 1 else 0)  # the upload of step 1 begins
    assert {*list_checkpoints(tmp_path)} == {1, 2, 4, 5}
    go.set()
    run.uploader.finish(lambda: None, 60)
    run.end()
    assert stored(memory) == dict.fromkeys((2, 4, 5), WHOLE)


def test_the_end_waits_for_a_limited_time(tmp_path, memory, monkeypatch):
    go, beats = threading.Event(), []
    put = ObjectStore.put
    monkeypatch.setattr(ObjectStore, "put", lambda self, path, name: (go.wait(60), put(self, path, name)))
    run = Run(tmp_path)
    run.checkpointer.save(1, {"w": torch.ones(3)}, {}, wait=True)
    run.uploader.finish(lambda: beats.append(1), 1.5)
    assert len(beats) >= 2 and "was not complete after 2 s" in run.uploader.failure
    assert run.uploader.failure in " ".join(run.end())
    go.set()


def test_launchers_and_paths_act_as_on_a_disk(tmp_path, memory):
    run = Run(tmp_path / "c", launcher="mine", keep_last=0)
    run.save(1, 2, began_from="none")
    run.launcher = "theirs"
    run.save(3, began_from=f"{URL}/step-00000001")
    run.end()
    for folder in (tmp_path / "c", tmp_path / "lost"):
        assert begin(folder, resume="none")[0] is None
        assert begin(folder, launcher="mine", resume="none")[0] == 2, "a restart of the launch goes on"
        assert begin(folder, resume=f"{URL}/step-00000001")[0] == 3, "the path acted before"
        assert begin(folder, resume=f"{URL}/step-00000002")[0] == 2
        assert begin(folder, resume=URL)[0] == 3
    with pytest.raises(
        ConfigError, match="there is no complete checkpoint.*set checkpoint.resume to memory://.*-00000003"
    ):
        begin(tmp_path / "c", resume=f"{URL}/step-00000009")


def test_the_checkpoint_of_another_run_is_fetched_beside(tmp_path, memory):
    run = Run(tmp_path / "c", keep_last=0)
    run.save(1, 2)
    run.end()
    name = "/bucket/runs/one/step-00000002/rank-00000.bin"
    memory.pipe(name, memory.cat(name)[:-1] + b"x")
    value, notes, path = begin(tmp_path / "new", upload=None, resume=URL)
    assert value == 1 and "step-00000002" in notes[0] and "does not match its checksum" in notes[0]
    assert not list_checkpoints(tmp_path / "new"), "it is none of this run's"
    Checkpointer(tmp_path / "new", CheckpointConfig())
    assert not [*(tmp_path / "new").iterdir()]
    with pytest.raises(ConfigError, match="holds no whole checkpoint .*does not match its checksum"):
        begin(tmp_path / "new", upload=None, resume=f"{URL}/step-00000002")
    with pytest.raises(ConfigError, match="holds no whole checkpoint; set"):
        begin(tmp_path / "new", upload=None, resume="memory://bucket/none")


def test_commands_refuse_a_url_by_name():
    with pytest.raises(ConfigError, match="checkpoint=s3://b/c must be on a disk; copy it there first"):
        open_saved("s3://b/c")


def test_thousands_of_keys(tmp_path, memory, monkeypatch):
    run = Run(tmp_path / "c")
    run.save(3)
    run.end()
    for number in range(3000):
        memory.store[f"/bucket/runs/one/step-{number + 10:08d}/rank-00000.bin"] = memory.store[
            "/bucket/runs/one/step-00000003/rank-00000.bin"
        ]
        memory.pipe(f"/bucket/runs/one/notes/{number}", b"")
    assert begin(tmp_path / "lost")[0] == 3, "none of them has a manifest"
    checkpoints = StoredCheckpoints(URL)
    assert len(checkpoints.list_folders()) == 3001 and [*checkpoints.list_complete()] == [3]
    monkeypatch.setattr(ObjectStore.list, "__defaults__", (100,))
    with pytest.raises(StoreError, match=f"checkpoint.upload={URL} has more than 100 objects"):
        begin(tmp_path / "lost")


# Whole runs, with a server.


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The settings of a run of six steps, which saves every second one."""
    made = ["+config=debug", f"data.cache={tmp_path_factory.mktemp('cache')}", "data.sources.stdlib.limit=20"]
    made += ["model.depth=1", "logging.report=false", "run.steps=6", "run.device=cpu", "logging.console=plain"]
    made += ["checkpoint.every=2", "checkpoint.at_end=true", f"checkpoint.upload=s3://{BUCKET}/runs/r"]
    return lambda folder, *overrides: [*made, f"run.dir={folder}", *overrides]


@pytest.fixture
def run(command):
    return lambda folder, *overrides: trainer.run(trainer.compose(command(folder, *overrides))).code


@pytest.fixture
def impatient(monkeypatch):
    """Failing requests are repeated once only."""
    monkeypatch.setitem(objects.TIMEOUTS, "retries", {"max_attempts": 0})
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 2)


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_run_that_is_killed_in_an_upload_goes_on_on_an_empty_disk(tmp_path, store, command, run):
    folder, complete, killed = tmp_path / "run", [], []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([warm_python(), "-m", "trainer", "train", *command(folder)], env=environment)

    def kill(method: str, path: str) -> int | None:
        """When the second manifest is about to be uploaded. Of several checkpoints that wait, the newest goes first."""
        found = re.search("step-([0-9]{8})/manifest.json", path)
        if method == "PUT" and found and not killed:
            (killed if complete else complete).append(int(found[1]))
        if killed:
            os.kill(program_of(process.pid), signal.SIGKILL)
        return 500 if killed else None

    store.fail = kill
    assert process.wait(120) != 0 and killed
    time.sleep(0.5)
    store.fail = lambda method, path: None
    step = f"runs/r/step-{killed[0]:08d}"
    assert store.keys(step) == [f"{step}/rank-00000.bin"]
    shutil.rmtree(folder)
    assert run(folder) == 0
    if complete == [6]:
        assert status(folder)["status"] == "done" and list(list_checkpoints(folder / "checkpoints")) == [6]
        return  # the last checkpoint was there, and nothing was left to train
    assert min(losses(folder)) == complete[0] + 1, "it went on from the one that was complete"
    assert "reason" not in status(folder)
    whole = tmp_path / "whole" / "run"
    assert run(whole, "checkpoint.upload=null") == 0
    assert all(losses(whole)[step] == loss for step, loss in losses(folder).items())
    assert {key.split("/")[2] for key in store.keys("runs/r/step-")} == {"step-00000004", "step-00000006"}


def test_a_store_that_goes_down_is_told_and_never_ends_a_run(tmp_path, store, run, capsys):
    folder = tmp_path / "run"
    saw = []

    def refuse(method: str, path: str) -> int | None:
        saw.append(path)
        return 403 if method == "PUT" and "/step-" in path else None

    store.fail = refuse
    assert run(folder) == 0
    listings = [path for path in saw if "list-type" in path]
    assert listings and all("prefix=runs%2Fr%2Fstep-" in path for path in listings), "earlier/ may hold very much"
    said = status(folder)
    assert said["status"] == "done" and "step 6 could not be uploaded" in said["reason"]
    printed = capsys.readouterr().out
    assert "done: " in printed and "not uploaded: the checkpoint of step 6" in printed
    assert SECRET not in printed + (folder / "console.log").read_text()
    assert 6 in list_checkpoints(folder / "checkpoints")
    # At the next start the store is back. What is missing follows, even if there is nothing left to train.
    store.fail = lambda method, path: None
    assert run(folder) == 0
    assert status(folder) == {"status": "done", "step": 6, "steps": 6}
    assert {key.split("/")[2] for key in store.keys("runs/r/step-")} == {"step-00000004", "step-00000006"}
    assert run(folder, "run.steps=8") == 0
    assert "reason" not in status(folder)
    assert {key.split("/")[2] for key in store.keys("runs/r/step-")} == {"step-00000006", "step-00000008"}


@pytest.mark.parametrize(
    "code, word", [(403, "the store refuses access"), (500, "does not answer as it should"), (0, "no such bucket")]
)
def test_a_store_that_is_down_at_the_start(code, word, tmp_path, store, run, impatient, capsys):
    """Without checkpoints on the disk the run does not begin anew; with some it goes on if the store is only down."""
    other = [] if code else ["checkpoint.upload=s3://nowhere/runs/r"]
    store.fail = lambda method, path: code or None
    with pytest.raises(ConfigError, match=f"checkpoint.upload=s3://.*{word}"):
        run(tmp_path / "run", *other)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    store.fail = lambda method, path: None
    assert run(tmp_path / "run") == 0
    store.fail = lambda method, path: code or None
    if code == 500:
        assert run(tmp_path / "run", "run.steps=8") == 0
        assert min(step for step in losses(tmp_path / "run") if step > 6) == 7
        assert "are taken" in capsys.readouterr().out
    else:
        with pytest.raises(ConfigError, match=word):
            run(tmp_path / "run", "run.steps=8", *other)


def test_a_store_that_can_only_be_read_is_refused_before_any_step(tmp_path, store, run):
    store.fail = lambda method, path: 403 if method == "PUT" else None
    with pytest.raises(ConfigError, match="checkpoint.upload=.* cannot be written: the store refuses access"):
        run(tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_every_rank_uploads_and_fetches_its_share(tmp_path, store):
    launch("stored_checkpoints.py", 2, tmp_path, f"s3://{BUCKET}/runs/two")
    first, second = json.loads((tmp_path / "answers.json").read_text())
    for rank, (put, fetched, _, _, name, right) in enumerate((first, second)):
        assert {one for one in put if one != "manifest.json"} == {f"rank-0000{rank}.bin"}
        assert {one for one in fetched if one != "manifest.json"} == {f"rank-0000{rank}.bin"}
        assert name == "step-00000005" and right
    assert "manifest.json" in first[0] and "manifest.json" not in second[0] and first[3] is None
    assert any("uploaded" in text and "step-00000005" in text for text in first[2]) and not second[2]
    assert "step-00000005" in {key.split("/")[2] for key in store.keys("runs/two/step-")}
