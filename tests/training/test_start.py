"""What a start does with the files of its run folder: it takes place whole or not at all, writes nothing elsewhere, and
does not take longer for a longer run."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.faults_of_files import DIED, REFUSED, SURVIVED, every_fault

import trainer
from trainer.cluster import job, node
from trainer.cluster.options import PreflightOptions
from trainer.config import Config, ConfigError
from trainer.data.tokenizer import byte_tokenizer
from trainer.observe import metrics, sinks
from trainer.observe.report import StartReport
from trainer.observe.sinks import Logger
from trainer.sweep.results import clear
from trainer.training import history
from trainer.training.session import claimed
from trainer.util.files import FolderError
from trainer.util.run_folder import refuse_links

ALONE = SimpleNamespace(rank=0, agree=lambda decide: decide())
"""What a start needs to know of a world of one process."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def settings(cache):
    def make(folder: Path, **overrides: object) -> Config:
        values = {
            "model": "tiny",
            "model.width": 32,
            "model.depth": 1,
            "data.tokenizer": "bytes",
            "data.cache": cache,
            "data.sources.stdlib.limit": 20,
            "batch.sequence_length": 16,
            "batch.micro_size": 1,
            "batch.accumulation": 2,
            "run.steps": 8,
            "run.dir": folder,
            "run.device": "cpu",
            "lr.warmup": 1,
            "checkpoint.every": 2,
            "checkpoint.keep_last": 0,
            "logging.console": "none",
            **overrides,
        }
        return trainer.compose([f"{name}={value}" for name, value in values.items()])

    return make


# A start that is killed, or fails


@pytest.fixture
def quick(monkeypatch):
    """Leaves out what takes a second and writes no file, for hundreds of starts."""
    monkeypatch.setattr(history, "code_version", lambda: None)
    monkeypatch.setattr(history, "versions", dict)
    monkeypatch.setattr(history, "changes", lambda before, now: {})
    told = {"run": {"steps": 8}}
    monkeypatch.setattr(history, "typed", SimpleNamespace(plain=lambda config: told, to_yaml=lambda config: f"{told}\n"))


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """A run folder to be made hundreds of times: in memory where the machine has such a file system."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as place:
        yield Path(place) / "run"


def line(step: int) -> str:
    return json.dumps({"step": step, "time": 1e9 + step, "loss": 1.0 / step}) + "\n"


def earlier_run(folder: Path) -> None:
    """The folder of a run that was killed at step 7, after its checkpoint of step 6."""
    for step in (2, 4, 6):
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps({"saved": step, "step": step}))
        (checkpoint / "rank-00000.bin").write_text(f"weights {step}")
    (folder / "metrics.jsonl").write_text("".join(map(line, range(1, 8))) + '{"step": 8, "lo')
    (folder / "metrics-replaced.jsonl").write_text(line(3).replace("1000000003", "900000003"))
    (folder / "starts.jsonl").write_text('{"step": 0, "processes": 1, "settings": {}, "mine": 1}\n')
    (folder / "status.json").write_text('{"status": "running", "step": 7, "steps": 8}\n')
    (folder / "config.yaml").write_text("the old settings: 1\n")
    (folder / "samples.jsonl").write_text('{"step": 2}\n')
    (folder / "console.log").write_text("the old log\n")
    for name in ("tokenizer/tokenizer.json", "schedule/choice.yaml", "wandb/offline/x", "traces/step", "wandb-id"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the old {name}")
    (folder / "earlier" / "1").mkdir(parents=True)
    (folder / "earlier" / "1" / "metrics.jsonl").write_text(line(1).replace("1000000001", "800000001"))


def nothing(folder: Path) -> None:
    folder.mkdir()


def start(config: Config, resumed: int | None) -> Callable[[], None]:
    """The part of a start that has to do with its folder."""
    folder = Path(config.run.dir)
    path = folder / "checkpoints" / f"step-{resumed:08d}" if resumed else None
    table = StartReport({"model": [("name", "tiny")]}, {})

    def opened() -> None:
        with claimed(folder, ALONE):
            try:
                history.begin(config, resumed or 0, path, [("host", "CPU")], table, byte_tokenizer())
                Logger(folder, config.logging, config.run, resumed or 0, {})
            finally:
                sys.setprofile(None)  # the end of the claim belongs to the end of the run

    return opened


def state(folder: Path) -> dict[str, object]:
    """What lies in a folder. Of the lines of starts.jsonl those of the earlier run and the last one count, without what
    differs between any two starts: a start that was killed may have its own; and of console.log that it is there."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        content = "a folder" if path.is_dir() else path.read_text()
        if name == "starts.jsonl":
            *before, last = map(json.loads, content.splitlines())
            kept = [one for one in before if "mine" in one]
            content = json.dumps([kept, {key: last[key] for key in last if key not in ("time", "set_aside")}])
        found[name] = "a log" if name == "console.log" else content
    return found


def treasure(folder: Path) -> list[str]:
    """What took time to make, whole files and lines of metrics, each as often as it is there."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    lines = [text for path in files if path.name.startswith("metrics") for text in path.read_text().split("\n")[:-1]]
    return sorted(lines + [str(path.parent.name) + path.read_text() for path in files if path.parent.name[:4] == "step"])


SITUATIONS = {
    "resumed": (earlier_run, 6),
    "gone back": (earlier_run, 2),
    "begun anew": (earlier_run, None),
    "new": (nothing, None),
}
FAULTS = {
    "killed": None,
    "no space": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "no rights": OSError(errno.EACCES, os.strerror(errno.EACCES)),
}


@pytest.mark.parametrize(
    "situation, fault",
    [*((situation, "killed") for situation in SITUATIONS), ("gone back", "no space"), ("begun anew", "no rights")],
)
def test_a_start_is_whole_or_the_next_one_is_as_if_it_had_not_been(
    quick, settings, folder, capfd, situation, fault
):
    make, resumed = SITUATIONS[situation]
    work = start(settings(folder), resumed)

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        make(folder)

    prepare()
    before = treasure(folder)
    work()
    wanted, kept, seen = state(folder), treasure(folder), set()
    assert set(before) <= set(kept)
    refusals = (ConfigError,) if fault == "no rights" else (FolderError, ConfigError)
    for number, code in every_fault(prepare, work, FAULTS[fault], refusals):
        seen.add(code)
        assert code in (DIED, REFUSED, SURVIVED), (number, capfd.readouterr().err)
        assert set(before) <= set(treasure(folder)), number
        work()
        differing = {name for name, _ in state(folder).items() ^ wanted.items()}
        told = {"earlier/2/status.json"} if code == REFUSED and situation == "gone back" else set()
        assert differing <= told, number  # the status of the run that is set aside tells of the start that failed
        assert treasure(folder) == kept, number  # nothing lost, nothing twice
    assert (DIED if fault == "killed" else REFUSED) in seen and number > 25


def test_a_start_with_other_wishes_finds_what_a_killed_one_was_moving(quick, settings, folder):
    whole = folder.with_name("whole")
    anew, resume = (start(settings(folder), resumed) for resumed in (None, 6))

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        earlier_run(folder)

    prepare()
    resume()
    wanted = state(folder)
    earlier_run(whole)
    places = set()
    for number, _ in every_fault(prepare, anew, None):
        with claimed(folder, ALONE):  # before a start looks for checkpoints
            steps = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
            aside = sorted(path.name for path in (folder / "earlier" / "2" / "checkpoints").glob("step-*"))
        assert (len(steps), len(aside)) in ((3, 0), (0, 3)), number
        places.add(len(steps))
        if steps:
            resume()
            assert state(folder) == wanted, number
        else:
            moved = (folder / "earlier" / "2" / "metrics.jsonl").read_text()
            assert moved == (whole / "metrics.jsonl").read_text(), number
    assert places == {0, 3}


def test_moved_lines_may_be_cut_anywhere_and_none_is_lost_or_there_twice(tmp_path):
    """A process may be killed within one write, or between the copy and the cut."""
    lines = [line(step) for step in range(1, 8)]
    tail = "".join(lines[3:])
    for before in ("", "".join(line(step).replace("1000000", "900000") for step in (5, 6, 7))):
        for written in range(len(tail) + 1):
            (tmp_path / "metrics.jsonl").write_text("".join(lines))
            (tmp_path / "metrics-replaced.jsonl").write_text(before + tail[:written])
            sinks.JsonLines(tmp_path, 3, print).close("done")
            assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:3])
            assert (tmp_path / "metrics-replaced.jsonl").read_text() == before + tail, written


def test_status_tells_why_a_start_failed(settings, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tokenizer").write_text("no folder")
    with pytest.raises(ConfigError, match=f"run.dir={folder} cannot be prepared for this start .*tokenizer"):
        start(settings(folder), None)()
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "failed" and "tokenizer" in status["reason"]


@pytest.mark.parametrize("problem", ["a setting", "the machine"])
def test_all_ranks_end_with_one_message_where_a_start_fails(settings, tmp_path, cache, problem):
    folder, config = tmp_path / "run", settings(tmp_path / "run")
    folder.mkdir()
    arguments = [*("model=tiny", "model.width=32", "model.depth=1", "data.tokenizer=bytes", f"data.cache={cache}")]
    arguments += ["data.sources.stdlib.limit=20", "batch.sequence_length=16", "batch.micro_size=1", "run.steps=2"]
    arguments += ["batch.accumulation=1", f"run.dir={folder}", "run.device=cpu", "lr.warmup=1", "logging.console=none"]
    command = [sys.executable, "-m", "trainer", "train", "--processes", "2", *arguments]
    if problem == "a setting":
        (folder / "console.log").mkdir()
    else:  # a file may not grow beyond its half: what the start prints is longer
        command = ["prlimit", "--fsize=2000", *command]
    assert config.run.steps == 8
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == (2 if problem == "a setting" else 1), ended.stderr
    assert ended.stderr.count("cannot be prepared for this start") == 1 and "Traceback" not in ended.stderr, ended.stderr
    assert json.loads((folder / "status.json").read_text())["status"] == "failed"
